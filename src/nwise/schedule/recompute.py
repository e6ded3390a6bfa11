"""Recomputation: a schedule whose stages keep only their input while their rank works on anything else.

If a rank does other work before the next pass of a micro-batch, the stage lets the graph go, and a second forward (R) makes it
again right before that pass. A rank that only waits keeps it. Two stages on a rank, end-to-end, M = 1; stage 1 goes on with its
own head and pass, so it needs no R::

    F0(0) F1(0) H1(0) B1(0.0) W0(0)    ->    F0(0) F1(0) H1(0) B1(0.0) R0(0) W0(0)
"""

from __future__ import annotations

from dataclasses import replace

from nwise.schedule.actions import PASSES, Kind
from nwise.schedule.graph import Need
from nwise.schedule.schedule import Schedule

__all__ = ["recomputing"]


def recomputing(schedule: Schedule) -> Schedule:
    """Return a schedule in which every graph that would wait for a later pass is let go and made again.

    >>> import nwise
    >>> from nwise.schedule import PAPER, best
    >>> plain = best("end-to-end", num_stages=2, num_microbatches=1, costs=PAPER, num_ranks=1)
    >>> [str(action) for action in recomputing(plain).actions[0]]
    ['F0(0)', 'F1(0)', 'H1(0)', 'B1(0.0)', 'R0(0)', 'W0(0)', 'U0', 'U1']
    """
    if schedule.recomputed:
        return schedule
    graph = schedule.graph
    tasks = list(graph.tasks)
    needs = list(graph.needs)
    before = dict[int, int]()
    for numbers in schedule.microbatches.values():
        forward, *later = [n for n in numbers if tasks[n].kind in (Kind.FORWARD, *PASSES)]
        tracked = forward in schedule.continued
        kept = False
        for task in later:
            action = tasks[task]
            if not tracked:
                before[task] = len(tasks)
                tasks.append(action._replace(kind=Kind.RECOMPUTE))
                needs.append((Need(forward, action.age, link=False),))
            # A cotangent that an I keeps for its W keeps the graph.
            if action.kind is Kind.WEIGHT_GRAD:
                kept = False
            elif action.kind is Kind.INPUT_GRAD and action.message == graph.stage(task).fused:
                kept = True
            tracked = kept or task in schedule.continued
    lists = tuple(
        tuple(
            tuple([n for task in rank for n in ((before[task], task) if task in before else (task,))]) for rank in call
        )
        for call in schedule.lists
    )
    return replace(schedule, graph=replace(graph, tasks=tuple(tasks), needs=tuple(needs)), lists=lists)
