"""The records of an experiment, asked by method, stages and seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, stdev

import numpy as np

from experiments.harness.cell import Record
from experiments.harness.experiment import Size

Score = Callable[[Record], float]


def accuracy(record: Record, head: int = -1) -> float:
    """Return the test accuracy of a head at the end, per cent; not a number where there is none."""
    value = record["tests"][-1]["accuracy"][head]
    return math.nan if value is None else 100 * float(value)


def perplexity(record: Record) -> float:
    """Return the test perplexity at the end; infinite if the run diverged."""
    return math.exp(loss(record)) if loss(record) < 700 else math.inf


def loss(record: Record) -> float:
    """Return the test loss of the last head at the end, in nats."""
    return _number(record["tests"][-1]["loss"][-1])


def head_accuracy(index: int) -> Score:
    """Return the score that is the accuracy of a head."""
    return partial(accuracy, head=index)


def ensemble_accuracy(count: int) -> Score:
    """Return the score that is the accuracy of so many top heads."""
    return lambda record: 100 * float(record["ensembles"][count - 1]["accuracy"])


def loss_at(steps: float) -> Score:
    """Return the score that is the test loss of the last head after so many steps, interpolated between tests."""

    def score(record: Record) -> float:
        tests = record["tests"]
        return float(np.interp(steps, [t["step"] for t in tests], [_number(t["loss"][-1]) for t in tests]))

    return score


def _number(value: float | None) -> float:
    return math.inf if value is None else float(value)


class Runs:
    """Records of one size of an experiment, on one data set.

    Args:
        records: all of them.
        size: ``"small"``, ``"medium"`` or ``"full"``.
        source: name of the data, such as ``"cifar10"``.
    """

    def __init__(self, records: Sequence[Record], size: Size = "small", source: str = "") -> None:
        self.records = list(records)
        self.size, self.source = size, source

    def records_for(self, method: str, stages: int | None = None, part: str = "") -> list[Record]:
        """Return the records of a method, by seed."""
        records = [
            r
            for r in self.records
            if r["method"] == method and r["part"] == part and (stages is None or r["stages"] == stages)
        ]
        return sorted(records, key=lambda r: int(r["seed"]))

    def scores(self, score: Score, method: str, stages: int | None = None, part: str = "") -> dict[int, float]:
        """Return a score by seed."""
        return {r["seed"]: score(r) for r in self.records_for(method, stages, part)}

    def shown(self, score: Score, method: str, stages: int | None = None, part: str = "", *, digits: int = 2) -> str:
        """Return mean and standard error as text; – if there is none."""
        return shown(list(self.scores(score, method, stages, part).values()), digits)


def shown(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean as text, and the standard error in brackets if there are several.

    >>> shown([1.0, 2.0, 3.0]), shown([1.5]), shown([])
    ('2.00 (0.58)', '1.50', '–')
    """
    if not values or any(math.isnan(value) for value in values):
        return "–"
    if len(values) == 1 or any(math.isinf(value) for value in values):
        return f"{mean(values):.{digits}f}"
    return f"{mean(values):.{digits}f} ({stdev(values) / len(values) ** 0.5:.{digits}f})"
