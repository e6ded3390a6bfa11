"""The pictures of the manual and of the README, from records alone: `python -m experiments.manual`, in two minutes.

The last two show pages, and need Chromium; BROWSER names another browser of its kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import nwise
from benchmarks.wire import losses
from experiments.frontier import clock
from experiments.frontier import experiment as frontier
from experiments.harness.claims import Claim, holm, interval
from experiments.harness.experiment import Job, Size
from experiments.harness.plots import make_panels
from experiments.harness.runs import Runs, loss_at
from experiments.harness.store import Store
from experiments.index import experiment
from experiments.width import experiment as width
from nwise.app.report.figures import flow_figure, method_colour, new_figure
from nwise.app.report.grid import Picture, schedule_figure
from nwise.schedule import TRANSFORMER, Costs
from nwise.schedule.find import method_schedule
from nwise.strategies import EndToEnd, Local, NWise, strategy

ROOT = Path(__file__).parents[1]
Lines = Mapping[str, Sequence[tuple[float, float]]]

# Methods of the two figures about time, from the slowest down, with their line and a name that needs no glossary.
_METHODS = {
    "1f1b": ("-", "1F1B (exact)"),
    "zero-bubble": ("-", "zero-bubble (exact)"),
    "end-to-end-delay-1": ("--", "end-to-end, one update late"),
    "end-to-end-delay-2": (":", "end-to-end, two updates late"),
    "2-wise": ("-", "2-wise"),
    "local": ("-", "local"),
}
_COLUMNS = {"fast links": 0.0, "slow links: a message takes one slot": 1.0}
_VERDICTS = {"holds": "#009E73", "does not hold": "#D55E00", "undecided": "#666666"}


def _records(name: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _lines(axes: Axes, lines: Lines, *, legend: bool = True) -> None:
    """Draw slots per step on a logarithmic axis, a line for each method."""
    for name, points in lines.items():
        look, text = _METHODS[name]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, look, color=method_colour(name), label=text, lw=2, marker="o", markersize=3.5)
    axes.set_yscale("log", base=2)
    ticks = [4, 8, 16, 32, 64]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.set_ylabel("slots per step")
    if legend:
        axes.legend(frameon=False, fontsize=9, handlelength=3.2)


def latency(path: Path) -> None:
    """Draw the measured steps of four stages over real links, by nwise and by torch."""
    rows = [row for row in _records("wire/records/steps.jsonl") if row["source"] == "here"]
    rows = [row for row in rows if (row["ranks"], row["size"], row["slot"]) == (4, "64KiB", 0.02)]
    links = {"loopback": "loopback", "1ms": "1 ms", "20ms": "20 ms", "40ms": "40 ms", "80ms": "80 ms"}
    shown = [
        ("torch", "1f1b", ":", "1F1B of torch (exact)"),
        ("torch", "zero-bubble", "--", "zero-bubble of torch (exact)"),
        ("nwise", "zero-bubble", "-", "zero-bubble (exact)"),
        ("nwise", "end-to-end-delay-1", "--", "end-to-end, one update late"),
        ("nwise", "2-wise", "-", "2-wise"),
        ("nwise", "local", "-", "local"),
    ]
    with make_panels(1, path, width=6.4, height=3.9) as (_, [axes]):
        for library, method, look, text in shown:
            mine = [row for row in rows if (row["library"], row["method"]) == (library, method)]
            found = {one: median(row["step_ms"] for row in mine if row["link"] == one) for one in links}
            colour = method_colour(method) if library == "nwise" else "#777777"
            axes.plot(
                range(len(links)),
                [found[one] for one in links],
                look,
                color=colour,
                label=text,
                lw=2,
                marker="o",
                ms=3.5,
            )
        axes.set_xticks(range(len(links)), links.values())
        axes.set_yscale("log")
        ticks = [50, 100, 200, 500, 1000, 2000]
        axes.set_yticks(ticks, [str(t) for t in ticks])
        axes.minorticks_off()
        axes.set_ylabel("milliseconds per step")
        axes.set_xlabel("latency of the link")
        axes.legend(frameon=False, fontsize=9, handlelength=3.2)
        axes.set_title("A step of four stages of 20 ms, over real links")


def two(path: Path) -> None:
    """Draw the measured steps of two stages over real links, and the step of one device that has both."""
    rows = [
        row for row in _records("wire/records/steps.jsonl") if row["source"] == "here" and row["library"] == "nwise"
    ]
    rows = [row for row in rows if (row["ranks"], row["size"], row["slot"]) == (2, "64KiB", 0.02)]
    links = {"1ms": "1 ms, 1 Gbit/s", "20ms": "20 ms, 200 Mbit/s", "80ms": "80 ms, 20 Mbit/s"}
    costs = Costs(**rows[0]["costs"])
    alone = method_schedule("end-to-end", num_stages=2, num_microbatches=1, costs=costs, placement=(0, 0))
    looks: dict[str, Any] = {"facecolor": "#999999"}
    bars = [("one device alone", [1e3 * alone.period] * len(links), looks)]
    shown = {"zero-bubble": "exact", "end-to-end-delay-1": "end-to-end, one update late", "local": "local"}
    for method, text in shown.items():
        mine = [row for row in rows if row["method"] == method]
        found = [median(row["step_ms"] for row in mine if row["link"] == one) for one in links]
        looks = {"facecolor": method_colour(method), "hatch": "///" if "delay" in method else ""}
        bars.append((text, found, looks))
    with make_panels(1, path, width=6.4, height=2.8) as (_, [axes]):
        for k, (text, found, looks) in enumerate(bars):
            places = [i + (k - 1.5) * 0.21 for i in range(len(links))]
            axes.bar_label(axes.bar(places, found, 0.2, label=text, edgecolor="white", **looks), fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(links)), links.values())
        axes.set_ylabel("milliseconds per step")
        axes.grid(visible=False, axis="x")
        axes.legend(frameon=False, fontsize=9)


def seconds(path: Path) -> None:
    """Draw the test loss against seconds of training over two real links: mean and range of three seeds."""
    rows = [row for row in _records("wire/records/losses.jsonl") if row["compress"] == "none"]
    names = {
        "end-to-end": "exact",
        "end-to-end-delay-1": "end-to-end, one update late",
        "2-wise-mean": "2-wise-mean",
        "local": "local",
    }
    with make_panels(len(losses.LINKS), path, height=3.1, share=True) as (_, panels):
        for axes, (link, known) in zip(panels, losses.LINKS.items(), strict=True):
            for method, text in names.items():
                runs = [row for row in rows if (row["link"], row["method"]) == (link, method)]
                times = np.linspace(max(run["tests"][0]["seconds"] for run in runs), losses.SECONDS, 50)
                values = np.array([[losses.loss_at(run, time) for time in times] for run in runs])
                colour = method_colour(method)
                look = "--" if "delay" in method else "-"
                axes.plot(times, values.mean(0), look, color=colour, label=text, lw=2)
                axes.fill_between(times, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
            axes.set(title=known.name, xlabel="seconds of training", xlim=(0, losses.SECONDS))
        panels[0].set_ylabel("test loss, nats per byte")
        panels[1].legend(frameon=False, fontsize=9, handlelength=3.2)


def stages(path: Path) -> None:
    """Draw the planned steps against the number of stages, on fast and on slow links."""
    rows = _records("planning/records/methods.jsonl")
    with make_panels(len(_COLUMNS), path, height=3.1, share=True) as (_, panels):
        for axes, (title, each) in zip(panels, _COLUMNS.items(), strict=True):
            points = {
                name: sorted((r["devices"], r["period"]) for r in rows if (r["method"], r["latency"]) == (name, each))
                for name in _METHODS
            }
            _lines(axes, points, legend=not each)
            axes.set_xscale("log", base=2)
            axes.set_xticks([4, 8, 16, 32], ["4", "8", "16", "32"])
            axes.set(title=title, xlabel="stages")


# Rows of the figure at equal time: the frontier's arm, and what readers call it.
_ROWS = {
    frontier.PROMPT: "exact",
    frontier.BETTER_LATE: "end-to-end, one update late",
    "end-to-end-delay-2, extrapolated": "end-to-end, two updates late",
    frontier.TWO: "2-wise-mean",
    frontier.ROTATING: "rotating blocks of 2",
    frontier.LOCAL: "local",
}
_WIDTHS = {96: (True, 0.14), 256: (False, -0.14)}  # whether the marker is hollow, and its distance from the row


@cache
def _runs(wide: int) -> Runs:
    module, name = (frontier, "frontier") if wide == 96 else (width, "width")
    records = Store(ROOT / "experiments" / name / "medium.jsonl").records_for(module.cells("medium", 5))
    return Runs([record for _, record in records if record is not None])


def at_equal_time(name: str, wide: int, each: float) -> dict[int, float]:
    """Return the losses of an arm by seed, at the moment when local training of the same width has done its steps."""
    one = width.at(name, wide)
    if not _runs(wide).records_for(one.name):
        return {}
    steps = clock.steps_done(one, clock.total(width.at(frontier.LOCAL, wide)), each)
    return _runs(wide).scores(loss_at(steps), one.name)


def equal_time(path: Path) -> None:
    """Draw the test loss of six methods at equal time, on fast and on slow links, at two widths."""
    with make_panels(2, path, height=2.8) as (figure, panels):
        for axes, (title, each) in zip(panels, _COLUMNS.items(), strict=True):
            for row, name in enumerate(_ROWS):
                for wide, (hollow, beside) in _WIDTHS.items():
                    if values := at_equal_time(name, wide, each):
                        mean, low, high, _ = interval(values, dict.fromkeys(values, 0.0))
                        colour = method_colour(name)
                        axes.errorbar(
                            [mean],
                            [-row + beside],
                            xerr=[[mean - low], [high - mean]],
                            color=colour,
                            marker="o" if hollow else "s",
                            markerfacecolor="white" if hollow else colour,
                            capsize=2,
                            label=None if row else f"width {wide}",
                            linestyle="",
                        )
            axes.set(title=title, xlabel="test loss, nats per byte (lower is better)", ylim=(-len(_ROWS) + 0.4, 0.6))
            axes.set_yticks([-row for row in range(len(_ROWS))], list(_ROWS.values()))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def forest(groups: Sequence[Sequence[Claim]], unit: str, path: Path) -> None:
    """Draw the effect of every claim with its 95 % interval; a hollow dot is undecided after the correction of its experiment."""
    pairs = [pair for claims in groups for pair in zip(claims, holm(claims), strict=True)]
    kept = [(claim, stays) for claim, stays in pairs if claim.seeds > 1]
    with new_figure(5.8, 0.8 + 0.3 * len(kept), path) as figure:
        axes = figure.subplots()
        for i, (claim, stays) in enumerate(kept):
            colour = _VERDICTS["holds" if claim.verdict == "exact" else claim.verdict]
            error = [[claim.effect - claim.low], [claim.high - claim.effect]]
            axes.errorbar(
                [claim.effect],
                [-i],
                xerr=error,
                fmt="o",
                color=colour,
                mfc=colour if stays else "white",
                capsize=2,
                ms=5,
            )
        axes.axvline(0, color="#999999", lw=0.8)
        axes.set_yticks([-i for i in range(len(kept))], [fill(claim.text, 40) for claim, _ in kept])
        axes.set(xlabel=f"effect, {unit}", ylim=(-len(kept) + 0.4, 0.6))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, labelsize=8)


def _claims(name: str, size: Size) -> list[Claim]:
    return experiment(name).claims(Job(folder=ROOT / "experiments", size=size))


def convolutional(path: Path) -> None:
    """Draw the claims about convolutional networks of medium size."""
    forest([_claims("e1", "medium"), _claims("e2", "medium")], "points of accuracy", path)


def _at_best(name: str) -> Picture:
    """Return two mini-batches of a method on four stages, at its best number of micro-batches."""
    options = (
        method_schedule(name, num_stages=4, num_microbatches=m, costs=TRANSFORMER.split_in(m)) for m in (1, 2, 4, 8, 16)
    )
    schedule = min(options, key=lambda one: one.period)
    return Picture(f"{name}, M = {schedule.num_microbatches}", schedule, 2)


def schedules(path: Path) -> None:
    """Draw two mini-batches of four methods."""
    schedule_figure(list(map(_at_best, ("local", "2-wise", "zero-bubble", "end-to-end-delay-1"))), path)


def _photograph(page: Path, path: Path) -> None:
    """Write what a browser shows of a page at first, with the version of nwise that made it."""
    options = [
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        "--window-size=1200,900",
        "--virtual-time-budget=9000",
    ]
    browser = os.environ.get("BROWSER", "chromium")
    subprocess.run([browser, *options, f"--screenshot={path}", page.as_uri()], check=True, capture_output=True)
    note(path, version=nwise.__version__)


def _nwise(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "nwise", *words], check=True)


def report(path: Path) -> None:
    """Train the digits with two strategies, and photograph the report of both runs."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("2-wise", "end-to-end"):
            _nwise("train", "digits", "--strategy", name, "--heads", "all", "--epochs", "5", "--runs", folder)
        runs = [f"{folder}/digits-{name}-001" for name in ("2-wise", "end-to-end")]
        _nwise("report", *runs, "--out", f"{folder}/report.html")
        _photograph(Path(folder, "report.html"), path)


