"""Timelines as Chrome trace JSON for https://ui.perfetto.dev: a track for each rank, arrows for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nwise.app.report.grid import Picture, row_names
from nwise.schedule.placement import Placement
from nwise.schedule.simulation import Event, Message

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
    trace += [
        {
            "name": str(e.action),
            "cat": e.action.kind.name.lower(),
            "ph": "X",
            "pid": process,
            "tid": placement[e.action.stage],
            "ts": _UNIT * e.start,
            "dur": _UNIT * (e.end - e.start),
            "args": {"micro-batch": e.action.microbatch, "pass": e.cycle, "mini-batch": e.batch},
        }
        for e in events
    ]
    inside = 1e-3  # both ends of an arrow are just inside the actions that the viewer attaches them to
    for number, message in enumerate(messages):
        common = {"name": "message", "cat": "message", "pid": process, "id": f"{process}.{number}"}
        trace += [
            {**common, "ph": "s", "tid": placement[message.sender], "ts": _UNIT * message.sent - inside},
            {**common, "ph": "f", "bp": "e", "tid": placement[message.receiver], "ts": _UNIT * message.used + inside},
        ]
    return trace
