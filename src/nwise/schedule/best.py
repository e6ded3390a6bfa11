"""The best schedule of a strategy: the shortest of several orders, and how far from the bound it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from nwise.credit import Strategy
from nwise.flow import Flow, flow_of
from nwise.schedule import orders
from nwise.schedule.actions import Kind
from nwise.schedule.bounds import latest_starts, lower_bound, resource_bound
from nwise.schedule.costs import Chains, Costs
from nwise.schedule.greedy import list_schedule, nearest_first
from nwise.schedule.improve import improve
from nwise.schedule.lists import Schedule, Word
from nwise.schedule.network import network
from nwise.schedule.period import period
from nwise.strategy import strategy as strategy_of

_CLOSE = 1e-9
_LOOKS = 500  # neighbours that local improvement looks at, for each schedule it starts from
_STARTS = 3
_RANDOM_LISTS = 100
_EFFORT = 100_000  # of which fewer are looked at the more actions there are
_SPREAD = 4.0  # of their random numbers, in forwards
# Comparisons of pairs of actions beyond which the head-work-tail bound and local improvement are left out.
_SMALL = 3e8


class DoesNotFit(ValueError):
    """The memory is too small.

    Args:
        what: needs it.
        least: bytes that a stage needs.
        memory: bytes that there are.
    """

    def __init__(self, what: str, least: float, memory: float) -> None:
        self.what, self.least, self.memory = what, least, memory
        super().__init__(self.message("bytes", 1.0))

    def message(self, unit: str, size: float) -> str:
        """The sentence, in a unit of so many bytes."""
        return (
            f"`memory` should be at least {self.least / size:,.4g} {unit} a stage, which {self.what} needs. Found "
            f"{self.memory / size:,.4g}; give more, or cut the mini-batch into more micro-batches or the network into more "
            "stages."
        )


@dataclass(frozen=True)
class Timed:
    """A schedule with its costs and its period.

    Args:
        schedule: what every stage does.
        costs: of a micro-batch.
        chains: what a W costs that follows an I of the same cotangent.
        period: time per mini-batch in the steady state, exact; of a rotating strategy the mean over its cycle.
    """

    schedule: Schedule
    costs: Costs
    chains: Chains
    period: float

    @property
    def order(self) -> str:
        """Name of the order."""
        return self.schedule.order

    @property
    def lists(self) -> tuple[Word, ...]:
        """Per stage everything that it does, in order."""
        return self.schedule.lists

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage the most micro-batches whose forward has run and that are still needed."""
        return self.schedule.in_flight

    @cached_property
    def lower_bound(self) -> float:
        """Time per mini-batch that no order of these actions can be shorter than."""
        flows = self.schedule.flows
        bound = resource_bound(flows, self.costs)
        if self.period * len(flows) > bound * (1 + _CLOSE) and _size(self.schedule) < _SMALL:
            bound = max(bound, lower_bound(flows, self.costs, self.period * len(flows)))
        return bound / len(flows)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per stage what it keeps always and what its micro-batches in flight need."""
        return peak_bytes(self.schedule, self.costs)

    @property
    def stores_cotangents(self) -> bool:
        """Whether its price asks that an I keeps the cotangent of every layer for a W, which nwise's own stages do not
        (they walk the chain again)."""
        words = self.schedule.words
        split = (a for word in words for a in word if a.kind is Kind.WEIGHT_GRAD)
        flows = self.schedule.flows
        return self.chains == "stored" and any(
            flows[a.turn][a.microbatch].stages[a.stage].fused is not None for a in split
        )


def timed(schedule: Schedule, costs: Costs, chains: Chains = "stored") -> Timed:
    """A schedule with its exact period."""
    return Timed(schedule, costs, chains, period(network(schedule, costs, chains)) / len(schedule.flows))


def best(
    strategy: str | Strategy,
    *,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    chains: Chains = "stored",
    memory: float | None = None,
) -> Timed:
    """The schedule of shortest period: then of least memory, then with first-in-first-out messages.

    The orders of `nwise.schedule.orders` are tried, and, where the shortest does not meet the lower bound, locally
    improved. Hogwild waits for nobody, so that its busiest stage decides.

    Args:
        strategy: a strategy or its name.
        num_stages: A.
        num_microbatches: M.
        costs: of one micro-batch.
        chains: ``"stored"``, an I may keep the cotangent of every layer for a later W of the same cotangent;
            ``"walked"``, such a W walks the chain again, as nwise's own stages do.
        memory: bytes that every stage may use at most (`Costs.activation_bytes`, `Costs.fixed_bytes`); default: any.

    Raises:
        ValueError: a number is out of range.
        DoesNotFit: no order fits the memory; a ValueError too.

    >>> found = best("2-wise", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1))
    >>> found.period, found.lower_bound, found.order, max(found.in_flight)
    (18.0, 18.0, 'skewed', 2)
    """
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` should be an integer of at least 1. Found {value!r}.")
    if chains not in ("stored", "walked"):
        raise ValueError(f"`chains` should be 'stored' or 'walked'. Found {chains!r}.")
    rule = strategy_of(strategy)
    flows = flows_of(rule, num_stages, num_microbatches)
    bound = resource_bound(flows, costs) / len(flows)
    if rule.asynchronous:
        free = orders.hogwild(flows, costs, chains, pace=bound / num_microbatches)
        _refuse_too_large([free], costs, memory)
        return Timed(free, costs, chains, bound)
    fits = partial(_fits, costs=costs, memory=memory)
    rules = _rules(flows, costs, chains)
    found: list[Timed] = []
    for fuse in _fuses(costs, chains):
        for rule_of in rules:
            schedule = rule_of(fuse)
            if fits(schedule):
                found.append(timed(schedule, costs, chains))
                if len(found) == 1 and found[0].period <= bound * (1 + _CLOSE):
                    return found[0]  # the first has the least memory and first-in-first-out messages
    if not found:
        small = [rule_of(fuse) for fuse in _fuses(costs, chains) for rule_of in _small_rules(flows, costs, chains)]
        _refuse_too_large(small, costs, memory)
        found = [timed(schedule, costs, chains) for schedule in small if fits(schedule)]
    found.sort(key=_rank)
    if _size(found[0].schedule) < _SMALL and found[0].period > found[0].lower_bound * (1 + _CLOSE):
        found = sorted([found[0], *_fused_in_part(found[0], rules, fits), *_improved(found, fits)], key=_rank)
    return found[0]


def flows_of(strategy: Strategy, num_stages: int, num_microbatches: int) -> list[list[Flow]]:
    """The flow of every micro-batch in one cycle of mini-batches, ``[turns][M]``."""
    probes = [strategy.heads == "all"] * num_stages
    flows = [flow_of(strategy.credit(num_stages, turn), probes=probes) for turn in range(strategy.turns)]
    return [[flows[strategy.turn(step, m)] for m in range(num_microbatches)] for step in range(strategy.turns)]


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Per stage the bytes it keeps always and those of its micro-batches in flight."""
    sizes = zip(*(costs.of(n, schedule.num_stages) for n in ("fixed_bytes", "activation_bytes")), strict=True)
    return tuple(fixed + each * count for (fixed, each), count in zip(sizes, schedule.in_flight, strict=True))


