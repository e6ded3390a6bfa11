"""Simulation: when every action of some mini-batches starts and ends, and what that means.

Stages work through their lists as early as they can. Messages need a latency and, on links of finite bandwidth, queue
up behind each other. With jitter every computation takes a random factor longer or shorter, drawn from a seed.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Chains, Costs, check_counts
from nwise.schedule.lists import Schedule, check_schedule
from nwise.schedule.network import Network, Run, network, run


@dataclass(frozen=True, slots=True)
class Event:
    """A computation or an update with its times.

    Args:
        action: what was done.
        cycle: which pass through the lists, from 0; with one turn it is the mini-batch.
        start, end: in the unit of the costs.
    """

    action: Action
    cycle: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor on its way from one stage to the next or the previous.

    Args:
        sender, receiver: stages.
        sent: when its producer has ended.
        arrives: when it can be used.
        used: when the first action that waits for it starts.
        producer, consumer: the actions at both ends.
        cycle: see `Event`.
        size: in bytes.
    """

    sender: int
    receiver: int
    sent: float
    arrives: float
    used: float
    producer: Action
    consumer: Action
    cycle: int
    size: float


@dataclass(frozen=True)
class Timeline:
    """What a simulation found.

    Args:
        schedule: what was run.
        costs: its costs.
        net: the network that was run.
        runs: times of its nodes, for each pass through the lists.
    """

    schedule: Schedule
    costs: Costs
    net: Network
    runs: list[Run]

    @property
    def cycles(self) -> int:
        """Passes through the lists."""
        return len(self.runs)

    @cached_property
    def events(self) -> list[Event]:
        """Computations and updates, in order of their start."""
        nodes = [node for word in self.net.words[: self.net.num_stages] for node in word]
        events = [
            Event(self.net.actions[node], cycle, found.start[node], found.end[node])
            for cycle, found in enumerate(self.runs)
            for node in nodes
        ]
        return sorted(events, key=lambda e: (e.start, e.end, e.action.stage))

    @cached_property
    def messages(self) -> list[Message]:
        """Between stages, each once."""
        return [message for cycle, found in enumerate(self.runs) for message in self._messages(cycle, found)]

    @property
    def length(self) -> float:
        """When the last action ends."""
        return max(max(found.end) for found in self.runs)

    @cached_property
    def period(self) -> float:
        """Time per mini-batch in the second half of the run, at the stage that ends last."""
        ends = [0.0, *(max(found.end) for found in self.runs)]
        half = len(self.runs) // 2
        return (ends[-1] - ends[half]) / ((len(self.runs) - half) * len(self.schedule.flows))

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the second half of the run that each stage works, from the end of one of its lists to the end of
        another."""
        half, shares = len(self.runs) // 2, []
        for word in self.net.words[: self.net.num_stages]:
            begin = self.runs[half - 1].end[word[-1]] if half else 0.0
            length = self.runs[-1].end[word[-1]] - begin
            busy = sum(found.end[node] - found.start[node] for found in self.runs[half:] for node in word)
            shares.append(busy / length if length else 0.0)
        return tuple(shares)

    @property
    def bubble(self) -> float:
        """Share of the second half of the run that stages wait, the mean over stages."""
        return 1.0 - sum(self.utilisation) / len(self.utilisation)

    @cached_property
    def bytes_sent(self) -> dict[tuple[int, int], float]:
        """Per link (sender, receiver) and mini-batch."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        for message in self.messages:
            found[message.sender, message.receiver] += message.size / (self.cycles * len(self.schedule.flows))
        return dict(found)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage the most micro-batches between the start of their forward and the end of their last action."""
        return tuple(round(most) for most in self._most(1.0, 0.0))

    @cached_property
    def waiting(self) -> dict[tuple[int, int], int]:
        """Per link the most messages that had been sent and were not used yet."""
        changes: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        for message in self.messages:
            changes[message.sender, message.receiver] += [(message.sent, 1), (message.used, -1)]
        return {link: round(_peak([(t, float(d)) for t, d in found])) for link, found in changes.items()}

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per stage: what it keeps always, its micro-batches in flight, and messages that wait to be used."""
        fixed = self.costs.of("fixed_bytes", self.schedule.num_stages)
        return tuple(a + b for a, b in zip(fixed, self._most(None, 1.0), strict=True))

    def _most(self, each: float | None, message: float) -> list[float]:
        """The peak over time per stage, in micro-batches of `each` (None: their bytes) and messages of their bytes."""
        sizes = self.costs.of("activation_bytes", self.schedule.num_stages)
        changes: list[list[tuple[float, float]]] = [[] for _ in sizes]
        spans: dict[tuple[int, int, int, int], list[float]] = {}
        for event in self.events:
            kind, k, m, _, turn = event.action
            if kind is not Kind.UPDATE:
                span = spans.setdefault((event.cycle, turn, k, m), [event.start, event.end])
                span[0], span[1] = min(span[0], event.start), max(span[1], event.end)
        for (_, _, k, _), (start, end) in spans.items():
            size = sizes[k] if each is None else each
            changes[k] += [(start, size), (end, -size)]
        if message:
            for sent in self.messages:
                changes[sent.receiver] += [(sent.arrives, message * sent.size), (sent.used, -message * sent.size)]
        return [_peak(found) for found in changes]

    def _messages(self, cycle: int, found: Run) -> Iterator[Message]:
        """Each is used by the first action that waits for it."""
        net = self.net
        sizes = self.costs.of("message_bytes", net.num_stages)
        first: dict[tuple[int, int], int] = {}  # by producer and receiving stage
        leaves: dict[tuple[int, int], int] = {}  # the node whose end puts it on its way: the producer, or a link
        for node in (node for word in net.words[: net.num_stages] for node in word):
            k = net.actions[node].stage
            for other, _ in net.needs[node]:
                on_link = net.actions[other].kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
                producer = net.needs[other][0][0] if on_link else other
                if net.actions[producer].stage == k:
                    continue
                leaves[producer, k] = other
                if (producer, k) not in first or found.start[node] < found.start[first[producer, k]]:
                    first[producer, k] = node
        for (producer, k), node in first.items():
            sender = net.actions[producer].stage
            yield Message(
                sender=sender,
                receiver=k,
                sent=found.end[producer],
                arrives=found.end[leaves[producer, k]] + self.costs.latency,
                used=found.start[node],
                producer=net.actions[producer],
                consumer=net.actions[node],
                cycle=cycle,
                size=sizes[min(sender, k)],
            )


