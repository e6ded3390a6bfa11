"""The sweep: works through the lists of several workers, each in its order, while tasks wait for those of other lists.

A *machine* says what it means to run a task: `nwise.schedule.clock` notes times, `merge` notes the order for one process, and
validation asks only whether every task runs at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from nwise.schedule.actions import Kind
from nwise.schedule.graph import TaskGraph

# Runs a task of a list (index of the list, task); returns None, or the task for which it has to wait instead.
Machine = Callable[[int, int], int | None]


class Deadlock(ValueError):
    """Lists in which actions wait for each other.

    Args:
        stuck: the next action of every list that cannot proceed.
    """

    def __init__(self, stuck: Sequence[object]) -> None:
        names = ", ".join(map(str, stuck[:6])) + (", ..." if len(stuck) > 6 else "")
        super().__init__(
            "The lists should let every action run. Found a deadlock: each of these waits for one that comes later in another "
            f"list or its own: {names}. Put each action after those that it waits for."
        )


def sweep(
    lists: Sequence[Sequence[int]],
    machine: Machine,
    names: Sequence[object],
    urgency: Callable[[int], object] | None = None,
) -> None:
    """Run all tasks, each as soon as those before it in its list and those that it waits for have run.

    Args:
        lists: tasks of every list, in order.
        machine: runs a task, or returns the task for which it has to wait.
        names: name of every task, for the error.
        urgency: key of a task, for lists that take turns: of the tasks that can run, the one with the smallest key runs next.
            Default: each list runs until it has to wait.

    Raises:
        Deadlock: tasks are left that wait for each other.
    """
    # A list that has to wait is parked at the task for which it waits, and woken up when that has run:
    #
    #     list 0   F0 F1 | W0           W0 waits for B0, so list 0 is parked at B0
    #     list 1   F0 | B0              B0 runs and wakes list 0
    at = [0] * len(lists)
    parked = dict[int, list[int]]()
    awake: list[tuple[object, int]] = []

    def wake(i: int) -> None:
        if at[i] < len(lists[i]):
            heapq.heappush(awake, (urgency(lists[i][at[i]]) if urgency else 0, i))

    for i in range(len(lists)):
        wake(i)
    while awake:
        i = heapq.heappop(awake)[1]
        tasks = lists[i]
        place = at[i]
        while place < len(tasks):
            task = tasks[place]
            missing = machine(i, task)
            if missing is not None:
                parked.setdefault(missing, []).append(i)
                break
            place += 1
            for other in parked.pop(task, ()) if task in parked else ():
                wake(other)
            if urgency is not None:
                at[i] = place
                wake(i)
                break
        at[i] = place
    if stuck := [names[tasks[place]] for tasks, place in zip(lists, at, strict=True) if place < len(tasks)]:
        raise Deadlock(stuck)


def merge(graph: TaskGraph, lists: Sequence[Sequence[int]]) -> list[int]:
    """Merge the lists of a call into one order that respects each of them, for one process; updates come last."""
    # The oldest micro-batch comes first, then passes before forwards (False < True), so few micro-batches are in flight.
    tasks = graph.tasks
    done = set[int]()
    order = list[int]()
    updates = [task for one in lists for task in one if tasks[task].kind is Kind.UPDATE]

    def run(_: int, task: int) -> int | None:
        for need in graph.needs[task]:
            if not need.calls and need.task not in done:
                return need.task
        done.add(task)
        order.append(task)
        return None

    def urgency(task: int) -> tuple[int, bool]:
        return tasks[task].microbatch, tasks[task].kind is Kind.FORWARD

    sweep([[task for task in one if tasks[task].kind is not Kind.UPDATE] for one in lists], run, tasks, urgency)
    return order + sorted(updates)
