"""The plan: where to cut a network for the devices at hand, measured on the network itself."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from nwise._errors import check_at_least, check_optimizer
from nwise._summary import table
from nwise.models.chain import Chain
from nwise.models.split import cut_points, even_starts, split
from nwise.planning.devices import Device, Search, as_devices, search
from nwise.planning.profile import Network, Profile, profile
from nwise.randomness import preserved
from nwise.runtime.launch import launched, start
from nwise.schedule.best import DoesNotFit
from nwise.schedule.bounds import stage_work
from nwise.schedule.timed import Timed
from nwise.stage import LossFn
from nwise.strategies import Strategy, Switch
from nwise.strategies import strategy as parse
from nwise.tensors import Input, Tensors, as_argument, as_tuple, names, with_names

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_MIB = 2.0**20
_numbers = itertools.count()  # numbers the exchanges, equally on every rank because all run the same script


@dataclass(frozen=True)
class Plan:
    """A network cut into stages for given devices, and what it is expected to cost. Printing it shows a table.

    Args:
        at: names of the modules at which stages begin, for `nwise.split`.
        placement: index of every stage's device, which is its rank under ``torchrun``.
        devices: the devices.
        strategy: name of the strategy.
        timed: the schedule, with the expected seconds of a step and the bytes of every device.
        equal: expected seconds of a step with equal numbers of blocks in every stage; nan if no such cut fits.
        measured: the costs of every module.
        report: function that gets the measured times after the first steps; None for none.
    """

    at: tuple[str, ...]
    placement: tuple[int, ...]
    devices: tuple[Device, ...]
    strategy: str
    timed: Timed
    equal: float
    measured: Profile
    report: Callable[[str], object] | None

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, M."""
        return self.timed.schedule.num_microbatches

    @property
    def seconds(self) -> float:
        """Expected seconds of a step."""
        return self.timed.period

    @property
    def busy(self) -> list[float]:
        """Expected seconds of a step in which each device computes."""
        flows = self.timed.schedule.flows
        times = stage_work(flows, self.timed.costs)
        busy = [0.0] * len(self.devices)
        for device, seconds in zip(self.placement, times, strict=True):
            busy[device] += seconds / len(flows)
        return busy

    def __str__(self) -> str:
        several = "s" if len(self.devices) > 1 else ""
        title = (
            f"{len(self.devices)} device{several}, {self.strategy}, M = {self.num_microbatches}: "
            f"{_milliseconds(self.seconds)} a step expected"
        )
        if isfinite(self.equal):
            title += f", {self.equal / self.seconds:.2f} times as fast as stages with equal numbers of blocks"
        begins = ["the start", *self.at]
        rows = []
        for i, device in enumerate(self.devices):
            stages = [k for k, place in enumerate(self.placement) if place == i]
            row = [str(i), f"{device.speed:.3g}", ", ".join(f"{k} from {begins[k]}" for k in stages)]
            rows.append([*row, _milliseconds(self.busy[i]), *self._memory(i)])
        heads = ["device", "speed", "stages", "busy", *(["memory"] if self._limited else [])]
        return "\n".join([title, *table([heads, *rows])])

    @property
    def _limited(self) -> bool:
        return any(isfinite(device.memory) for device in self.devices)

    def _memory(self, device: int) -> list[str]:
        if not self._limited:
            return []
        limit = self.devices[device].memory
        most = f" of {limit / _MIB:,.0f}" if isfinite(limit) else ""
        return [f"{self.timed.peak_bytes[device] / _MIB:,.0f}{most} MiB"]


