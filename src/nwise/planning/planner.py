"""The planner: measures a network and finds where to cut it for the devices at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nwise._torch import uncompiled
from nwise.checks import check_at_least
from nwise.network.chain import Chain
from nwise.network.splitting import even_starts, is_hugging_face
from nwise.planning.devices import Device, as_devices, limits
from nwise.planning.plan import Plan
from nwise.planning.prepare import (
    Heads,
    Optimizers,
    action_overhead,
    agree,
    batch_size,
    check_functions,
    gather,
    message_latency,
    network_in_pieces,
    numbers_to_try,
    speeds,
)
from nwise.planning.profiling import Profile, profile
from nwise.planning.search import Search, search
from nwise.progress import progress_bar
from nwise.randomness import preserved
from nwise.runtime.launch import launched, variable
from nwise.schedule.costs import Costs
from nwise.schedule.find import DoesNotFit
from nwise.schedule.partitions import check_enough
from nwise.stage import LossFn
from nwise.strategies import Strategy
from nwise.strategies import strategy as parse
from nwise.tensors import Input, Tensors, as_tuple

__all__ = ["plan"]


def plan(
    model: nn.Module,
    example: Input | Tensors,
    target: Input | Tensors | None = None,
    *,
    devices: int | Sequence[float | Device] | None = None,
    num_stages: int | None = None,
    strategy: str | Strategy = "2-wise",
    heads: Heads | None = None,
    loss_fn: LossFn = nn.functional.cross_entropy,
    optimizer: Optimizers | None = torch.optim.Adam,
    microbatches: int | Sequence[int] | None = None,
    latency: float | None = None,
    bandwidth: float = float("inf"),
    before: Mapping[str, Callable[..., Any]] | None = None,
    rounds: int = 3,
    report: Callable[[str], object] | None = print,
) -> Plan:
    """Measure a network and find the cut, the placement and the number of micro-batches with the shortest step.

    Every module at which `nwise.split` can cut runs alone, forward and backward, on a copy of the network; the network itself
    does not change. The search balances times over devices of different speed, under the memory of each.

    ``torchrun`` starts one process for every device. All call this function with equal arguments, measure at the same time, and
    get the same plan.

    Args:
        model: the network, as for `nwise.split`, on the device where it is measured.
        example: inputs of a mini-batch: a tensor, or a tuple or dictionary of them.
        target: its target; default: none, and the mean square of the outputs stands for the loss.
        devices: their number, their speeds relative to the one that measures, or `nwise.Device`s; default: the processes of
            ``torchrun``, with the speeds that they measure.
        num_stages: number of stages; default: one for each device.
        strategy: a strategy or its name.
        heads: function that makes the heads of stages, such as `nwise.heads.copied`; default: heads cost nothing.
        loss_fn: the loss of all heads, as for `Pipeline`.
        optimizer: function that makes the optimizer of some parameters; None to leave its time and memory out. Default: Adam.
        microbatches: number of micro-batches, or numbers to try; default: powers of two up to 32 and up to the size of
            the mini-batch; with batch norm each micro-batch has two samples or more.
        latency: seconds of every message; default: measured between the processes of ``torchrun``, else 0.
        bandwidth: bytes a second of every link; default: no limit.
        before: functions between the modules, as for `nwise.split`; default: none.
        rounds: number of measurements, of which the medians count; default: 3.
        report: function that gets the plan as a text, and, from a pipeline on these devices, times after the first steps;
            None for silence. Default: print, in the first process only.

    Returns:
        The plan, for `nwise.split` and `Pipeline`.

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
    """
    rule = parse(strategy)
    check_functions(model, loss_fn=loss_fn, heads=heads, optimizer=optimizer, report=report)
    check_at_least(1, rounds=rounds)
    links = {"latency": latency or 0.0, "bandwidth": bandwidth}
    Costs(0, 0, 0, 0, **links)  # checks them
    inputs = as_tuple(example, "`example`")
    targets = None if target is None else as_tuple(target, "`target`")
    model = uncompiled(model)
    shown = report is not None and _is_first()
    ms = numbers_to_try(microbatches, batch_size(inputs, targets), model)
    known, count = _known_devices(devices)
    num_stages = count if num_stages is None else num_stages
    check_at_least(count, num_stages=num_stages)
    with preserved(inputs[0].device), torch.inference_mode(False), torch.enable_grad():
        network = network_in_pieces(model, inputs, targets, heads, loss_fn, optimizer, before)
        pieces = list(network.pieces)
        check_enough(pieces, num_stages)
        if launched():
            agree(
                devices=[[one.speed, one.memory] for one in known or ()],
                strategy=rule.name,
                num_stages=num_stages,
                microbatches=ms,
                example=[list(x.shape) for x in inputs],
                model=pieces,
            )
        sizes = known is not None and limits(known) is not None
        measured = profile(network, ms, rounds=rounds, sizes=sizes, progress=progress_bar("measuring", shown=shown))
        links["overhead"] = action_overhead()
    if launched():
        measured, shared, processes = _exchange(measured, links["overhead"], network.device)
        links |= shared if latency is None else {**shared, "latency": latency}
        known = known or processes
    known = known or (Device(),)
    cut = search(measured.pieces, rule, known, num_stages, progress_bar("searching", shown=shown), **links)
    result = Plan(
        _short(model, pieces, [pieces[i] for i in cut.starts[1:]]),
        cut.placement,
        known,
        rule.name,
        cut.timed,
        _equal(model, pieces, measured, rule, known, num_stages, links),
        measured,
        report,
    )
    if report is not None and shown:
        report(str(result))
    return result


def _is_first() -> bool:
    """Return whether this process is the first, or the only one; the group of processes need not exist yet."""
    return not launched() or (dist.get_rank() if dist.is_initialized() else variable("RANK")) == 0


def _exchange(
    measured: Profile, overhead: float, device: torch.device
) -> tuple[Profile, dict[str, float], tuple[Device, ...]]:
    """Return what all processes use: the first one's profile and latency, the largest overhead, and all speeds."""
    facts = measured.seconds, measured.spread, overhead, message_latency(device), measured.as_json()
    first, *_ = reports = gather(facts)
    links = {"overhead": max(one[2] for one in reports), "latency": first[3]}
    devices = tuple(Device(speed=speed) for speed in speeds([(one[0], one[1]) for one in reports]))
    return Profile.from_json(first[4]), links, devices


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


