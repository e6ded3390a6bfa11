"""The best schedule of a strategy: the shortest of a few orders, with its distance from the lower bound.

End-to-end pipelines, such as 1F1B, are timed here too, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from numbers import Real
from typing import Any

from nwise.checks import check_at_least, hint
from nwise.flow import Flows, counted, flows_for
from nwise.schedule import orders
from nwise.schedule.ages import Ages, strategy_ages
from nwise.schedule.bounds import lower_bound
from nwise.schedule.costs import CLOSE, Costs
from nwise.schedule.graph import TaskGraph
from nwise.schedule.named import BASELINES, RULES, check_order, choose, named_schedule
from nwise.schedule.orders import Actions, make_schedule, paced
from nwise.schedule.placement import Placement, make_placement
from nwise.schedule.schedule import Schedule
from nwise.schedule.sweep import Deadlock
from nwise.strategies import EndToEnd, Strategy
from nwise.strategies import strategy as parse

__all__ = ["DoesNotFit", "Limit", "baseline", "best", "best_order", "known_method", "method_flows", "method_schedule"]

Limit = float | Sequence[float] | None  # of the memory of every rank, in bytes: one for all, or one for each

# Name of an order, its rule, and the cap of list scheduling.
_Candidate = tuple[str, Callable[..., list[Actions]], int | None]
# Times between the calls of a delayed list schedule, as multiples of the lower bound on the period.
_PACES = (1.0, 1.01, 1.02, 1.035, 1.05, 1.075, 1.1, 1.15, 1.2, 0.0)


class DoesNotFit(ValueError):
    """The memory is too small.

    Args:
        what: name of the method that does not fit.
        least: bytes that a rank needs at least.
        memory: bytes that a rank may use.
    """

    def __init__(self, what: str, least: float, memory: float) -> None:
        self.what = what
        self.least = least
        self.memory = memory
        super().__init__(self.message("bytes", 1.0))

    def message(self, unit: str, size: float) -> str:
        """Return the error message, with sizes in a unit of `size` bytes."""
        return (
            f"`memory` should be at least {self.least / size:,.4g} {unit} a rank for {self.what}. Found "
            f"{self.memory / size:,.4g}; allow more, or cut the mini-batch into more micro-batches or the network into more "
            "stages."
        )


def best(
    strategy: str | Strategy,
    *,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    memory: Limit = None,
    placement: str | Sequence[int] = "contiguous",
    num_ranks: int | None = None,
) -> Schedule:
    """Find the schedule with the shortest period.

    The candidates are the orders of `nwise.schedule.orders` and list schedules, sorted roughly by memory. Under a delay they are
    the skewed order and list schedules; some of these choose the ages of their messages. The search ends at the first candidate
    that meets the lower bound. Otherwise the shortest period wins; of equal periods, the one with the fewest micro-batches in
    flight. A `memory` limit adds leaner candidates.

    Args:
        strategy: a strategy or its name.
        num_stages: number of stages, A.
        num_microbatches: number of micro-batches, M.
        costs: costs of one micro-batch.
        memory: limit in bytes, one for all ranks or one for each (`Costs.activation_bytes`, `Costs.fixed_bytes`); default: none.
        placement: rank of every stage, see `nwise.schedule.placement`; default: neighbouring stages share a rank, in equal
            numbers. `nwise.planning.assign.balanced` makes one by the work of unequal stages.
        num_ranks: number of ranks; default: one for each stage, or those of the placement.

    Raises:
        ValueError, TypeError: an argument is invalid.
        DoesNotFit: no order that it tries fits the memory; a ValueError too.

    >>> schedule = best("2-wise", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1))
    >>> schedule.period, schedule.lower_bound, schedule.order, max(schedule.in_flight)
    (18.0, 18.0, 'skewed', 2)
    """
    flows, ranks, ages = problem(strategy, num_stages, num_microbatches, costs, placement, num_ranks)
    return best_order(flows, costs, ranks, ages, memory=memory)


def baseline(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    memory: Limit = None,
    placement: str | Sequence[int] | None = None,
    num_ranks: int | None = None,
) -> Schedule:
    """Return the schedule of an end-to-end pipeline.

    Args:
        name: one of `BASELINES`.
        num_stages, num_microbatches, costs, num_ranks: as for `best`.
        memory: as for `best`; zero-bubble meets it with fewer micro-batches in flight.
        placement: rank of every stage; default: the one that the pipeline is made for.

    Raises:
        ValueError: the name is unknown, or a number is out of range.
        DoesNotFit: the pipeline does not fit the memory; a ValueError too.

    >>> baseline("1f1b", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1)).period
    35.0
    """
    if name not in BASELINES:
        raise ValueError(f"A baseline should be one of {', '.join(BASELINES)}. Found {name!r}.{hint(name, BASELINES)}")
    where = RULES[name].placement if placement is None else placement
    flows, ranks, _ = problem(EndToEnd(), num_stages, num_microbatches, costs, where, num_ranks)
    return pipeline_order(name, flows, costs, ranks, memory)


def method_schedule(name: str, order: str = "best", **options: Any) -> Schedule:
    """Return the schedule of a pipeline of `BASELINES`, or of a strategy, by name.

    Args:
        name: name of a pipeline or strategy.
        order: order of a strategy, one of `nwise.schedule.named.ORDERS`, which a pipeline runs under that name; default: the
            best.
        options: options of `baseline` or `best`, which are the same; another order than the best meets no `memory`.

    Raises:
        ValueError: a name is unknown, or an option is out of range.

    >>> options = {"num_stages": 8, "num_microbatches": 4, "costs": Costs(1, 0.5, 1, 1)}
    >>> method_schedule("2-wise", "phase", **options).period, method_schedule("1f1b", **options).period
    (18.0, 35.0)
    """
    check_order(order)
    if name in BASELINES and order != "best":
        raise ValueError(
            f"`strategy` should be a strategy if an order is given. Found {name!r}, which is itself an order; use 'end-to-end'."
        )
    if name in BASELINES:
        return baseline(name, **options)
    if order == "best":
        return best(known_method(name), **options)
    flows, ranks, ages = problem(known_method(name), **options)
    return choose(order, flows, ranks, ages, options["costs"])


def known_method(name: str) -> Strategy:
    """Return the strategy with a name; for an unknown one, suggest pipelines too.

    Raises:
        ValueError: the name is unknown.
    """
    try:
        return parse(name)
    except ValueError as error:
        if meant := hint(name, BASELINES):
            raise ValueError(
                f"`strategy` should be a strategy, or one of {', '.join(BASELINES)}. Found {name!r}.{meant}"
            ) from error
        raise


def method_flows(name: str, num_stages: int, num_microbatches: int) -> Flows:
    """Return the flow of every micro-batch of a pipeline or strategy, by name, ``[cycle][M]``."""
    return flows_for(EndToEnd() if name in BASELINES else parse(name), num_stages, num_microbatches)


def problem(
    strategy: str | Strategy,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    placement: str | Sequence[int] = "contiguous",
    num_ranks: int | None = None,
) -> tuple[Flows, Placement, Ages]:
    """Return the flow of every micro-batch, the rank of every stage and the age of every pass; see `best`."""
    check_at_least(1, num_stages=num_stages, num_microbatches=num_microbatches)
    if not isinstance(costs, Costs):
        raise TypeError(f"`costs` should be a nwise.schedule.Costs. Found {type(costs).__name__}.")
    rule = parse(strategy)
    flows = flows_for(rule, num_stages, num_microbatches)
    if num_ranks is None:
        num_ranks = num_stages if isinstance(placement, str) else 1 + max(placement, default=0)
    check_at_least(1, num_ranks=num_ranks)
    # This checks the number of ranks, too.
    ranks = make_placement(placement, num_stages, num_ranks)
    return flows, ranks, strategy_ages(rule, flows)


def best_order(flows: Flows, costs: Costs, placement: Placement, ages: Ages, *, memory: Limit = None) -> Schedule:
    """Find the best of the closed-form orders and list schedules; see `best`."""
    bound = lower_bound(flows, costs, placement, ages) / len(flows)
    schedules = _candidates(flows, costs, placement, ages, bound, small=memory is not None)
    # The first candidates need little memory, so the first that meets the bound will do.
    return _fastest(schedules, "the smallest order tried", 1 + max(placement), memory, bound * (1 + 2 * CLOSE))


def pipeline_order(name: str, flows: Flows, costs: Costs, placement: Placement, memory: Limit = None) -> Schedule:
    """Find the best order of one of `BASELINES`, given the rank of every stage; see `baseline`."""
    schedules = _variants(name, flows, costs, placement, small=memory is not None)
    return _fastest(schedules, name, 1 + max(placement), memory)


def _fastest(schedules: Iterable[Schedule], what: str, num_ranks: int, memory: Limit, enough: float = 0.0) -> Schedule:
    """Return the best of the schedules that fit the memory.

    Args:
        schedules: the schedules, of equal ones the preferred first.
        what: name of the schedule with the least memory, for the error.
        num_ranks: number of ranks.
        memory: the limit; see `best`.
        enough: period at which the search ends; default: it tries all.

    Raises:
        DoesNotFit: none fits.
    """
    _check_memory(memory, num_ranks)
    found = list[Schedule]()
    least = (float("inf"), 0.0, 0.0)
    limit = float("inf")
    for schedule in schedules:
        if memory is not None and (needed := excess(schedule.peak_bytes, memory))[0] > 1:
            least = min(least, needed)
            continue
        try:
            period = schedule.period_within(limit)  # a schedule that is slower need not be timed to the end
        except Deadlock:  # a delay puts the lists of several mini-batches together, which not every order allows
            continue
        if period <= limit:
            found.append(schedule)
            limit = min(limit, period * (1 + CLOSE))
        if limit <= enough:
            break
    if not found:
        raise DoesNotFit(what, *least[1:])
    # The rest of the sort key takes longer to compute, so only the fastest schedules compute it.
    shortest = min(rounded(option.period) for option in found)
    return min((option for option in found if rounded(option.period) == shortest), key=preference)


def preference(schedule: Schedule) -> tuple[float, int, int]:
    """Return a sort key, smallest for the best schedule: period, micro-batches in flight, number of tasks."""
    return rounded(schedule.period), max(schedule.in_flight), len(schedule.graph.tasks)


def _check_memory(memory: Limit, num_ranks: int) -> None:
    """Raise ValueError unless `memory` is None or above 0, one number for all ranks or one for each of so many."""
    if memory is None:
        return
    several = isinstance(memory, Sequence) and not isinstance(memory, str)
    for limit in memory if several else [memory]:  # type: ignore[union-attr]
        if not isinstance(limit, Real) or not limit > 0:  # type: ignore[operator]
            raise ValueError(f"`memory` should be a number of bytes above 0. Found {limit!r}.")
    if several and num_ranks != len(memory):  # type: ignore[arg-type]
        raise ValueError(f"`memory` should be one number, or one for each of {num_ranks} ranks. Found {memory!r}.")


def excess(sizes: Sequence[float], memory: float | Sequence[float]) -> tuple[float, float, float]:
    """Return the largest share of its limit that a rank needs, with these bytes and this limit.

    >>> excess((50.0, 60.0), (100.0, 80.0))
    (0.75, 60.0, 80.0)
    """
    limits = memory if isinstance(memory, Sequence) else [memory] * len(sizes)
    return max((size / limit, size, limit) for size, limit in zip(sizes, limits, strict=True))


def rounded(time: float) -> float:
    """Return a time without its last digits, so times that differ only by rounding compare as equal."""
    return float(f"{time:.9e}")


def _candidates(
    flows: Flows, costs: Costs, placement: Placement, ages: Ages, bound: float, *, small: bool
) -> Iterator[Schedule]:
    """Iterate over schedules to try; of equal ones the first is preferred."""
    late = ages.oldest > 0
    size = len(flows[0])
    graphs: dict[bool, TaskGraph] = {}

    def in_order(name: str, rule: Callable[..., list[Actions]], cap: int | None) -> Iterator[Schedule]:
        # One pass instead of two saves an overhead and a kept cotangent, so it is tried first; two passes start earlier.
        for fuse in (True, False):
            with suppress(Deadlock):
                rule_of = partial(rule, fuse=fuse)
                made = make_schedule(
                    name, flows, rule_of, placement, ages, costs=costs, cap=cap, graph=graphs.get(fuse)
                )
                graphs.setdefault(fuse, made.graph)
                yield made

    # Under a delay a message may run in any of several calls. Lists made at a pace choose the call, those of a rule do not:
    #
    #     first                the leanest list of a rule
    #     lean, at two paces   one micro-batch in flight: the least memory
    #     other rules          more in flight
    #     paces                all in flight, from the pace of the bound to slower ones
    first, *others = _rules(flows, late=late, small=small)
    yield from in_order(*first)
    lean = list[tuple[float, int]]()
    more = list[tuple[float, int]]()
    if late and ages.stashes:
        at_pace = paced(flows, placement, ages, costs)
        lean = [(1.0, 1), (0.0, 1)] if size > 1 else []
        caps = [2**i for i in range(size.bit_length()) if 2**i < size] if small else []
        more = [pair for pair in product(_PACES, [*caps, size]) if pair not in lean]
    for pace, cap in lean:
        yield from at_pace(pace * bound, cap)
    for candidate in others:
        yield from in_order(*candidate)
    for pace, cap in more:
        yield from at_pace(pace * bound, cap)


def _rules(flows: Flows, *, late: bool, small: bool) -> list[_Candidate]:
    """Return rules with their names and, for list schedules, caps: for `late` gradients, and for a `small` memory."""
    # The search ends at the first schedule that meets the lower bound, so rules with few micro-batches in flight come first: with
    # stride s the skewed order has up to s reach + 1, and a list schedule its cap. A long stride gives messages more time to
    # arrive. With M - 1 the passes of a loss begin when the last forward of the mini-batch has begun.
    size = len(flows[0])
    reach = max(map(orders.reach, counted(flows)))
    lists = [_nearest_first(min(size, cap)) for cap in (reach + 1, 2 * reach + 1, size)]
    long = sorted({3, size // 2, size - 1} & {*range(3, size)})
    rules: list[_Candidate]
    if late:
        # Old micro-batches wait for nothing new, so a stage can end one before each forward. Then it keeps the mini-batches of
        # the delay and one micro-batch, where other orders keep up to one mini-batch more. Orders that are not here tie old
        # passes to new micro-batches.
        rules = [_nearest_first(1), ("skewed", orders.skewed, None), *lists]
    else:
        rules = [
            ("skewed", orders.skewed, None),
            ("1f1b", orders.one_forward_one_backward, None),
            lists[0],
            ("skewed-2", partial(orders.skewed, stride=2), None),
            lists[1],
            *((f"skewed-{stride}", partial(orders.skewed, stride=stride), None) for stride in long),
            lists[2],
            ("phase", orders.phase, None),
        ]
    if small:
        rules += [("depth-first", orders.depth_first, None), *map(_nearest_first, range(1, size + 1))]
    return list({rule[0]: rule for rule in rules}.values())  # each once


def _nearest_first(cap: int) -> _Candidate:
    return f"nearest-first-{cap}", orders.depth_first, cap


def _variants(name: str, flows: Flows, costs: Costs, placement: Placement, *, small: bool) -> Iterator[Schedule]:
    """Iterate over the schedules of a pipeline: one for GPipe and 1F1B, several to choose from for zero-bubble."""
    size = len(flows[0])
    num_stages = len(placement)
    named = RULES[name]
    yield named_schedule(name, flows, placement, None, costs)
    if named.cap is None:
        return
    for stride in named.strides:
        skewed = partial(orders.skewed, fuse=False, stride=stride)
        yield make_schedule(name, flows, skewed, placement, costs=costs)
    caps = set(range(1, num_stages)) if small else set()
    if named.by_rank is not None:
        caps.add(named.cap(num_stages))  # shorter where messages take time
    if named.any_cap:
        caps.add(size)
    for cap in sorted({min(cap, size) for cap in caps}):
        yield make_schedule(name, flows, named.rule, placement, costs=costs, cap=cap)
