"""Steps over real links: what they take, what the links allow, and what torch's pipelines take on the same links.

    python -m benchmarks.wire                              # 40 minutes on a quiet machine, as root
    python -m benchmarks.wire --ranks 4 --sizes 64KiB --links 20ms --rounds 1

writes ``records/steps.jsonl`` and ``tables.md``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.wire.net import ROOT, Link, Wires
from nwise.machine import machine
from nwise.schedule import Costs, Schedule
from nwise.schedule.find import method_schedule

HERE = Path(__file__).parent
RECORDS = HERE / "records" / "steps.jsonl"
LINKS: dict[str, Link | None] = {
    "loopback": None,
    "1ms": Link("1 ms, 1 Gbit/s", 0.001, 1e9),
    "20ms": Link("20 ms, 200 Mbit/s", 0.02, 200e6),
    "40ms": Link("40 ms, 100 Mbit/s", 0.04, 100e6),
    "80ms": Link("80 ms, 20 Mbit/s", 0.08, 20e6),
}
SIZES = {"8B": (4, 2), "64KiB": (64, 256), "2MiB": (512, 1024)}  # rows and numbers in a row, of a mini-batch's message
METHODS = (
    ("nwise", "local", 1),
    ("nwise", "2-wise-mean", 1),
    ("nwise", "2-wise", 1),
    ("nwise", "end-to-end-delay-1", 1),
    ("nwise", "gpipe", 1),
    ("torch", "gpipe", 1),
    ("nwise", "gpipe", 4),
    ("torch", "gpipe", 4),
    ("nwise", "1f1b", 4),
    ("torch", "1f1b", 4),
    ("nwise", "zero-bubble", 4),
    ("torch", "zero-bubble", 4),
)
SLOT = 0.02  # seconds of a virtual stage's forward, and of each of its gradients
FIRST = {"nwise": 21, "torch": 6}  # steps before the steady ones: one that connects, and the first twenty of nwise
SECONDS = 8.0  # about the longest time of the steady steps
Record = dict[str, Any]


def cases(link: Link | None, ranks: int, shape: tuple[int, int], slot: float) -> Iterator[Record]:
    """Iterate over the cases of a link.

    Args:
        link: the link.
        ranks: number of ranks, one stage each.
        shape: rows and numbers in a row of a mini-batch.
        slot: seconds of a stage's forward; 0 for real computation.
    """
    for library, method, least_m in METHODS:
        m = max(least_m, ranks) if least_m > 1 else 1  # a micro-batch for every rank, as torch's 1F1B wants
        # A stage of gpipe waits two slots in its backward, the first one too, which makes no gradient of an input.
        first = 2 * slot if method == "gpipe" else slot
        weight_grad = (first, *[slot] * (ranks - 1))
        given = {"forward": slot, "head": 0.0, "input_grad": slot, "weight_grad": weight_grad, "chain_share": 0.0}
        costs: dict[str, Any] = {**given, "message_bytes": 4 * shape[0] * shape[1]}
        if link is not None:
            costs |= {"latency": link.latency, "bandwidth": link.bytes_per_second}
        least = timed(method, ranks, m, costs)
        last = max(5, min(25, int(SECONDS / max(least.period, 1e-3))))
        yield {
            "library": library,
            "method": method,
            "microbatches": m,
            "shape": shape,
            "slot": slot,
            "costs": costs,
            "least_ms": 1e3 * least.period,
            "bound_ms": 1e3 * least.lower_bound,
            "steps": FIRST[library] + last,
            "last": last,
        }


def timed(method: str, ranks: int, m: int, costs: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a method with costs of a mini-batch in one stage; its period is the time of a step by the model."""
    return method_schedule(method, num_stages=ranks, num_microbatches=m, costs=Costs(**costs).split_in(m))


def measure(link: Link | None, ranks: int, todo: Sequence[Record], source: Path) -> Iterator[Record]:
    """Run cases one after the other on the same ranks; iterate over their records."""
    told = json.dumps(list(todo))
    environment = {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "NWISE_TIMEOUT": "600"}
    with Wires(ranks, link) as wires:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.wire.ranks", told]
        running = [wires.start(k, command, environment) for k in range(ranks)]
        try:
            assert running[0].stdout is not None
            for line in running[0].stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            for one in running:
                if one.wait():
                    said = one.stderr.read() if one.stderr else ""
                    raise OSError(f"Rank {running.index(one)} should measure and end. Found: {said[-2000:]}")
        finally:
            for one in running:
                one.kill()


