"""Accuracy of the local rules of examples/rules.py on the bundled digits: ``python -m benchmarks.rules``, half a minute."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from nwise.machine import machine

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))
import rules  # noqa: E402 - the folder of the examples is no package

RECORDS, TABLE = HERE / "records.jsonl", HERE / "README.md"
SEEDS, STEPS = 5, 150


def accuracy(name: str, seed: int) -> float:
    """Return the test accuracy of a rule, in per cent."""
    torch.set_num_threads(1)
    return round(100 * rules.train(name, STEPS, seed), 2)


def table() -> str:
    """Return the page: a mean and a standard deviation for every rule."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in RECORDS.open():
        row = json.loads(line)
        found[row["rule"]].append(row["accuracy"])
    lines = [
        "# Local rules on digits",
        "",
        f"Test accuracy in per cent after {STEPS} steps of [the example](../../examples/rules.py): mean and standard",
        f"deviation of {SEEDS} seeds. The networks are small, and no rule was tuned. `python -m benchmarks.rules` writes this",
        "page and its [records](records.jsonl).",
        "",
        "| rule | accuracy |",
        "|---|---|",
    ]
    lines += [f"| {name} | {statistics.mean(one):.1f} ± {statistics.stdev(one):.1f} |" for name, one in found.items()]
    return "\n".join([*lines, ""])


def main() -> None:
    """Train every rule with every seed, and write records and the page."""
    pairs = list(product(rules.RULES, range(SEEDS)))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        results = pool.map(accuracy, *zip(*pairs, strict=True))
        rows = [
            {"rule": name, "seed": seed, "accuracy": found, "machine": machine()}
            for (name, seed), found in zip(
                pairs, track(results, total=len(pairs), console=Console(stderr=True)), strict=True
            )
        ]
    RECORDS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    TABLE.write_text(table())
