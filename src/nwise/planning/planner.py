"""The planner: measures a network and finds where to cut it for the devices at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import nn

from nwise._torch import uncompiled
from nwise.checks import check_at_least
from nwise.planning.devices import Device, as_devices
from nwise.planning.partitions import check_enough
from nwise.planning.plan import Plan
from nwise.planning.plans import Plans, compare
from nwise.planning.prepare import Heads, Optimizers, batch_size, check_functions, network_in_pieces
from nwise.planning.profiling import Profile, numbers_to_try
from nwise.planning.source import Source, from_costs, measure
from nwise.progress import progress_bar
from nwise.randomness import preserved
from nwise.runtime.launch import launched, variable
from nwise.schedule.costs import Costs
from nwise.stage.stage import LossFn
from nwise.strategies import Strategy
from nwise.strategies import strategy as parse
from nwise.tensors import Input, Tensors, as_tuple

__all__ = ["plan"]


class _Options(TypedDict, total=False):
    """The options of `plan`, which has their defaults."""

    devices: int | Sequence[float | Device] | None
    num_stages: int | None
    heads: Heads | None
    loss_fn: LossFn
    optimizer: Optimizers | None
    microbatches: int | Sequence[int] | None
    latency: float | None
    bandwidth: float
    rounds: int
    report: Callable[[str], object] | None


_Model = nn.Module | Profile | Costs
_Batch = Input | Tensors | None


@overload
def plan(
    model: _Model,
    example: _Batch = None,
    target: _Batch = None,
    *,
    strategy: str | Strategy = ...,
    **options: Unpack[_Options],
) -> Plan: ...
@overload
def plan(
    model: _Model,
    example: _Batch = None,
    target: _Batch = None,
    *,
    strategy: list[Any] | tuple[Any, ...],
    **options: Unpack[_Options],
) -> Plans: ...
def plan(
    model: nn.Module | Profile | Costs,
    example: Input | Tensors | None = None,
    target: Input | Tensors | None = None,
    *,
    devices: int | Sequence[float | Device] | None = None,
    num_stages: int | None = None,
    strategy: str | Strategy | list[Any] | tuple[Any, ...] = "2-wise-mean",
    heads: Heads | None = None,
    loss_fn: LossFn = nn.functional.cross_entropy,
    optimizer: Optimizers | None = torch.optim.Adam,
    microbatches: int | Sequence[int] | None = None,
    latency: float | None = None,
    bandwidth: float = float("inf"),
    rounds: int = 3,
    report: Callable[[str], object] | None = print,
) -> Plan | Plans:
    """Find the cut, the placement and the number of micro-batches with the shortest step, for a strategy or for several.

    Every module at which `nwise.split` can cut runs alone, forward and backward, on a copy of the network; the network itself
    does not change. The search balances times over devices of different speed, under the memory of each. Several strategies
    share one measurement, and the table compares them with end-to-end pipelines and one device alone.

    ``torchrun`` starts one process for every device. All call this function with equal arguments, measure at the same time, and
    get the same plan.

    Args:
        model: the network, as for `nwise.split`, on the device where it is measured. Or what is known of it: an earlier plan's
            ``measured``, or `nwise.schedule.Costs` of a whole mini-batch on one device's equal share of the network. Then the
            arguments that describe the network are not needed.
        example: inputs of a mini-batch: a tensor, or a tuple or dictionary of them.
        target: its target; default: none, and the mean square of the outputs stands for the loss.
        devices: their number, their speeds relative to the one that measures, or `nwise.Device`s; default: the processes of
            ``torchrun``, with the speeds that they measure.
        num_stages: number of stages; default: one for each device.
        strategy: a strategy or its name; or a list or tuple of them, for a table.
        heads: function that makes the heads of stages, such as `nwise.heads.copied`; default: heads cost nothing.
        loss_fn: the loss of all heads, as for `Pipeline`.
        optimizer: function that makes the optimizer of some parameters; None to leave its time and memory out. Default: Adam.
        microbatches: number of micro-batches, or numbers to try; default: powers of two up to 32 and up to the size of
            the mini-batch; with batch norm each micro-batch has two samples or more.
        latency: seconds of every message, or in the unit of the costs; default: that of the costs, or measured between the
            processes of ``torchrun``, else 0.
        bandwidth: bytes a second of every link at most, or in the unit of the costs; default: that of the costs, or measured,
            else no limit.
        rounds: number of measurements, of which the medians count; default: 3.
        report: function that gets the plan as a text; None for silence. Default: print, in the first process only.

    Returns:
        The plan, for `nwise.split` and `Pipeline`; for a list of strategies the plans of all.

    Raises:
        ValueError, TypeError: an argument is invalid, or the network cannot be cut into so many stages.
        nwise.schedule.find.DoesNotFit: no cut that was tried fits the memory; a ValueError too.

    >>> import nwise
    >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    >>> plan = nwise.plan(model, torch.randn(32, 64), devices=[1, 1], microbatches=1, report=None)
    >>> stages = nwise.split(model, at=plan.at)
    >>> heads = nwise.heads.fitting(stages, torch.randn(1, 64), 64)
    >>> pipe = nwise.Pipeline(stages, heads, nn.functional.mse_loss, placement=plan)
    >>> pipe.num_stages, pipe.num_microbatches
    (2, 1)

    >>> from nwise.schedule import TRANSFORMER
    >>> plans = nwise.plan(TRANSFORMER, devices=16, strategy=["local", "2-wise"], microbatches=(2, 16), report=None)
    >>> plans.recommended.strategy, f"{plans['one device alone'].seconds:.4g}"
    ('2-wise', '48.58')
    """
    rules = [parse(one) for one in (strategy if isinstance(strategy, list | tuple) else [strategy])]
    check_functions(model, loss_fn=loss_fn, heads=heads, optimizer=optimizer, report=report)
    check_at_least(1, rounds=rounds)
    links = {"latency": latency or 0.0, "bandwidth": bandwidth}
    Costs(0, 0, 0, 0, **links)  # checks them
    known, count = _known_devices(devices)
    num_stages = count if num_stages is None else num_stages
    check_at_least(count, num_stages=num_stages)
    shown = report is not None and _is_first()
    if isinstance(model, Costs):
        links |= {"overhead": model.overhead, "latency": model.latency if latency is None else latency}
        links["bandwidth"] = model.bandwidth if bandwidth == float("inf") else bandwidth
        source = from_costs(model, numbers_to_try(microbatches), known or (Device(),) * count, links)
    elif isinstance(model, Profile):
        pieces = {m: model.pieces[m] for m in _among(microbatches, model)}
        links["overhead"] = model.overhead
        source = Source(lambda _: pieces, known or (Device(),) * count, links, model)
    else:
        inputs = as_tuple(example, "`example`")
        targets = None if target is None else as_tuple(target, "`target`")
        module = uncompiled(model)
        ms = numbers_to_try(microbatches, batch_size(inputs, targets), [module])
        with preserved(inputs[0].device), torch.inference_mode(False), torch.enable_grad():
            network = network_in_pieces(module, inputs, targets, heads, loss_fn, optimizer)
            check_enough(list(network.pieces), num_stages)
            same = {"strategy": [rule.name for rule in rules], "num_stages": num_stages}
            source = measure(network, known, latency, links, ms, same, rounds, progress_bar("measuring", shown=shown))
        source = replace(source, model=module)
    bar = progress_bar("searching", shown=shown)
    result: Plan | Plans
    if isinstance(strategy, list | tuple):
        result = compare(source, rules, num_stages, bar)
    else:
        result = source.plan(rules[0].name, rules[0], source.pieces(num_stages), num_stages, progress=bar)
    if report is not None and shown:
        report(str(result))
    return result


def _among(microbatches: int | Sequence[int] | None, measured: Profile) -> list[int]:
    """Return the numbers of micro-batches to try; ValueError if one was not measured."""
    ms = list(measured.pieces) if microbatches is None else numbers_to_try(microbatches)
    if missing := [m for m in ms if m not in measured.pieces]:
        known = ", ".join(map(str, measured.pieces))
        raise ValueError(f"`microbatches` should be among those that were measured, {known}. Found {missing[0]}.")
    return ms


def _is_first() -> bool:
    """Return whether this process is the first, or the only one; the group of processes need not exist yet."""
    return not launched() or (dist.get_rank() if dist.is_initialized() else variable("RANK")) == 0


def _known_devices(devices: int | Sequence[float | Device] | None) -> tuple[tuple[Device, ...] | None, int]:
    """Return the devices, None if the processes will measure them, and their number."""
    size = dist.get_world_size() if dist.is_initialized() else variable("WORLD_SIZE", 1)
    if devices is None:
        if "RANK" not in os.environ and not dist.is_initialized():
            raise ValueError(
                "`devices` should be a number, or speeds such as [1, 2, 4], unless torchrun starts a process for each. Found "
                "none."
            )
        return None, size
    known = as_devices(devices)
    if launched() and len(known) > size:
        raise ValueError(f"`devices` should be at most the {size} processes of torchrun. Found {len(known)}.")
    return known, len(known)
