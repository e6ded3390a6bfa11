"""Schedules in one interactive HTML file that opens offline: choose one, hover over an action to see what it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nwise.report.grid import EXPLANATION, KIND_COLOURS, KIND_NAMES, Picture, batch_of, farthest_loss
from nwise.schedule import Kind
from nwise.schedule.simulate import Event


def explorer(pictures: Sequence[Picture], path: Path) -> None:
    """Write the file.

    Args:
        pictures: the schedules to choose from.
        path: of the file; plotly's script is put into it, so that it needs no network.

    Raises:
        ImportError: plotly is missing.
    """
    graph = _plotly()
    figure = graph.Figure()
    owners: list[int] = []
    for i, picture in enumerate(pictures):
        events = picture.events
        for kind, name in KIND_NAMES.items():
            chosen = [event for event in events if event.action.kind is kind]
            if chosen:
                figure.add_trace(_bars(graph, picture, chosen, kind, name, visible=i == 0))
                owners.append(i)
    buttons = [
        {
            "label": picture.title,
            "method": "update",
            "args": [
                {"visible": [owner == i for owner in owners]},
                {"annotations[0].text": picture.caption, "yaxis.range": _range(picture)},
            ],
        }
        for i, picture in enumerate(pictures)
    ]
    rows = max(picture.timed.schedule.num_stages for picture in pictures)
    menu = {
        "buttons": buttons,
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 34},
        "showactive": True,
    }
    caption = {"text": pictures[0].caption, "xref": "paper", "yref": "paper", "x": 0, "y": 1, "showarrow": False}
    figure.update_layout(
        annotations=[{**caption, "xanchor": "left", "yanchor": "bottom", "yshift": 8}],
        updatemenus=[menu],
        barmode="overlay",
        bargap=0.12,
        template="simple_white",
        height=max(360, 220 + 34 * rows),
        margin={"t": 110, "l": 70, "r": 20, "b": 100},
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left"},
    )
    figure.update_xaxes(title={"text": EXPLANATION, "standoff": 6, "font": {"size": 11}}, rangemode="tozero")
    figure.update_yaxes(range=_range(pictures[0]), dtick=1, tickprefix="stage ")
    figure.write_html(path, include_plotlyjs=True, full_html=True, config={"displaylogo": False, "responsive": True})


def _bars(graph: Any, picture: Picture, events: Sequence[Event], kind: Kind, name: str, *, visible: bool) -> Any:
    return graph.Bar(
        orientation="h",
        y=[event.action.stage for event in events],
        base=[event.start for event in events],
        x=[event.end - event.start for event in events],
        name=f"{kind.value}  {name}",
        marker={
            "color": KIND_COLOURS[kind],
            "line": {"color": "white", "width": 1},
            "pattern": {"shape": ["/" if batch_of(event, picture) % 2 else "" for event in events], "size": 5},
        },
        text=[_label(picture, event) for event in events],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[_hover(picture, event, name) for event in events],
        hoverinfo="text",
        visible=visible,
    )


def _label(picture: Picture, event: Event) -> str:
    loss = farthest_loss(event, picture)
    return f"{event.action.microbatch}" + ("" if loss is None else f"<sub>{loss}</sub>")


def _hover(picture: Picture, event: Event, name: str) -> str:
    loss = farthest_loss(event, picture)
    lines = [
        f"<b>{event.action}</b> {name}",
        f"stage {event.action.stage}, micro-batch {event.action.microbatch}, mini-batch {batch_of(event, picture)}",
        f"{event.start:.6g} to {event.end:.6g}",
    ]
    return "<br>".join(lines + ([f"gradient of loss {loss}"] if loss is not None else []))


def _range(picture: Picture) -> list[float]:
    return [picture.timed.schedule.num_stages - 0.5, -0.5]


def _plotly() -> Any:
    try:
        import plotly.graph_objects as graph
    except ImportError as error:
        raise ImportError("Interactive pages need plotly. Install it with `pip install nwise[html]`.") from error
    return graph