def simulate(
    schedule: Schedule,
    costs: Costs,
    *,
    chains: Chains = "stored",
    cycles: int = 4,
    jitter: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """Run a schedule for some mini-batches.

    Args:
        schedule: the lists.
        costs: of one micro-batch.
        chains: see `nwise.schedule.best`.
        cycles: passes through the lists; a mini-batch each, for a rotating strategy one of every turn.
        jitter: every computation takes ``exp(jitter z)`` times as long, z normal.
        seed: of the jitter.

    >>> from nwise.schedule import PAPER, best
    >>> found = best("2-wise", num_stages=4, num_microbatches=2, costs=PAPER)
    >>> simulate(found.schedule, PAPER).period == found.period == 6
    True
    """
    check_counts(cycles=cycles)
    if not 0 <= jitter <= 10:
        raise ValueError(f"`jitter` should be from 0 to 10. Found {jitter}.")
    check_schedule(schedule)
    net = network(schedule, costs, chains)
    numbers = random.Random(seed)
    free = [0.0] * len(net.words)
    taken: dict[int, float] = {}
    runs = []
    for _ in range(cycles):
        times = list(net.duration)
        if jitter:
            for node in (node for word in net.words[: net.num_stages] for node in word):
                times[node] *= math.exp(jitter * numbers.gauss(0, 1))
        found = run(net, free, taken, times)
        free = [found.end[word[-1]] if word else 0.0 for word in net.words]
        taken = {node: found.start[taker] for node, taker in net.taken.items()}
        runs.append(found)
    return Timeline(schedule, costs, net, runs)


def _peak(changes: list[tuple[float, float]]) -> float:
    """The largest sum; what ends at a time makes room for what begins then."""
    now = most = 0.0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
