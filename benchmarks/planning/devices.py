"""Unequal devices: the cut that `nwise.plan` finds, an equal one, and the best of all, by their exact periods and on processes.

    python -m benchmarks.planning.devices [--networks 100] [--measured 4]

A network has 12 blocks of random costs; devices have speeds 1, 2 and 4. The search sees one order of the devices after the other
and a few cuts of each. The best of all comes from a trial of every cut with every order. Some networks also run, on three
processes whose stages wait as long as such devices would compute.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.runtime.bench import Case, start_all
from nwise.planning.devices import as_devices
from nwise.planning.partitions import Piece
from nwise.planning.search import Cut, Search
from nwise.schedule import Costs
from nwise.strategies import strategy as parse

RECORDS = Path(__file__).parent / "records" / "devices.jsonl"
SPEEDS = (1, 2, 4)
BLOCKS = 12
STRATEGIES = ("local", "2-wise", "end-to-end")
MICROBATCHES = 4
SLOT_MS = 5.0


def blocks(seed: int) -> list[Piece]:
    """Draw a network whose blocks, passes and heads differ in cost."""
    numbers = random.Random(seed)
    drawn = [[numbers.uniform(0.5, 2) for _ in range(3)] + [numbers.uniform(0.1, 0.5)] for _ in range(BLOCKS)]
    return [Piece(f"block {i}", f, through, w, 0.0, h) for i, (f, through, w, h) in enumerate(drawn)]


def equal(search: Search) -> Cut:
    """Return the cut into equal numbers of blocks, on the devices in their order."""
    count = len(SPEEDS)
    return search.cut([k * BLOCKS // count for k in range(count)], tuple(range(count)))


def best(search: Search, known: float) -> float:
    """Return the shortest period of all cuts and orders of the devices, at most a known one."""
    count = len(SPEEDS)
    for rest in combinations(range(1, BLOCKS), count - 1):
        for placement in permutations(range(count)):
            if search.bound((0, *rest), placement) < known * (1 - 1e-9):
                known = min(known, search.cut((0, *rest), placement).schedule.period)
    return known


def case(cut: Cut, name: str) -> Case:
    """Return a measurement of a cut: a stage on each process, which waits as its device computes."""
    costs: Costs = replace(cut.schedule.costs, latency=0.0)
    names = ("forward", "head", "input_grad", "weight_grad", "chain_share", "update")
    text = json.dumps({name: list(costs.per_stage(name, len(SPEEDS))) for name in names})
    return Case(method=name, stages=len(SPEEDS), microbatches=MICROBATCHES, slot_ms=SLOT_MS, costs=text, batches=8)


def main(networks: int = 100, measured: int = 4) -> None:
    """Run the benchmark.

    Args:
        networks: random networks for each strategy.
        measured: networks for each strategy that also run on processes.
    """
    records: list[dict[str, Any]] = []
    for name in STRATEGIES:
        cuts: list[tuple[Cut, Cut]] = []
        for seed in range(networks):
            search = Search(blocks(seed), parse(name), MICROBATCHES, as_devices(SPEEDS), len(SPEEDS), {})
            planned, even = search.improved(), equal(search)
            periods = {"planned": planned.schedule.period, "equal": even.schedule.period}
            records.append({"strategy": name, "seed": seed, **periods, "best": best(search, planned.schedule.period)})
            cuts.append((even, planned))
        chosen = cuts[:measured]
        results = start_all([case(cut, name) for pair in chosen for cut in pair])
        for i, record in enumerate(records[-networks:][:measured]):
            before, after = results[2 * i : 2 * i + 2]
            record["measured"] = {"equal": before.measured_slots, "planned": after.measured_slots}
            record["efficiency"] = {"equal": before.efficiency, "planned": after.efficiency}
        print(summary(name, [record for record in records if record["strategy"] == name]), flush=True)
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    RECORDS.write_text("".join(json.dumps({**machine, **record}) + "\n" for record in records))


def summary(name: str, records: Sequence[dict[str, Any]]) -> str:
    """Return a row of the README's table."""
    gains = [record["equal"] / record["planned"] for record in records]
    losses = [record["planned"] / record["best"] - 1 for record in records]
    ratios = [r["measured"]["equal"] / r["measured"]["planned"] for r in records if "measured" in r]
    shown = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "–"
    return f"| {name} | {statistics.median(gains):.2f} | {min(gains):.2f} | {100 * max(losses):.1f} % | {shown} |"


if __name__ == "__main__":
    tyro.cli(main)
