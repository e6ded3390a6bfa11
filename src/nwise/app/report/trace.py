"""Timelines as Chrome trace JSON for https://ui.perfetto.dev: a track for each rank, arrows for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nwise.app.report.grid import Picture, row_names
from nwise.schedule.placement import Placement
from nwise.schedule.simulation import Event, Message

# The format counts microseconds; draw a unit of the costs as a millisecond.
_UNIT = 1000.0


class Process(NamedTuple):
    """A timeline to draw; times are in milliseconds, or in units of the costs."""

    title: str
    placement: Placement
    events: Sequence[Event]
    messages: Sequence[Message]


def chrome_trace(pictures: Iterable[Picture]) -> dict[str, Any]:
    """Make a trace of simulated schedules, with a process for each."""
    return make_trace(
        Process(f"{p.title}; {p.caption}", p.timed.schedule.placement, p.timeline.events, p.timeline.messages)
        for p in pictures
    )


def make_trace(processes: Iterable[Process]) -> dict[str, Any]:
    """Make a trace: complete events (``"X"``) for actions, a thread per rank, flow events (``"s"``, ``"f"``) for messages."""
    trace: list[dict[str, Any]] = []
    for pid, (title, placement, events, messages) in enumerate(processes):
        trace.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}})
        for rank, name in enumerate(row_names(placement)):
            trace.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": rank, "args": {"name": name}})
        for e in events:
            kind, args = e.action.kind.name.lower(), {"micro-batch": e.action.microbatch, "pass": e.cycle}
            times = {"ts": _UNIT * e.start, "dur": _UNIT * (e.end - e.start)}
            where = {"ph": "X", "pid": pid, "tid": placement[e.action.stage]}
            trace.append({"name": str(e.action), "cat": kind, **where, **times, "args": args | {"mini-batch": e.batch}})
        inside = 1e-3  # both ends of an arrow are just inside the actions that the viewer attaches them to
        for number, m in enumerate(messages):
            common = {"name": "message", "cat": "message", "pid": pid, "id": f"{pid}.{number}"}
            trace += [
                {**common, "ph": "s", "tid": placement[m.sender], "ts": _UNIT * m.sent - inside},
                {**common, "ph": "f", "bp": "e", "tid": placement[m.receiver], "ts": _UNIT * m.used + inside},
            ]
    return {"traceEvents": trace, "displayTimeUnit": "ms"}