def main(
    ranks: tuple[int, ...] = (2, 4, 8),
    sizes: tuple[str, ...] = ("64KiB",),
    links: tuple[str, ...] = tuple(LINKS),
    slot_ms: float = 1e3 * SLOT,
    rounds: int = 1,
    source: Path = ROOT / "src",
    methods: tuple[str, ...] = (),
    libraries: tuple[str, ...] = ("nwise", "torch"),
    records: Path = RECORDS,
) -> None:
    """Measure steps over links, and write records and tables.

    Args:
        ranks: numbers of ranks, one after the other.
        sizes: of messages.
        links: names of links.
        slot_ms: milliseconds of a stage's forward; 0 for real computation.
        rounds: how often.
        source: folder of the library, perhaps of another revision.
        methods: those to measure; default: all.
        libraries: those to measure.
        records: file to which records are added.
    """
    records.parent.mkdir(exist_ok=True)
    about = {"machine": machine(), "source": "here" if source == ROOT / "src" else source.parent.name}
    with Progress(console=Console(stderr=True)) as progress:
        work = [
            (number, size, count, name)
            for number in range(rounds)
            for size in sizes
            for count in ranks
            for name in links
        ]
        for number, size, count, name in work:
            todo = [
                case
                for case in cases(LINKS[name], count, SIZES[size], slot_ms / 1e3)
                if case["library"] in libraries and case["method"] in (methods or [one[1] for one in METHODS])
            ]
            task = progress.add_task(f"{count} ranks, {name}, {size}", total=len(todo))
            for found in measure(LINKS[name], count, todo, source):
                record = {"round": number, "ranks": count, "link": name, "size": size, **found, **about}
                if link := record.get("link_found"):
                    plan = timed(found["method"], count, found["microbatches"], found["costs"] | link)
                    record["planned_ms"] = 1e3 * plan.period
                with records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                said = f"{count} ranks, {name}, {size}, {found['library']} {found['method']} M={found['microbatches']}"
                progress.console.print(f"{said}: {_cell([found])}, the first {found['early_ms']:.1f}")
                progress.advance(task)
    (HERE / "tables.md").write_text(tables([json.loads(line) for line in records.open()]))


def tables(records: Sequence[Record]) -> str:
    """Return a table for every revision, number of ranks, size of messages and kind of stages."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for row in records:
        groups[row["source"], row["slot"], row["size"], row["ranks"]].append(row)
    lines = [
        "# Tables, written by run.py",
        "",
        "Milliseconds of a step, and its ratio to the least that the link allows.",
        "",
    ]
    for (source, slot, size, ranks), rows in groups.items():
        stages = f"stages of {1e3 * slot:g} ms" if slot else "stages that compute"
        where = "" if source == "here" else f", revision {source}"
        links = [name for name in LINKS if any(row["link"] == name for row in rows)]
        lines += [f"## {ranks} ranks, {size}, {stages}{where}", ""]
        lines += [f"| library | method | M | {' | '.join(map(_title, links))} |", "|---|---|---|" + "---|" * len(links)]
        for library, method, m in dict.fromkeys(_key(row)[:3] for row in rows):
            cells = [_cell([row for row in rows if _key(row) == (library, method, m, link)]) for link in links]
            lines.append(f"| {library} | {method} | {m} | {' | '.join(cells)} |")
        lines.append("")
        early = [row for row in rows if row["library"] == "nwise"]
        if slot and (plans := [row for row in early if "planned_ms" in row]):  # a plan knows no time of computing
            far = max(plans, key=lambda row: abs(log(row["planned_ms"] / row["step_ms"])))
            lines += [
                f"A plan with the measured links predicts {far['planned_ms'] / far['step_ms']:.2f} of the step where it is "
                f"farthest from it ({far['method']}, M = {far['microbatches']}, {_title(far['link'])}).",
                "",
            ]
        worst = max(early, key=lambda row: row["early_ms"] / row["step_ms"])
        lines += [
            f"The first steps of nwise take at most {worst['early_ms'] / worst['step_ms']:.2f} times a later one "
            f"({worst['method']}, {_title(worst['link'])}).",
            "",
        ]
    return "\n".join(lines)


def _title(link: str) -> str:
    known = LINKS[link]
    return link if known is None else known.name


def _key(row: Record) -> tuple[Any, ...]:
    return row["library"], row["method"], row["microbatches"], row["link"]


def _cell(rows: Sequence[Record]) -> str:
    if not rows:
        return ""
    step, least = median(row["step_ms"] for row in rows), rows[0]["least_ms"]
    return f"{step:.1f} ({step / least:.2f})" if least else f"{step:.1f}"
