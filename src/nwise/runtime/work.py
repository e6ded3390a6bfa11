"""The work of a rank: its part of a schedule, and who reads the result of each task.

A task reads what tasks of other stages have made: the activation of the stage before, or messages of the stage after. Everything
else that it needs is on the tape of its micro-batch. Two stages on a rank, end-to-end, M = 1::

    task        F0(0)   F1(0)       H1(0)   B1(0.0)   W0(0)
    reads               F0(0)                         B1(0.0)
    uses        1       0           0       1         0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nwise.schedule.actions import WEIGHT_GRADS, Kind
from nwise.schedule.schedule import Schedule

__all__ = ["RankWork", "work_of"]


@dataclass(frozen=True)
class RankWork:
    """What a rank does in one cycle of calls.

    Args:
        calls: the numbers of its computations in every call, in order.
        updates: the numbers of its updates in every call, which follow.
        reads: the tasks of other stages whose results a task reads, each with its message; None for an activation.
        uses: number of tasks of this rank that read a result.
        completes: the last task of each stage in every call that adds to a gradient.
    """

    calls: Sequence[Sequence[int]]
    updates: Sequence[Sequence[int]]
    reads: Mapping[int, Sequence[tuple[int, int | None]]]
    uses: Counter[int] = field(default_factory=Counter)
    completes: frozenset[int] = frozenset()


def work_of(schedule: Schedule, rank: int) -> RankWork:
    """Return the work of a rank of a schedule."""
    tasks = schedule.graph.tasks
    needs = schedule.graph.needs
    lists = [call[rank] for call in schedule.lists]
    calls = [[n for n in one if tasks[n].kind is not Kind.UPDATE] for one in lists]
    updates = [[n for n in one if tasks[n].kind is Kind.UPDATE] for one in lists]
    reads = {
        n: [(need.task, tasks[need.task].message) for need in needs[n] if tasks[need.task].stage != tasks[n].stage]
        for one in calls
        for n in one
    }
    completes: set[int] = set()
    for one in calls:
        adding = (n for n in one if tasks[n].kind in (Kind.HEAD, *WEIGHT_GRADS))
        completes.update({tasks[n].stage: n for n in adding}.values())
    return RankWork(
        calls, updates, reads, Counter(task for one in reads.values() for task, _ in one), frozenset(completes)
    )
