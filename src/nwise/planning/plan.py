"""A plan: the cut of a network for the devices at hand, and the expected time of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from nwise._summary import milliseconds, table
from nwise.flow import flows_for
from nwise.network.chain import Chain
from nwise.planning.devices import Device, limits
from nwise.planning.observe import Observer
from nwise.planning.profiling import Profile
from nwise.runtime.processes import Processes
from nwise.schedule.costs import Costs
from nwise.schedule.timing import Limit, Timed
from nwise.strategies import EndToEnd

__all__ = ["Plan"]

_MIB = 2.0**20
_NOISE = 0.1  # spread of the rounds above which a plan says so


@dataclass(frozen=True)
class Plan:
    """The cut of a network into stages for given devices, with its expected costs. Printing it shows a table.

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
    def busy(self) -> tuple[float, ...]:
        """Expected seconds of a step in which each device computes."""
        return self.timed.busy

    def __str__(self) -> str:
        several = "s" if len(self.devices) > 1 else ""
        same = " (with these stages the same as end-to-end)" if self._is_end_to_end else ""
        title = (
            f"{len(self.devices)} device{several}, {self.strategy}{same}, M = {self.num_microbatches}: "
            f"{milliseconds(self.seconds)} a step expected"
        )
        if isfinite(self.equal):
            title += f", {self.equal / self.seconds:.2f} times as fast as stages with equal numbers of blocks"
        if self.measured.spread > _NOISE:
            spread = f"{100 * self.measured.spread:.0f} %"
            title += f". Measurements differ by {spread}: measure on an idle machine, or with more `rounds`"
        begins = ["the start", *self.at]
        rows = []
        for i, device in enumerate(self.devices):
            stages = [k for k, place in enumerate(self.placement) if place == i]
            row = [str(i), f"{device.speed:.3g}", ", ".join(f"{k} from {begins[k]}" for k in stages)]
            rows.append([*row, milliseconds(self.busy[i]), *self._memory(i)])
        heads = ["device", "speed", "stages", "busy", *(["memory"] if self.limits else [])]
        return "\n".join([title, *table([heads, *rows])])

    @property
    def _is_end_to_end(self) -> bool:
        schedule = self.timed.schedule
        exact = flows_for(EndToEnd(), len(self.placement), self.num_microbatches)
        return self.strategy != "end-to-end" and schedule.flows == exact and not any(schedule.ages)

    @property
    def limits(self) -> tuple[float, ...] | None:
        """Bytes that each device may use; None without any limit."""
        return limits(self.devices)

    def check_stages(self, stages: Sequence[object]) -> None:
        """Raise ValueError unless the stages are those of the plan, as far as their modules have names."""
        begins = [next(iter(stage.pieces())) for stage in stages if isinstance(stage, Chain)]
        count = len(self.placement)
        if len(stages) != count or (len(begins) == count and tuple(begins[1:]) != self.at):
            cut = f"{len(stages)} stages" + (f" that begin at {', '.join(begins[1:])}" if begins[1:] else "")
            raise ValueError(
                f"`placement` should be a plan for these stages. Found one for {count} stages that begin at "
                f"{', '.join(self.at)}, and {cut}; cut the network with `nwise.split(model, at=plan.at)`."
            )

    def prices(self, num_ranks: int) -> tuple[Costs, Limit]:
        """Return the costs by which orders are compared, and the memory of every rank if the ranks are the plan's devices."""
        return self.timed.costs, self.limits if num_ranks == len(self.devices) else None

    def observer(self, processes: Processes) -> Observer:
        """Return what compares the first steps of the pipeline with this plan."""
        return Observer(self, processes)

    def _memory(self, device: int) -> list[str]:
        if not self.limits:
            return []
        limit = self.devices[device].memory
        most = f" of {limit / _MIB:,.0f}" if isfinite(limit) else ""
        return [f"{self.timed.peak_bytes[device] / _MIB:,.0f}{most} MiB"]
