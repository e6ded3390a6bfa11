"""A plan: the cut of a network for the devices at hand, and the expected time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from nwise.flow import flows_for
from nwise.network.chain import Chain
from nwise.network.section import Section
from nwise.planning.devices import Device, limits
from nwise.planning.profiling import Profile
from nwise.program.summary import milliseconds, table
from nwise.schedule.costs import Costs
from nwise.schedule.find import Limit, rounded
from nwise.schedule.named import BASELINES
from nwise.schedule.schedule import Schedule
from nwise.strategies import EndToEnd

__all__ = ["Plan"]

ALONE = "one device alone"

_MIB = 2.0**20
_NOISE = 0.1  # spread of the rounds above which a plan says so


@dataclass(frozen=True)
class Plan:
    """The cut of a network into stages for given devices, with its expected costs. Printing it shows a table.

    Args:
        at: names of the modules at which stages begin, for `nwise.split`.
        placement: index of every stage's device, which is its rank under ``torchrun``.
        devices: the devices.
        strategy: name of the strategy, of one of `nwise.schedule.BASELINES`, or `ALONE`.
        schedule: the schedule, with the expected time of a step and the bytes of every device.
        measured: the costs of every module, in seconds; None if costs were given. Then all times are in their unit.
    """

    at: tuple[str, ...]
    placement: tuple[int, ...]
    devices: tuple[Device, ...]
    strategy: str
    schedule: Schedule
    measured: Profile | None = None

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, M."""
        return self.schedule.num_microbatches

    @property
    def seconds(self) -> float:
        """Expected time of a step."""
        return self.schedule.period

    @property
    def busy(self) -> tuple[float, ...]:
        """Expected time of a step in which each device computes."""
        return self.schedule.busy

    @property
    def end_to_end(self) -> bool:
        """Whether it computes the gradients of ordinary training."""
        return self.strategy in (*BASELINES, "end-to-end", ALONE)

    @property
    def comparable(self) -> bool:
        """Whether gradients cross boundaries and none is late, so a step is comparable with an end-to-end one."""
        schedule = self.schedule
        return self.end_to_end or (not schedule.oldest and any(any(f.messages) for fs in schedule.flows for f in fs))

    @property
    def preference(self) -> tuple[float, bool, int]:
        """Sort key, smallest for the best plan: fast, then end-to-end, with little in flight."""
        return rounded(self.seconds), not self.end_to_end, max(self.schedule.in_flight)

    def show(self, time: float) -> str:
        """Return a time as text: in milliseconds if it was measured, else in the unit of the costs."""
        return f"{time:.4g}" if self.measured is None else milliseconds(time)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "method": self.strategy,
            "at": list(self.at),
            "placement": list(self.placement),
            "microbatches": self.num_microbatches,
            "period": self.seconds,
            "lower_bound": self.schedule.lower_bound,
            "order": self.schedule.order,
            "in_flight": list(self.schedule.in_flight),
            "peak_bytes": list(self.schedule.peak_bytes),
            "end_to_end": self.end_to_end,
        }

    def __str__(self) -> str:
        several = "s" if len(self.devices) > 1 else ""
        exact = flows_for(EndToEnd(), len(self.placement), self.num_microbatches)
        hidden = not self.end_to_end and not self.schedule.oldest and self.schedule.flows == exact
        same = " (with these stages the same as end-to-end)" if hidden else ""
        title = (
            f"{len(self.devices)} device{several}, {self.strategy}{same}, M = {self.num_microbatches}: "
            f"{self.show(self.seconds)} a step expected"
        )
        if self.measured is not None and self.measured.spread > _NOISE:
            spread = f"{100 * self.measured.spread:.0f} %"
            title += f". Measurements differ by {spread}: measure on an idle machine, or with more `rounds`"
        begins = ["the start", *self.at]
        rows = []
        for i, device in enumerate(self.devices):
            stages = [k for k, place in enumerate(self.placement) if place == i]
            row = [str(i), f"{device.speed:.3g}", ", ".join(f"{k} from {begins[k]}" for k in stages)]
            rows.append([*row, self.show(self.busy[i]), *self._memory(i)])
        heads = ["device", "speed", "stages", "busy", *(["memory"] if self.limits else [])]
        return "\n".join([title, *table([heads, *rows])])

    @property
    def limits(self) -> tuple[float, ...] | None:
        """Bytes that each device may use; None without any limit."""
        return limits(self.devices)

    def check_stages(self, stages: Sequence[object]) -> None:
        """Raise ValueError unless the stages are those of the plan, as far as their modules have names."""
        begins = [next(iter(stage.pieces())) for stage in stages if isinstance(stage, Chain | Section)]
        count = len(self.placement)
        if len(stages) != count or (len(begins) == count and tuple(begins[1:]) != self.at):
            cut = f"{len(stages)} stages" + (f" that begin at {', '.join(begins[1:])}" if begins[1:] else "")
            raise ValueError(
                f"`placement` should be a plan for these stages. Found one for {count} stages that begin at "
                f"{', '.join(self.at)}, and {cut}; cut the network with `nwise.split(model, plan.at, x)`."
            )

    def prices(self, num_ranks: int) -> tuple[Costs, Limit]:
        """Return the costs by which orders are compared, and the memory of every rank if the ranks are the plan's devices."""
        return self.schedule.costs, self.limits if num_ranks == len(self.devices) else None

    def _memory(self, device: int) -> list[str]:
        if not self.limits:
            return []
        limit = self.devices[device].memory
        most = f" of {limit / _MIB:,.0f}" if isfinite(limit) else ""
        return [f"{self.schedule.peak_bytes[device] / _MIB:,.0f}{most} MiB"]
