"""Search: the candidates for the best schedule, closed-form orders and list schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from nwise.flow import Flow
from nwise.schedule import orders
from nwise.schedule.costs import Costs
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule, Word, counted
from nwise.schedule.timed import Timed, peak_bytes, timed

# A function from the stages that fuse I and W to a schedule.
Rule = Callable[[Collection[int]], Schedule]


@dataclass(frozen=True)
class Search:
    """The problem for which a schedule is sought.

    Args:
        flows: flow of every micro-batch, ``[turns][M]``.
        costs: costs of one micro-batch.
        memory: limit per stage in bytes; default: none.
    """

    flows: Sequence[Sequence[Flow]]
    costs: Costs
    memory: float | None = None

    def fits(self, schedule: Schedule) -> bool:
        """Tell whether a schedule fits the memory of every stage."""
        return self.memory is None or max(peak_bytes(schedule.in_flight, self.costs)) <= self.memory

    def timed(self, schedule: Schedule) -> Timed:
        """Return a schedule with its exact period."""
        return timed(schedule, self.costs)

    def rules(self) -> list[Rule]:
        """Return the candidates; of equal ones the first is preferred."""
        size = len(self.flows[0])
        # In the skewed order with stride 1 or 2, reach + 1 or 2 reach + 1 micro-batches are in flight: these caps give list
        # schedules with the same memory.
        reach = max(orders.reach(flow) for flow, _ in counted(self.flows))
        caps = sorted({min(size, cap) for cap in (reach + 1, 2 * reach + 1, size)})
        return [
            lambda fuse: self._schedule("skewed", partial(orders.skewed, fuse=fuse, stride=1)),
            lambda fuse: self._schedule("skewed-2", partial(orders.skewed, fuse=fuse, stride=2)),
            *map(self._nearest, caps),
            lambda fuse: self._schedule("phase", partial(orders.phase, fuse=fuse)),
            *([] if self.memory is None else self._small_rules()),
        ]

    def _small_rules(self) -> list[Rule]:
        """Return candidates for little memory, with one or more micro-batches in flight."""
        return [
            lambda fuse: self._schedule("depth-first", partial(orders.depth_first, fuse=fuse)),
            *map(self._nearest, range(1, len(self.flows[0]) + 1)),
        ]

    def _schedule(self, name: str, rule: Callable[[Sequence[Flow], int], list[Word]]) -> Schedule:
        return orders.make_schedule(name, self.flows, rule)

    def _nearest(self, cap: int) -> Rule:
        rule = partial(nearest_first, cap=cap, costs=self.costs)
        return lambda fuse: self._schedule(f"nearest-first-{cap}", partial(rule, fuse=fuse))