def _rank(found: Timed) -> tuple[float, float, bool]:
    # Periods that differ by rounding are equal.
    return (float(f"{found.period:.9e}"), max(found.in_flight), not found.schedule.first_in_first_out)


def _size(schedule: Schedule) -> int:
    return (len(schedule.words) * max(map(len, schedule.words))) ** 2


# From the stages that fuse to a schedule.
Rule = Callable[[Collection[int]], Schedule]


def _rules(flows: Sequence[Sequence[Flow]], costs: Costs, chains: Chains) -> list[Rule]:
    """In the order in which they are preferred among equals."""
    reach = max(map(orders.reach, (flow for batch in flows for flow in batch)))
    num_microbatches = len(flows[0])
    caps = sorted({min(num_microbatches, cap) for cap in (reach + 1, 2 * reach + 1, num_microbatches)})
    return [
        lambda fuse: orders.schedule_of("skewed", flows, partial(orders.skewed, fuse=fuse, stride=1)),
        lambda fuse: orders.schedule_of("skewed-2", flows, partial(orders.skewed, fuse=fuse, stride=2)),
        *(_nearest(flows, costs, chains, cap) for cap in caps),
        lambda fuse: orders.schedule_of("phase", flows, partial(orders.phase, fuse=fuse)),
    ]


