"""Search: the schedules that are tried, from closed-form orders to random lists and local moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from nwise.flow import Flow
from nwise.schedule import orders
from nwise.schedule.bounds import latest_starts
from nwise.schedule.costs import Chains, Costs
from nwise.schedule.greedy import list_schedule, nearest_first
from nwise.schedule.improve import improve
from nwise.schedule.lists import Schedule, Word, counted
from nwise.schedule.network import network
from nwise.schedule.timed import Timed, peak_bytes, timed

_STARTS = 3  # schedules that local improvement starts from
_LOOKS = 500  # neighbours that it looks at, from each of them
_RANDOM_LISTS = 100
_SPREAD = 4.0  # of their random numbers, in forwards
_EFFORT = 100_000  # actions that are simulated at most for each of the starts
_LARGE = 3_000  # actions of schedules that are not searched further

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

    def further(self, found: Sequence[Timed]) -> Iterator[Timed]:
        """What is tried where the orders do not meet the bound, unless the schedule is large.

        Args:
            found: the orders, the best first.
        """
        if sum(map(len, found[0].schedule.words)) <= _LARGE:
            yield from self._fused_in_part()
            yield from self.improved(found)

    def _fused_in_part(self) -> Iterator[Timed]:
        """The orders with more and more stages that fuse, from the last on, as long as that makes the best shorter."""
        if len(self.fuses) == 1:
            return
        kept: frozenset[int] = frozenset()
        shortest = float("inf")
        for k in reversed(range(len(self.flows[0][0].stages))):
            if not any(flow.stages[k].fused is not None for flow, _ in counted(self.flows)):
                continue
            tried = [self.timed(s) for rule in self.rules() if self.fits(s := rule(kept | {k}))]
            best_here = min((t.period for t in tried), default=float("inf"))
            if best_here < shortest:
                kept, shortest = kept | {k}, best_here
                yield from tried

    def improved(self, found: Sequence[Timed]) -> Iterator[Timed]:
        """What local improvement makes of the best, random lists among them; I and W stay as they are, fused or split.

        Args:
            found: so far, the best first.
        """
        actions = sum(map(len, found[0].schedule.words))
        count, looks = min(_RANDOM_LISTS, _EFFORT // (5 * actions)), min(_LOOKS, _EFFORT // actions)
        lists = [self.timed(s) for s in self._random_lists(count) if self.fits(s)]
        starts = sorted([*found, *lists], key=lambda t: t.rank)[:_STARTS]
        yield from starts
        network_of = partial(network, costs=self.costs, chains=self.chains)
        bound = found[0].lower_bound * len(self.flows)
        for start in starts:
            yield self.timed(improve(start.schedule, network_of, bound, looks, self.fits))

    def _of(self, name: str, words_of: Callable[[Sequence[Flow], int], list[Word]]) -> Schedule:
        return orders.schedule_of(name, self.flows, words_of)

    def _nearest(self, cap: int) -> Rule:
        rule = partial(nearest_first, cap=cap, costs=self.costs, chains=self.chains)
        return lambda fuse: self._of(f"nearest-first-{cap}", partial(rule, fuse=fuse))

    def _random_lists(self, count: int) -> Iterator[Schedule]:
        """List schedules by latest start, which random numbers, ever the same, make sooner or later."""
        urgencies = {batch: latest_starts(batch, self.costs) for batch in set(map(tuple, self.flows))}
        spread = _SPREAD * max(self.costs.of("forward", len(self.flows[0][0].stages)))
        numbers = random.Random(0)

        def words_of(batch: Sequence[Flow], turn: int) -> list[Word]:
            width = spread * numbers.random()
            shaken = {
                a._replace(turn=turn): (t + numbers.uniform(-width, width), 0.0)
                for a, t in urgencies[tuple(batch)].items()
            }
            rule = partial(list_schedule, fuse=orders.NONE, cap=len(batch), costs=self.costs, chains=self.chains)
            return rule(batch, turn, shaken.__getitem__)

        for _ in range(count):
            yield self._of("random-list", words_of)