def plan(
    model: nn.Module,
    example: Input | Tensors,
    target: Input | Tensors | None = None,
    *,
    devices: int | Sequence[float | Device] | None = None,
    num_stages: int | None = None,
    strategy: str | Strategy = "2-wise",
    heads: Callable[[list[Chain]], Sequence[nn.Module | None]] | None = None,
    loss_fn: LossFn = nn.functional.cross_entropy,
    optimizer: Optimizers | None = torch.optim.Adam,
    microbatches: int | Sequence[int] | None = None,
    latency: float = 0.0,
    bandwidth: float = float("inf"),
    rounds: int = 3,
    report: Callable[[str], object] | None = print,
) -> Plan:
    """Measure a network and find the cut, the placement and the number of micro-batches with the shortest step.

    Every module at which `nwise.split` can cut runs alone, forward and backward, on a copy of the network; the network itself
    does not change. The search balances times over devices of different speed, under the memory of each.

    ``torchrun`` starts one process for every device. All call this function, measure at the same time, and get the same plan.

    Args:
        model: the network, as for `nwise.split`, on the device where it is measured.
        example: inputs of a mini-batch: a tensor, or a tuple or dictionary of them.
        target: its target; default: none, and the mean square of the outputs stands for the loss.
        devices: their number, their speeds relative to the one that measures, or `nwise.Device`s; default: the processes of
            ``torchrun``, with the speeds that they measure.
        num_stages: number of stages; default: one for each device.
        strategy: a strategy or its name.
        heads: function that makes the heads of stages, such as `nwise.heads.copied`; default: heads cost nothing.
        loss_fn: the loss, as for `Pipeline`.
        optimizer: function that makes the optimizer of some parameters; None to leave its time and memory out. Default: Adam.
        microbatches: number of micro-batches, or numbers to try; default: powers of two up to 32 and the mini-batch.
        latency: seconds of every message; default: 0.
        bandwidth: bytes a second of every link; default: no limit.
        rounds: number of measurements, of which the medians count; default: 3.
        report: function that gets the plan as a text, and, from a pipeline on these devices, times after the first steps;
            None for silence. Default: print, in the first process only.

    Returns:
        The plan, for `nwise.split` and `Pipeline`.

    Raises:
        ValueError, TypeError: an argument is invalid, or the network cannot be cut into so many stages.
        nwise.schedule.best.DoesNotFit: no cut that was tried fits the memory; a ValueError too.

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
    if isinstance(rule, Switch):
        raise ValueError(f"`strategy` should be the same at every step. Found {rule.name!r}; pass one of its parts.")
    check_at_least(1, rounds=rounds)
    given = as_tuple(example, "`example`")
    size = _batch_size(given)
    ms = _microbatches(microbatches, size)
    known = None if devices is None else as_devices(devices)
    if known is None and not launched():
        raise ValueError(
            "`devices` should be a number, or speeds such as [1, 2, 4], unless torchrun starts a process for each. Found none."
        )
    limited = known is not None and any(isfinite(device.memory) for device in known)
    with preserved(given[0].device):
        network = _network(model, given, target, heads, loss_fn, optimizer, size)
        measured = profile(network, ms, rounds=rounds, sizes=limited)
    if launched():
        measured, known = _agreed(measured, known)
    assert known is not None, "given, or found by the processes"
    links = {"latency": latency, "bandwidth": bandwidth}
    cut = search(measured.pieces, rule, known, num_stages, **links)
    pieces = list(network.pieces)
    result = Plan(
        _short(model, pieces, [pieces[i] for i in cut.starts[1:]]),
        cut.placement,
        known,
        rule.name,
        cut.timed,
        _equal(model, pieces, measured, rule, known, len(cut.starts), links),
        measured,
        report,
    )
    if report is not None and (not launched() or dist.get_rank() == 0):
        report(str(result))
    return result


def _batch_size(inputs: Tensors) -> int:
    if any(not x.dim() or len(x) != len(inputs[0]) for x in inputs) or not len(inputs[0]):
        shapes = ", ".join(str(list(x.shape)) for x in inputs)
        raise ValueError(f"`example` should have the samples of a mini-batch along dimension 0. Found shapes {shapes}.")
    return len(inputs[0])


def _microbatches(microbatches: int | Sequence[int] | None, size: int) -> list[int]:
    if microbatches is None:
        return [m for m in (1, 2, 4, 8, 16, 32) if m <= size]
    ms = [microbatches] if isinstance(microbatches, int) else list(microbatches)
    if not ms:
        raise ValueError("`microbatches` should contain at least one number to try. Found none.")
    for m in ms:
        check_at_least(1, microbatches=m)
        if m > size:
            raise ValueError(f"`microbatches` should be at most the {size} samples of `example`. Found {m}.")
    return ms


def _network(
    model: nn.Module,
    example: Tensors,
    target: Input | Tensors | None,
    heads: Callable[[list[Chain]], Sequence[nn.Module | None]] | None,
    loss_fn: LossFn,
    optimizer: Optimizers | None,
    size: int,
) -> Network:
    """Return a copy of the network in its smallest pieces, each with its head."""
    one = with_names((x[:1] for x in example), names(example))
    stages = split(copy.deepcopy(model).train(), cut_points(model), example=one)
    sides = [None] * (len(stages) - 1) if heads is None else list(heads(stages))
    if len(sides) != len(stages) - 1:
        raise ValueError(
            f"`heads` should return a head for every stage but the last: {len(stages) - 1} for {len(stages)}. Found {len(sides)}."
        )
    given = None if target is None else as_tuple(target, "`target`")
    device = next((p.device for p in model.parameters()), example[0].device)

    def batch(count: int) -> tuple[Tensors, Any]:
        inputs = with_names((x[:count].to(device) for x in example), names(example))
        if given is None:
            return inputs, None
        return inputs, as_argument(with_names((y[:count].to(device) for y in given), names(given)))

    return Network(
        {next(iter(stage.pieces())): stage for stage in stages},
        [*sides, None],
        batch,
        size,
        _mean_square if given is None else loss_fn,
        None if optimizer is None else partial(_made, optimizer),
        device,
        autocast=nullcontext,
    )


def _made(optimizer: Optimizers, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = optimizer(parameters)
    check_optimizer(made)
    for group in made.param_groups:
        group["lr"] = 0.0
    return made


def _mean_square(output: Any, target: object) -> Tensor:
    del target
    tensors = [y for y in as_tuple(output, "The output of a head") if y.is_floating_point()]
    return torch.stack([y.float().square().mean() for y in tensors]).sum()


def _agreed(measured: Profile, devices: tuple[Device, ...] | None) -> tuple[Profile, tuple[Device, ...]]:
    """Exchange what the processes have measured: the costs of the first, and the speeds of all relative to it."""
    start()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"nwise/plan/{next(_numbers)}", _get_default_store())
    store.set(str(rank), json.dumps([measured.seconds, measured.as_json() if rank == 0 else None]))
    everyone = [json.loads(store.get(str(other))) for other in range(size)]
    speeds = [everyone[0][0] / seconds for seconds, _ in everyone]
    if devices is not None and len(devices) > size:
        raise ValueError(f"`devices` should be at most the {size} processes of torchrun. Found {len(devices)}.")
    return Profile.from_json(everyone[0][1]), devices or tuple(Device(speed=round(v, 3)) for v in speeds)


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
    found = [next((i for i, piece in enumerate(pieces) if f"{piece}.".startswith(f"{name}.")), None) for name in names]
    starts = [0, *(i for i in found if i is not None)]
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
    """Name sequences in the place of their first modules, where no other cut goes through them."""
    chosen = list(at)
    for i in range(len(chosen)):
        while parent := chosen[i].rpartition(".")[0]:
            first = next(piece for piece in pieces if piece.startswith(f"{parent}."))
            others = [name for name in chosen if name != chosen[i] and name.startswith(f"{parent}.")]
            sequence = type(model.get_submodule(parent)) in (nn.Sequential, Chain)
            if others or not sequence or not f"{first}.".startswith(f"{chosen[i]}."):
                break
            chosen[i] = parent
    return tuple(chosen)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