def _equal(
    model: nn.Module,
    pieces: Sequence[str],
    measured: Profile,
    rule: Strategy,
    devices: Sequence[Device],
    num_stages: int,
    links: dict[str, float],
) -> float:
    """Return the seconds of a step with equal numbers of blocks in every stage, at the best M."""
    try:
        names = even_starts(model, num_stages)
    except ValueError:  # fewer blocks than stages
        return float("nan")
    places = [next((i for i, piece in enumerate(pieces) if f"{piece}.".startswith(f"{name}.")), None) for name in names]
    starts = [0, *(i for i in places if i is not None)]
    if len(starts) < num_stages:
        return float("nan")
    placement = tuple(k * len(devices) // num_stages for k in range(num_stages))
    periods = []
    for m, costs in measured.pieces.items():
        try:
            periods.append(Search(costs, rule, m, devices, num_stages, links).cut(starts, placement).timed.period)
        except DoesNotFit:
            continue
    return min(periods, default=float("nan"))


def _short(model: nn.Module, pieces: Sequence[str], at: Sequence[str]) -> tuple[str, ...]:
    """Name a sequence instead of its first module, where no other cut goes through it."""
    chosen = list(at)
    for i in () if is_hugging_face(model) else range(len(chosen)):
        while parent := chosen[i].rpartition(".")[0]:
            first = next(piece for piece in pieces if piece.startswith(f"{parent}."))
            others = [name for name in chosen if name != chosen[i] and name.startswith(f"{parent}.")]
            sequence = type(model.get_submodule(parent)) in (nn.Sequential, Chain)
            if others or not sequence or not f"{first}.".startswith(f"{chosen[i]}."):
                break
            chosen[i] = parent
    return tuple(chosen)
