"""List scheduling: a free rank takes the most urgent action that is ready."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Costs, prices
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Deadlock, Word, needs, product

# The result of an action of a mini-batch: what, stage, micro-batch, and the number of the mini-batch.
_Result = tuple[str | int, int, int, int]


class ListScheduler:
    """Simulates calls in which every rank takes the most urgent ready action: its head, a pass, a forward, then weights.

    Args:
        calls: for each call of the cycle the actions of every stage.
        flows: flow of every micro-batch, ``[turns][M]``.
        placement: rank of every stage.
        costs: costs of one micro-batch, which decide when actions are ready.
        cap: largest number of micro-batches in flight per stage, besides the mini-batches that wait for their delay, if ranks
            may reorder the actions of a stage; None if they may not.
    """

    def __init__(
        self,
        calls: Sequence[Sequence[Word]],
        flows: Sequence[Sequence[Flow]],
        placement: Placement,
        costs: Costs,
        cap: int | None,
    ) -> None:
        actions = [a for call in calls for word in call for a in word]
        oldest = max(a.age for a in actions)
        self._calls = [*calls] * (oldest + 2 if oldest else 1)  # a delay fills the pipeline in several rounds
        self._flows, self._placement, self._reorders = flows, placement, cap is not None
        self._prices, self._latency = prices(costs, len(placement)), costs.latency
        ranks = range(1 + max(placement))
        self._stages = [[k for k, rank in enumerate(placement) if rank == r] for r in ranks]
        self._call = [0] * len(ranks)
        self._queues: list[list[list[Action]]] = [self._load(r, 0) for r in ranks]
        self._words: list[list[list[Action]]] = [[[] for _ in ranks] for _ in self._calls]
        self._arrival: dict[_Result, float] = {}
        self._in_flight = [0] * len(placement)
        self._all = Counter((a.stage, a.microbatch, a.turn) for a in actions)
        self._done = Counter[tuple[int, int, int]]()
        # Under a delay of d all micro-batches of d mini-batches wait for their passes, besides those that the cap counts.
        delays = [max(a.age for call in calls for a in call[k]) for k in range(len(placement))]
        self._most = [(cap or 0) + delay * len(flows[0]) for delay in delays]
        self._needs = {a: [(key[0], key[1], key[2]) for key in needs(a, flows)] for a in actions}

    def _load(self, rank: int, call: int) -> list[list[Action]]:
        """Return the queues of a rank in a call: one for each stage, or for each kind of action if it may reorder them."""
        queues: dict[object, list[Action]] = {}
        for k in self._stages[rank]:
            for a in reversed(self._calls[call][k]):
                key = (k, a.kind, a.message, a.age) if self._reorders else k
                queues.setdefault(key, []).append(a)
        return list(queues.values())

    def run(self) -> list[list[Word]]:
        """Return for each call of the cycle the actions of every rank in order; with a delay, once the pipeline is full.

        Raises:
            Deadlock: the words cannot run.
        """
        # Times at which a rank may find something to do: it becomes free, or a message arrives.
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
                action = self._take(rank, now) if busy[rank] <= now else None
                if action is None:
                    continue
                call, k = self._call[rank], action.stage
                price = self._prices[k].time(action, self._flows[action.turn][action.microbatch].stages[k])
                busy[rank] = now + (price if call >= action.age else 0.0)
                heapq.heappush(events, (busy[rank], rank))
                made = product(action)
                if made is not None:
                    self._arrival[made[0], k, action.microbatch, call - action.age] = busy[rank]
                    for other in (k - 1, k + 1):
                        if 0 <= other < len(self._placement) and self._placement[other] != rank:
                            heapq.heappush(events, (busy[rank] + self._latency, self._placement[other]))
        if stuck := [queue[-1] for queues in self._queues for queue in queues if queue]:
            raise Deadlock(stuck)
        return [[tuple(word) for word in call] for call in self._words[-len(self._flows) :]]

    def _take(self, rank: int, now: float) -> Action | None:
        """Remove the most urgent ready action of a rank from its queue and return it; None if none is ready."""
        while not any(self._queues[rank]) and self._call[rank] + 1 < len(self._calls):
            self._call[rank] += 1
            self._queues[rank] = self._load(rank, self._call[rank])
        call = self._call[rank]
        ready = [queue for queue in self._queues[rank] if queue and self._ready(queue[-1], call, now)]
        if not ready:
            return None
        action = min(ready, key=lambda queue: self._urgency(queue[-1])).pop()
        self._words[call][rank].append(action)
        self._in_flight[action.stage] += action.kind is Kind.FORWARD
        key = (action.stage, action.microbatch, call - action.age)
        self._done[key] += 1
        if key[2] >= 0 and self._done[key] == self._all[action.stage, action.microbatch, action.turn]:
            self._in_flight[action.stage] -= 1
        return action

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

    def _ready(self, action: Action, call: int, now: float) -> bool:
        """Tell whether a rank may start an action now."""
        k, number = action.stage, call - action.age
        if self._reorders and action.kind is Kind.FORWARD and self._in_flight[k] >= self._most[k]:
            return False
        if number < 0:
            return True
        for what, stage, m in self._needs[action]:
            when = self._arrival.get((what, stage, m, number))
            apart = self._placement[stage] != self._placement[k]
            if when is None or when + (self._latency if apart else 0.0) > now:
                return False
        return True
