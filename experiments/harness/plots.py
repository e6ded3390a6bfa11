"""The figures of the experiments, from records alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.cell import Record
from experiments.harness.clock import step_time
from experiments.harness.runs import Runs, Score, accuracy, ensemble_accuracy, head_accuracy, perplexity
from nwise.app.report.figures import COLOURS, MARKERS, method_colour, new_figure
from nwise.schedule import PAPER, Costs

_MARKERS = {"end-to-end": "o", "1-wise": "s", "local": "s", "2-wise": "^", "3-wise": "D", "4-wise": "v"}


def style(method: str) -> dict[str, Any]:
    """Return colour and marker of a method; the mean variant is dashed and hollow."""
    colour, mean_variant = method_colour(method) or COLOURS[-1], method.endswith("-mean")
    return {
        "color": colour,
        "marker": _MARKERS.get(method.removesuffix("-mean"), "P"),
        "markersize": 4,
        "linestyle": "--" if mean_variant else "-",
        "markerfacecolor": "white" if mean_variant else colour,
        "label": method,
    }


@contextmanager
def make_panels(
    count: int, path: Path, *, columns: int = 1, width: float = 5.4, height: float = 3.2, share: bool = False
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure and its panels, with a grid and without a frame; write it at the end.

    Panels stand one below the other, so a phone can show them.
    """
    rows = -(-count // columns)
    with new_figure(width * columns, height * rows, path) as figure:
        places = list(figure.subplots(rows, columns, squeeze=False, sharey=share).ravel())
        panels, empty = places[:count], places[count:]
        for axes in empty:
            axes.remove()
        for axes in panels:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        yield figure, panels


def legend(axes: Axes, size: int = 8, **place: Any) -> None:
    """Draw a legend if there is anything to name; `place` goes to matplotlib's `legend`."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=size, **place)


def _error_bars(axes: Axes, xs: Sequence[float], columns: Sequence[Sequence[float]], look: dict[str, Any]) -> None:
    """Draw means with one standard deviation over seeds, as in the paper."""
    kept = [(x, values) for x, values in zip(xs, columns, strict=True) if values and np.isfinite(values).all()]
    if kept:
        means = [mean(values) for _, values in kept]
        errors = [stdev(values) if len(values) > 1 else 0.0 for _, values in kept]
        axes.errorbar([x for x, _ in kept], means, errors, capsize=2, **look)


def _beside(xs: Sequence[float], i: int, count: int, by: float = 0.05) -> list[float]:
    """Return the places of the i-th of so many curves' points, so that their bars can be distinguished."""
    return [x + by * (i - (count - 1) / 2) for x in xs]


def lines_over_stages(runs: Runs, score: Score, panels: Mapping[str, Sequence[str]], quality: str, path: Path) -> None:
    """Draw a score against the number of stages."""
    stages = sorted({r["stages"] for r in runs.records})
    with make_panels(len(panels), path, share=True) as (_, all_axes):
        for axes, (title, methods) in zip(all_axes, panels.items(), strict=True):
            for i, method in enumerate(methods):
                columns = [list(runs.scores(score, method, a).values()) for a in stages]
                _error_bars(axes, _beside(stages, i, len(methods), by=0.08), columns, style(method))
            axes.set(title=title, xlabel="stages", xticks=stages, ylabel=quality)
            legend(axes, 8)


def _mean_curve(runs: Runs, method: str, stages: int, column: str, part: str = "") -> tuple[list[int], list[float]]:
    """Return the steps of all tests but the one before training, and their means over seeds."""
    records = [r["tests"] for r in runs.records_for(method, stages, part)]
    if not records:
        return [], []

    def value(test: Record) -> float:
        number = test[column] if column == "train" else test[column][-1]
        return np.nan if number is None else float(number)

    values = [mean(value(tests[i]) for tests in records) for i in range(1, len(records[0]))]
    return [test["step"] for test in records[0]][1:], values


def accuracy_and_step_time(runs: Runs, slots: Mapping[str, float], stages: int, path: Path) -> None:
    """Draw accuracy against steps, and at the end against the slots that a step takes, for each method that has them."""
    with make_panels(2, path, share=True) as (_, (upper, lower)):
        for method, each in slots.items():
            steps, values = _mean_curve(runs, method, stages, "accuracy")
            upper.plot(steps, [100 * value for value in values], **{**style(method), "markersize": 2.5})
            column = [list(runs.scores(accuracy, method, stages).values())]
            _error_bars(lower, [each], column, {**style(method), "markersize": 6})
        upper.set(title="accuracy against steps", xlabel="steps", ylabel="test accuracy, %")
        lower.set(
            title="at the end, against the time of a step",
            xlabel="slots a step, honest costs, best M",
            ylabel="test accuracy, %",
        )
        last = [100 * value for method in slots for value in _mean_curve(runs, method, stages, "accuracy")[1][-1:]]
        if last:
            upper.set_ylim(min(last) - 8, max(last) + 4)
        legend(upper, 7)


def loss_over_time(
    runs: Runs, methods: Sequence[str], stages: int, clocks: Mapping[str, tuple[Costs, str]], path: Path
) -> None:
    """Draw losses in tests and, dotted, in training: against steps, and against time by clocks, until the first has ended.

    A clock has costs, and the part of the runs to draw; of methods that have none, the runs of equal steps are drawn.
    """
    titles: dict[str, tuple[Costs | None, str]] = {"equal steps": (None, "")}
    titles |= {f"equal time, {name} costs": clock for name, clock in clocks.items()}
    with make_panels(3, path, share=True) as (_, panels):
        for axes, (title, (clock, wanted)) in zip(panels, titles.items(), strict=True):
            ends = []
            for method in methods:
                part = wanted if runs.records_for(method, stages, wanted) else ""
                each = 1.0 if clock is None else step_time(method, stages, clock).slots
                steps, values = _mean_curve(runs, method, stages, "loss", part)
                axes.plot([step * each for step in steps], values, **{**style(method), "markersize": 2.5})
                ends += [step * each for step in steps[-1:]]
                steps, values = _mean_curve(runs, method, stages, "train", part)
                axes.plot([step * each for step in steps], values, ":", color=style(method)["color"], lw=1.2)
            axes.set(
                title=title,
                xlabel="steps" if clock is None else "slots",
                ylabel="loss, nats per token (dotted: in training)",
            )
            axes.set_xlim(0, 1.02 * min(ends, default=1.0))
        legend(panels[0], 7)


def accuracy_of_heads(runs: Runs, methods: Sequence[str], num_stages: int, path: Path) -> None:
    """Draw the accuracy of the head of every stage."""
    with make_panels(1, path, height=3.8) as (_, (axes,)):
        for i, method in enumerate(methods):
            columns = [[v for v in runs.scores(head_accuracy(k), method).values() if v == v] for k in range(num_stages)]
            _error_bars(axes, _beside(range(1, num_stages + 1), i, len(methods)), columns, style(method))
        axes.set(xlabel="head of stage", ylabel="test accuracy, %", xticks=range(1, num_stages + 1))
        legend(axes, 8)


def accuracy_of_ensembles(runs: Runs, methods: Sequence[str], num_heads: int, path: Path) -> None:
    """Draw the accuracy of the mean of the top heads' probabilities."""
    with make_panels(1, path, width=6.4) as (_, (axes,)):
        for i, method in enumerate(methods):
            columns = [list(runs.scores(ensemble_accuracy(n), method).values()) for n in range(1, num_heads + 1)]
            _error_bars(axes, _beside(range(1, num_heads + 1), i, len(methods)), columns, style(method))
        axes.set(xlabel="top heads in the ensemble", ylabel="test accuracy, %", xticks=range(1, num_heads + 1))
        legend(axes, 8, loc="center left", bbox_to_anchor=(1, 0.5))


def grid_of_fine_tuning(
    runs: Runs, methods: Sequence[str], grid: Mapping[tuple[int, float], Mapping[int, float]], path: Path
) -> None:
    """Draw equal time, and validation accuracy over the grid, if there is one."""
    with make_panels(2 if grid else 1, path) as (_, (upper, *lower)):
        for i, method in enumerate(methods):
            values = list(runs.scores(accuracy, method).values())
            _error_bars(upper, [i], [values], {**style(method), "markersize": 6})
        upper.set(
            title="equal time", xticks=range(len(methods)), ylabel="test accuracy, %", xlim=(-0.5, len(methods) - 0.5)
        )
        upper.set_xticklabels(methods, fontsize=8)
        for axes in lower:
            for i, rate in enumerate(sorted({rate for _, rate in grid}, reverse=True)):
                points = sorted(first for first, r in grid if r == rate)
                columns = [list(grid[first, rate].values()) for first in points]
                look = {"color": COLOURS[i], "marker": MARKERS[i], "label": f"rate {rate:g} after it"}
                _error_bars(axes, points, columns, look)
            firsts = sorted({first for first, _ in grid})
            axes.set(title="fine-tuning", xlabel="epochs 1-wise", ylabel="validation accuracy, %", xticks=firsts)
            legend(axes, 8)


def language_models(
    runs: Runs,
    methods: Sequence[str],
    stages: Sequence[int],
    path: Path,
    seconds: Mapping[tuple[str, int], float] | None = None,
) -> None:
    """Draw perplexity against the number of stages, and the time of a step: measured, or slots if nothing was."""
    with make_panels(2, path) as (_, (upper, lower)):
        for i, method in enumerate(methods):
            columns = [list(runs.scores(perplexity, method, a).values()) for a in stages]
            _error_bars(upper, _beside(stages, i, len(methods)), columns, style(method))
            if seconds:
                times = {a: seconds[method, a] for a in stages if (method, a) in seconds}
            else:
                times = {a: step_time(method, a, PAPER).slots for a in stages}
            lower.plot(list(times), list(times.values()), **style(method))
        upper.set(xlabel="stages", ylabel="test perplexity per token", xticks=stages, title="equal steps")
        unit = "seconds a step, measured, M = 1" if seconds else "slots a step, paper's costs"
        lower.set(xlabel="stages", ylabel=unit, xticks=stages, ylim=(0, None), title="step time")
        legend(upper, 8)
