"""End-to-end pipelines for comparison: GPipe, 1F1B and zero-bubble.

    gpipe        all forwards, then all backwards
    1f1b         at most A - k micro-batches in flight on stage k, the period of GPipe
    zb-h1        backward split into I and W, at most A micro-batches in flight
    zero-bubble  the same without a cap: no bubble if there are enough micro-batches

The split keeps the cotangents of all layers between I and W (`nwise.kept`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nwise._errors import current_name, hint
from nwise.flow import flows_for
from nwise.schedule import orders
from nwise.schedule.best import DoesNotFit, best
from nwise.schedule.costs import Costs, check_counts
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule
from nwise.schedule.search import Search
from nwise.schedule.timed import Timed, check_memory, peak_bytes
from nwise.strategies import EndToEnd, Strategy
from nwise.strategies import strategy as parse

BASELINES = ("gpipe", "1f1b", "zb-h1", "zero-bubble")


def baseline(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    memory: float | None = None,
) -> Timed:
    """Return an end-to-end pipeline with its period.

    Args:
        name: one of `BASELINES`.
        num_stages: number of stages, A.
        num_microbatches: number of micro-batches, M.
        costs: costs of one micro-batch.
        memory: limit per stage in bytes, which zero-bubble meets with fewer micro-batches in flight; default: none.

    Raises:
        ValueError: the name is unknown, or a number is out of range.
        DoesNotFit: the pipeline does not fit the memory; a ValueError too.

    >>> baseline("1f1b", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1)).period
    35.0
    """
    name = current_name(name)
    if name not in BASELINES:
        raise ValueError(f"A baseline should be one of {', '.join(BASELINES)}. Found {name!r}.{hint(name, BASELINES)}")
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    check_memory(memory)
    search = Search(flows_for(EndToEnd(), num_stages, num_microbatches), costs, memory)
    schedules = _schedules(name, search)
    options = [search.timed(schedule) for schedule in schedules if search.fits(schedule)]
    if not options:
        raise DoesNotFit(name, min(max(peak_bytes(s.in_flight, costs)) for s in schedules), memory or 0.0)
    return min(options, key=lambda t: t.rank)


def timed_method(name: str, **options: Any) -> Timed:
    """Return a pipeline of `BASELINES` or the best schedule of a strategy, by name.

    Args:
        name: name of a pipeline or strategy.
        options: options of `baseline` or `best`, which are the same.

    Raises:
        ValueError: the name is unknown, or an option is out of range.
    """
    name = current_name(name)
    if name in BASELINES:
        return baseline(name, **options)
    return best(known_method(name), **options)


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


def _schedules(name: str, search: Search) -> list[Schedule]:
    """Return the schedules of a pipeline: one for GPipe and 1F1B, several to choose from for zero-bubble."""
    flows, size = search.flows, len(search.flows[0])
    if name == "gpipe":
        return [orders.make_schedule(name, flows, partial(orders.phase, fuse=orders.ALL))]
    if name == "1f1b":
        return [orders.make_schedule(name, flows, orders.one_forward_one_backward)]
    num_stages = len(flows[0][0].stages)
    capped = name == "zb-h1"
    schedules = [
        orders.make_schedule(name, flows, partial(orders.skewed, fuse=orders.NONE, stride=stride))
        for stride in ((1,) if capped else (1, 2))
    ]
    # With F and I of one slot, stage 0 receives its first gradient after 2 A - 1 slots, which as many forwards fill.
    # Smaller caps help only if memory is short.
    caps = {num_stages} if capped else {2 * num_stages - 1, size}
    caps |= set() if search.memory is None else set(range(1, num_stages))
    for cap in sorted({min(cap, size) for cap in caps}):
        rule = partial(nearest_first, fuse=orders.NONE, cap=cap, costs=search.costs)
        schedules.append(orders.make_schedule(name, flows, rule))
    return schedules
