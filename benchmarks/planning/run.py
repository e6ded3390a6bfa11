"""Cost of planning itself: schedules of more and more stages built, timed, validated and simulated.

Every size runs in a process of its own, in turn, so that its peak memory is its own. Writes one JSON record per run to
``records/planning.jsonl`` and draws ``planning.png``: seconds against actions, with the slope of both on logarithmic axes.

    python -m benchmarks.planning --rounds 5
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import resource
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nwise
from nwise.schedule import Costs, best, simulate, validate

HERE = Path(__file__).parent
PHASES = ("build", "lists", "validate", "simulate")
COSTS = Costs(forward=1, head=0.5, input_grad=1, weight_grad=1)


def measure(size: tuple[str, int, int]) -> dict[str, Any]:
    """Measure the seconds of every phase and the process's peak memory."""
    strategy, num_stages, num_microbatches = size
    marks = [time.perf_counter()]
    schedule = best(nwise.strategy(strategy), num_stages=num_stages, num_microbatches=num_microbatches, costs=COSTS)
    marks.append(time.perf_counter())
    actions = sum(map(len, schedule.actions))
    marks.append(time.perf_counter())
    validate(schedule)
    marks.append(time.perf_counter())
    line = simulate(schedule, cycles=2)
    period, bound = line.period, schedule.lower_bound
    marks.append(time.perf_counter())
    return {
        "strategy": strategy,
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "actions": actions,
        "period": schedule.period,
        "simulated_period": period,
        "lower_bound": bound,
        "seconds": {name: b - a for name, (a, b) in zip(PHASES, pairwise(marks), strict=True)},
        "total_seconds": marks[-1] - marks[0],
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
    }


def main(rounds: int = 5, strategy: str = "2-wise", microbatches: int = 64, largest: int = 1024) -> None:
    """Measure and draw.

    Args:
        rounds: times that every size is run.
        strategy: of the schedules.
        microbatches: M.
        largest: stages of the largest size; the others are halves of it.
    """
    sizes = [(strategy, largest >> shift, microbatches) for shift in range(7)]
    context = multiprocessing.get_context("spawn")
    records = []
    for i in track(range(rounds * len(sizes)), description="planning"):
        with context.Pool(1) as pool:
            records.append(pool.apply(measure, (sizes[i % len(sizes)],)))
    (HERE / "records").mkdir(exist_ok=True)
    (HERE / "records" / "planning.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = Table(title=f"{strategy}, M = {microbatches}: median seconds of {rounds}", title_justify="left")
    for heading in ("stages", "actions", *PHASES, "total", "worst", "peak GiB"):
        table.add_column(heading, justify="right")
    for size in sorted(sizes, key=lambda s: s[1]):
        rows = [r for r in records if r["num_stages"] == size[1]]
        phases = [f"{statistics.median(r['seconds'][name] for r in rows):.2f}" for name in PHASES]
        totals = [r["total_seconds"] for r in rows]
        table.add_row(str(size[1]), f"{rows[0]['actions']:,}", *phases, f"{statistics.median(totals):.2f}",
                      f"{max(totals):.2f}", f"{max(r['peak_gib'] for r in rows):.2f}")  # fmt: skip
    Console().print(table)
    draw(records, HERE / "planning.png")


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds against actions, one point a run."""
    actions = np.array([r["actions"] for r in records])
    seconds = np.array([r["total_seconds"] for r in records])
    large = actions >= np.median(actions)  # small ones are dominated by what is done once
    slope, _ = np.polyfit(np.log(actions[large]), np.log(seconds[large]), 1)
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.loglog(actions, seconds, "o", color="#0072B2", markersize=4, alpha=0.7, label="runs")
    middle = float(np.exp(np.mean(np.log(seconds / actions))))
    ends = np.array([actions.min(), actions.max()])
    axes.loglog(ends, middle * ends, "--", color="#555555", lw=1, label=f"{1e6 * middle:.0f} µs an action")
    axes.set_xlabel("actions in the lists")
    axes.set_ylabel("seconds to build, validate and simulate")
    axes.set_title(f"cost of planning: slope {slope:.2f} in the upper half", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
