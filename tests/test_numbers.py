"""Numbers of the manual, computed again from records.

Below a paragraph or table of a page stands where its numbers come from::

    <!-- numbers: wire('local', '20ms') wire('2-wise', '20ms') -->

These are calls of the functions of this file, in the order of the numbers in the text since the comment before.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from benchmarks.wire.losses import SECONDS, loss_at

ROOT = Path(__file__).parents[1]
PAGES = {page: ROOT / page for page in ("README.md", "docs/choose.md", "docs/works.md", "docs/links.md")}
# Two digits at least: smaller whole numbers count stages, heads and so on.
NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d+\.\d+|\d\d+)(?![\w.]*\d)")
# Decimals and percentages that are settings, sizes and versions rather than results; all others have a source.
SETTINGS = {
    "README.md": {"3.11", "2.11", "2.13", "2.15", "2010.04116"},
    "docs/choose.md": {"0.5", "0.02"},
    "docs/works.md": {"0.02", "95 %"},
    "docs/links.md": {"0.5", "0.2"},
}
E1, E2, E4 = ("experiments/e1/medium.jsonl", "experiments/e2/medium.jsonl", "experiments/e4/small.jsonl")
FRONTIER = "experiments/frontier/medium.jsonl"


@cache
def records(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


def end(path: str, method: str, stages: int | None = None) -> float:
    """The mean over seeds of what a method reaches at the end of its runs: accuracy of images in per cent, loss of text."""
    rows = [row for row in records(path) if row["method"] == method and not row["part"]]
    rows = [row for row in rows if stages in (None, row["stages"])]
    assert rows, (path, method)
    text = path == FRONTIER
    values = [row["tests"][-1]["loss" if text else "accuracy"][-1] for row in rows]
    return mean(values) if text else 100 * mean(values)


def diff(path: str, method: str, other: str, stages: int | None = None) -> float:
    """The difference of two methods at the end."""
    return end(path, method, stages) - end(path, other, stages)


def row_of(page: str, heading: str, name: str) -> dict[str, str]:
    """A row of a table that an experiment writes."""
    table = (ROOT / page).read_text().partition(f"## {heading}\n")[2].split("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    [row] = [line for line in lines if line[0] == name]
    return dict(zip(lines[0][1:], row[1:], strict=True))


def width(method: str, *columns: str) -> list[float]:
    """Losses at width 256."""
    row = row_of("experiments/width/medium.md", "Losses", method)
    columns = columns or ("equal steps", "equal time, latency 0", "equal time, latency 1")
    return [float(row[f"{column}, width 256"].split()[0]) for column in columns]


def planning(method: str, stages: int) -> float:
    """Slots of a step on fast links."""
    return float(row_of("benchmarks/planning/methods.md", "Latency 0", method)[f"A = {stages}"].split()[0])


def more(heading: str, column: str, method: str) -> float:
    """How much more than exact training a method of residual networks takes, by a table of E2, in per cent."""
    rows = [row_of("experiments/e2/medium.md", heading, name) for name in (method, "end-to-end")]
    own, exact = (float(row[column].split()[0]) for row in rows)
    return 100 * (own / exact - 1)


def work(method: str) -> float:
    """How much more is computed in a step."""
    return more("Work", "all", method)


def fit(kind: str) -> float:
    """The error of the paper's formula, fitted to measured times, in per cent."""
    [found] = re.findall(rf"^{kind}: .*error ([\d.]+) %$", (ROOT / "experiments/t/small.md").read_text(), re.M)
    return float(found)


def longer(method: str) -> float:
    """How much longer a step is, with priced heads and the best M."""
    return more("Beyond the paper", "slots a step (M)", method)


Cell = tuple[str, int, str, float, str, str, int]  # library, ranks, size of messages, slot, link, method, M


