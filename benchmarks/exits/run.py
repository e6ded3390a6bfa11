"""Accuracy against work and time where samples may leave early, by strategy.

    NWISE_DATA=<folder with cifar10/> python -m benchmarks.exits train --data cifar10    # minutes; two runs at a time
    python -m benchmarks.exits measure --data cifar10                                     # on a quiet machine

`train` keeps runs in ``runs/exits``, and skips those that are there. `measure` writes ``records/<data>.jsonl`` and a figure.
Every head is trained. A head whose loss trains no stage, as all do in end-to-end training, learns from a network that does not
learn from it, as if it were trained afterwards.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import nwise
from nwise.app.report.figures import method_colour, new_figure
from nwise.app.training import Run
from nwise.exits import EarlyExit
from nwise.machine import processor

HERE = Path(__file__).parent
LOST = 0.005  # accuracy that may be lost in the table
DROPS = (0.0, 0.001, 0.0025, LOST, 0.01, 0.02, 0.04, 0.08)  # and at the points of the figure
BOUNDS = (math.inf, *(0.02 * n for n in range(51)))  # thresholds, one for all exits; inf for none
TIMED = 1000  # samples, at most
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
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    records = []
    everything = folders(runs, data, seeds)
    for (strategy, seed), parent in track(everything.items(), "measuring", console=Console(stderr=True)):
        pipe, test = Run.open(next(parent.glob("*/run.json")).parent).trained("cpu")
        halves = [outcomes(pipe, *test.batch(torch.arange(first, len(test), 2))) for first in (0, 1)]
        whole = statistics.mean(half[0][0] for half in halves)
        accuracy, work = crossed(halves, LOST)
        bound = BOUNDS[choose(halves[0], LOST)]
        x, _ = test.batch(torch.arange(min(TIMED, len(test))))
        records.append(
            {
                **{"data": data, "strategy": strategy, "seed": seed, "processor": processor(), "accuracy": whole},
                "exits": {"accuracy": accuracy, "work": work},
                "curve": [(1.0, whole), *(crossed(halves, drop)[::-1] for drop in DROPS)],
                **{f"seconds_{size}": seconds(pipe, x.split(size), bound, rounds) for size in (1, 64)},
            }
        )
    path = HERE / "records" / f"{data}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    show(data)


def network(pipe: nwise.Pipeline, bound: float) -> EarlyExit:
    """Return the network with one threshold for all exits; without exits its heads do not run."""
    thresholds = {} if bound == math.inf else dict.fromkeys(range(pipe.num_stages - 1), bound)
    return EarlyExit(pipe.stages, pipe.heads, thresholds, "classes")


def outcomes(pipe: nwise.Pipeline, x: Tensor, y: Tensor) -> list[tuple[float, float]]:
    """Return accuracy and operations under every bound."""
    rows = []
    for bound in BOUNDS:
        with FlopCounterMode(display=False) as counter:
            right = network(pipe, bound)(x).argmax(1) == y
        rows.append((float(right.double().mean()), float(counter.get_total_flops())))
    return rows


def choose(rows: list[tuple[float, float]], drop: float) -> int:
    """Return the index of the bound with the fewest operations that loses no more than `drop`."""
    return min((work, n) for n, (accuracy, work) in enumerate(rows) if accuracy >= rows[0][0] - drop)[1]


def crossed(halves: list[list[tuple[float, float]]], drop: float) -> tuple[float, float]:
    """Return accuracy and share of the operations where each half of the samples has the bound of the other half."""
    chosen = [choose(half, drop) for half in halves[::-1]]
    accuracy = statistics.mean(half[n][0] for half, n in zip(halves, chosen, strict=True))
    return accuracy, statistics.mean(half[n][1] / half[0][1] for half, n in zip(halves, chosen, strict=True))


def seconds(pipe: nwise.Pipeline, batches: Sequence[Tensor], bound: float, rounds: int) -> dict[str, float]:
    """Return the seconds for all batches without exits (whole) and with them (exits), medians over rounds."""
    networks = {"whole": network(pipe, math.inf), "exits": network(pipe, bound)}
    times: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(rounds + 1):  # both take turns, so a slow spell of the machine meets both; the first round warms up
        for name, module in networks.items():
            began = time.perf_counter()
            for x in batches:
                module(x)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


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
            return f"{mean([1 - t['exits'] / t['whole'] for t in times]):.0f} %"

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
    with new_figure(5.6, 3.8, HERE / f"{data}.png") as figure:
        axes = figure.subplots()
        for strategy, points in curves.items():
            work, accuracy = zip(*sorted(points), strict=True)
            axes.plot(
                [100 * share for share in work], accuracy, "o-", label=strategy, color=method_colour(strategy), ms=4
            )
        axes.set_xlabel("floating-point operations of a sample, % of the main network")
        axes.set_ylabel("test accuracy, %")
        axes.legend(frameon=False)