def _small_rules(flows: Sequence[Sequence[Flow]], costs: Costs, chains: Chains) -> list[Rule]:
    """For little memory: ever fewer micro-batches in flight, at last one."""
    caps = range(1, len(flows[0]) + 1)
    first: Rule = lambda fuse: orders.schedule_of("depth-first", flows, partial(orders.depth_first, fuse=fuse))  # noqa: E731
    return [first, *(_nearest(flows, costs, chains, cap) for cap in caps)]


def _nearest(flows: Sequence[Sequence[Flow]], costs: Costs, chains: Chains, cap: int) -> Rule:
    rule = partial(nearest_first, cap=cap, costs=costs, chains=chains)
    return lambda fuse: orders.schedule_of(f"nearest-first-{cap}", flows, partial(rule, fuse=fuse))


def _fuses(costs: Costs, chains: Chains) -> tuple[Collection[int], ...]:
    """One pass in the place of two saves an overhead, or a walk; else the split can do all that it can."""
    return (orders.NONE, orders.ALL) if chains == "walked" or costs.overhead else (orders.NONE,)


def _fused_in_part(best_found: Timed, rules: Sequence[Rule], fits: Callable[[Schedule], bool]) -> list[Timed]:
    """Stage by stage, fused if that makes the best of the orders shorter."""
    costs, chains, flows = best_found.costs, best_found.chains, best_found.schedule.flows
    if len(_fuses(costs, chains)) == 1:
        return []
    kept: frozenset[int] = frozenset()
    shortest = float("inf")
    found: list[Timed] = []
    shared = [
        any(f.stages[k].fused is not None for batch in flows for f in batch) for k in range(len(flows[0][0].stages))
    ]
    for k in reversed([k for k, fusable in enumerate(shared) if fusable]):
        tried = [timed(s, costs, chains) for rule in rules if fits(s := rule(kept | {k}))]
        best_here = min((t.period for t in tried), default=float("inf"))
        if best_here < shortest:
            kept, shortest = kept | {k}, best_here
            found += tried
    return found


def _improved(found: Sequence[Timed], fits: Callable[[Schedule], bool]) -> list[Timed]:
    """What local improvement makes of the best orders, and of the best of some random lists."""
    first = found[0]
    flows, costs, chains = first.schedule.flows, first.costs, first.chains
    actions = sum(map(len, first.schedule.words))
    looks, count = min(_LOOKS, _EFFORT // actions), min(_RANDOM_LISTS, _EFFORT // (5 * actions))
    lists = [s for s in _random_lists(flows, costs, chains, count) if fits(s)]
    starts = sorted([*found, *(timed(s, costs, chains) for s in lists)], key=_rank)[:_STARTS]
    network_of = partial(network, costs=costs, chains=chains)
    bound = first.lower_bound * len(flows)
    better = (improve(start.schedule, network_of, bound, looks, fits) for start in starts)
    return [*starts, *(timed(schedule, costs, chains) for schedule in better)]


def _random_lists(flows: Sequence[Sequence[Flow]], costs: Costs, chains: Chains, count: int) -> Iterator[Schedule]:
    """List schedules by latest start, which random numbers, ever the same, make sooner or later."""
    urgencies = {batch: latest_starts(batch, costs) for batch in set(map(tuple, flows))}
    spread = _SPREAD * max(costs.of("forward", len(flows[0][0].stages)))
    numbers = random.Random(0)

    def words_of(batch: Sequence[Flow], turn: int) -> list[Word]:
        width = spread * numbers.random()
        shaken = {
            a._replace(turn=turn): (t + numbers.uniform(-width, width), 0.0) for a, t in urgencies[tuple(batch)].items()
        }
        rule = partial(list_schedule, fuse=orders.NONE, cap=len(batch), costs=costs, chains=chains)
        return rule(batch, turn, shaken.__getitem__)

    for _ in range(count):
        yield orders.schedule_of("random-list", flows, words_of)


def _fits(schedule: Schedule, costs: Costs, memory: float | None) -> bool:
    return memory is None or max(peak_bytes(schedule, costs)) <= memory


def _refuse_too_large(schedules: Sequence[Schedule], costs: Costs, memory: float | None) -> None:
    least = min(max(peak_bytes(schedule, costs)) for schedule in schedules)
    if memory is not None and least > memory:
        raise DoesNotFit("the smallest order of this strategy", least, memory)
