"""Search: the closed-form orders and list schedules that are tried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from nwise.flow import Flow
from nwise.schedule import orders
from nwise.schedule.costs import Chains, Costs
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule, Word, counted
from nwise.schedule.timed import Timed, peak_bytes, timed

# From the stages that fuse I and W to a schedule.
Rule = Callable[[Collection[int]], Schedule]


@dataclass(frozen=True)
class Search:
    """What is known while a schedule is looked for.

    Args:
        flows: of every micro-batch, ``[turns][M]``.
        costs: of one micro-batch.
        chains: see `nwise.schedule.best`.
        memory: bytes that a stage may use; default: any.
    """

    flows: Sequence[Sequence[Flow]]
    costs: Costs
    chains: Chains
    memory: float | None = None

    def fits(self, schedule: Schedule) -> bool:
        """Whether every stage has memory enough."""
        return self.memory is None or max(peak_bytes(schedule.in_flight, self.costs)) <= self.memory

    def timed(self, schedule: Schedule) -> Timed:
        """With its exact period."""
        return timed(schedule, self.costs, self.chains)

    @property
    def fuses(self) -> tuple[Collection[int], ...]:
        """One pass in the place of two saves an overhead, or a walk; else the split can do all that it can."""
        helps = self.chains == "walked" or self.costs.overhead > 0
        return (orders.NONE, orders.ALL) if helps else (orders.NONE,)

    def rules(self) -> list[Rule]:
        """Orders that are tried first; of equal ones the first is preferred."""
        size = len(self.flows[0])
        reach = max(orders.reach(flow) for flow, _ in counted(self.flows))
        caps = sorted({min(size, cap) for cap in (reach + 1, 2 * reach + 1, size)})
        return [
            lambda fuse: self._of("skewed", partial(orders.skewed, fuse=fuse, stride=1)),
            lambda fuse: self._of("skewed-2", partial(orders.skewed, fuse=fuse, stride=2)),
            *map(self._nearest, caps),
            lambda fuse: self._of("phase", partial(orders.phase, fuse=fuse)),
            *([] if self.memory is None else self._small_rules()),
        ]

    def _small_rules(self) -> list[Rule]:
        """Orders for little memory, with one micro-batch in flight and more."""
        return [
            lambda fuse: self._of("depth-first", partial(orders.depth_first, fuse=fuse)),
            *map(self._nearest, range(1, len(self.flows[0]) + 1)),
        ]

    def _of(self, name: str, words_of: Callable[[Sequence[Flow], int], list[Word]]) -> Schedule:
        return orders.schedule_of(name, self.flows, words_of)

    def _nearest(self, cap: int) -> Rule:
        rule = partial(nearest_first, cap=cap, costs=self.costs, chains=self.chains)
        return lambda fuse: self._of(f"nearest-first-{cap}", partial(rule, fuse=fuse))
