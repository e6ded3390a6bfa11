"""Figures of the frontier, from records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments.frontier import clock
from experiments.frontier.arms import ARMS, STAGES, STEPS, Arm, Optimizer
from experiments.harness.claims import interval
from experiments.harness.plots import make_panels
from experiments.harness.runs import Runs, loss, loss_at
from nwise.app.report.figures import method_colour

_POINTS = 60
_BANDS = 10  # most arms whose intervals a panel can show
# The line of every arm that is drawn, by its label: the delay or the variant. The colour is that of the credit.
_LINES: dict[str, Any] = {
    "end-to-end": "-",
    "end-to-end-delay-1": (0, (1, 3)),
    "end-to-end-delay-1, extrapolated": "--",
    "end-to-end-delay-2, extrapolated": "-.",
    "end-to-end-delay-4": ":",
    "end-to-end-delay-4, extrapolated": (0, (6, 1, 1, 1, 1, 1)),
    "deep-supervision": "-",
    "local": "-",
    "local, heads of 1": "--",
    "2-wise": "-.",
    "2-wise-mean": "-",
    "2-wise-mean-delay-1, extrapolated": "--",
    "2-wise-mean, heads of 1": ":",
    "3-wise": "-.",
    "3-wise-mean": "-",
    "rotating-2": "--",
    "rotating-2, all heads": "-",
    "rotating-2-microbatch, all heads": ":",
    "rotating-3": (0, (6, 1, 1, 1, 1, 1)),
    "rotating-3, all heads": "-.",
    "geometric-0.5": "--",
    "local@half,end-to-end": "-",
    "local@quarter,2-wise-mean@half,end-to-end": "--",
    "hogwild-forward-least": ":",
}
# Families of credit and delay.
_FAMILIES = (
    ("end-to-end",),
    tuple(name for name in _LINES if name.startswith("end-to-end-delay")),
    ("deep-supervision", "geometric-0.5"),
    tuple(name for name in _LINES if "-wise" in name and "@" not in name),
    tuple(name for name in _LINES if name.startswith("rotating")),
    ("local", "local, heads of 1"),
    tuple(name for name in _LINES if "@" in name),
    ("hogwild-forward-least",),
)
_OPTIMIZERS: tuple[Optimizer, ...] = ("muon", "adam")


def _shown(runs: Runs, optimizer: Optimizer, num_stages: int) -> list[Arm]:
    """Return the arms of the figure that have runs, cut into so many stages."""
    deep = {one.label: one for one in ARMS if one.optimizer == optimizer and one.blocks == STAGES}
    arms = [replace(deep[name], num_stages=num_stages) for name in _LINES if name in deep]
    return [one for one in arms if runs.records_for(one.run_name)]


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


def curve(
    axes: Axes, runs: Runs, one: Arm, steps_done: Callable[[Arm, float], float], stop: float, *, band: bool = True
) -> None:
    """Draw an arm's mean up to the end of an axis, and as a band its 95 % interval if there are three seeds or more.

    Args:
        axes: where to draw.
        runs: the records.
        one: the arm, with any number of blocks.
        steps_done: function from an arm and a point of the axis to the steps done.
        stop: end of the axis.
        band: whether to draw the interval.
    """
    xs = np.linspace(stop / 20, stop, _POINTS)
    scores = [runs.scores(loss_at(steps_done(one, x)), one.run_name) for x in xs]
    ys, low, high, seeds = zip(*(interval(column, dict.fromkeys(column, 0.0)) for column in scores), strict=True)
    name = replace(one, blocks=STAGES).label
    colour, line = method_colour(name), _LINES[name]
    axes.plot(xs, ys, color=colour, linestyle=line, label=name, lw=1.6)
    if band and min(seeds) > 2:  # the interval of two is as wide as the panel
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, lw=0)


def loss_against_time(runs: Runs, arms: Sequence[Arm], title: str, path: Path) -> None:
    """Draw test loss against steps, work, and time at both latencies: the mean, and with few arms its 95 % interval.

    Args:
        runs: the records.
        arms: the arms, all of which have runs.
        title: the figure's.
        path: of the figure.
    """
    bands = len(arms) <= _BANDS
    with make_panels(len(_AXES), path, width=6.4, height=3.6, share=True) as (figure, panels):
        for axes, (heading, (unit, steps_done, end)) in zip(panels, _AXES.items(), strict=True):
            stop = min(end(one) for one in arms)
            for one in arms:
                curve(axes, runs, one, steps_done, stop, band=bands)
            axes.set(title=heading, xlabel=unit, ylabel="test loss, nats a byte")
        ends = [runs.scores(loss, one.run_name).values() for one in arms]
        best = min(map(min, ends))
        panels[0].set_ylim(best - 0.03, max(best + 0.8, *(fmean(values) + 0.05 for values in ends)))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        figure.suptitle(f"{title}: mean" + (", and 95 % interval of three seeds or more" if bands else ""))


def best_of_each_family(runs: Runs, arms: Sequence[Arm], path: Path) -> None:
    """Draw test loss against work, and time at both latencies, for the arm of each family with the lowest mean at the end.

    Args:
        runs: the records.
        arms: the arms, all of which have runs.
        path: of the figure.
    """
    shown = [(heading, *axis) for heading, axis in _AXES.items() if heading != "equal steps"]
    with make_panels(len(shown), path, width=6.4, height=4.4, share=True) as (figure, panels):
        for axes, (heading, unit, steps_done, end) in zip(panels, shown, strict=True):
            stop = min(end(one) for one in arms)

            def at_end(one: Arm, stop: float = stop, steps_done: Callable[[Arm, float], float] = steps_done) -> float:
                return fmean(runs.scores(loss_at(steps_done(one, stop)), one.run_name).values())

            for family in _FAMILIES:
                if members := [one for one in arms if one.label in family]:
                    curve(axes, runs, min(members, key=at_end), steps_done, stop)
            axes.set(title=heading, xlabel=unit, ylabel="test loss, nats a byte")
            axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        lowest = min(fmean(runs.scores(loss, one.run_name).values()) for one in arms)
        panels[0].set_ylim(lowest - 0.03, lowest + 1.0)
        figure.suptitle("Best of each family, eight stages, Muon: mean and 95 % interval")


def draw_frontier(runs: Runs, path: Path) -> None:
    """Draw a figure of eight stages for each optimizer that has runs, one of four stages, and the best of each family."""
    for optimizer in _OPTIMIZERS:
        if arms := _shown(runs, optimizer, STAGES):
            title = f"Eight stages, {optimizer.capitalize()}"
            loss_against_time(runs, arms, title, path.with_name(f"{path.name}-{optimizer}.png"))
    if arms := _shown(runs, "muon", STAGES):
        best_of_each_family(runs, arms, path.with_name(f"{path.name}-best.png"))
    four = _shown(runs, "muon", 4)
    if any(one.run_name == one.name for one in four):  # more than end-to-end training, the same for every cut
        loss_against_time(runs, four, "Four stages, Muon", path.with_name(f"{path.name}-muon-four.png"))