def explorer(path: Path) -> None:
    """Photograph a small schedule explorer."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--stages", "4", "8", "--microbatches", "1", "2", "4", "8", "--costs", "transformer"]
        _nwise("explore", *sizes, "--out", f"{folder}/explore.html")
        _photograph(Path(folder, "explore.html"), path)


# Of the manual's second figure of flows; the README's has the other four.
_STRATEGIES = ("2-wise-mean", "3-wise-mean", "deep-supervision", "blocks-2", "rotating-2")

# The records that a figure draws; the others draw schedules and flows, and nothing measured.
_TRAINED = ("experiments/frontier/medium.jsonl", "experiments/width/medium.jsonl")
SOURCES: dict[str, tuple[str, ...]] = {
    "latency": ("benchmarks/wire/records/steps.jsonl",),
    "two": ("benchmarks/wire/records/steps.jsonl",),
    "seconds": ("benchmarks/wire/records/losses.jsonl",),
    "stages": ("benchmarks/planning/records/methods.jsonl",),
    "equal-time": _TRAINED,
    "claims": ("experiments/e1/medium.jsonl", "experiments/e2/medium.jsonl"),
}
FIGURES: dict[str, Callable[[Path], None]] = {
    "latency": latency,
    "two": two,
    "seconds": seconds,
    "stages": stages,
    "equal-time": equal_time,
    "claims": convolutional,
    "flow": partial(flow_figure, [Local(), NWise(2), NWise(3), EndToEnd()], 4),
    "strategies": partial(flow_figure, [strategy(name) for name in _STRATEGIES], 4),
    "schedule": schedules,
    "report": report,
    "explore": explorer,
}


def digest(sources: Sequence[str]) -> str:
    """Return what a figure says of its records; a test compares it with theirs."""
    return sha256(b"".join((ROOT / name).read_bytes() for name in sources)).hexdigest()[:16]


def main() -> None:
    """Draw figures into docs/."""
    parser = argparse.ArgumentParser(description="Draw the figures of the manual into docs/.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(FIGURES)}")
    names = parser.parse_args().names
    if unknown := set(names) - set(FIGURES):
        parser.error(f"a figure should be one of {', '.join(FIGURES)}. Found {', '.join(sorted(unknown))}.")
    for name in names or FIGURES:
        path = ROOT / "docs" / f"{name}.png"
        FIGURES[name](path)
        if name in SOURCES:
            note(path, records=digest(SOURCES[name]))


def note(path: Path, **texts: str) -> None:
    """Write texts into a picture that no viewer shows."""
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    with Image.open(path) as picture:
        picture.load()
        picture.save(path, pnginfo=info)


if __name__ == "__main__":
    main()
