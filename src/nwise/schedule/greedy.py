"""List scheduling: a free rank takes the most urgent task that is ready."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from nwise.schedule.actions import INPUT_GRADS, Action, Kind
from nwise.schedule.clock import durations
from nwise.schedule.costs import Costs
from nwise.schedule.graph import TaskGraph
from nwise.schedule.sweep import Deadlock

Lists = list[list[list[int]]]  # [calls][ranks][tasks]

# A task to do, the number of its mini-batch (below 0 if there is none), and the last call that may run it.
_Work = tuple[int, int, int]
# What every rank has done in every call: tasks with the ages of their mini-batches.
_Done = list[list[list[tuple[int, int]]]]
# Work in order, and how much of it each call may run, with that of the calls before.
_Queue = tuple[list[_Work], list[int]]


class ListScheduler:
    """Simulates calls in which every rank takes the most urgent ready task: its head, a pass, a forward, then weights.

    Args:
        graph: the task graph; in each micro-batch a message may have any age from that of its task to that in `graph.ages`.
        calls: for each call of the cycle the tasks of every stage.
        costs: costs of one micro-batch, which decide when tasks are ready.
        cap: largest number of micro-batches in flight per stage, besides the mini-batches that wait for their delay, if ranks
            may reorder the tasks of a stage; None if they may not.
        paced: whether runs keep a pace, so the calls become alike, though after more rounds; default: False.
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
        paced: bool = False,
    ) -> None:
        placement = graph.placement
        tasks = graph.tasks
        # Under a delay of d all micro-batches of d mini-batches wait for their passes, besides those that the cap counts.
        delays = [max(tasks[task].age for call in calls for task in call[k]) for k in range(len(placement))]
        # A delay fills the pipeline in several rounds.
        rounds = 1 if not any(delays) else max(delays) + 2
        if paced:  # more in a deep pipeline
            rounds += max(10, 6 + len(placement) // 2)
        self.tasks = tasks
        self.count = len(calls) * rounds
        self._graph = graph
        self._calls = calls
        self._paced = paced
        self.queues = [self._queued(rank, reorders=cap is not None) for rank in range(1 + max(placement))]
        self.duration = durations(graph, costs)
        self.latency = costs.latency
        self.needs = [[(n, costs.latency if link else 0.0) for n, _, link in needs] for needs in graph.needs]
        keys = [urgency(action, graph) for action in tasks]
        places = {key: place for place, key in enumerate(sorted(set(keys)))}
        self.urgent = [places[key] for key in keys]
        self.wakes: list[set[int]] = [set() for _ in tasks]  # the ranks to which the result of a task travels
        for rank, needs in zip(graph.ranks, graph.needs, strict=True):
            for need in (need for need in needs if need.link):
                self.wakes[need.task].add(rank)
        self.most = [math.inf if cap is None else cap + delay * len(graph.flows[0]) for delay in delays]
        self.forward = [a.kind is Kind.FORWARD for a in tasks]
        # The stage and micro-batch of every task, and the number of tasks of each, by mini-batch.
        self.parts = [(a.stage, a.microbatch) for a in tasks]
        self.totals = [Counter[tuple[int, int]]() for _ in calls]
        for part, a in zip(self.parts, tasks, strict=True):
            self.totals[a.minibatch][part] += a.kind is not Kind.UPDATE

    def _queued(self, rank: int, *, reorders: bool) -> list[_Queue]:
        """Return the queues of a rank: one for each stage, or for each kind of action if it may reorder them."""
        # A queue of one stage that may not reorder its tasks, a delay of one, M = 1, three calls. Work has the number of its
        # mini-batch, and `come` counts the work that has come by each call. The B of the first call has no mini-batch:
        #
        #     work   F/0 B/-1 | F/1 B/0 | F/2 B/1         come   2, 4, 6
        queues: dict[object, list[list[_Work]]] = {}
        for first, call in enumerate(self._calls):
            for task in (task for k, one in enumerate(call) if self._graph.placement[k] == rank for task in one):
                a = self._graph.tasks[task]
                key = (a.stage, a.kind, a.message) if reorders else a.stage
                works = queues.setdefault(key, [[] for _ in range(self.count)])
                oldest = self._graph.ages.of(a)
                for number in range(first, self.count, len(self._calls)):
                    works[number].append((task, number - a.age, number - a.age + oldest))
        return [
            ([work for works in queue for work in works], list(accumulate(map(len, queue))))
            for queue in queues.values()
        ]

    def run(self, pace: float = 0.0) -> Iterator[tuple[list[int], Lists]]:
        """Simulate all calls, and iterate over cycles of them that are schedules: the age of every task, and the lists.

        That is the last cycle, once a delay has filled the pipeline; with a pace it is every cycle that repeats, latest first, or
        none.

        Args:
            pace: least time from a rank's first work in a call to its next call; default: 0.

        Raises:
            Deadlock: the lists cannot run.
        """
        done = _Run(self, pace).run()
        size = len(self._calls)
        later = None
        # No call follows the last cycle, so all that is left runs there.
        for first in reversed(range(0, len(done) - size, size)) if self._paced else [len(done) - size]:
            cycle = done[first : first + size]
            ages = None if cycle == later else self._ages(cycle)
            later = cycle
            if ages is not None:
                yield ages, [[[task for task, _ in tasks] for tasks in lists] for lists in cycle]

    def _ages(self, cycle: _Done) -> list[int] | None:
        """Return the ages in a cycle; None if a task is missing or twice, or a result older than its use."""
        tasks = list(chain.from_iterable(chain.from_iterable(cycle)))
        ages = dict(tasks)
        if not len(ages) == len(tasks) == sum(len(one) for call in self._calls for one in call):
            return None
        if any(ages[other] > age for task, age in ages.items() for other, _ in self.needs[task]):
            return None
        return [ages.get(task, 0) for task in range(len(self.needs))]  # an update is in no list


class _Run:
    """One simulation; see `ListScheduler.run`."""

    def __init__(self, tables: ListScheduler, pace: float) -> None:
        self._tables = tables
        self._pace = pace
        count = tables.count
        ranks = len(tables.queues)
        # The call of every rank, the last in which it has worked, and the time from which it may begin the next one.
        self._call = [0] * ranks
        self._worked = [-1] * ranks
        self._begin = [0.0] * ranks
        self._busy = [0.0] * ranks
        self._events = [(0.0, rank) for rank in range(ranks)]
        # The place of every rank in its queues, and the work that a call has to run.
        self._at = [[0] * len(queues) for queues in tables.queues]
        self._due = [Counter(last for works, _ in queues for *_, last in works) for queues in tables.queues]
        self._done: _Done = [[[] for _ in range(ranks)] for _ in range(count)]
        # Time and call in which a task has ended, by mini-batch.
        self._made = [[(math.inf, 0)] * len(tables.needs) for _ in range(count)]
        # The micro-batches in flight on every stage, and the number of tasks that are left of each, by mini-batch.
        self._in_flight = [0] * len(tables.most)
        self._left = [tables.totals[batch % len(tables.totals)].copy() for batch in range(count)]

    def run(self) -> _Done:
        """Return what every rank does in every call."""
        # Times at which a rank may find something to do: it becomes free, a message arrives, or its next call may begin.
        events = self._events
        busy = self._busy
        while events:
            # All events of one time come before any choice, so a rank sees everything that has arrived by then.
            now = events[0][0]
            awake = list[int]()
            while events and events[0][0] <= now:
                rank = heapq.heappop(events)[1]
                if rank not in awake[-1:]:
                    awake.append(rank)
            for rank in awake:
                if busy[rank] <= now:
                    self._begin_calls(rank, now)
                    queue = self._choose(rank, now)
                    if queue is not None:
                        self._take(rank, queue, now)
        tables = self._tables
        stuck = [
            tables.tasks[works[place][0]]
            for queues, places, call in zip(tables.queues, self._at, self._call, strict=True)
            for (works, come), place in zip(queues, places, strict=True)
            if place < come[call]
        ]
        if stuck:
            raise Deadlock(stuck)
        return self._done

    def _begin_calls(self, rank: int, now: float) -> None:
        """Begin calls of a rank while nothing is due in its call, or wait for the pace."""
        while self._call[rank] + 1 < len(self._done) and not self._due[rank][self._call[rank]]:
            if now < self._begin[rank]:
                heapq.heappush(self._events, (self._begin[rank], rank))
                return
            self._call[rank] += 1

    def _choose(self, rank: int, now: float) -> int | None:
        """Return the queue whose next task is the most urgent of those that are ready; None if none is."""
        tables = self._tables
        call = self._call[rank]
        places = self._at[rank]
        in_flight = self._in_flight
        chosen = None
        least = len(tables.urgent)
        for i, (works, come) in enumerate(tables.queues[rank]):
            if places[i] == come[call]:
                continue
            task, batch, _ = works[places[i]]
            if tables.urgent[task] >= least:
                continue
            stage = tables.parts[task][0]
            if tables.forward[task] and in_flight[stage] >= tables.most[stage]:
                continue
            if batch < 0 or self._ready(task, batch, call, now):
                chosen = i
                least = tables.urgent[task]
        return chosen

    def _ready(self, task: int, batch: int, call: int, now: float) -> bool:
        """Tell whether all that a task needs has arrived."""
        made = self._made[batch]
        for other, lag in self._tables.needs[task]:
            when, then = made[other]
            # A neighbour may be in a later call already, but no result is older than its use.
            if when + lag > now or then > call:
                return False
        return True

    def _take(self, rank: int, queue: int, now: float) -> None:
        """Run the next task of a queue."""
        tables = self._tables
        call = self._call[rank]
        task, batch, last = tables.queues[rank][queue][0][self._at[rank][queue]]
        self._at[rank][queue] += 1
        self._due[rank][last] -= 1
        self._done[call][rank].append((task, call - batch))
        end = now
        if batch >= 0:
            end += tables.duration[task]
            self._made[batch][task] = end, call
            if self._worked[rank] < call:
                self._begin[rank] = now + self._pace
                self._worked[rank] = call
            part = tables.parts[task]
            left = self._left[batch]
            left[part] -= 1
            self._in_flight[part[0]] += tables.forward[task] - (not left[part])
        self._busy[rank] = end
        heapq.heappush(self._events, (end, rank))
        for other in tables.wakes[task]:
            heapq.heappush(self._events, (end + tables.latency, other))


def urgency(action: Action, graph: TaskGraph) -> tuple[int, int, int]:
    """Return the place of a task among the ready ones of a rank; the smallest comes first."""
    kind, k, m, q, minibatch, _ = action
    if kind in INPUT_GRADS:  # the nearest loss first
        return kind.urgency, graph.flows[minibatch][m].stages[k].cotangent(q).farthest_loss - k, k
    return kind.urgency, 0, -k if kind is Kind.FORWARD else 0  # the deepest forward feeds the most stages
