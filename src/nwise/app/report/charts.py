"""Charts of a page as plotly JSON: curves of heads, timelines, utilisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nwise.app.report.display import head_name
from nwise.app.report.figures import COLOURS
from nwise.app.report.grid import KIND_COLOURS
from nwise.app.report.summary import AXES, Series
from nwise.schedule import Kind
from nwise.schedule.simulation import Event

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star")
_FONT = {"family": "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif", "size": 13}
_GRID = "#e5e5e5"
_HATCHING = {"fillmode": "overlay", "fgcolor": "white", "solidity": 0.25}


def lines(runs: Sequence[tuple[str, int, Sequence[Series]]], title: str, *, several: bool) -> dict[str, Any] | None:
    """Draw the curves of every head over a title; None if there are none.

    A run has a name, a number of stages and series; if the page has several runs, each has its own colour.
    """
    traces = []
    for i, (name, num_stages, curves) in enumerate(runs):
        for series in curves:
            output = series.head == num_stages - 1
            head = head_name(series.head, num_stages)
            colour = i if several else series.head
            dash = _DASHES[(num_stages - 1 - series.head) % len(_DASHES)]
            look = {
                "mode": "lines+markers",
                "line": {"color": COLOURS[colour % len(COLOURS)], "dash": dash},
                "marker": {"symbol": _SYMBOLS[colour % len(_SYMBOLS)], "size": 6},
                "visible": True if output or not several else "legendonly",
            }
            label = f"{name}, {head}" if several else head
            traces.append({"type": "scatter", "name": label, "along": series.along, "y": series.values, **look})
    if not traces:
        return None
    layout = _layout(340 + 18 * min(len(traces), 12), title)
    # The untrained network is far from where runs differ; the chart's own menu shows all of it.
    late = [value for _, _, curves in runs for series in curves for value in series.values[1:] if value is not None]
    if title.endswith("perplexity"):
        layout["yaxis"]["type"] = "log"
    elif len(late) > 2:
        room = 0.06 * (max(late) - min(late)) or 1.0
        layout["yaxis"]["range"] = [min(late) - room, max(late) + room]
    return {"axes": AXES, "data": traces, "layout": layout}


def gantt(events: Sequence[Event], title: str, batches: int) -> dict[str, Any]:
    """Draw the computations of every stage in the first mini-batches over time, an axis with a title."""
    first = min(event.batch for event in events if event.action.kind is Kind.FORWARD)
    shown = [e for e in events if first <= e.batch < first + batches and e.end > e.start]
    stages = 1 + max(e.action.stage for e in shown)
    return {
        "title": title,
        "rows": [f"stage {k}" for k in range(stages)],
        "bars": bars(shown, lambda e: e.action.stage),
    }


def bars(
    events: Sequence[Event], row: Callable[[Event], int], loss: Callable[[Event], int | None] = lambda e: None
) -> list[list[Any]]:
    """Return kind, row, micro-batch, loss, mini-batch, start and length of events, as `gantt.js` draws them, from 0 on."""
    zero = min((e.start for e in events), default=0.0)
    return [
        [
            e.action.kind.value,
            row(e),
            e.action.microbatch,
            loss(e),
            e.batch,
            *map(six_digits, (e.start - zero, e.end - e.start)),
        ]
        for e in events
    ]


def six_digits(number: float) -> float:
    """Round a number for a page."""
    return float(f"{number:.6g}")


def kinds() -> dict[str, dict[str, str]]:
    """Return name and colour of every kind of action, for `gantt.js`."""
    return {kind.value: {"name": kind.words, "colour": colour} for kind, colour in KIND_COLOURS.items()}


def utilisation(names: Sequence[str], shares: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Draw bars for every rank by its name, in per cent; patterns distinguish measured and predicted without colour."""
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": list(names),
            "y": [100 * value for value in values],
            "marker": {"color": COLOURS[i], "pattern": {"shape": "/" if i else "", **_HATCHING}},
            "text": [f"{100 * value:.0f} %" for value in values],
            "textposition": "outside",
            "cliponaxis": False,
        }
        for i, (name, values) in enumerate(shares.items())
    ]
    layout = _layout(300, "%") | {"barmode": "group"}
    layout["yaxis"] |= {"range": [0, 110]}
    return {"data": traces, "layout": layout}


def _layout(height: int, title: str) -> dict[str, Any]:
    return {
        "height": height,
        "font": _FONT,
        "plot_bgcolor": "white",
        "margin": {"t": 30, "l": 60, "r": 15, "b": 90},
        "xaxis": {"gridcolor": _GRID, "zeroline": False, "automargin": True},
        "yaxis": {"gridcolor": _GRID, "zeroline": False, "title": {"text": title}},
        "legend": {"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0},
        "hoverlabel": {"align": "left"},
        "showlegend": True,
    }
