"""Compare a measured run with its prediction: a simulation of the same lists with the measured costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import Any, NamedTuple

from nwise.app.report.grid import Process, make_trace
from nwise.schedule import Costs, Schedule, Timeline, simulate
from nwise.schedule.actions import COMPUTATIONS, SENDS, Action, Kind
from nwise.schedule.simulation import Event, Message

_MS = 1e3

# What one rank did: step, action, and its start and end in seconds.
RankRecord = Sequence[tuple[int, Action, float, float]]


class Deviation(NamedTuple):
    """An action's measured and predicted start within its stage's step, in milliseconds."""

    action: Action
    measured: float
    predicted: float


@dataclass(frozen=True)
class Comparison:
    """A measured timeline and the predicted one; times in milliseconds."""

    schedule: Schedule
    ranks: Sequence[RankRecord]
    bytes_sent: Sequence[Sequence[int]]  # by rank, of activations and gradients in a step

    @cached_property
    def costs(self) -> Costs:
        """Medians of the measured times; for messages, of those that a receiver waited for."""
        rows = []
        for k in range(self.schedule.num_stages):
            times: dict[Kind, list[float]] = defaultdict(list)
            for _, action, begin, end in self.ranks[self.schedule.placement[k]]:
                if action.stage == k:
                    times[action.kind].append(_MS * (end - begin))
            middle = {kind: median(values) for kind, values in times.items()}
            # A B measures only the sum of I and W. I is known where another loss has a separate I; otherwise it is half.
            both = middle.get(Kind.BOTH, 0.0)
            back = middle.get(Kind.INPUT_GRAD, both / 2)
            weights = max(both - back, 0.0) if both else middle.get(Kind.WEIGHT_GRAD, 0.0)
            rows.append((middle.get(Kind.FORWARD, 0.0), middle.get(Kind.HEAD, 0.0), back, weights))
        # A message may lie in its buffer until its receiver is free. That time is not latency, so only awaited messages count.
        latency = median([travel for travel, waited in self._travels if waited > 0] or [0.0])
        forward, head, input_grad, weight_grad = zip(*rows, strict=True)
        return Costs(forward, head, input_grad, weight_grad, chain_share=0.0, latency=latency)

    @cached_property
    def predicted(self) -> Timeline:
        """Simulation of as many mini-batches as were measured."""
        turns = len(self.schedule.flows)
        steps = len({step for step, *_ in self.ranks[0]})
        return simulate(self.schedule.with_costs(self.costs), cycles=max(2, steps // turns))

    @cached_property
    def _all(self) -> list[Event]:
        """Everything measured, messages too; the first action starts at 0."""
        zero = min(begin for record in self.ranks for _, _, begin, _ in record)
        return [
            Event(action, step, _MS * (begin - zero), _MS * (end - zero), step - action.age)
            for record in self.ranks
            for step, action, begin, end in record
        ]

    @cached_property
    def events(self) -> list[Event]:
        """Measured computations and updates."""
        return [e for e in self._all if e.action.kind in (*COMPUTATIONS, Kind.UPDATE)]

    @cached_property
    def _pairs(self) -> list[tuple[Event, Event]]:
        """Every send with its receive."""
        happened = {(e.cycle, e.action): e for e in self._all}
        cycles = sorted({e.cycle for e in self._all})
        pairs = (
            (happened.get((cycle, send)), happened.get((cycle + receive.age - send.age, receive)))
            for send, receive in self.schedule.transfers
            for cycle in cycles
        )
        return [(put, got) for put, got in pairs if put is not None and got is not None]

    @cached_property
    def _travels(self) -> list[tuple[float, float]]:
        """Milliseconds that each message travelled, and those of them that its receiver waited."""
        return [(got.end - put.start, got.end - max(got.start, put.start)) for put, got in self._pairs]

    @property
    def overlap(self) -> float:
        """Share of the messages' travel time in which their receivers did not wait."""
        total = sum(travel for travel, _ in self._travels)
        return 1 - sum(waited for _, waited in self._travels) / total if total else 1.0

    @cached_property
    def period(self) -> float:
        """Measured time per mini-batch: mean time between a stage's updates, averaged over stages."""
        spans = []
        for k in range(self.schedule.num_stages):
            ends = [e.end for e in self.events if e.action.kind is Kind.UPDATE and e.action.stage == k]
            if len(ends) > 1:
                spans.append((max(ends) - min(ends)) / (len(ends) - 1))
        return mean(spans) if spans else 0.0

    @cached_property
    def utilisation(self) -> list[float]:
        """Measured share of the time that each rank computes."""
        time = self.period * len({e.cycle for e in self.events})
        busy = [0.0] * len(self.ranks)
        for e in self.events:
            if e.action.kind in COMPUTATIONS:
                busy[self.schedule.placement[e.action.stage]] += e.end - e.start
        return [each / time if time else 0.0 for each in busy]

    @property
    def bubble(self) -> float:
        """Measured share of the time that ranks do not compute, the mean over ranks."""
        return 1 - mean(self.utilisation) if self.period else 0.0

    def deviations(self, count: int = 5) -> list[Deviation]:
        """Return the actions whose start within their stage's step deviates most; medians over the steps."""
        measured = _offsets(self.events)
        predicted = _offsets(self.predicted.events)
        deviations = [Deviation(action, measured[action], predicted[action]) for action in measured.keys() & predicted]
        return sorted(deviations, key=lambda d: (-abs(d.measured - d.predicted), str(d.action)))[:count]

    def table(self) -> list[tuple[str, str, str]]:
        """Return what is compared, measured and predicted, as text."""
        predicted = self.predicted
        return [
            ("time per mini-batch, ms", f"{self.period:.2f}", f"{predicted.period:.2f}"),
            ("bubble, %", f"{100 * self.bubble:.1f}", f"{100 * predicted.bubble:.1f}"),
            ("overlap of messages with work, %", f"{100 * self.overlap:.1f}", "–"),
        ]

    def as_json(self) -> dict[str, Any]:
        predicted = self.predicted
        return {
            "period_ms": {"measured": self.period, "predicted": predicted.period},
            "bubble": {"measured": self.bubble, "predicted": predicted.bubble},
            "utilisation": {"measured": self.utilisation, "predicted": list(predicted.utilisation)},
            "overlap": self.overlap,
            "bytes": list(self.bytes_sent),
            "deviations": [
                {"action": str(d.action), "measured_ms": d.measured, "predicted_ms": d.predicted}
                for d in self.deviations()
            ],
        }

    def trace(self, title: str) -> dict[str, Any]:
        """Make the Chrome trace JSON of both timelines, the measured one first."""
        placement = self.schedule.placement
        predicted = self.predicted
        events = [e for e in self._all if e.action.kind not in SENDS]
        # Arrows from the end of each send to the end of its receive.
        arrows = [Message(put.action.stage, got.action.stage, put.end, got.end, got.end) for put, got in self._pairs]
        heading = f"{title}: predicted with the measured costs"
        measured = Process(f"{title}: measured", placement, events, arrows)
        return make_trace([measured, Process(heading, placement, predicted.events, predicted.messages)])


def _offsets(events: Sequence[Event]) -> dict[Action, float]:
    """Return each action's start after its stage's first action in the mini-batch; medians over mini-batches."""
    first: dict[tuple[int, int, int], float] = {}
    for e in events:
        if e.action.kind is Kind.FORWARD and e.action.microbatch == 0:
            first[e.cycle, e.action.minibatch, e.action.stage] = e.start
    offsets: dict[Action, list[float]] = defaultdict(list)
    for e in events:
        start = first.get((e.cycle, e.action.minibatch, e.action.stage))
        if start is not None:
            offsets[e.action].append(e.start - start)
    return {action: median(values) for action, values in offsets.items()}
