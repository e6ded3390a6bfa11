"""What people look at: the display of a run, and the pictures."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import nwise
from nwise.app.cli.output import Output
from nwise.app.cli.report import _print_comparison
from nwise.app.recipes import ConvNet, recipe
from nwise.app.report.charts import gantt, utilisation
from nwise.app.report.display import LiveDisplay, PlainDisplay, display_for
from nwise.app.report.figures import flow_figure
from nwise.app.report.grid import Picture, row_names
from nwise.app.report.measured import Comparison
from nwise.app.training import Score, Scores, Trainer
from nwise.app.training.log import load
from nwise.schedule import Costs, best, simulate
from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import PAPER


def shown(terminal: bool, strategy: str) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    display = display_for(console)
    assert isinstance(display, LiveDisplay if terminal else PlainDisplay)
    narrow = ConvNet(num_stages=4, filters=4)
    config = dataclasses.replace(recipe("digits"), epochs=1, strategy=strategy, heads="live", model=narrow)
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


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_slow_run_has_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("nwise.app.report.display.time", clock)
    display = PlainDisplay(Console(file=io.StringIO(), width=100))
    display.started(Trainer(dataclasses.replace(recipe("digits"), epochs=100)))
    for done in range(1, 11):
        clock.now += 9
        display.evaluating(done, 10)
    losses = torch.tensor([0.5, 0.25])
    display.evaluated(0, Scores((None, Score(1.0, 0.5))))
    for step in range(1, 11):
        clock.now += 20
        display.stepped(step, losses)
        display.logged(step, losses)
    assert isinstance(display.console.file, io.StringIO)
    assert display.console.file.getvalue().splitlines()[2:] == [
        "step      0/2200     63.0 s  testing 7/10",
        "step      0/2200     90.0 s  test accuracy – 50.00%",
        "step      4/2200    170.0 s  training  training loss 0.500 0.250",
        "step      8/2200    250.0 s  training  training loss 0.500 0.250",
    ]


def test_stop_is_shown_at_once_below_the_live_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = LiveDisplay(console)
    display.started(Trainer(recipe("digits")))
    display.stopping("stopping after this step; Ctrl-C again to end now")
    display.live.refresh()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith("stopping after this step; Ctrl-C again to end now")
    display.finished("stopped")


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


@pytest.mark.parametrize("name", ["rotating-2", "2-wise-delay-1", "end-to-end-delay-2"])
def test_timeline_has_every_action_of_its_mini_batches(name: str) -> None:
    """Regression: for rotating and delayed strategies the chart took passes through the lists for mini-batches."""
    schedule = best(nwise.strategy(name), num_stages=3, num_microbatches=1, costs=Costs(1, 0, 1, 1))
    picture = Picture("", schedule, 2)
    bars = gantt(picture.timeline.events, "", 2)["bars"]
    assert sorted(batch for kind, _, _, _, batch, *_ in bars if kind == "F") == [0, 0, 0, 1, 1, 1]
    turns = len(schedule.flows)
    passes = [sum(schedule.passes[batch % turns].values()) for batch in range(2)]
    later = [batch for kind, _, _, _, batch, *_ in bars if kind != "F"]
    assert [later.count(0), later.count(1)] == passes


def test_measured_run_is_compared_with_its_prediction() -> None:
    """The measured times are simulated, plus one delay that the prediction does not know."""
    costs = Costs(forward=2.0, head=1.0, input_grad=3.0, weight_grad=2.0, chain_share=0.0)
    schedule = best("2-wise", num_stages=3, num_microbatches=1, costs=costs)
    line = simulate(schedule.with_costs(costs), cycles=6)
    stages: list[list[tuple[int, Action, float, float]]] = [[] for _ in range(3)]
    for e in line.events:
        late = 1e-3 if e.action.kind is Kind.WEIGHT_GRAD and e.action.stage == 1 else 0.0
        stages[e.action.stage].append((e.cycle, e.action, e.start / 1e3 + late, e.end / 1e3 + late))
    found = Comparison(schedule, stages, [])
    assert found.costs.per_stage("forward", 3) == pytest.approx((2, 2, 2))
    assert found.costs.per_stage("input_grad", 3)[1] == pytest.approx(3)
    assert found.period == pytest.approx(line.period)
    assert found.predicted.period == pytest.approx(line.period)
    worst = found.deviations(1)[0]
    assert str(worst.action) == "W1(0)"
    assert worst.measured - worst.predicted == pytest.approx(1)


def test_ranks_with_several_stages_have_no_name_of_a_stage() -> None:
    """They were called stage 0, 1 and so on in the page and the table of a report."""
    schedule = best("2-wise", num_stages=4, num_microbatches=1, costs=PAPER, placement=[0, 0, 0, 1])
    ranks: list[list[tuple[int, Action, float, float]]] = [[], []]
    for e in simulate(schedule.with_costs(PAPER), cycles=6).events:
        ranks[schedule.placement[e.action.stage]].append((e.cycle, e.action, e.start, e.end))
    found = Comparison(schedule, ranks, [[8, 8]] * 2)
    chart = utilisation(row_names(schedule.placement), {"measured": found.utilisation})
    assert chart["data"][0]["x"] == ["rank 0", "rank 1"]
    console = Output(file=io.StringIO(), width=120)
    _print_comparison(console, "run", Path(), found)
    assert "bytes sent by rank 1 in a step" in console.file.getvalue()  # type: ignore[attr-defined]


def test_broken_timeline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with pytest.raises(FileNotFoundError, match="should hold a measured timeline"):
        load(path)
    path.write_text('{"events": [[["X", 0]]]}')
    with pytest.raises(ValueError, match="should hold a measured timeline. Found"):
        load(path)
