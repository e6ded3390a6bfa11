"""Validation: the conditions that a schedule must meet before anything runs.

1. complete: every rank's list contains each task of its stages once, in its call, and updates come last. The graph is complete
   by construction (`nwise.schedule.graph.task_graph`), and its arcs say what crosses each boundary;
2. of the right age: no result is older than its use, the weight gradients of a stage have one age, and forwards and heads have
   age 0;
3. in order: the clock runs all tasks, so there is no deadlock;
4. bounded: the number of messages on every link is limited.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from nwise.flow import counted
from nwise.schedule.actions import Kind
from nwise.schedule.clock import make_clock
from nwise.schedule.costs import Costs
from nwise.schedule.graph import TaskGraph, back_pressure
from nwise.schedule.schedule import Schedule, check_schedule

_FREE = Costs(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Buffer:
    """The largest number of messages that may wait at one boundary.

    Args:
        activations: activations on their way from stage k - 1 to stage k.
        gradients: gradients on their way from stage k to stage k - 1.
        limited: whether stage k - 1 is held back: it starts a forward only after its activation of an earlier mini-batch
            has been taken. It is where a micro-batch has no gradient that flows back over the boundary, and under a delay.
    """

    activations: int
    gradients: int
    limited: bool


def validate(schedule: Schedule) -> list[Buffer]:
    """Check that a schedule can run.

    Args:
        schedule: the schedule.

    Returns:
        The buffers that boundaries 1 .. A-1 need.

    Raises:
        ValueError: the schedule cannot run; the message names the first error and its actions.
        TypeError: `schedule` is not a `Schedule`.
    """
    check_schedule(schedule)
    _check_ages(schedule.graph)
    _check_lists(schedule)
    make_clock(schedule.with_costs(_FREE)).run()  # with free tasks a run asks only whether everything runs
    return buffers(schedule)


def buffers(schedule: Schedule) -> list[Buffer]:
    """Return limits on the messages that may wait at the boundaries 1 .. A-1, for any times of the actions."""
    # One cycle's messages at most, and more under a delay. A runtime may let more be on their way, up to a number of bytes
    # (`nwise.runtime.channel`). Stages of one rank send each other nothing.
    cycles = 1 + schedule.oldest
    size = cycles * len(schedule.flows) * schedule.num_microbatches
    limited = back_pressure(schedule.flows, schedule.placement, schedule.ages)
    limits = []
    for k, (before, here) in enumerate(pairwise(schedule.placement), start=1):
        if before == here:
            limits.append(Buffer(activations=0, gradients=0, limited=False))
            continue
        gradients = sum(count * len(flow.stages[k].messages) for flow, count in counted(schedule.flows).items())
        limits.append(Buffer(activations=size, gradients=cycles * gradients, limited=k - 1 in limited))
    return limits


def _check_ages(graph: TaskGraph) -> None:
    """Raise ValueError for a task that is younger than a result that it needs, or of another age than its stage's."""
    for action, needs in zip(graph.tasks, graph.needs, strict=True):
        free = action.kind in (Kind.INPUT_GRAD, Kind.RECOMPUTE)
        right = action.age >= 0 if free else action.age == graph.ages.of(action)
        if not right or any(need.calls < 0 for need in needs):
            raise ValueError(
                "Weight gradients should have their stage's age, forwards and heads age 0, and no result should be older than "
                f"its use. Found {action} on a stage of age {graph.ages.weights[action.stage]}."
            )


def _check_lists(schedule: Schedule) -> None:
    """Raise ValueError unless the lists of every call have each of their tasks once, the updates last."""
    graph = schedule.graph
    (calls, ranks) = (len(schedule.flows), schedule.num_ranks)
    if [len(lists) for lists in schedule.lists] != [ranks] * calls:
        found = [len(lists) for lists in schedule.lists]
        raise ValueError(f"`lists` should have one list for each of the {ranks} ranks in {calls} calls. Found {found}.")
    expected = Counter(zip(range(len(graph.tasks)), graph.call, graph.ranks, strict=True))
    counts = Counter(
        (task, call, rank)
        for call, lists in enumerate(schedule.lists)
        for rank, tasks in enumerate(lists)
        for task in tasks
    )
    if counts != expected:
        missing = expected - counts
        extra = counts - expected
        task, call, rank = next(iter(missing or extra))
        action = graph.tasks[task] if task in range(len(graph.tasks)) else f"task {task}"
        problem = f"no {action}" if missing else f"{action} too often or unneeded"
        raise ValueError(
            f"The list of rank {rank} in call {call} should contain each of its actions once. Found {problem} "
            f"({missing.total()} missing, {extra.total()} too many)."
        )
    for rank, tasks in ((rank, tasks) for lists in schedule.lists for rank, tasks in enumerate(lists)):
        for before, after in pairwise(graph.tasks[task] for task in tasks):
            if before.kind is Kind.UPDATE and after.kind is not Kind.UPDATE:
                raise ValueError(
                    f"The list of rank {rank} should update after all other actions of a call. Found {before} before {after}."
                )
