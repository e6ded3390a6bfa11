"""The runtime against torch.distributed.pipelining, on virtual devices and with real computation.

    python -m benchmarks.runtime --stages 4 8 16 --rounds 3
    python -m benchmarks.runtime --stages --messages --gpt-rounds 8

writes ``records/virtual-<A>.jsonl``, ``messages.jsonl`` and ``gpt.jsonl`` anew, as far as they are asked for, and ``tables.md``
from all of them. More rounds of a case that a few leave undecided are added to the records:

    python -m benchmarks.runtime --stages 16 --mib 4 --methods gpipe --rounds 8 --add
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.runtime.bench import Case
from nwise.app.cli.costs import parse_costs
from nwise.machine import processor
from nwise.schedule import BASELINES
from nwise.schedule.find import method_schedule

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDS = HERE / "records"
SLOT_MS = Case.slot_ms  # where every micro-batch has a slot
Record = dict[str, Any]


def measure(script: str, processes: int, arguments: Sequence[str], progress: Progress, title: str) -> list[Record]:
    """Run a script on some ranks and return the JSON lines that they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    task = progress.add_task(title, total=None)
    records = []
    with subprocess.Popen(
        [*command, "-m", f"benchmarks.runtime.{script}", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    ) as process:
        for line in process.stdout or []:
            if line.startswith("{"):
                records.append(json.loads(line))
                progress.advance(task)
    if process.returncode:
        raise SystemExit(f"{script}.py should measure on {processes} processes and end. Found that it failed.")
    progress.remove_task(task)
    return records


def write(name: str, records: Sequence[Record], mode: Literal["w", "a"] = "w") -> None:
    """Write records as JSON lines, with the machine; mode "a" keeps those of earlier runs."""
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }
    with (RECORDS / f"{name}.jsonl").open(mode) as file:
        file.writelines(json.dumps({**machine, **record}) + "\n" for record in records)


def read(name: str) -> list[Record]:
    """Read the records of an earlier run."""
    path = RECORDS / f"{name}.jsonl"
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**record, "devices": record.get("ranks") or record.get("stages")} for record in records]


def grouped(records: Sequence[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Group records with equal values of the keys, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[key] for key in keys)].append(record)
    return groups


