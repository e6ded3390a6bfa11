"""The best schedule of a strategy: the shortest of several orders, with its distance from the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product

from nwise.checks import check_at_least
from nwise.flow import Flows, counted, flows_for
from nwise.schedule import orders
from nwise.schedule.ages import Ages, strategy_ages
from nwise.schedule.assign import balanced
from nwise.schedule.bounds import lower_bound, stage_work
from nwise.schedule.costs import Costs
from nwise.schedule.graph import TaskGraph
from nwise.schedule.memory import peak_bytes
from nwise.schedule.orders import Actions, make_schedule, paced
from nwise.schedule.placement import Placement, make_placement
from nwise.schedule.schedule import Schedule
from nwise.schedule.sweep import Deadlock
from nwise.schedule.timing import CLOSE, Limit, Timed, check_memory, excess, rounded, timed
from nwise.strategies import Strategy
from nwise.strategies import strategy as parse

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
        self.what, self.least, self.memory = what, least, memory
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
) -> Timed:
    """Find the schedule with the shortest period.

    The candidates are the orders of `nwise.schedule.orders` and list schedules, sorted roughly by memory. Under a delay they are
    the skewed order and list schedules; some of these choose the ages of their messages. The search ends at the first candidate
    that meets the lower bound. Otherwise the shortest period wins; of equal periods, the one with the fewest micro-batches in
    flight, then the one with first-in-first-out messages. A `memory` limit adds leaner candidates.

    Args:
        strategy: a strategy or its name.
        num_stages: number of stages, A.
        num_microbatches: number of micro-batches, M.
        costs: costs of one micro-batch.
        memory: limit in bytes, one for all ranks or one for each (`Costs.activation_bytes`, `Costs.fixed_bytes`); default: none.
        placement: rank of every stage, see `nwise.schedule.placement`, or ``"balanced"`` for contiguous stages of which the
            busiest rank has the least work by these costs; default: neighbouring stages share a rank, in equal numbers.
        num_ranks: number of ranks; default: one for each stage, or those of the placement.

    Raises:
        ValueError, TypeError: an argument is invalid.
        DoesNotFit: no order that it tries fits the memory; a ValueError too.

    >>> result = best("2-wise", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1))
    >>> result.period, result.lower_bound, result.order, max(result.in_flight)
    (18.0, 18.0, 'skewed', 2)
    """
    flows, ranks, ages = problem(strategy, num_stages, num_microbatches, costs, placement, num_ranks)
    return best_order(flows, costs, ranks, ages, memory=memory)


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
    ranks = make_placement("contiguous" if placement == "balanced" else placement, num_stages, num_ranks)
    ranks = balanced(stage_work(flows, costs), num_ranks) if placement == "balanced" else ranks
    return flows, ranks, strategy_ages(rule, flows)


def best_order(flows: Flows, costs: Costs, placement: Placement, ages: Ages, *, memory: Limit = None) -> Timed:
    """Find the best of the closed-form orders and list schedules; see `best`."""
    check_memory(memory, 1 + max(placement))
    bound = lower_bound(flows, costs, placement, ages, pairs=False) / len(flows)
    schedules = _candidates(flows, costs, placement, ages, bound, small=memory is not None)
    # The first candidates need little memory, so the first that meets the bound will do.
    enough = bound * (1 + 2 * CLOSE)
    return fastest(schedules, costs, "the smallest order tried", memory=memory, enough=enough)


def fastest(
    schedules: Iterable[Schedule],
    costs: Costs,
    what: str,
    *,
    memory: Limit = None,
    enough: float = 0.0,
) -> Timed:
    """Return the best of the schedules that fit the memory.

    Args:
        schedules, costs, memory: the schedules, of equal ones the preferred first, and what they cost and may need; see `best`.
        what: name of the schedule with the least memory, for the error.
        enough: period at which the search ends; default: it tries all.

    Raises:
        DoesNotFit: none fits.
    """
    found, least, limit = list[Timed](), (float("inf"), 0.0, 0.0), float("inf")
    for schedule in schedules:
        if memory is not None and (needed := excess(peak_bytes(schedule, costs), memory))[0] > 1:
            least = min(least, needed)
            continue
        try:
            option = timed(schedule, costs, limit)
        except Deadlock:  # a delay puts the lists of several mini-batches together, which not every order allows
            continue
        if option.period <= limit:
            found.append(option)
            limit = min(limit, option.period * (1 + CLOSE))  # a schedule that is slower need not be timed to the end
        if limit <= enough:
            break
    if not found:
        raise DoesNotFit(what, *least[1:])
    # The rest of the sort key (`Timed.rank`) takes longer to compute, so only the fastest schedules compute it.
    shortest = min(rounded(option.period) for option in found)
    return min((option for option in found if rounded(option.period) == shortest), key=lambda option: option.rank)


def _candidates(
    flows: Flows, costs: Costs, placement: Placement, ages: Ages, bound: float, *, small: bool
) -> Iterator[Schedule]:
    """Iterate over schedules to try; of equal ones the first is preferred."""
    late, size = ages.oldest > 0, len(flows[0])
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
    lean, more = list[tuple[float, int]](), list[tuple[float, int]]()
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
