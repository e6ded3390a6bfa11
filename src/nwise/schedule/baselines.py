"""End-to-end pipelines for comparison, timed: GPipe, 1F1B, zero-bubble and their kin with several stages on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from nwise.checks import hint
from nwise.flow import Flows, flows_for
from nwise.schedule.costs import Costs
from nwise.schedule.find import best, fastest, problem
from nwise.schedule.named import RULES, check_order, choose, named_schedule
from nwise.schedule.orders import make_schedule, skewed
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Schedule
from nwise.schedule.timing import Limit, Timed, check_memory, timed
from nwise.strategies import EndToEnd, Strategy
from nwise.strategies import strategy as parse

__all__ = [
    "BASELINES",
    "SEVERAL_STAGES",
    "baseline",
    "known_method",
    "method_flows",
    "stages_on",
    "timed_method",
    "timed_pipeline",
]

BASELINES = tuple(name for name, order in RULES.items() if order.baseline)
# Those with two stages on a rank, or more.
SEVERAL_STAGES = tuple(name for name in BASELINES if RULES[name].placement != "contiguous")


def stages_on(devices: int, name: str) -> int:
    """Return the number of stages of a method on a number of devices: two on each if it is made for several.

    >>> stages_on(4, "zb-v"), stages_on(4, "2-wise")
    (8, 4)
    """
    return devices * (2 if name in SEVERAL_STAGES else 1)


def method_flows(name: str, num_stages: int, num_microbatches: int) -> Flows:
    """Return the flow of every micro-batch of a pipeline or strategy, by name, ``[cycle][M]``."""
    return flows_for(EndToEnd() if name in BASELINES else parse(name), num_stages, num_microbatches)


def baseline(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    memory: Limit = None,
    placement: str | Sequence[int] | None = None,
    num_ranks: int | None = None,
) -> Timed:
    """Return an end-to-end pipeline with its period.

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
    return timed_pipeline(name, flows, costs, ranks, memory)


def timed_pipeline(name: str, flows: Flows, costs: Costs, placement: Placement, memory: Limit = None) -> Timed:
    """Return one of `BASELINES` with its period, given the rank of every stage; see `baseline`."""
    check_memory(memory, len(set(placement)))
    return fastest(_schedules(name, flows, placement, costs, small=memory is not None), costs, name, memory=memory)


def timed_method(name: str, order: str = "best", **options: Any) -> Timed:
    """Return a pipeline of `BASELINES`, or a schedule of a strategy, by name.

    Args:
        name: name of a pipeline or strategy.
        order: order of a strategy, one of `nwise.schedule.named.ORDERS`, which a pipeline runs under that name; default: the
            best.
        options: options of `baseline` or `best`, which are the same; another order than the best meets no `memory`.

    Raises:
        ValueError: a name is unknown, or an option is out of range.

    >>> options = {"num_stages": 8, "num_microbatches": 4, "costs": Costs(1, 0.5, 1, 1)}
    >>> timed_method("2-wise", "phase", **options).period, timed_method("1f1b", **options).period
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
    return timed(choose(order, flows, ranks, ages, options["costs"]), options["costs"])


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


def _schedules(name: str, flows: Flows, placement: Placement, costs: Costs, *, small: bool) -> Iterator[Schedule]:
    """Iterate over the schedules of a pipeline: one for GPipe and 1F1B, several to choose from for zero-bubble."""
    size, num_stages, named = len(flows[0]), len(placement), RULES[name]
    yield named_schedule(name, flows, placement, None, costs)
    if named.cap is None:
        return
    for stride in named.strides:
        yield make_schedule(name, flows, partial(skewed, fuse=False, stride=stride), placement, costs=costs)
    caps = set(range(1, num_stages)) if small else set()
    if named.by_rank is not None:
        caps.add(named.cap(num_stages))  # shorter where messages take time
    if named.any_cap:
        caps.add(size)
    for cap in sorted({min(cap, size) for cap in caps}):
        yield make_schedule(name, flows, named.rule, placement, costs=costs, cap=cap)
