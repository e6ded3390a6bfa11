"""Timelines as Chrome trace JSON for https://ui.perfetto.dev: a track for each rank, arrows for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nwise.report.grid import Picture, row_names
from nwise.schedule.placement import Placement
from nwise.schedule.simulate import Event, Message

# The format counts microseconds; draw a unit of the costs as a millisecond.
_UNIT = 1000.0


def chrome_trace(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Make a trace of simulated schedules, with a process for each.

    Returns:
        JSON: complete events (``"X"``) for actions, flow events (``"s"``, ``"f"``) for messages. A unit of the costs
        is a millisecond of the trace.
    """
    events: list[dict[str, Any]] = []
    for process, picture in enumerate(pictures):
        timeline = picture.timeline
        title = f"{picture.title}; {picture.caption}"
        events += process_events(process, title, picture.timed.schedule.placement, timeline.events, timeline.messages)
    return make_trace(events)


def make_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Wrap events in a trace."""
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def process_events(
    process: int, title: str, placement: Placement, events: Sequence[Event], messages: Sequence[Message]
) -> list[dict[str, Any]]:
    """Make the events of a process of the trace, a thread per rank; times are in milliseconds, or in units of the costs."""
    trace: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}}]
    trace += [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": rank, "args": {"name": name}}
        for rank, name in enumerate(row_names(placement))
    ]
    trace += [_slice(process, placement[event.action.stage], event) for event in events]
    for number, message in enumerate(messages):
        trace += _arrow(process, number, placement, message)
    return trace


def _slice(process: int, rank: int, event: Event) -> dict[str, Any]:
    action = event.action
    return {
        "name": str(action),
        "cat": action.kind.name.lower(),
        "ph": "X",
        "pid": process,
        "tid": rank,
        "ts": _UNIT * event.start,
        "dur": _UNIT * (event.end - event.start),
        "args": {"micro-batch": action.microbatch, "pass": event.cycle, "mini-batch": event.batch},
    }


def _arrow(process: int, number: int, placement: Placement, message: Message) -> list[dict[str, Any]]:
    """Make both ends of an arrow, just inside the actions that the viewer attaches them to."""
    common = {"name": "message", "cat": "message", "pid": process, "id": f"{process}.{number}"}
    inside = 1e-3
    return [
        {**common, "ph": "s", "tid": placement[message.sender], "ts": _UNIT * message.sent - inside},
        {**common, "ph": "f", "bp": "e", "tid": placement[message.receiver], "ts": _UNIT * message.used + inside},
    ]
