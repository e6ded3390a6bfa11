"""Figures of the frontier, from records alone."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import numpy as np

from experiments.frontier import clock
from experiments.frontier.arms import ARMS, STAGES, STEPS, Arm, Optimizer
from experiments.harness.plots import legend, panels_of, styled
from experiments.harness.runs import Runs, loss_at
from nwise.report.figures import COLOURS

_POINTS = 60
_SHOWN: dict[Optimizer, tuple[str, ...]] = {
    "muon": ("end-to-end", "end-to-end-delay-1", "end-to-end-delay-4", "rotating-2", "2-wise-mean", "local"),
    "adam": ("end-to-end", "end-to-end-delay-1", "rotating-2", "2-wise-mean", "local"),
}
_COLOUR = {name: COLOURS[i] for i, name in enumerate(_SHOWN["muon"])}


def _shown(optimizer: Optimizer) -> list[Arm]:
    return [
        one
        for one in ARMS
        if one.optimizer == optimizer and one.strategy in _SHOWN[optimizer] and one.num_stages == one.blocks == STAGES
        if not one.head_blocks and one.extrapolate == ("-delay-" in one.strategy)
    ]


@styled
def loss_against_time(runs: Runs, optimizer: Optimizer, path: Path) -> None:
    """Draw test loss against steps, and against time at both latencies, with the range of the seeds.

    Args:
        runs: the records.
        optimizer: the arms' optimizer.
        path: of the figure.
    """
    figure, panels = panels_of(3, width=3.9, height=3.8, share=True)
    lowest = []
    for axes, latency in zip(panels, (None, 0.0, 1.0), strict=True):
        for one in _shown(optimizer):
            if not runs.records_for(one.name):
                continue
            end = STEPS if latency is None else clock.total(_local(), latency)
            xs = np.linspace(end / 20, end, _POINTS)
            steps = [x if latency is None else clock.steps_done(one, x, latency) for x in xs]
            columns = [list(runs.scores(loss_at(step), one.name).values()) for step in steps]
            ys = [mean(column) for column in columns]
            axes.plot(xs, ys, color=_COLOUR[one.strategy], label=one.name.partition(" ")[2], lw=1.6)
            half = [stdev(column) if len(column) > 1 else 0.0 for column in columns]
            axes.fill_between(
                xs, np.subtract(ys, half), np.add(ys, half), color=_COLOUR[one.strategy], alpha=0.15, lw=0
            )
            lowest.append(ys[-1])
        axes.set(
            title="equal steps" if latency is None else f"equal time, latency {latency:g}",
            xlabel="steps" if latency is None else "slots",
        )
    if lowest:
        panels[0].set_ylim(min(lowest) - 0.03, min(lowest) + 0.9)
    panels[0].set_ylabel("test loss, nats a byte")
    legend(panels[0], 7)
    figure.suptitle(f"Eight stages, {optimizer.capitalize()}: mean and one standard deviation over seeds")
    figure.savefig(path, dpi=150)


def _local() -> Arm:
    return next(one for one in ARMS if one.strategy == "local" and one.num_stages == STAGES)


def draw_frontier(runs: Runs, path: Path) -> None:
    """Draw a figure for each optimizer that has runs."""
    for optimizer in _SHOWN:
        if any(runs.records_for(one.name) for one in _shown(optimizer)):
            loss_against_time(runs, optimizer, path.with_name(f"{path.name}-{optimizer}.png"))
