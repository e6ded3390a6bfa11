"""Accuracy against work and time where samples may leave early, by strategy.

    NWISE_DATA=<folder with cifar10/> python -m benchmarks.exits train --data cifar10    # minutes; two runs at a time
    python -m benchmarks.exits measure --data cifar10                                     # on a quiet machine

`train` keeps runs in ``runs/exits``, and skips those that are there. `measure` writes ``records/<data>.jsonl`` and a figure.
Every head is trained. A head whose loss trains no stage, as all do in end-to-end training, learns from a network that does not
learn from it, as if it were trained afterwards.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from nwise.app.cli.exits import DROPS
from nwise.app.report.figures import exits_figure
from nwise.machine import processor

HERE = Path(__file__).parent
STRATEGIES = ("end-to-end", "deep-supervision", "2-wise", "2-wise-mean", "local")
Data = Literal["digits", "cifar10"]
OPTIONS = {
    "digits": ["digits"],
    "cifar10": ["cifar10-convnet-small", "--train-limit", "25000", "--test-limit", "10000", "--epochs", "8"],
}


def folders(runs: Path, data: Data, seeds: int) -> dict[tuple[str, int], Path]:
    """Return the folder of every run."""
    return {(strategy, seed): runs / f"{data}-{strategy}-{seed}" for strategy in STRATEGIES for seed in range(seeds)}


def train(data: Data, seeds: int = 3, runs: Path = Path("runs/exits")) -> None:
    """Train every strategy with every seed.

    Args:
        data: the data set.
        seeds: number of seeds.
        runs: parent folder of the runs.
    """

    def one(strategy: str, seed: int, parent: Path) -> None:
        command = [sys.executable, "-m", "nwise", "train", *OPTIONS[data], "--strategy", strategy, "--seed", str(seed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--heads", "all", "--runs", str(parent), "--json"], check=True, env=environment)

    missing = {key: parent for key, parent in folders(runs, data, seeds).items() if not list(parent.glob("*/run.json"))}
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(one, *key, parent) for key, parent in missing.items()]
        for job in track(jobs, "training", console=Console(stderr=True)):
            job.result()


def measure(data: Data, seeds: int = 3, runs: Path = Path("runs/exits"), rounds: int = 5) -> None:
    """Calibrate exits for every run, measure them and write the records.

    Args:
        data: the data set.
        seeds: number of seeds.
        runs: parent folder of the runs.
        rounds: how often time is measured.
    """
    records = []
    everything = folders(runs, data, seeds)
    for (strategy, seed), parent in track(everything.items(), "measuring", console=Console(stderr=True)):
        folder = next(parent.glob("*/run.json")).parent
        record: dict[str, Any] = {"data": data, "strategy": strategy, "seed": seed, "processor": processor()}
        for size in (1, 64):
            command = [sys.executable, "-m", "nwise", "exits", str(folder), "--batch-size", str(size), "--json"]
            done = subprocess.run(
                [*command, "--rounds", str(rounds)],
                check=True,
                capture_output=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            result = json.loads(done.stdout)[str(folder)]
            record[f"seconds_{size}"] = result.pop("seconds")
        records.append(record | result)
    path = HERE / "records" / f"{data}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    show(data)


def show(data: Data) -> None:
    """Print a table of the records and draw the figure.

    Args:
        data: the data set.
    """
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in (HERE / "records" / f"{data}.jsonl").open():
        record = json.loads(line)
        groups[record["strategy"]].append(record)
    print(
        "| strategy | accuracy | with exits | operations saved | time saved, single samples | time saved, batches of 64 |"
    )
    print("|---|---|---|---|---|---|")
    curves = {}
    for strategy, rows in groups.items():

        def mean(values: list[float]) -> float:
            return 100 * statistics.mean(values)

        def saved(rows: list[dict[str, Any]], size: int) -> str:
            times = [row[f"seconds_{size}"] for row in rows]
            return f"{mean([1 - (t['exits'] / t['whole'] if t else 1) for t in times]):.0f} %"

        cells = [
            f"{mean([row['accuracy'] for row in rows]):.2f} %",
            f"{mean([row['exits']['accuracy'] for row in rows]):.2f} %",
            f"{mean([1 - row['exits']['work'] for row in rows]):.0f} %",
        ]
        print("| " + " | ".join([strategy, *cells, saved(rows, 1), saved(rows, 64)]) + " |")
        points = [
            (statistics.mean(row["curve"][i][0] for row in rows), mean([row["curve"][i][1] for row in rows]))
            for i in range(1 + len(DROPS))
        ]
        curves[strategy] = points
    exits_figure(curves, HERE / f"{data}.png")
