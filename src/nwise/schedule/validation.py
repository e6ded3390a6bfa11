"""Validation: the conditions that a schedule must meet before anything runs.

1. complete: every rank's list contains each task of its stages once, in its call, and updates come last. The graph is complete
   by construction (`nwise.schedule.graph.task_graph`), and its arcs say what crosses each boundary;
2. of the right age: no result is older than its use, the weight gradients of a stage have one age, and forwards and heads have
   age 0;
3. in order: the clock runs all tasks, so there is no deadlock.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from nwise.schedule.actions import Kind
from nwise.schedule.clock import make_clock
from nwise.schedule.costs import Costs
from nwise.schedule.graph import TaskGraph
from nwise.schedule.schedule import Schedule, check_schedule

_FREE = Costs(0, 0, 0, 0)


def validate(schedule: Schedule) -> None:
    """Check that a schedule can run.

    Args:
        schedule: the schedule.

    Raises:
        ValueError: the schedule cannot run; the message names the first error and its actions.
        TypeError: `schedule` is not a `Schedule`.
    """
    check_schedule(schedule)
    _check_ages(schedule.graph)
    _check_lists(schedule)
    make_clock(schedule.with_costs(_FREE)).run()  # with free tasks a run asks only whether everything runs


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
