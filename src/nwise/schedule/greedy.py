"""List scheduling: a free stage takes the most urgent action that is ready."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.schedule.costs import Costs, prices
from nwise.schedule.lists import Product, Word, needs, product


def nearest_first(
    flows: Sequence[Flow],
    turn: int,
    *,
    fuse: Collection[int],
    cap: int,
    costs: Costs,
    pace: float = 0.0,
) -> list[Word]:
    """Run the own head first, then passes of the nearest loss, then forwards, then weight gradients.

    Args:
        flows: flow of every micro-batch.
        turn: index of the mini-batch in the cycle.
        fuse: stages that fuse I and W if these share a cotangent.
        cap: largest number of micro-batches in flight per stage.
        costs: costs of one micro-batch, which decide when actions are ready.
        pace: least time between two forwards of the first stage; default: 0.
    """
    return _Greedy(flows, turn, fuse, cap, costs, pace).words()


class _Greedy:
    """An event-driven simulation of one mini-batch that decides the order as it goes."""

    def __init__(
        self,
        flows: Sequence[Flow],
        turn: int,
        fuse: Collection[int],
        cap: int,
        costs: Costs,
        pace: float,
    ) -> None:
        num_stages = len(flows[0].stages)
        self._flows = flows
        self._by_turn = [flows] * (turn + 1)
        self._cap = cap
        self._pace = pace
        self._latency = costs.latency
        self._prices = prices(costs, num_stages)
        self._in_flight = [0] * num_stages
        self._words: list[list[Action]] = [[] for _ in range(num_stages)]
        # Per stage one queue for each kind of action, in the order of the micro-batches; the next one is at the end. So a
        # stage has only one candidate per kind to compare.
        self._queues: list[dict[tuple[Kind, int | None], list[Action]]] = [{} for _ in range(num_stages)]
        self._left = [[0] * len(flows) for _ in range(num_stages)]
        for k, queues in enumerate(self._queues):
            for m in reversed(range(len(flows))):
                stage = flows[m].stages[k]
                todo = [*forwards(stage, k, m, turn), *passes(stage, k, m, fuse=k in fuse, turn=turn)]
                self._left[k][m] = len(todo)
                for action in todo:
                    queues.setdefault((action.kind, action.message), []).append(action)

    def words(self) -> list[Word]:
        """Run all actions and return their order on each stage."""
        arrival: dict[Product, float] = {}
        # Times at which a stage may find something to do: it becomes free, a message arrives, the pace lets a forward start.
        events = [(0.0, k) for k in range(len(self._words))]
        if self._pace:
            events += [(m * self._pace, 0) for m in range(1, len(self._flows))]
        free = [0.0] * len(self._words)
        while events:
            # All events of one time come before any choice, so a stage sees everything that has arrived by then.
            now = events[0][0]
            awake = set()
            while events and events[0][0] <= now:
                awake.add(heapq.heappop(events)[1])
            for k in sorted(awake):
                action = self._take(k, now, arrival) if free[k] <= now else None
                if action is None:
                    continue
                stage = self._flows[action.microbatch].stages[k]
                free[k] = now + self._prices[k].time(action, stage)
                heapq.heappush(events, (free[k], k))
                made = product(action)
                if made is not None:
                    arrival[made] = free[k]
                    for other in (k - 1, k + 1):
                        if 0 <= other < len(self._words):
                            heapq.heappush(events, (free[k] + self._latency, other))
        return [tuple(word) for word in self._words]

    def _take(self, k: int, now: float, arrival: dict[Product, float]) -> Action | None:
        """Remove the most urgent ready action of a stage from its queue and return it; None if none is ready."""
        heads = [queue[-1] for queue in self._queues[k].values() if queue]
        ready = [action for action in heads if self._ready(action, now, arrival)]
        if not ready:
            return None
        action = min(ready, key=self._urgency)
        self._queues[k][action.kind, action.message].pop()
        self._words[k].append(action)
        self._in_flight[k] += action.kind is Kind.FORWARD
        self._left[k][action.microbatch] -= 1
        self._in_flight[k] -= self._left[k][action.microbatch] == 0
        return action

    def _urgency(self, action: Action) -> tuple[int, int]:
        """Return the place of an action among the ready ones of a stage; the smallest comes first."""
        if action.kind is Kind.HEAD:
            return (0, 0)
        if action.kind is Kind.FORWARD:
            return (2, 0)
        if action.kind is Kind.WEIGHT_GRAD:
            return (3, 0)
        return (1, self._flows[action.microbatch].stages[action.stage].cotangent(action.message).far)

    def _ready(self, action: Action, now: float, arrival: dict[Product, float]) -> bool:
        """Tell whether a stage may start an action now."""
        k = action.stage
        full = self._in_flight[k] >= self._cap
        early = k == 0 and action.microbatch * self._pace > now
        if action.kind is Kind.FORWARD and (full or early):
            return False
        for key in needs(action, self._by_turn):
            when = arrival.get(key)
            if when is None or when + (self._latency if key[1] != k else 0.0) > now:
                return False
        return True