@cache
def steps() -> dict[Cell, tuple[float, float]]:
    """Steps over real links: their milliseconds, and their ratio to the least of the schedule."""
    found: dict[Cell, list[dict[str, Any]]] = {}
    for row in records("benchmarks/wire/records/steps.jsonl"):
        if row["source"] == "here":
            key = ("library", "ranks", "size", "slot", "link", "method", "microbatches")
            found.setdefault(tuple(row[name] for name in key), []).append(row)
    return {
        cell: (median(row["step_ms"] for row in rows), median(row["step_ms"] / (row["least_ms"] or 1) for row in rows))
        for cell, rows in found.items()
    }


SLOW = ("20ms", "40ms", "80ms")


def wire(method: str, link: str) -> float:
    """Milliseconds of a step of four stages of 20 ms; with four micro-batches where a method has them."""
    found = {m: steps().get(("nwise", 4, "64KiB", 0.02, link, method, m)) for m in (1, 4)}
    ms, _ = found[4] or found[1] or (math.nan, math.nan)
    return ms


def worst_ratio(slot: float = 0.0) -> float:
    """The longest step of nwise over links of 20 ms or more, as a multiple of its least; of stages with this slot or more."""
    return max(
        ratio for cell, (_, ratio) in steps().items() if cell[0] == "nwise" and cell[3] >= slot and cell[4] in SLOW
    )


def slowdown(which: Callable[[list[float]], float]) -> float:
    """The least or largest ratio of torch's steps to nwise's, four stages of 20 ms over links of 20 ms or more."""
    torchs = [cell for cell in steps() if cell[:4] == ("torch", 4, "64KiB", 0.02) and cell[4] in SLOW]
    return which([steps()[cell][0] / steps()["nwise", *cell[1:]][0] for cell in torchs])


def late(link: str, method: str, messages: str = "none") -> float:
    """The mean test loss after 30 seconds over a real link."""
    rows = records("benchmarks/wire/records/losses.jsonl")
    asked = (link, method, messages)
    return mean(loss_at(row, SECONDS) for row in rows if (row["link"], row["method"], row["compress"]) == asked)


def table2(method: str) -> float:
    """Accuracy at equal time by the paper's clock, in small size."""
    return end(E4, method)


def sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Iterate over the text before each comment, and the calls in it; without code, links and pictures."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "", text)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)|\]\([^)]*\)|https?://\S+", "", text)
    parts = re.split(r"<!-- numbers: (.*?) -->", text, flags=re.S)
    for before, calls in zip(parts[::2], [*parts[1::2], ""], strict=True):
        yield before, re.findall(r"\w+\([^()]*\)", calls)


def explain(text: str, calls: list[str]) -> list[str]:
    """Return the numbers of a text that no call gives and that look like results; fails if a call gives no number of it."""
    at = 0
    explained = set()
    for call in calls:
        found = eval(call)
        for value in found if isinstance(found, list) else [found]:
            for match in NUMBER.finditer(text, at):
                digits = len(match[0].partition(".")[2])
                if match[0].lstrip("+") in (f"{value:.{digits}f}", f"{abs(value):.{digits}f}"):
                    break
            else:
                pytest.fail(f"{call} is {value:.4g}, which the text should have next: {text[at : at + 300]!r}")
            explained.add(match.start())
            at = match.end()
    rest = [match for match in NUMBER.finditer(text) if match.start() not in explained]
    return [
        match[0] + (" %" if text[match.end() :].startswith(" %") else "")
        for match in rest
        if "." in match[0] or text[match.end() :].startswith(" %")
    ]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_records(page: str) -> None:
    for text, calls in sections(PAGES[page].read_text()):
        assert set(explain(text, calls)) <= SETTINGS[page], calls


def test_a_changed_number_is_seen() -> None:
    text = "A step takes 42.4 ms over 20 ms, and 131 ms."
    assert explain(text, ["wire('local', '20ms')", "wire('2-wise', '20ms')"]) == []
    assert explain(text, ["wire('2-wise', '20ms')"]) == ["42.4"]
    with pytest.raises(pytest.fail.Exception, match="which the text should have next"):
        explain(text.replace("42.4", "42.5"), ["wire('local', '20ms')"])
