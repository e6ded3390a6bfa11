"""Timelines as Chrome trace JSON, which https://ui.perfetto.dev opens: one track per stage, arrows for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nwise.report.grid import Picture
from nwise.schedule.simulate import Event, Message

# The format counts microseconds; a unit of the costs is drawn as a millisecond.
_UNIT = 1000.0


def chrome_trace(pictures: Sequence[Picture]) -> dict[str, Any]:
    """The trace of simulated schedules, a process for each.

    Returns:
        JSON: complete events (``"X"``) for actions, flow events (``"s"``, ``"f"``) for messages. One unit of the costs
        is one millisecond of the trace.
    """
    events: list[dict[str, Any]] = []
    for process, picture in enumerate(pictures):
        line = picture.timeline
        title = f"{picture.title}; {picture.caption}"
        events += trace_of(process, title, picture.timed.schedule.num_stages, line.events, line.messages)
    return named(events)


def named(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A trace of events."""
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def trace_of(
    process: int, title: str, num_stages: int, events: Sequence[Event], messages: Sequence[Message]
) -> list[dict[str, Any]]:
    """The events of one process of a trace; times in milliseconds, or units of the costs."""
    found: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}}]
    found += [_track(process, k) for k in range(num_stages)]
    found += [_slice(process, event) for event in events]
    for number, message in enumerate(messages):
        found += _arrow(process, number, message)
    return found


def _track(process: int, stage: int) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": process, "tid": stage, "args": {"name": f"stage {stage}"}}


def _slice(process: int, event: Event) -> dict[str, Any]:
    action = event.action
    return {
        "name": str(action),
        "cat": action.kind.name.lower(),
        "ph": "X",
        "pid": process,
        "tid": action.stage,
        "ts": _UNIT * event.start,
        "dur": _UNIT * (event.end - event.start),
        "args": {"micro-batch": action.microbatch, "pass": event.cycle, "turn": action.turn},
    }


def _arrow(process: int, number: int, message: Message) -> list[dict[str, Any]]:
    """Both ends; each is tied to the action that it lies in, so they are put just inside."""
    common = {"name": "message", "cat": "message", "pid": process, "id": f"{process}.{number}"}
    inside = 1e-3
    return [
        {**common, "ph": "s", "tid": message.sender, "ts": _UNIT * message.sent - inside},
        {**common, "ph": "f", "bp": "e", "tid": message.receiver, "ts": _UNIT * message.used + inside},
    ]
