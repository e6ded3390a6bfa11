"""Figures of the frontier, from records alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from experiments.frontier import clock
from experiments.frontier.arms import ARMS, STEPS, Arm, Optimizer
from experiments.harness.plots import legend, make_panels, styled
from experiments.harness.runs import Runs, loss, loss_at
from nwise.report.figures import COLOURS

_POINTS = 60
# Names of the arms of each optimizer without its own; an arm has one colour in all figures.
_SHOWN = (
    "end-to-end",
    "end-to-end-delay-1, extrapolated",
    "end-to-end-delay-2, extrapolated",
    "end-to-end-delay-4",
    "rotating-2, all heads",
    "2-wise-mean",
    "local",
    "local@half,end-to-end",
)
_COLOUR = dict(zip(_SHOWN, COLOURS, strict=True))
_OPTIMIZERS: tuple[Optimizer, ...] = ("muon", "adam")


def _label(one: Arm) -> str:
    return one.name.partition(" ")[2]


def _shown(optimizer: Optimizer) -> list[Arm]:
    arms = {_label(one): one for one in ARMS if one.optimizer == optimizer}
    return [arms[name] for name in _SHOWN if name in arms]


# What a curve is drawn against, for an arm: its name, and the steps that an arm has done at a point of the axis.
_AXES: dict[str, tuple[str, Callable[[Arm, float], float], Callable[[Arm], float]]] = {
    "equal steps": ("steps", lambda one, x: x, lambda one: STEPS),
    "equal work": (
        "slots of work over all stages",
        lambda one, x: x / clock.work(one),
        lambda one: STEPS * clock.work(one),
    ),
    "equal time, latency 0": ("slots", lambda one, x: clock.steps_done(one, x), clock.total),
    "equal time, latency 1": (
        "slots",
        lambda one, x: clock.steps_done(one, x, 1.0),
        lambda one: clock.total(one, 1.0),
    ),
}


@styled
def loss_against_time(runs: Runs, optimizer: Optimizer, path: Path) -> None:
    """Draw test loss against steps, work, and time at both latencies, with the deviation over seeds.

    Args:
        runs: the records.
        optimizer: the arms' optimizer.
        path: of the figure.
    """
    figure, panels = make_panels(2, rows=2, width=4.6, height=3.5, share=True)
    arms = [one for one in _shown(optimizer) if runs.records_for(one.name)]
    for axes, (title, (unit, steps_done, end)) in zip(panels, _AXES.items(), strict=True):
        stop = min(end(one) for one in arms)
        for one in arms:
            xs = np.linspace(stop / 20, stop, _POINTS)
            columns = [list(runs.scores(loss_at(steps_done(one, x)), one.name).values()) for x in xs]
            ys = [mean(column) for column in columns]
            axes.plot(xs, ys, color=_COLOUR[_label(one)], label=_label(one), lw=1.6)
            spread = [stdev(column) if len(column) > 1 else 0.0 for column in columns]
            low, high = np.subtract(ys, spread), np.add(ys, spread)
            axes.fill_between(xs, low, high, color=_COLOUR[_label(one)], alpha=0.15, lw=0)
        axes.set(title=title, xlabel=unit)
    best = min(min(runs.scores(loss, one.name).values()) for one in arms)
    panels[0].set_ylim(best - 0.03, best + 0.8)
    for axes in panels[::2]:
        axes.set_ylabel("test loss, nats a byte")
    legend(panels[0], 7)
    figure.suptitle(f"Eight stages, {optimizer.capitalize()}: mean and one standard deviation over seeds")
    figure.savefig(path, dpi=150)


def draw_frontier(runs: Runs, path: Path) -> None:
    """Draw a figure for each optimizer that has runs."""
    for optimizer in _OPTIMIZERS:
        if any(runs.records_for(one.name) for one in _shown(optimizer)):
            loss_against_time(runs, optimizer, path.with_name(f"{path.name}-{optimizer}.png"))
