"""End-to-end pipelines to compare with: GPipe, 1F1B and zero-bubble.

    gpipe             all forwards, then all backwards
    1f1b              at most A - k micro-batches in flight on stage k, the period of GPipe
    zero-bubble-lean  backward split into I and W, at most A micro-batches in flight (ZB-H1)
    zero-bubble       the same without a cap: no bubble where there are micro-batches enough

The split needs the cotangents of all layers kept between I and W (``chains="stored"``). nwise's own stages walk the
chain again in W (``chains="walked"``), so those are the prices at which nwise itself can run zero-bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nwise.credit import EndToEnd
from nwise.flow import Flow
from nwise.hint import hint
from nwise.schedule import orders
from nwise.schedule.best import flows_of
from nwise.schedule.costs import Chains, Costs, check_counts
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule
from nwise.schedule.timed import Timed, rounded, timed

RIVALS = ("gpipe", "1f1b", "zero-bubble-lean", "zero-bubble")


def rival(name: str, *, num_stages: int, num_microbatches: int, costs: Costs, chains: Chains = "stored") -> Timed:
    """An end-to-end pipeline with its period.

    Args:
        name: one of `RIVALS`.
        num_stages: A.
        num_microbatches: M.
        costs: of one micro-batch.
        chains: see `nwise.schedule.best`.

    >>> rival("1f1b", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1)).period
    35.0
    """
    if name not in RIVALS:
        raise ValueError(f"A rival should be one of {', '.join(RIVALS)}. Found {name!r}.{hint(name, RIVALS)}")
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    flows = flows_of(EndToEnd(), num_stages, num_microbatches)
    found = [timed(schedule, costs, chains) for schedule in _schedules(name, flows, costs, chains)]
    return min(found, key=lambda t: (rounded(t.period), max(t.in_flight)))


def _schedules(name: str, flows: Sequence[Sequence[Flow]], costs: Costs, chains: Chains) -> list[Schedule]:
    if name == "gpipe":
        return [orders.schedule_of(name, flows, partial(orders.phase, fuse=orders.ALL))]
    if name == "1f1b":
        return [orders.schedule_of(name, flows, orders.one_forward_one_backward)]
    strides = (1,) if name == "zero-bubble-lean" else (1, 2)
    found = [
        orders.schedule_of(name, flows, partial(orders.skewed, fuse=orders.NONE, stride=stride)) for stride in strides
    ]
    num_stages, num_microbatches = len(flows[0][0].stages), len(flows[0])
    caps = {num_stages} if name == "zero-bubble-lean" else {2 * num_stages - 1, num_microbatches}
    for cap in sorted({min(cap, num_microbatches) for cap in caps}):
        rule = partial(nearest_first, fuse=orders.NONE, cap=cap, costs=costs, chains=chains)
        found.append(orders.schedule_of(name, flows, rule))
    return found
