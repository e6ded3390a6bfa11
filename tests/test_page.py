"""`nwise report` and `nwise explore`: pages in a real browser, by mouse and keyboard, wide and narrow."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nwise
from browser import browser, complaints, picture
from nwise.app import cli
from nwise.app.report.explore import Choices
from nwise.app.report.figures import COLOURS
from nwise.app.report.grid import KIND_COLOURS, Picture
from nwise.app.report.html import embed_json
from nwise.app.training import Run
from nwise.schedule import Costs, baseline, best
from once import made_once

pytest.importorskip("plotly", reason="needs the extra 'html'")
# `NWISE_SCREENSHOTS=FOLDER pytest tests/test_page.py` takes pictures of the pages.
SHOTS = os.environ.get("NWISE_SCREENSHOTS")
WIDE, PHONE = (1200, 900), (390, 800)
NARROW = ("--filters", "4")  # the digits in a tenth of the time
SMALL_TEXT = "--num-stages 2 --width 8 --num-heads 1 --sequence-length 256 --batch-size 64 --test-limit 20000".split()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "pages", _make_pages)


def _make_pages(folder: Path) -> None:
    """Make two runs, one of them with a timeline as four processes would record it, their page, and a small explorer."""
    runs = folder / "runs"
    for strategy in ("2-wise", "end-to-end"):
        options = ["--strategy", strategy, "--epochs", "3", "--heads", "all", *NARROW]
        assert cli.run(["train", "digits", *options, "--runs", str(runs)]) == 0
    (runs / "digits-2-wise-001" / "timeline.json").write_text(json.dumps(recorded()))
    both = [str(runs / "digits-2-wise-001"), str(runs / "digits-end-to-end-001")]
    assert cli.run(["report", *both, "--out", str(folder / "report.html")]) == 0
    sizes = [
        "--strategy",
        "local",
        "2-wise",
        "3-wise",
        "end-to-end",
        "gpipe",
        "zb-h1",
        "zero-bubble",
        "zb-v",
        "--stages",
        "2",
        "4",
        "8",
    ]
    sizes += ["--microbatches", "1", "2", "4", "--costs", "transformer", "paper", "--latency", "0", "0.25"]
    assert cli.run(["explore", *sizes, "--out", str(folder / "explore.html")]) == 0


def recorded(steps: int = 4) -> dict[str, Any]:
    """A timeline of the 2-wise lists with stages of unlike speed, as `nwise train --timeline` writes it."""
    costs = Costs((2e-3, 3e-3, 4e-3, 4e-3), 1e-3, (0, 2e-3, 3e-3, 3e-3), (3e-3, 3e-3, 4e-3, 4e-3), latency=2e-4)
    strategy = nwise.NWise(2, heads="all")
    drawn = Picture("", best(strategy, num_stages=4, num_microbatches=1, costs=costs), steps)
    events: list[list[Any]] = [[] for _ in range(4)]
    for e in drawn.timeline.events:
        a = e.action
        events[a.stage].append([a.kind.value, a.stage, a.microbatch, a.message, a.minibatch, e.cycle, e.start, e.end])
    return {"strategy": "2-wise", "events": events, "bytes": [[8, 8]] * 4}


# Each browser takes ten seconds, and a phone shows the same page.
@pytest.fixture(
    scope="module",
    params=[WIDE, pytest.param(PHONE, marks=pytest.mark.slow("the same pages once more, on a narrow screen"))],
    ids=["wide", "phone"],
)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Any]]:
    with browser(tmp_path_factory.mktemp("profile"), *request.param) as driver:

        def page(path: Path) -> Any:
            driver.get(path.as_uri())
            wait(driver, "return document.body.dataset.ready === 'yes'")
            return driver

        yield page


def wait(driver: Any, condition: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(driver, 30).until(lambda d: d.execute_script(condition))


def shot(driver: Any, name: str, *, whole: bool = True) -> None:
    if SHOTS is not None:
        wide = driver.execute_script("return innerWidth") > 600
        picture(driver, Path(SHOTS) / f"{name}{'' if wide else '-phone'}.png", whole=whole)


def fits(driver: Any) -> bool:
    """Nothing is wider than the window; wide tables scroll by themselves."""
    width, window = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    return bool(width <= window)


def readable(driver: Any) -> bool:
    sizes = driver.execute_script(
        "return [...document.querySelectorAll('p, td, th, label, legend')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    return min(sizes) >= 12


def test_report_in_a_browser(pages: Path, opened: Callable[[Path], Any]) -> None:
    driver = opened(pages / "report.html")
    wait(driver, "return document.querySelectorAll('.chart .main-svg').length >= 8")
    assert complaints(driver) == []
    assert fits(driver)
    assert readable(driver)
    text = driver.find_element("tag name", "body").text
    for words in (
        "digits-2-wise-001",
        "digits-end-to-end-001",
        "Which loss trains which stage",
        "test accuracy, %",
        "{}.{}".format(*torch.__version__.split(".")),
    ):
        assert words in text
    shot(driver, "report")

    def along() -> list[float]:
        found = driver.execute_script("return document.getElementById('test-accuracy').data[0].x")
        return [float(value) for value in found]

    tests = [r for r in Run.open(pages / "runs" / "digits-2-wise-001").metrics() if r["kind"] == "test"]
    assert along() == [r["step"] for r in tests]
    shown = driver.execute_script(
        "return document.getElementById('test-accuracy').data.map(t => [t.name, t.visible, t.y])"
    )
    assert shown[3] == ["digits-2-wise-001, stage 3 (output)", True, [100 * r["accuracy"][3] for r in tests]]
    assert [name for name, visible, _ in shown if visible is True] == [shown[3][0], shown[7][0]]
    # By keyboard alone: to the radio buttons, and along them.
    from selenium.webdriver.common.keys import Keys

    button = driver.find_element("css selector", "input[name=axis]:checked")
    button.send_keys(Keys.ARROW_RIGHT)
    wait(driver, "return document.querySelector('input[name=axis]:checked').value === 'samples'")
    assert along() == [r["samples"] for r in tests]
    driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert along() == [r["seconds"] for r in tests]
    assert complaints(driver) == []


def test_report_timelines(pages: Path, opened: Callable[[Path], Any]) -> None:
    driver = opened(pages / "report.html")
    for name, unit in (("measured-0", "ms"), ("predicted-0", "ms"), ("predicted-1", "slots")):
        data = driver.execute_script(f"return document.getElementById('{name}').data")
        assert {y for trace in data for y in trace["y"]} == {0, 1, 2, 3}
        title = driver.execute_script(f"return document.getElementById('{name}').layout.xaxis.title.text")
        assert title == f"time, {unit}"
    bars = driver.execute_script("return document.getElementById('utilisation-0').data.map(t => t.y)")
    assert len(bars) == 2
    assert max(abs(a - b) for a, b in zip(*bars, strict=True)) < 25, (
        "the measured run is the predicted one but for its begin"
    )
    assert driver.execute_script("return document.getElementById('measured-1')") is None, "it was not recorded"
    credit = driver.find_element("css selector", "#credit table").text.split("\n")
    assert credit[-1].split() == ["loss", "3", "0", "0", "1", "1"]
    assert driver.execute_script("return [...document.images].every(i => i.naturalWidth > 100 && i.alt)")


def test_explorer_in_a_browser(pages: Path, opened: Callable[[Path], Any]) -> None:
    driver = opened(pages / "explore.html")
    assert complaints(driver) == []
    assert fits(driver)
    assert readable(driver)

    def choose(name: str, value: str) -> None:
        # In one question to the browser, because each takes ten milliseconds.
        [label] = driver.execute_script(
            "return [...document.querySelectorAll('label.choice')].filter(label => "
            "label.innerText.trim() === arguments[1] && label.querySelector('input').name === arguments[0])",
            name,
            value,
        )
        label.click()

    def shown() -> dict[str, Any]:
        names = ("period", "bound", "held", "busy", "order", "answer")
        return {name: driver.find_element("id", name).text for name in names}

    transformer = Costs(forward=1, head=0.5, input_grad=1, weight_grad=1, overhead=0.02)
    assert "A" not in shown()["period"]
    for stages, m, latency in ((4, 2, 0), (8, 4, 0.25), (2, 1, 0.25)):
        choose("stages", str(stages))
        choose("microbatches", str(m))
        choose("latency", f"{latency:g}")
        # All kinds of methods once; 2-wise training of two stages is none.
        for method in ("local", "2-wise", "gpipe", "zero-bubble") if stages == 4 else ("local", "zero-bubble"):
            choose("method", method)
            costs = Costs(**{**vars_of(transformer.split_in(m)), "latency": latency})
            if method in ("gpipe", "zero-bubble"):
                schedule = baseline(method, num_stages=stages, num_microbatches=m, costs=costs)
            else:
                schedule = best(method, num_stages=stages, num_microbatches=m, costs=costs)
            found = shown()
            assert float(found["period"]) == pytest.approx(schedule.period, rel=1e-3)
            assert float(re.split(r"[ :]", found["bound"])[0]) == pytest.approx(schedule.lower_bound, rel=1e-3)
            assert found["held"].startswith(", ".join(map(str, schedule.in_flight)))
            drawn = Picture("", schedule, 2)
            busy = [time / schedule.period for time in schedule.busy]
            assert found["busy"] == ", ".join(str(round(100 * share)) for share in busy) + " %"
            bars = driver.execute_script(
                "return document.getElementById('grid').data.reduce((n, t) => n + t.y.length, 0)"
            )
            assert bars == len(drawn.events)
    choose("stages", "2")
    choose("method", "2-wise")
    assert "is end-to-end training: N is not smaller than A" in driver.find_element("id", "absent").text
    assert not driver.find_element("id", "result").is_displayed()
    choose("stages", "4")
    choose("microbatches", "2")
    choose("latency", "0")
    assert driver.find_element("id", "result").is_displayed()
    shot(driver, "explore")
    assert complaints(driver) == []


def vars_of(costs: Costs) -> dict[str, Any]:
    return {name: getattr(costs, name) for name in costs.__dataclass_fields__}


def test_explorer_names_the_method_of_the_planner(
    pages: Path, opened: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    driver = opened(pages / "explore.html")
    methods = ["--strategies", "2-wise", "3-wise"]
    for stages in (4, 8):
        arguments = ["--costs", "transformer", "--devices", str(stages), "--microbatches", "1", "2", "4", *methods]
        capsys.readouterr()
        assert cli.run(["plan", *arguments, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        [m] = [one["microbatches"] for one in plan["options"] if one["method"] == plan["recommended"]]
        driver.find_element("css selector", f"input[name=stages][value='{[2, 4, 8].index(stages)}']").click()
        answer = driver.find_element("id", "answer").text
        assert answer.startswith(f"The shortest step: {plan['recommended']} with M = {m} (")
        [best_row] = driver.find_elements("css selector", "#methods tr.best")
        assert best_row.text.startswith(f"{plan['recommended']} "), "the star and the sentence name one method"


def test_every_choice_is_reached_by_keyboard(pages: Path, opened: Callable[[Path], Any]) -> None:
    from selenium.webdriver import ActionChains, Keys

    driver = opened(pages / "explore.html")
    groups = []
    for _ in range(9):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        name = driver.switch_to.active_element.get_attribute("name")
        if name:
            groups.append(name)
            driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
            assert driver.execute_script("return document.activeElement.checked")
            outline = driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", "the focus is seen"
    assert groups == ["method", "stages", "microbatches", "costs", "latency"]


def deuteranope(colour: str) -> tuple[float, ...]:
    """What eyes without the middle cones see of a colour (Machado, Oliveira and Fernandes 2009, severity 1)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    seen = (
        0.367322 * red + 0.860646 * green - 0.227968 * blue,
        0.280085 * red + 0.672501 * green + 0.047413 * blue,
        -0.011820 * red + 0.042940 * green + 0.968881 * blue,
    )
    return tuple(max(part, 0.0) ** (1 / 2.2) for part in seen)


