"""List scheduling: a free rank takes the most urgent task that is ready."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence

from nwise.schedule.actions import Kind
from nwise.schedule.ages import Ages
from nwise.schedule.clock import durations
from nwise.schedule.costs import Costs
from nwise.schedule.graph import TaskGraph
from nwise.schedule.sweep import Deadlock

Lists = list[list[list[int]]]  # [calls][ranks][tasks]


# A task to do, the number of its mini-batch, and the last call that may run it.
_Work = tuple[int, int, int]


class ListScheduler:
    """Simulates calls in which every rank takes the most urgent ready task: its head, a pass, a forward, then weights.

    Args:
        graph: the task graph; with ages to choose, that of the smallest.
        calls: for each call of the cycle the tasks of every stage.
        costs: costs of one micro-batch, which decide when tasks are ready.
        cap: largest number of micro-batches in flight per stage, besides the mini-batches that wait for their delay, if ranks
            may reorder the tasks of a stage; None if they may not.
        latest: largest ages of messages; in each micro-batch a message may have any age from that in the graph to this one.
            Default: None, the ages in the graph.
        pace: least time from a rank's first work in a call to its next call; default: 0.
    """

    # The first calls, in which no gradient has come back yet, are short. Without a pace their forwards stay ahead of the
    # gradients, and calls of unequal length follow each other. At the pace of the steady state each call finds its messages where
    # the call before found them:
    #
    #     no pace   |F F|F F|F F W W     |F F W W|F F I I W W     |          calls differ
    #     paced     |F F    |F F    |F F W W|F F W W|F F W W|                the last ones are alike

    def __init__(
        self,
        graph: TaskGraph,
        calls: Sequence[Sequence[Sequence[int]]],
        costs: Costs,
        cap: int | None,
        *,
        latest: Ages | None = None,
        pace: float = 0.0,
    ) -> None:
        placement, tasks = graph.placement, graph.tasks
        # Under a delay of d all micro-batches of d mini-batches wait for their passes, besides those that the cap counts.
        delays = [max(tasks[task].age for call in calls for task in call[k]) for k in range(len(placement))]
        # A delay fills the pipeline in several rounds.
        rounds = 1 if not any(delays) else max(delays) + 2
        if latest is not None:  # the calls become alike later, in a deep pipeline after more of them
            rounds += max(10, 6 + len(placement) // 2)
        self._graph, self._calls = graph, [*calls] * rounds
        self._turns, self._reorders = len(calls), cap is not None
        self._latest, self._pace = latest, pace
        self._duration, self._latency = durations(graph, costs), costs.latency
        self._needs = [[(n, costs.latency if link else 0.0) for n, _, link in needs] for needs in graph.needs]
        self._urgent = [self._urgency(task) for task in range(len(tasks))]
        self._wakes = [
            {graph.ranks[user] for user in users} - {rank} for users, rank in zip(graph.users, graph.ranks, strict=True)
        ]
        ranks = range(1 + max(placement))
        self._stages = [[k for k, rank in enumerate(placement) if rank == r] for r in ranks]
        self._call = [-1] * len(ranks)
        # The last call in which a rank has done work, and the time from which it may begin the next one.
        self._worked, self._next = [-1] * len(ranks), [0.0] * len(ranks)
        self._queues: list[dict[object, deque[_Work]]] = [{} for _ in ranks]
        self._done: list[list[list[_Work]]] = [[[] for _ in ranks] for _ in self._calls]
        # Time and call in which a task has ended, by mini-batch.
        self._made: list[list[tuple[float, int]]] = [[(math.inf, 0)] * len(tasks) for _ in self._calls]
        self._in_flight = [0] * len(placement)
        # Number of tasks of every stage and micro-batch that are left, by mini-batch.
        self._tape = [(a.stage, a.microbatch) for a in tasks]
        totals = [
            Counter(self._tape[n] for n, a in enumerate(tasks) if a.minibatch == t and a.kind is not Kind.UPDATE)
            for t in range(len(calls))
        ]
        self._left = [totals[batch % len(calls)].copy() for batch in range(len(self._calls))]
        self._most = [(cap or 0) + delay * len(graph.flows[0]) for delay in delays]

    def run(self) -> list[tuple[TaskGraph, Lists]]:
        """Simulate all calls, and return cycles of them that are schedules, each with the graph of the ages that it chose.

        That is the last cycle, once a delay has filled the pipeline; with ages to choose it is every cycle that repeats, latest
        first, or none.

        Raises:
            Deadlock: the lists cannot run.
        """
        # Times at which a rank may find something to do: it becomes free, a message arrives, or its next call may begin.
        ranks = len(self._stages)
        events = [(0.0, r) for r in range(ranks)]
        busy = [0.0] * ranks
        while events:
            # All events of one time come before any choice, so a rank sees everything that has arrived by then.
            now, awake = events[0][0], list[int]()
            while events and events[0][0] <= now:
                rank = heapq.heappop(events)[1]
                if rank not in awake[-1:]:
                    awake.append(rank)
            for rank in awake:
                if busy[rank] > now:
                    continue
                if self._begin_calls(rank, now):
                    heapq.heappush(events, (self._next[rank], rank))
                work = self._take(rank, now)
                if work is None:
                    continue
                task, batch, _ = work
                busy[rank] = now + (self._duration[task] if batch >= 0 else 0.0)
                heapq.heappush(events, (busy[rank], rank))
                if batch >= 0:
                    self._made[batch][task] = busy[rank], self._call[rank]
                for other in self._wakes[task]:
                    heapq.heappush(events, (busy[rank] + self._latency, other))
        tasks = self._graph.tasks
        if stuck := [tasks[queue[0][0]] for queues in self._queues for queue in queues.values() if queue]:
            raise Deadlock(stuck)
        cycles = [self._done[i : i + self._turns] for i in range(0, len(self._done), self._turns)][::-1]
        if self._latest is None:
            return [(self._graph, _tasks(cycles[0]))]
        # No call follows the last cycle, so all that is left runs there.
        found: dict[object, tuple[TaskGraph, Lists]] = {}
        for i, cycle in enumerate(cycles[1:], 2):
            ages, lists = self._ages(cycle, len(self._calls) - i * self._turns), _tasks(cycle)
            key = repr((ages, lists))
            if ages is not None and key not in found:
                found[key] = self._graph.aged(ages), lists
        return [*found.values()]

    def _ages(self, cycle: list[list[list[_Work]]], first: int) -> list[int] | None:
        """Return the ages in a cycle from a call on; None if a task is missing or twice, or a result older than its use."""
        ages = [-1] * len(self._graph.tasks)
        count = 0
        for call, lists in enumerate(cycle, first):
            for task, batch, _ in (work for one in lists for work in one):
                ages[task] = call - batch
                count += 1
        todo = [task for call in self._calls[: self._turns] for one in call for task in one]
        if count != len(todo) or any(ages[task] < 0 for task in todo):
            return None
        needs = self._graph.needs
        old = any(ages[need.task] > ages[task] for task in todo for need in needs[task])
        return None if old else [max(age, 0) for age in ages]  # an update is in no list

    def _begin_calls(self, rank: int, now: float) -> bool:
        """Begin calls of a rank while nothing is due in its call; return whether it has to wait for the pace."""
        queues = self._queues[rank]
        while self._call[rank] + 1 < len(self._calls):
            call = self._call[rank]
            for queue in queues.values():
                if queue and queue[0][2] <= call:
                    return False
            if now < self._next[rank]:
                return True
            self._call[rank] += 1
            self._load(rank, self._call[rank])
        return False

    def _load(self, rank: int, call: int) -> None:
        """Add the tasks of a call to the queues of a rank: one for each stage, or for each kind if it may reorder them."""
        for k in self._stages[rank]:
            for task in self._calls[call][k]:
                a, slack = self._graph.tasks[task], 0
                if self._latest is not None and a.kind is Kind.INPUT_GRAD:
                    slack = self._latest.messages[k][a.message or 0] - a.age
                key = (k, a.kind, a.message) if self._reorders else k
                self._queues[rank].setdefault(key, deque()).append((task, call - a.age, call + slack))

    def _take(self, rank: int, now: float) -> _Work | None:
        """Remove the most urgent ready task of a rank from its queue and return it; None if none is ready."""
        first, least = None, (math.inf, 0, 0)
        for queue in self._queues[rank].values():
            if queue and self._urgent[queue[0][0]] < least and self._ready(queue[0], rank, now):
                first, least = queue, self._urgent[queue[0][0]]
        if first is None:
            return None
        work = task, batch, _ = first.popleft()
        action, call = self._graph.tasks[task], self._call[rank]
        self._done[call][rank].append(work)
        self._in_flight[action.stage] += action.kind is Kind.FORWARD
        if batch >= 0:
            if self._worked[rank] < call:
                self._next[rank], self._worked[rank] = now + self._pace, call
            self._left[batch][self._tape[task]] -= 1
            self._in_flight[action.stage] -= not self._left[batch][self._tape[task]]
        return work

    def _urgency(self, task: int) -> tuple[int, int, int]:
        """Return the place of a task among the ready ones of a rank; the smallest comes first."""
        action = self._graph.tasks[task]
        kind, k = action.kind, action.stage
        if kind in (Kind.HEAD, Kind.UPDATE):
            return (0, 0, 0)
        if kind is Kind.FORWARD:
            return (2, 0, -k)
        if kind is Kind.WEIGHT_GRAD:
            return (3, 0, 0)
        if kind in (Kind.INPUT_GRAD, Kind.BOTH):
            return (1, self._graph.stage(task).cotangent(action.message).far - k, k)
        raise ValueError(f"Only computations and updates should have an urgency. Found {action}.")

    def _ready(self, work: _Work, rank: int, now: float) -> bool:
        """Tell whether a rank may start a task now."""
        task, batch, _ = work
        if self._reorders and self._graph.tasks[task].kind is Kind.FORWARD:
            k = self._graph.tasks[task].stage
            if self._in_flight[k] >= self._most[k]:
                return False
        if batch < 0:
            return True
        made, call = self._made[batch], self._call[rank]
        for other, lag in self._needs[task]:
            when, then = made[other]
            # A neighbour may be in a later call already, but no result is older than its use.
            if when + lag > now or then > call:
                return False
        return True


def _tasks(cycle: list[list[list[_Work]]]) -> Lists:
    return [[[task for task, *_ in one] for one in lists] for lists in cycle]
