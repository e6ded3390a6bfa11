"""Numbers of the manual, computed again from records.

Below a paragraph or table of a page stands where its numbers come from::

    <!-- numbers: wire('local', '20ms') wire('2-wise', '20ms') -->

These are calls of the functions of this file, in the order of the numbers in the text since the comment before.
"""

from __future__ import annotations

import json
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
    "docs/links.md": {"0.5", "0.2", "8 %"},
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


def work(method: str) -> float:
    """How much more a residual network computes in a step than in exact training, in per cent."""
    page = "experiments/e2/medium.md"
    slots, exact = (float(row_of(page, "Work", name)["all"]) for name in (method, "end-to-end"))
    return 100 * (slots / exact - 1)


def fit(kind: str) -> float:
    """The error of the paper's formula, fitted to measured times, in per cent."""
    [found] = re.findall(rf"^{kind}: .*error ([\d.]+) %$", (ROOT / "experiments/t/small.md").read_text(), re.M)
    return float(found)


def longer(method: str) -> float:
    """How much longer a step of the residual network is than an exact one, with priced heads and the best M, in per cent."""
    column = "slots a step (M)"
    page = "experiments/e2/medium.md"
    slots, exact = (float(row_of(page, "Beyond the paper", name)[column].split()[0]) for name in (method, "end-to-end"))
    return 100 * (slots / exact - 1)


def steps(ranks: int, link: str, method: str, library: str = "nwise", size: str = "64KiB") -> Iterator[dict[str, Any]]:
    """Rows of steps over real links, with stages of 20 ms."""
    for row in records("benchmarks/wire/records/steps.jsonl"):
        same = (row["ranks"], row["link"], row["method"], row["library"], row["size"])
        if same == (ranks, link, method, library, size) and (row["source"], row["slot"]) == ("here", 0.02):
            yield row


def wire(method: str, link: str) -> float:
    """Milliseconds of a step of four stages."""
    return median(row["step_ms"] for row in steps(4, link, method) if row["microbatches"] in (1, 4))


def worst_ratio() -> float:
    """The longest step over links of 20 ms or more, as a multiple of what its schedule says."""
    cells: dict[tuple[Any, ...], list[float]] = {}
    for row in records("benchmarks/wire/records/steps.jsonl"):
        if row["source"] == "here" and row["library"] == "nwise" and row["link"] in ("20ms", "40ms", "80ms"):
            key = (row["ranks"], row["size"], row["slot"], row["link"], row["method"], row["microbatches"])
            cells.setdefault(key, []).append(row["step_ms"] / row["least_ms"])
    return max(map(median, cells.values()))


def slowdown(ranks: int, which: Callable[[list[float]], float]) -> float:
    """The least or largest ratio of torch's steps to nwise's over links of 20 ms or more."""
    ratios = []
    for link in ("20ms", "40ms", "80ms"):
        for method in ("gpipe", "1f1b", "zero-bubble"):
            found: dict[tuple[str, int], list[float]] = {}
            for library in ("nwise", "torch"):
                for row in steps(ranks, link, method, library):
                    found.setdefault((library, row["microbatches"]), []).append(row["step_ms"])
            for library, m in found:
                if library == "torch":
                    ratios.append(median(found["torch", m]) / median(found["nwise", m]))
    return which(ratios)


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
