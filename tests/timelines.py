"""What overlaps in time in a simulated run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from nwise.schedule import Kind, Timeline


def overlapping(spans: Iterable[tuple[float, float]]) -> int:
    """Return the largest number of spans of time that overlap; of equal times, an end makes room for a start."""
    now = most = 0
    for _, change in sorted(change for start, end in spans for change in ((start, 1), (end, -1))):
        now += change
        most = max(most, now)
    return most


def in_flight(line: Timeline) -> tuple[int, ...]:
    """Return the largest number of micro-batches between forward and the end of the last action, for every stage."""
    times: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for e in line.events:
        if e.action.kind is not Kind.UPDATE:
            times[e.action.stage, e.batch, e.action.microbatch] += [e.start, e.end]
    stages = range(line.schedule.num_stages)
    return tuple(overlapping((min(t), max(t)) for (stage, *_), t in times.items() if stage == k) for k in stages)