@pytest.mark.parametrize("colours", [COLOURS, tuple(dict.fromkeys(KIND_COLOURS.values()))], ids=["runs", "kinds"])
def test_colours_differ_for_deuteranopes(colours: tuple[str, ...]) -> None:
    seen = [deuteranope(colour) for colour in colours]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 0.13


def test_report_needs_no_network_and_escapes_names(tmp_path: Path) -> None:
    name = tmp_path / "<img src=x onerror=alert(1)>"
    assert cli.run(["train", "digits", "--max-steps", "2", *NARROW, "--runs", str(tmp_path)]) == 0
    (tmp_path / "digits-2-wise-mean-001").rename(name)
    assert cli.run(["report", str(name), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "<img src=x" not in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"(http|//)", text)
    assert "</script" not in embed_json("x", "</script><script>")[len("<script") : -len("</script>\n")]


def test_report_json_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(tmp_path)]) == 2
    assert "A run should be a folder with a run.json" in capsys.readouterr().err
    assert cli.run(["train", "digits", "--max-steps", "2", *NARROW, "--runs", str(tmp_path)]) == 0
    run = tmp_path / "digits-2-wise-mean-001"
    capsys.readouterr()
    assert cli.run(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(run / "report.html")
    assert found["runs"][0]["last_test"]["step"] == 2
    assert found["runs"][0]["timeline"] is None
    assert cli.run(["report", str(run), "--out", "page.txt"]) == 2
    assert "should be a file that ends in .html. Found 'page.txt'" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("")
    assert cli.run(["report", str(run)]) == 2
    assert "should hold the records of at least one test. Found none" in capsys.readouterr().err
    assert cli.run(["explore", "--stages", "--out", "e.html"]) == 2
    assert "`stages` should have at least one value" in capsys.readouterr().err


def test_explorer_json_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--strategy", "2-wise", "end-to-end", "--stages", "2", "4", "--microbatches", "2", "--latency", "0"]
    arguments = [*sizes, "--costs", "paper", "--out", str(tmp_path / "e.html"), "--json"]
    assert cli.run(["explore", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["schedules"]
    assert [(one["method"], one["stages"]) for one in found] == [("2-wise", 4), ("end-to-end", 2), ("end-to-end", 4)]
    # By the paper's formula: three slots of half a mini-batch for each of two micro-batches.
    assert found[0]["period"] == 3.0
    assert "bars" not in found[0]


def test_explorer_of_a_delay(tmp_path: Path) -> None:
    """Regression: the bound of a delay was a number of numpy's, which is not JSON, so the page could not be written."""
    arguments = ["--strategy", "end-to-end-delay-1", "--stages", "4", "--microbatches", "1", "--costs", "paper"]
    assert cli.run(["explore", *arguments, "--latency", "0", "--out", str(tmp_path / "e.html")]) == 0


def test_empty_explorer_and_report_of_non_finite_run(tmp_path: Path) -> None:
    assert Choices(("2-wise",), (2,), (1,), {"paper": Costs(1, 0, 1, 0)}, (0.0,)).combinations() == []
    assert (
        cli.run(
            [
                "train",
                "digits",
                *NARROW,
                "--max-steps",
                "2",
                "--lr",
                "1e30",
                "--on-nan",
                "ignore",
                "--runs",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert cli.run(["report", str(tmp_path / "digits-2-wise-mean-001")]) == 0
    page = (tmp_path / "digits-2-wise-mean-001" / "report.html").read_text()
    assert "NaN" not in page.split('id="data">')[1].split("</script>")[0]


def trained(tmp_path: Path, *options: str, recipe: str = "digits") -> None:
    narrow = NARROW if recipe == "digits" else ()
    assert cli.run(["train", recipe, *narrow, "--runs", str(tmp_path), "--log-every", "2", *options]) == 0


def charts(page: Path) -> dict[str, Any]:
    text = page.read_text().split('id="data">')[1].split("</script>")[0]
    found: dict[str, Any] = json.loads(text)["charts"]
    return found


@pytest.mark.parametrize(("before", "after"), [("1 1 1 1", "2 2"), ("2 2", "1 1 1 1")])
def test_report_of_run_resumed_with_other_stages(before: str, after: str, tmp_path: Path) -> None:
    """Regression: fewer or more stages after a resume gave a traceback or called an inner stage the output."""
    trained(tmp_path, "--max-steps", "6", "--heads", "all", "--cut", *before.split())
    run = tmp_path / "digits-2-wise-mean-001"
    assert cli.run(["train", "--resume", str(run), "--cut", *after.split(), "--max-steps", "12"]) == 0
    assert cli.run(["report", str(run)]) == 0
    num_stages = len(after.split())
    found = charts(run / "report.html")
    records = [r for r in Run.open(run).metrics() if r["kind"] == "test"]
    last = found["test-accuracy"]["data"][-1]
    assert last["name"] == f"stage {num_stages - 1} (output)"
    assert last["y"] == [100 * r["accuracy"][-1] for r in records], "the output is the last head, whatever its number"
    first = found["test-accuracy"]["data"][0]["y"]
    assert first[0] is None
    assert first[-1] == 100 * records[-1]["accuracy"][0]
    text = (run / "report.html").read_text()
    assert "another number of stages up to step 6; only the last head is shown there" in text
    assert "resumed from step 6: " in text


def test_accuracy_and_perplexity_on_one_page_keep_apart(tmp_path: Path) -> None:
    """Regression: accuracies appeared under the heading of the first run, test perplexity."""
    trained(tmp_path, "--max-steps", "2", *SMALL_TEXT, recipe="source-code")
    trained(tmp_path, "--max-steps", "2")
    folders = [str(next(tmp_path.glob(f"{name}-*"))) for name in ("source-code", "digits")]
    page = tmp_path / "both.html"
    assert cli.run(["report", *folders, "--out", str(page)]) == 0
    found = charts(page)
    assert {t["name"].split(",")[0] for t in found["test-perplexity"]["data"]} == {Path(folders[0]).name}
    assert {t["name"].split(",")[0] for t in found["test-accuracy"]["data"]} == {Path(folders[1]).name}
    assert found["test-perplexity"]["data"][-1]["y"][-1] > 5
    rows = re.findall(r'<tr><th scope="row">(\S+)</th>(.*?)</tr>', page.read_text())[:2]
    assert re.search(r"<td>[\d.]+ perplexity</td>", dict(rows)[Path(folders[0]).name])
    assert re.search(r"<td>[\d.]+ %</td>", dict(rows)[Path(folders[1]).name])


def test_report_escapes_run_metadata(tmp_path: Path) -> None:
    """Regression: values that began like a table cell were inserted without escaping."""
    trained(tmp_path, "--max-steps", "2")
    run = tmp_path / "digits-2-wise-mean-001"
    state = json.loads((run / "run.json").read_text())
    state["status"] = state["versions"]["torch"] = state["config"]["name"] = "<td><script>alert(1)</script>"
    (run / "run.json").write_text(json.dumps(state))
    assert cli.run(["report", str(run)]) == 0
    assert "<script>alert" not in (run / "report.html").read_text()


def test_report_draws_each_phase_of_a_strategy(tmp_path: Path) -> None:
    trained(tmp_path, "--max-steps", "6", "--strategy", "local@3,end-to-end")
    [run] = tmp_path.iterdir()
    assert cli.run(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "local, from step 0 on: a mini-batch takes 2 slots" in text
    assert "end-to-end, from step 3 on: a mini-batch takes 8 slots" in text


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "test", "step": 4},
        {"kind": "test", "step": 4, "samples": 1, "seconds": 1.0, "loss": None, "accuracy": [1.0]},
        {"kind": "train", "step": 4, "samples": 1, "seconds": 1.0, "loss": ["<b>"]},
        {"kind": "train", "step": None, "samples": 1, "seconds": 1.0, "loss": [1.0]},
    ],
)
def test_report_rejects_invalid_records(
    line: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, "--max-steps", "2")
    run = tmp_path / "digits-2-wise-mean-001"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert cli.run(["report", str(run)]) == 2
    assert "metrics.jsonl should hold records with step, samples, seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stages", "10000", "--microbatches", "10000"], "should have at most 20,000 actions. Found about"),
        (
            ["--strategy", "2-wise", "local@5,end-to-end"],
            "should be the same at every step. Found 'local@5,end-to-end'",
        ),
        (["--costs", "forward=1,head=0,input_grad=1,weight_grad=1,latency=5"], "should leave the latency to `latency`"),
        (["--costs", "forward=1:2,head=0,input_grad=1,weight_grad=1"], "forward"),
        (["--strategy", "2-wise", "--stages", "1", "2"], "should have a number above N"),
        (["--strategy", "3-wize"], "`strategy` should be one like"),
        (["--latency", "-1"], "latency"),
        (["--out", "/proc/x.html"], "should be in a folder that can be written to. Found '/proc/x.html'"),
    ],
)
def test_explore_rejects_bad_options_before_timing(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("it was timed")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Choices, "time", never)
    assert cli.run(["explore", *options]) == 2
    assert re.search(message, capsys.readouterr().err)
