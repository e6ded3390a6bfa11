"""List scheduling: a free rank takes the most urgent action that is ready."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind
from nwise.schedule.ages import Ages
from nwise.schedule.costs import Costs, Prices, prices
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Deadlock, Word, needs, product

# The result of an action of a mini-batch: what, stage, and micro-batch.
_Result = tuple[str | int, int, int]


class _Job(NamedTuple):
    """An action of the cycle with all facts that the simulation asks for many times."""

    action: Action
    rank: int
    urgency: tuple[int, int, int]  # the smallest comes first
    price: float
    needs: tuple[tuple[_Result, float], ...]  # results, and the latency from where they are made
    made: _Result | None
    holds_back: bool  # a forward that waits while too many micro-batches are in flight


class _Work(NamedTuple):
    """A job to do, with the number of its mini-batch and the last call that may run it."""

    job: _Job
    number: int
    due: int


class ListScheduler:
    """Simulates calls in which every rank takes the most urgent ready action: its head, a pass, a forward, then weights.

    Args:
        calls: for each call of the cycle the actions of every stage.
        flows: flow of every micro-batch, ``[turns][M]``.
        placement: rank of every stage.
        costs: costs of one micro-batch, which decide when actions are ready.
        cap: largest number of micro-batches in flight per stage, besides the mini-batches that wait for their delay, if ranks
            may reorder the actions of a stage; None if they may not.
        latest: largest ages of messages; in each micro-batch a message may have any age from that in `calls` to this one.
            Default: None, the ages in `calls`.
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
        calls: Sequence[Sequence[Word]],
        flows: Sequence[Sequence[Flow]],
        placement: Placement,
        costs: Costs,
        cap: int | None,
        *,
        latest: Ages | None = None,
        pace: float = 0.0,
    ) -> None:
        actions = [a for call in calls for word in call for a in word]
        # Under a delay of d all micro-batches of d mini-batches wait for their passes, besides those that the cap counts.
        delays = [max(a.age for call in calls for a in call[k]) for k in range(len(placement))]
        # A delay fills the pipeline in several rounds.
        rounds = 1 if not any(delays) else max(delays) + 2
        if latest is not None:  # the calls become alike later, in a deep pipeline after more of them
            rounds += max(10, 6 + len(placement) // 2)
        self._calls = [*calls] * rounds
        self._flows, self._placement, self._reorders = flows, placement, cap is not None
        self._latest, self._pace = latest, pace
        self._latency = costs.latency
        ranks = range(1 + max(placement))
        self._stages = [[k for k, rank in enumerate(placement) if rank == r] for r in ranks]
        self._call = [-1] * len(ranks)
        # The last call in which a rank has done work, and the time from which it may begin the next one.
        self._worked, self._next = [-1] * len(ranks), [0.0] * len(ranks)
        self._queues: list[dict[object, deque[_Work]]] = [{} for _ in ranks]
        self._words: list[list[list[Action]]] = [[[] for _ in ranks] for _ in self._calls]
        # Results of every mini-batch, with their time and call.
        self._made: list[dict[_Result, tuple[float, int]]] = [{} for _ in self._calls]
        self._in_flight = [0] * len(placement)
        self._all = Counter((a.stage, a.microbatch, a.turn) for a in actions)
        self._done = Counter[tuple[int, int, int]]()
        self._most = [(cap or 0) + delay * len(flows[0]) for delay in delays]
        by_stage = prices(costs, len(placement))
        self._jobs = {a: self._job(a, by_stage[a.stage]) for a in actions}

    def run(self) -> list[list[list[Word]]]:
        """Simulate all calls, and return cycles of them, ``[cycle][turn][rank]``, that are schedules.

        That is the last cycle, once a delay has filled the pipeline; with ages to choose it is every cycle that repeats, latest
        first, or none.

        Raises:
            Deadlock: the words cannot run.
        """
        # Times at which a rank may find something to do: it becomes free, a message arrives, or its next call may begin.
        ranks = len(self._stages)
        events = [(0.0, r) for r in range(ranks)]
        busy = [0.0] * ranks
        while events:
            # All events of one time come before any choice, so a rank sees everything that has arrived by then.
            now = events[0][0]
            awake = set()
            while events and events[0][0] <= now:
                awake.add(heapq.heappop(events)[1])
            for rank in sorted(awake):
                if busy[rank] > now:
                    continue
                if self._begin_calls(rank, now):
                    heapq.heappush(events, (self._next[rank], rank))
                work = self._take(rank, now)
                if work is None:
                    continue
                job, number, _ = work
                busy[rank] = now + (job.price if number >= 0 else 0.0)
                heapq.heappush(events, (busy[rank], rank))
                if job.made is not None:
                    if number >= 0:
                        self._made[number][job.made] = busy[rank], self._call[rank]
                    k = job.action.stage
                    for other in (k - 1, k + 1):
                        if 0 <= other < len(self._placement) and self._placement[other] != rank:
                            heapq.heappush(events, (busy[rank] + self._latency, self._placement[other]))
        if stuck := [queue[0].job.action for queues in self._queues for queue in queues.values() if queue]:
            raise Deadlock(stuck)
        turns = len(self._flows)
        cut = [self._words[i : i + turns] for i in range(0, len(self._words), turns)]
        cycles = [[[tuple(word) for word in call] for call in cycle] for cycle in reversed(cut)]
        if self._latest is None:
            return cycles[:1]
        # No call follows the last cycle, so all that is left runs there.
        return [cycle for i, cycle in enumerate(cycles) if i and cycle not in cycles[1:i] and self._repeats(cycle)]

    def _repeats(self, cycle: list[list[Word]]) -> bool:
        """Return whether a cycle contains each action once, and no result that is older than its use."""
        actions = [a for call in cycle for word in call for a in word]
        counts = Counter(a._replace(age=0) for a in actions)
        if any(counts[a._replace(age=0)] != 1 for call in self._calls[: len(cycle)] for word in call for a in word):
            return False
        ages = {made: a.age for a in actions if (made := product(a)) is not None}
        return all(ages[key] <= a.age for a in actions for key in needs(a, self._flows))

    def _begin_calls(self, rank: int, now: float) -> bool:
        """Begin calls of a rank while nothing is due in its call; return whether it has to wait for the pace."""
        queues = self._queues[rank]
        while self._call[rank] + 1 < len(self._calls):
            call = self._call[rank]
            for queue in queues.values():
                if queue and queue[0].due <= call:
                    return False
            if now < self._next[rank]:
                return True
            self._call[rank] += 1
            self._load(rank, self._call[rank])
        return False

    def _load(self, rank: int, call: int) -> None:
        """Add the actions of a call to the queues of a rank: one for each stage, or for each kind if it may reorder them."""
        for k in self._stages[rank]:
            for a in self._calls[call][k]:
                slack = 0
                if self._latest is not None and a.kind is Kind.INPUT_GRAD:
                    slack = self._latest.messages[k][a.message or 0] - a.age
                key = (k, a.kind, a.message) if self._reorders else k
                self._queues[rank].setdefault(key, deque()).append(_Work(self._jobs[a], call - a.age, call + slack))

    def _take(self, rank: int, now: float) -> _Work | None:
        """Remove the most urgent ready action of a rank from its queue and return it; None if none is ready."""
        first: deque[_Work] | None = None
        for queue in self._queues[rank].values():
            more_urgent = queue and (first is None or queue[0].job.urgency < first[0].job.urgency)
            if more_urgent and self._ready(queue[0], now):
                first = queue
        if first is None:
            return None
        work = first.popleft()
        action, number, call = work.job.action, work.number, self._call[rank]
        if number >= 0 and self._worked[rank] < call:
            self._next[rank] = now + self._pace
            self._worked[rank] = call
        age = call - number
        self._words[call][rank].append(action if age == action.age else action._replace(age=age))
        self._in_flight[action.stage] += action.kind is Kind.FORWARD
        if number >= 0:
            key = (action.stage, action.microbatch, number)
            self._done[key] += 1
            if self._done[key] == self._all[action.stage, action.microbatch, action.turn]:
                self._in_flight[action.stage] -= 1
        return work

    def _ready(self, work: _Work, now: float) -> bool:
        """Tell whether a rank may start a job now."""
        job, number, _ = work
        if job.holds_back and self._in_flight[job.action.stage] >= self._most[job.action.stage]:
            return False
        if number < 0:
            return True
        made, call = self._made[number], self._call[job.rank]
        for result, latency in job.needs:
            # A neighbour may be in a later call already, but no result is older than its use.
            if result not in made or made[result][0] + latency > now or made[result][1] > call:
                return False
        return True

    def _job(self, action: Action, price: Prices) -> _Job:
        """Return an action with the facts that the simulation needs."""
        k, made = action.stage, product(action)
        rank = self._placement[k]
        needed = [(key[:3], self._placement[key[1]]) for key in needs(action, self._flows)]
        return _Job(
            action,
            rank,
            self._urgency(action),
            price.time(action, self._flows[action.turn][action.microbatch].stages[k]),
            tuple((result, 0.0 if owner == rank else self._latency) for result, owner in needed),
            None if made is None else made[:3],
            self._reorders and action.kind is Kind.FORWARD,
        )

    def _urgency(self, action: Action) -> tuple[int, int, int]:
        """Return the place of an action among the ready ones of a rank; the smallest comes first."""
        kind, k = action.kind, action.stage
        if kind is Kind.HEAD:
            return (0, 0, 0)
        if kind is Kind.FORWARD:
            return (2, 0, -k)
        if kind is Kind.WEIGHT_GRAD:
            return (3, 0, 0)
        far = self._flows[action.turn][action.microbatch].stages[k].cotangent(action.message).far
        return (1, far - k, k)