def spread(records: Sequence[Record], key: str, digits: int) -> str:
    """Return median (lowest to highest) as text."""
    values = [record[key] for record in records]
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def efficiencies(records: Sequence[Record]) -> list[str]:
    """Return a table of both libraries side by side, a slot for every micro-batch."""
    lines = [
        "| A | messages | method | M | predicted slots | nwise: efficiency | torch: efficiency | nwise: us/action "
        "| torch: us/action | waits alone | with gloo's messages |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    # End-to-end a boundary waits for the one before it, so that messages travel alone.
    one_way = {
        (r["devices"], r["message_mib"], alone): r["alone_ms" if alone else "one_way_ms"]
        for r in read("messages")
        for alone in (True, False)
    }
    slots = [r for r in records if r["slot_ms"] == SLOT_MS]
    for (devices, mib, method, m), group in grouped(slots, "devices", "message_mib", "method", "microbatches").items():
        cells = [str(devices), f"{mib:g} MiB" if mib else "8 bytes", method, str(m), f"{group[0]['predicted_slots']:g}"]
        by_library = grouped(group, "library")
        for key, digits in (("efficiency", 3), ("action_overhead_us", 0)):
            for library in ("nwise", "torch"):
                one = by_library.get((library,))
                cells.append(spread(one, key, digits) if one else "–")
        cells.append(f"{statistics.median(r['ceiling'] for r in by_library[('nwise',)]):.4f}")
        travel = one_way.get((devices, mib, method in BASELINES))
        cells.append("–" if travel is None else f"{limit(group[0], travel):.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def limit(case: Record, travel: float) -> float:
    """Return the efficiency if nothing but messages took time, each so many milliseconds, on the best order for that."""
    method, costs = case["method"], parse_costs(case["costs"])
    options: dict[str, Any] = {
        "num_stages": case["stages"],
        "num_ranks": case["devices"],
        "num_microbatches": case["microbatches"],
    }
    free = method_schedule(method, costs=costs, **options)
    return free.period / method_schedule(method, costs=replace(costs, latency=travel / SLOT_MS), **options).period


def equal_batches(records: Sequence[Record]) -> list[str]:
    """Return a table of step times of one mini-batch of one size, every method at the M with the shortest predicted step."""
    lines = [
        "| A | library | method | M | ms a step | / end-to-end, M = 1 | / GPipe | / 1F1B |",
        "|---|---|---|---|---|---|---|---|",
    ]
    whole = [r for r in records if r["slot_ms"] != SLOT_MS]
    for (stages,), group in grouped(whole, "devices").items():
        own = [r for r in group if r["library"] == "nwise"]
        bases = [
            statistics.median(r["measured_slots"] for r in own if r["method"] == baseline)
            for baseline in ("end-to-end", "gpipe", "1f1b")
        ]
        for (method, library, m), one in grouped(group, "method", "library", "microbatches").items():
            times = [{"ms": r["measured_slots"] * r["slot_ms"]} for r in one]
            slots = statistics.median(r["measured_slots"] for r in one)
            cells = [
                str(stages),
                library,
                method,
                str(m),
                spread(times, "ms", 0),
                *(f"{slots / base:.3f}" for base in bases),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def real(records: Sequence[Record]) -> list[str]:
    """Return a table of the GPT's samples per second."""
    lines = [
        "| method | M | nwise: samples/s | torch: samples/s | nwise / torch, round by round |",
        "|---|---|---|---|---|",
    ]
    for (method, m), group in grouped(records, "method", "microbatches").items():
        by_library = grouped(group, "library")
        cells = [method, str(m)]
        cells += [
            spread(by_library[(name,)], "samples_per_second", 2) if (name,) in by_library else "–"
            for name in ("nwise", "torch")
        ]
        pairs = zip(by_library.get(("nwise",), []), by_library.get(("torch",), []), strict=False)
        ratios = [{"ratio": a["samples_per_second"] / b["samples_per_second"]} for a, b in pairs]
        cells.append(spread(ratios, "ratio", 3) if ratios else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def tables() -> str:
    """Return all tables, from the records."""
    virtual = [record for stages in (4, 8, 16) for record in read(f"virtual-{stages}")]
    parts = []
    if virtual:
        parts += ["## Efficiency on virtual devices, slots of 20 ms", "", *efficiencies(virtual), ""]
        parts += [
            "Median (lowest to highest) of the rounds; efficiency is predicted / measured time of a mini-batch.",
            "",
        ]
        parts += ["## One mini-batch of one size", "", *equal_batches(virtual), ""]
    gpt = read("gpt")
    if gpt:
        parts += ["## Real computation: a 12-block GPT in 2 stages, 2 processes of a thread each", "", *real(gpt), ""]
    one = (virtual or gpt)[0]
    parts.append(f"{one['cores']} cores, {one['processor']}, torch {one['torch']}, Python {one['python']}.")
    return "\n".join(["# Tables, written by run.py", "", *parts, ""])


def main(
    stages: tuple[int, ...] = (4, 8, 16),
    rounds: int = 3,
    mib: tuple[float, ...] = (0.0, 4.0),
    methods: tuple[str, ...] = (),
    add: bool = False,
    gpt_rounds: int = 0,
    messages: bool = False,
) -> None:
    """Measure and write.

    Args:
        stages: numbers of virtual devices, in turn; none for none.
        rounds: turns of every method.
        mib: sizes of messages.
        methods: methods to run on virtual devices; none for all.
        add: keep the records of earlier runs on virtual devices.
        messages: whether to time messages alone.
        gpt_rounds: turns of every method with real computation; 0 for none.
    """
    RECORDS.mkdir(exist_ok=True)
    console = Console()
    with Progress(console=console) as progress:
        for count in stages:
            arguments = [str(rounds), ",".join(map(str, mib)), *methods]
            records = measure("ranks", count, arguments, progress, f"{count} virtual devices")
            write(f"virtual-{count}", records, "a" if add else "w")
        if messages:
            sizes = ",".join(map(str, mib))
            batches = [measure("messages", count, [sizes], progress, f"messages of {count}") for count in (4, 8, 16)]
            write("messages", [record for records in batches for record in records])
        if gpt_rounds:
            write("gpt", measure("gpt", 2, [str(gpt_rounds)], progress, "GPT"))
    text = tables()
    (HERE / "tables.md").write_text(text)
    console.print(text, soft_wrap=True, highlight=False, markup=False)
