"""What people look at: the display of a run, and the pictures."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import nwise
from nwise.recipes import recipe
from nwise.report.charts import gantt
from nwise.report.display import LiveDisplay, PlainDisplay, display_for
from nwise.report.figures import Curve, compare_figure, flow_figure
from nwise.report.grid import Picture
from nwise.schedule import Costs, best
from nwise.training import Trainer


def shown(terminal: bool, strategy: str) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    display = display_for(console)
    assert isinstance(display, LiveDisplay if terminal else PlainDisplay)
    config = dataclasses.replace(recipe("digits"), epochs=1, strategy=strategy, heads="live")
    Trainer(config).train(callbacks=(display,))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_terminal_shows_live_table_of_every_head() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(terminal=True, strategy="3-wise"))
    last = text[text.rindex("digits: 4 stages, 3-wise") :]
    rows = {line.split("│")[1].strip(): line.split("│")[2:5] for line in last.splitlines() if "│" in line}
    assert list(rows) == ["stage 0", "stage 1", "stage 2", "stage 3 (output)"]
    assert [cell.strip() for cell in rows["stage 0"]] == ["–", "–", "–"]
    assert all(re.fullmatch(r"\s*\d+\.\d+( %)?\s*", cell) for cell in rows["stage 2"])
    assert "22/22" in last
    assert "done" in last


def test_display_without_terminal_prints_plain_lines() -> None:
    lines = shown(terminal=False, strategy="3-wise").splitlines()
    assert lines[0].startswith("digits: 4 stages, 3-wise")
    assert re.match(r"step +22/22 .* s  test accuracy – – \d+\.\d+% \d+\.\d+%  training loss – – \d", lines[3])
    assert lines[-1] == "done"
    assert not any("\x1b" in line for line in lines)


def test_flow_figure_shows_credit(tmp_path: Path) -> None:
    flow_figure([nwise.NWise(2), nwise.Rotating(2)], 4, tmp_path / "flow.svg")
    text = re.findall(r">([^<>]+)</text>", (tmp_path / "flow.svg").read_text())
    assert [t for t in text if "wise" in t or "turn" in t] == [
        "2-wise",
        "rotating-2, turn 1 of 2",
        "rotating-2, turn 2 of 2",
    ]
    assert text.count("learns from") == 3 * 4
    learns = [text[i + 1] for i, t in enumerate(text) if t == "learns from"]
    assert learns[:4] == ["loss 1", "loss 2", "loss 3", "loss 3"]


def test_compare_figure_draws_every_curve(tmp_path: Path) -> None:
    curves = {"local": Curve([0, 1], [10.0, 60.0], [0.0, 2.0]), "end-to-end": Curve([0, 1], [10.0, 70.0], [0.0, 8.0])}
    compare_figure(curves, "test accuracy, %", "a title", tmp_path / "compare.svg")
    svg = (tmp_path / "compare.svg").read_text()
    for text in ("local", "end-to-end", "a title", "steps", "(paper's timing model, not measured)", "test accuracy, %"):
        assert text in svg.replace("&#x27;", "'"), text


@pytest.mark.parametrize("name", ["rotating-2", "2-wise-delay-1", "end-to-end-delay-2"])
def test_timeline_has_every_action_of_its_mini_batches(name: str) -> None:
    """Regression: for rotating and delayed strategies the chart took passes through the lists for mini-batches."""
    timed = best(nwise.strategy(name), num_stages=3, num_microbatches=1, costs=Costs(1, 0, 1, 1))
    picture = Picture("", timed, 2)
    bars = gantt(picture.timeline.events, "", 2)["data"]
    by_kind = {trace["name"][0]: trace["marker"]["pattern"]["shape"] for trace in bars}
    assert sorted(by_kind["F"]) == ["", "", "", "/", "/", "/"]
    turns = len(timed.schedule.flows)
    passes = [sum(timed.schedule.passes[batch % turns].values()) for batch in range(2)]
    later = [shape for kind, shapes in by_kind.items() if kind != "F" for shape in shapes]
    assert [later.count(""), later.count("/")] == passes
