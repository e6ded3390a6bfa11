"""End-to-end pipelines to compare with: GPipe, 1F1B and zero-bubble.

    gpipe        all forwards, then all backwards
    1f1b         at most A - k micro-batches in flight on stage k, the period of GPipe
    zb-h1        backward split into I and W, at most A micro-batches in flight
    zero-bubble  the same without a cap: no bubble if there are enough micro-batches

The split needs the cotangents of all layers kept between I and W (``chains="stored"``). nwise's own stages walk the
chain again in W (``chains="walked"``), so those are the prices at which nwise itself can run zero-bubble.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nwise._errors import current_name, hint
from nwise.flow import flows_for
from nwise.schedule import orders
from nwise.schedule.best import DoesNotFit, best
from nwise.schedule.costs import Chains, Costs, check_counts
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule
from nwise.schedule.search import Search
from nwise.schedule.timed import Timed, check_memory, peak_bytes
from nwise.strategies import EndToEnd, Strategy
from nwise.strategies import strategy as strategy_of

BASELINES = ("gpipe", "1f1b", "zb-h1", "zero-bubble")


def baseline(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    chains: Chains = "stored",
    memory: float | None = None,
) -> Timed:
    """An end-to-end pipeline with its period.

    Args:
        name: one of `BASELINES`.
        num_stages: A.
        num_microbatches: M.
        costs: of one micro-batch.
        chains: see `nwise.schedule.best`.
        memory: bytes that every stage may use at most; default: any. Zero-bubble then has fewer micro-batches in flight.

    Raises:
        ValueError: there is no such pipeline, or a number is out of range.
        DoesNotFit: the pipeline does not fit the memory; a ValueError too.

    >>> baseline("1f1b", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1)).period
    35.0
    """
    name = current_name(name)
    if name not in BASELINES:
        raise ValueError(f"A baseline should be one of {', '.join(BASELINES)}. Found {name!r}.{hint(name, BASELINES)}")
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    check_memory(memory)
    search = Search(flows_for(EndToEnd(), num_stages, num_microbatches), costs, chains, memory)
    schedules = _schedules(name, search)
    found = sorted((search.timed(schedule) for schedule in schedules if search.fits(schedule)), key=lambda t: t.rank)
    if not found:
        raise DoesNotFit(name, min(max(peak_bytes(s.in_flight, costs)) for s in schedules), memory or 0.0)
    return found[0]


def timed_method(name: str, **options: Any) -> Timed:
    """A pipeline of `BASELINES` or the best schedule of a strategy, by name.

    Args:
        name: which.
        options: of `baseline` and `best`, which take the same.

    Raises:
        ValueError: there is no such pipeline or strategy, or an option is out of range.
    """
    name = current_name(name)
    if name in BASELINES:
        return baseline(name, **options)
    return best(known_method(name), **options)


def known_method(name: str) -> Strategy:
    """The strategy of a name; of an unknown one, suggest a pipeline too.

    Raises:
        ValueError: there is no such strategy.
    """
    try:
        return strategy_of(name)
    except ValueError as error:
        if meant := hint(name, BASELINES):
            raise ValueError(
                f"`strategy` should be a strategy, or one of {', '.join(BASELINES)}. Found {name!r}.{meant}"
            ) from error
        raise


def _schedules(name: str, search: Search) -> list[Schedule]:
    flows, size = search.flows, len(search.flows[0])
    if name == "gpipe":
        return [orders.schedule_of(name, flows, partial(orders.phase, fuse=orders.ALL))]
    if name == "1f1b":
        return [orders.schedule_of(name, flows, orders.one_forward_one_backward)]
    num_stages = len(flows[0][0].stages)
    capped = name == "zb-h1"
    found = [
        orders.schedule_of(name, flows, partial(orders.skewed, fuse=orders.NONE, stride=stride))
        for stride in ((1,) if capped else (1, 2))
    ]
    caps = {num_stages} if capped else {2 * num_stages - 1, size}
    caps |= set() if search.memory is None else set(range(1, num_stages))
    for cap in sorted({min(cap, size) for cap in caps}):
        rule = partial(nearest_first, fuse=orders.NONE, cap=cap, costs=search.costs, chains=search.chains)
        found.append(orders.schedule_of(name, flows, rule))
    return found
