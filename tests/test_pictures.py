"""Pictures of schedules say what the schedule says: terminal, figures, page and trace."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from nwise.app import cli
from nwise.app.report.grid import Picture, chrome_trace, terminal_grid
from nwise.schedule import PAPER, Costs, baseline, best


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def picture(name: str = "2-wise", costs: Costs = PAPER) -> Picture:
    return Picture(name, best(name, num_stages=4, num_microbatches=2, costs=costs))


QUICK = ["--strategy", "2-wise", "--stages", "3", "--microbatches", "1", "--latency", "0"]


def test_terminal_shows_the_schedule_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schedule"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:5] == [
        "2-wise, A = 4, M = 2: order skewed: 6 per mini-batch, which is optimal",
        "stage 0 F0 F1  · W0  · W1 F0 F1  · W0  · W1",
        "stage 1  · F0 I0 F1 I1 W0 W1 F0 I0 F1 I1 W0 W1",
        "stage 2  ·  · F0 I0 F1 I1 W0 W1 F0 I0 F1 I1 W0 W1",
        "stage 3  ·  ·  · F0 B0 F1 B1  ·  · F0 B0 F1 B1",
    ]
    assert lines[5].startswith(" F  forward   I  input gradient")


def test_terminal_grid_says_where_it_is_cut() -> None:
    text = terminal_grid(picture(), 30)
    assert "cut at the right" in text.plain
    assert max(map(len, text.plain.splitlines()[:4])) <= 30
    # colours by kind, the second mini-batch bold
    styles = {str(span.style) for span in terminal_grid(picture(), 100).spans}
    assert any("bold" in style for style in styles)
    assert len({style.split(" on ")[1].split()[0] for style in styles if " on " in style}) == 4


def test_schedule_command_lists_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schedule", "--strategy", "1f1b", "--stages", "2", "--microbatches", "1", "--lists"]) == 0
    assert "stage 1: RX1(0) F1(0) H1(0) B1(0.0) SG1(0.0) U1" in capsys.readouterr().out
    assert cli.run(["schedule", "--strategy", "local", "2-wise", "--microbatches", "1", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [s["title"] for s in record["schedules"]] == [
        f"{n}, A = 4, M = {m}" for m in (1, 2) for n in ("local", "2-wise")
    ]
    assert [s["period"] for s in record["schedules"]] == [2, 4, 4, 6]
    assert record["schedules"][3]["lists"][0][0] == "F0(0)"


def test_schedule_draws_an_order_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: only pipelines could be drawn, so a new order had to pretend to be one."""
    options = ["schedule", "--microbatches", "2", "--stages", "3", "--json", "--strategy"]
    assert cli.run([*options, "end-to-end", "2-wise-delay-1", "--order", "phase"]) == 0
    orders = json.loads(capsys.readouterr().out)["schedules"]
    assert [one["order"] for one in orders] == ["phase", "phase"]
    assert cli.run([*options, "gpipe"]) == 0
    gpipe = json.loads(capsys.readouterr().out)["schedules"][0]
    assert (orders[0]["period"], orders[0]["lists"]) == (gpipe["period"], gpipe["lists"])
    assert cli.run([*options, "2-wise", "--order", "skewed"]) == 0
    assert json.loads(capsys.readouterr().out)["schedules"][0]["order"] == "skewed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--order skwed", "`schedule` should be one of .* Found 'skwed'. Did you mean 'skewed'"),
        ("--order phase --strategy gpipe", "`strategy` should be a strategy if an order is given. Found 'gpipe'"),
        ("--order phase --strategy local@4,2-wise", "`strategy` should be the same at every step"),
        ("--order phase --csv here.csv", "`order` should not be given with `csv`, whose file has one. Found 'phase'"),
    ],
)
def test_schedule_with_bad_order(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schedule", *options.split()]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_schedule_figures_are_written(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    strategies = ["3-wise", *(["hogwild", "rotating-2"] if suffix == ".svg" else [])]  # each takes a while to draw
    arguments = ["schedule", "--strategy", *strategies, "--costs", "transformer", "--out"]
    assert cli.run([*arguments, f"deep/s{suffix}"]) == 0
    assert f"Schedule: deep/s{suffix}" in capsys.readouterr().out
    content = Path(f"deep/s{suffix}").read_bytes()
    assert len(content) > 5000
    if suffix == ".svg":
        text = content.decode()
        for words in ("3-wise, A = 4, M = 2", "stage 3", "weight gradient", "optimal"):
            assert words in text


def test_chrome_trace_matches_timeline_and_messages() -> None:
    costs = Costs(1, 0.5, 1, 1, latency=0.25)
    pictures = [
        picture("3-wise", costs),
        Picture("1f1b", baseline("1f1b", num_stages=3, num_microbatches=2, costs=costs)),
    ]
    trace = chrome_trace(pictures)
    json.dumps(trace, allow_nan=False)
    for process, drawn in enumerate(pictures):
        line = drawn.timeline
        events = [e for e in trace["traceEvents"] if e["pid"] == process]
        slices = [e for e in events if e["ph"] == "X"]
        assert [(e["name"], e["ts"] / 1000, e["tid"]) for e in slices] == [
            (str(e.action), e.start, e.action.stage) for e in line.events
        ]
        tracks = defaultdict(list)
        for e in slices:
            tracks[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        for times in tracks.values():  # a stage does one thing at a time
            assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(sorted(times)))
        starts = {e["id"]: e for e in events if e["ph"] == "s"}
        ends = {e["id"]: e for e in events if e["ph"] == "f"}
        schedule = drawn.schedule
        sends = sum(a.kind.name.startswith("SEND") for actions in schedule.actions for a in actions)
        assert starts.keys() == ends.keys()
        assert len(starts) == line.cycles * sends == len(line.messages)
        for key, start in starts.items():
            end = ends[key]
            assert abs(start["tid"] - end["tid"]) == 1
            assert end["ts"] - start["ts"] >= 250  # the latency
            for point in (start, end):  # each end lies in an action of its track
                assert any(a <= point["ts"] <= b for a, b in tracks[point["tid"]])


def test_chrome_trace_file_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schedule", "--out", "trace.json"]) == 0
    trace = json.loads(Path("trace.json").read_text())
    assert {"name": "thread_name", "ph": "M", "pid": 0, "tid": 2, "args": {"name": "stage 2"}} in trace["traceEvents"]
    assert "Schedule: trace.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "s.gif"], "`out` should be a file that ends in .png.*Found 's.gif'"),
        (["--batches", "0"], "`batches` should be an integer of at least 1. Found 0"),
        (["--strategy", "3-wize"], "`strategy` should be one like.*Found '3-wize'"),
        (["--stages", "0"], "`num_stages` should be an integer of at least 1. Found 0"),
        (["--stages"], "`stages` should have at least one value. Found none"),
        (["--costs", "x=1"], "Costs should have names among.*Found 'x'"),
        (["--stages", "8", "--microbatches", "64", "--batches", "20"], "at most 20,000 actions. Found"),
        (["--strategy", "credit-1,0;1,1"], "one row and column for each of the 4 stages. Found 2"),
    ],
)
def test_bad_schedule_options_get_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["schedule", *arguments]) == 2
    out, err = capsys.readouterr()
    assert re.search(message, err), err
    assert "Traceback" not in out + err


def test_explorer_escapes_names_of_costs(tmp_path: Path) -> None:
    """The name of a costs file is a choice of the page."""
    name = "<script>alert(1)<.json"
    Path(name).write_text(json.dumps({"forward": 1, "head": 0, "input_grad": 1, "weight_grad": 1}))
    assert cli.run(["explore", *QUICK, "--costs", "paper", name, "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert(1)" not in page
