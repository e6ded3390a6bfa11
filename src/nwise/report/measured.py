"""A measured run beside its prediction: what a simulation of the same lists with the measured costs says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median
from typing import Any

from nwise.report.trace import named, trace_of
from nwise.schedule import Costs, Schedule, Timeline, simulate
from nwise.schedule.actions import SENDS, Action, Kind, counterpart
from nwise.schedule.simulate import Event, Message

_COMPUTE = (Kind.FORWARD, Kind.HEAD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BOTH)
_MS = 1e3

Recorded = Sequence[tuple[int, Action, float, float]]


@dataclass(frozen=True)
class Deviation:
    """An action that begins later (or earlier) in its stage's step than predicted, in milliseconds."""

    action: Action
    measured: float
    predicted: float


@dataclass(frozen=True)
class Comparison:
    """A measured timeline and the predicted one; times in milliseconds.

    Args:
        schedule: the lists that were run.
        stages: what each stage did.
        bytes_sent: per stage and step: measured and predicted, of activations and gradients.
    """

    schedule: Schedule
    stages: Sequence[Recorded]
    bytes_sent: Sequence[dict[str, Any]]

    @cached_property
    def costs(self) -> Costs:
        """Medians of the measured times; the time of a message is the median of those that somebody waited for."""
        columns: dict[str, list[float]] = {name: [] for name in ("forward", "head", "input_grad", "weight_grad")}
        for recorded in self.stages:
            times: dict[Kind, list[float]] = defaultdict(list)
            for _, action, begin, end in recorded:
                times[action.kind].append(_MS * (end - begin))
            middle = {kind: median(found) for kind, found in times.items()}
            both = middle.get(Kind.BOTH, 0.0)
            # Of a B only the sum is known; shared out equally, it is again their sum.
            split = both / 2
            columns["forward"].append(middle.get(Kind.FORWARD, 0.0))
            columns["head"].append(middle.get(Kind.HEAD, 0.0))
            columns["input_grad"].append(middle.get(Kind.INPUT_GRAD, split))
            columns["weight_grad"].append(
                max(both - columns["input_grad"][-1], 0.0) if both else middle.get(Kind.WEIGHT_GRAD, 0.0)
            )
        latency = median([_MS * travel for travel, kept in self._travels if kept > 0] or [0.0])
        return Costs(**columns, chain_share=0.0, latency=latency)  # type: ignore[arg-type]

    @cached_property
    def predicted(self) -> Timeline:
        """A simulation of as many mini-batches as were measured."""
        turns = len(self.schedule.flows)
        steps = len({step for step, *_ in self.stages[0]})
        return simulate(self.schedule, self.costs, chains="walked", cycles=max(2, steps // turns))

    @cached_property
    def events(self) -> list[Event]:
        """Computations and updates as measured, from 0 on."""
        return [
            self._event(*one) for recorded in self.stages for one in recorded if one[1].kind in (*_COMPUTE, Kind.UPDATE)
        ]

    @cached_property
    def waits(self) -> list[Event]:
        """Receives and sends as measured."""
        kinds = (*SENDS.keys(), *SENDS.values())
        return [self._event(*one) for recorded in self.stages for one in recorded if one[1].kind in kinds]

    def _event(self, step: int, action: Action, begin: float, end: float) -> Event:
        return Event(action, step, _MS * (begin - self._zero), _MS * (end - self._zero))

    @cached_property
    def _zero(self) -> float:
        return min(begin for recorded in self.stages for _, _, begin, _ in recorded)

    @cached_property
    def _pairs(self) -> list[tuple[Event, Event]]:
        """Every send with its receive."""
        sent = {(e.cycle, counterpart(e.action)): e for e in self.waits if e.action.kind in SENDS}
        received = (e for e in self.waits if e.action.kind not in SENDS)
        return [(sent[key], event) for event in received if (key := (event.cycle, event.action)) in sent]

    @cached_property
    def _travels(self) -> list[tuple[float, float]]:
        """Of every message the seconds that it was under way, and those that its receiver waited for it meanwhile."""
        return [((got.end - put.start) / _MS, (got.end - max(got.start, put.start)) / _MS) for put, got in self._pairs]

    @property
    def messages(self) -> list[Message]:
        """As arrows: from the end of the send to that of the receive."""
        return [
            Message(
                put.action.stage, got.action.stage, put.end, got.end, got.end, put.action, got.action, put.cycle, 0.0
            )
            for put, got in self._pairs
        ]

    @property
    def overlap(self) -> float:
        """Of the time that messages were under way, the share in which their receivers did something else than wait."""
        total = sum(travel for travel, _ in self._travels)
        return 1 - sum(kept for _, kept in self._travels) / total if total else 1.0

    @cached_property
    def period(self) -> float:
        """Measured time per mini-batch: between the first and the last update of a stage, the mean over stages."""
        spans = []
        for k in range(len(self.stages)):
            ends = sorted(e.end for e in self.events if e.action.kind is Kind.UPDATE and e.action.stage == k)
            if len(ends) > 1:
                spans.append((ends[-1] - ends[0]) / (len(ends) - 1))
        return mean(spans) if spans else 0.0

    @cached_property
    def utilisation(self) -> list[float]:
        """Measured share of the time that each stage computes."""
        time = self.period * len({e.cycle for e in self.events})
        busy = [0.0] * len(self.stages)
        for e in self.events:
            if e.action.kind in _COMPUTE:
                busy[e.action.stage] += e.end - e.start
        return [each / time if time else 0.0 for each in busy]

    @property
    def bubble(self) -> float:
        """Measured share of the time that stages do not compute, the mean over stages."""
        return 1 - mean(self.utilisation) if self.period else 0.0

    def deviations(self, count: int = 5) -> list[Deviation]:
        """Actions whose begin within their stage's step differs most from the prediction; medians over the steps."""
        measured, predicted = _offsets(self.events), _offsets(self.predicted.events)
        found = [
            Deviation(action, measured[action], predicted[action]) for action in measured.keys() & predicted.keys()
        ]
        return sorted(found, key=lambda d: (-abs(d.measured - d.predicted), str(d.action)))[:count]

    def trace(self, title: str) -> dict[str, Any]:
        """Chrome trace JSON of both, the measured one first."""
        line = self.predicted
        events = [*self.events, *(e for e in self.waits if e.action.kind not in SENDS)]
        measured = trace_of(0, f"{title}: measured", len(self.stages), events, self.messages)
        beside = trace_of(
            1, f"{title}: predicted with the measured costs", len(self.stages), line.events, line.messages
        )
        return named([*measured, *beside])


def _offsets(events: Sequence[Event]) -> dict[Action, float]:
    """When each action begins after the first one of its stage's mini-batch, the median over mini-batches."""
    first: dict[tuple[int, int, int], float] = {}
    for e in events:
        if e.action.kind is Kind.FORWARD and e.action.microbatch == 0:
            first[e.cycle, e.action.turn, e.action.stage] = e.start
    offsets: dict[Action, list[float]] = defaultdict(list)
    for e in events:
        start = first.get((e.cycle, e.action.turn, e.action.stage))
        if start is not None:
            offsets[e.action].append(e.start - start)
    return {action: median(found) for action, found in offsets.items()}
