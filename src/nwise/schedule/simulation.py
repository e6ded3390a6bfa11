"""Simulation: the start and end of every action of some mini-batches, and numbers that follow from them.

Stages run their lists as early as possible. Messages take a latency and, on links of finite bandwidth, queue up. Jitter
multiplies the time of every computation by a random factor, drawn from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nwise.checks import check_at_least
from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Costs
from nwise.schedule.event_graph import EventGraph, SimulatedRun, event_graph, run
from nwise.schedule.schedule import Schedule, check_schedule

__all__ = ["Event", "Message", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class Event:
    """A computation or an update with its times.

    Args:
        action: the computation or update.
        cycle: index of the pass through the lists, from 0.
        start, end: times in the unit of the costs.
        batch: index of the mini-batch, from 0.
    """

    action: Action
    cycle: int
    start: float
    end: float
    batch: int


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor on its way from one stage to the next or the previous.

    Args:
        sender, receiver: indices of the stages.
        sent: time at which the action that makes it ends.
        arrives: time from which it can be used.
        used: start of the first action that needs it.
    """

    sender: int
    receiver: int
    sent: float
    arrives: float
    used: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Args:
        schedule: the schedule that was run.
        costs: costs of one micro-batch.
        graph: the event graph of the schedule.
        runs: times of its nodes, for each pass through the lists.
    """

    schedule: Schedule
    costs: Costs
    graph: EventGraph
    runs: list[SimulatedRun]

    @property
    def cycles(self) -> int:
        """Number of passes through the lists."""
        return len(self.runs)

    @cached_property
    def events(self) -> list[Event]:
        """Computations and updates, in order of their start."""
        nodes = [(node, self.graph.actions[node]) for word in self.graph.words[: self.graph.num_ranks] for node in word]
        events = [
            Event(action, cycle, times.start[node], times.end[node], batch)
            for cycle, times in enumerate(self.runs)
            for node, action in nodes
            if (batch := _batch(self.schedule, action, cycle)) >= 0
        ]
        return sorted(events, key=lambda e: (e.start, e.end, e.action.stage))

    @cached_property
    def messages(self) -> list[Message]:
        """All messages between stages."""
        return [message for cycle, times in enumerate(self.runs) for message in self._messages(cycle, times)]

    @cached_property
    def period(self) -> float:
        """Time per mini-batch in the second half of the run, at the stage that ends last."""
        # Without the first half, in which the pipeline fills.
        ends = [0.0, *(max(times.end) for times in self.runs)]
        half = len(self.runs) // 2
        return (ends[-1] - ends[half]) / ((len(self.runs) - half) * len(self.schedule.flows))

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the second half of the run in which each rank works, between two ends of its list."""
        half, shares = len(self.runs) // 2, []
        for word in self.graph.words[: self.graph.num_ranks]:
            begin = self.runs[half - 1].end[word[-1]] if half else 0.0
            length = self.runs[-1].end[word[-1]] - begin
            busy = sum(times.end[node] - times.start[node] for times in self.runs[half:] for node in word)
            shares.append(busy / length if length else 0.0)
        return tuple(shares)

    @property
    def bubble(self) -> float:
        """Share of the second half of the run in which ranks wait, the mean over ranks."""
        return 1.0 - sum(self.utilisation) / len(self.utilisation)

    def _messages(self, cycle: int, times: SimulatedRun) -> Iterator[Message]:
        """Iterate over the messages that one pass through the lists uses, each with the first action that uses it."""
        graph, placement = self.graph, self.schedule.placement
        # By producer and receiving stage: the first consumer, the node at whose end the latency begins (the producer or one of a
        # link), and the number of calls before the use.
        first: dict[tuple[int, int], tuple[int, float, int, int]] = {}
        for node in (node for word in graph.words[: graph.num_ranks] for node in word):
            action = graph.actions[node]
            k = action.stage
            if _batch(self.schedule, action, cycle) < 0:
                continue
            for other, lag, calls in graph.needs[node]:
                on_link = graph.actions[other].kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
                producer = graph.needs[other][0][0] if on_link else other
                if placement[graph.actions[producer].stage] == placement[k] or lag < 0 or calls > cycle:
                    continue
                # A use in the call of the send comes before those in later calls.
                use = calls, times.start[node], node, other
                first[producer, k] = min(use, first.get((producer, k), use))
        for (producer, k), (calls, _, node, leaves_at) in first.items():
            yield Message(
                sender=graph.actions[producer].stage,
                receiver=k,
                sent=self.runs[cycle - calls].end[producer],
                arrives=self.runs[cycle - calls].end[leaves_at] + self.costs.latency,
                used=times.start[node],
            )


def _batch(schedule: Schedule, action: Action, cycle: int) -> int:
    """Return the index of an action's mini-batch; below 0 for actions that the first calls leave out."""
    return (cycle - schedule.cycles_late(action)) * len(schedule.flows) + action.turn


def simulate(
    schedule: Schedule,
    costs: Costs,
    *,
    cycles: int = 4,
    jitter: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """Simulate some mini-batches of a schedule.

    Args:
        schedule: the schedule.
        costs: costs of one micro-batch.
        cycles: number of passes through the lists, each one mini-batch, or one of every turn for a rotating strategy;
            default: 4.
        jitter: size of the random factor ``exp(jitter z)`` of every computation, z standard normal; default: 0.
        seed: seed of the jitter; default: 0.

    Raises:
        ValueError: `jitter` or `cycles` is out of range, or the lists are in a deadlock.
        TypeError: `schedule` is not a `Schedule`.

    >>> from nwise.schedule import PAPER, best
    >>> result = best("2-wise", num_stages=4, num_microbatches=2, costs=PAPER)
    >>> simulate(result.schedule, PAPER).period == result.period == 6
    True
    """
    check_at_least(1, cycles=cycles)
    if not 0 <= jitter <= 10:
        raise ValueError(f"`jitter` should be from 0 to 10. Found {jitter}.")
    check_schedule(schedule)
    graph = event_graph(schedule, costs)
    numbers = random.Random(seed)
    runs: list[SimulatedRun] = []
    for cycle in range(cycles):
        # The first calls leave out the passes of mini-batches that do not exist: these take no time and wait for nothing.
        left_out = {node for node, a in enumerate(graph.actions) if _batch(schedule, a, cycle) < 0}
        times = [0.0 if node in left_out else time for node, time in enumerate(graph.duration)]
        if jitter:
            for node in (node for word in graph.words[: graph.num_ranks] for node in word):
                times[node] *= math.exp(jitter * numbers.gauss(0, 1))
        # A negative lag stands for the start of a node (`event_graph`), which jitter moves away from the end.
        needs = [
            [
                (u, runs[-calls].start[u] - runs[-calls].end[u] if lag < 0 and calls <= cycle else lag, calls)
                for u, lag, calls in (() if node in left_out else needed)
            ]
            for node, needed in enumerate(graph.needs)
        ]
        runs.append(run(replace(graph, needs=needs), [one.end for one in reversed(runs)], times))
    return Timeline(schedule, costs, graph, runs)
