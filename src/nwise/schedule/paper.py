"""The paper's timing model (section 3.1 and appendix C): T(A, M, N) slots of c(M) = c0 + c1 / M seconds.

A forward takes one slot, and so does each loss's pass through a stage; heads and messages are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nwise.checks import check_at_least

__all__ = ["C0", "C1", "POWERS", "Slot", "fit_slot", "paper_time"]

# Seconds, for the paper's Transformers.
C0 = 0.025
C1 = 1.279
POWERS = (1, 2, 4, 8, 16, 32)


def paper_time(num_stages: int, num_microbatches: int, n: int) -> int:
    """Return T(A, M, N): the slots per mini-batch of N-wise training in the steady state.

    Args:
        num_stages: number of stages, A.
        num_microbatches: number of micro-batches, M.
        n: the window N; a value above A means A.

    >>> paper_time(4, 1, 2), paper_time(4, 2, 2), paper_time(4, 4, 4)
    (4, 6, 14)
    """
    check_at_least(1, num_stages=num_stages, num_microbatches=num_microbatches, n=n)
    # Why no schedule is faster. Let c losses pass the stages k <= j. The first forward on j starts j - k slots after that on k.
    # Then j has M forwards and c M passes, and the result of the last one needs j - k slots to return to k, before its update:
    #
    #     T >= 2 (j - k) + M (1 + c),  where c = min(k + N - 1, A - 1) - max(j, N - 1) + 1
    #
    # The cases are the largest of these. With one micro-batch the path there and back decides, otherwise the busiest stage or,
    # in a shallow network, both.
    n = min(n, num_stages)
    if num_microbatches == 1:
        return 2 * n
    if num_stages >= 2 * n - 1:
        return (n + 1) * num_microbatches
    return (2 + num_stages - n) * num_microbatches + 2 * (2 * n - num_stages - 1)


@dataclass(frozen=True, slots=True)
class Slot:
    """Length of a slot: ``c(M) = c0 + c1 / M``.

    Args:
        c0: overhead of every action, in seconds; default: the paper's.
        c1: forward of a whole mini-batch through one stage, in seconds; default: the paper's.
        error: root mean square relative error of the fit; 0 (default) without a fit.

    >>> round(Slot().seconds(4), 3)
    0.345
    """

    c0: float = C0
    c1: float = C1
    error: float = 0.0

    def seconds(self, num_microbatches: int) -> float:
        """Return the length of one slot, in seconds."""
        return self.c0 + self.c1 / num_microbatches

    def batch_seconds(self, num_stages: int, num_microbatches: int, n: int) -> float:
        """Return the time of one mini-batch, ``T(A, M, N) c(M)``, in seconds."""
        return paper_time(num_stages, num_microbatches, n) * self.seconds(num_microbatches)

    def best_microbatches(self, num_stages: int, n: int, among: Sequence[int] = POWERS) -> int:
        """Return the fastest M, the smallest of equal ones."""
        return min(among, key=lambda m: (self.batch_seconds(num_stages, m, n), m))

    def speedup(self, num_stages: int, n: int, among: Sequence[int] = POWERS) -> float:
        """Return the time of GPipe over the time of N-wise, each at its best M.

        >>> round(Slot().speedup(15, 2), 4)
        1.4992
        """
        best = [
            self.batch_seconds(num_stages, self.best_microbatches(num_stages, w, among), w) for w in (num_stages, n)
        ]
        return best[0] / best[1]


def fit_slot(measured: Mapping[tuple[int, int, int], float]) -> Slot:
    """Fit a slot to measured times, by least squares of the relative errors with c0, c1 >= 0.

    Args:
        measured: seconds per mini-batch by (A, M, N), with at least two different M.

    Raises:
        ValueError: there are too few different M, or a time is not above 0.

    >>> result = fit_slot({(4, m, 2): Slot(0.01, 2.0).batch_seconds(4, m, 2) for m in (1, 2, 4)})
    >>> round(result.c0, 6), round(result.c1, 6), round(result.error, 6)
    (0.01, 2.0, 0.0)
    """
    if len({m for _, m, _ in measured}) < 2:
        raise ValueError("`measured` should have times of at least two different M, to tell c0 from c1. Found fewer.")
    for cell, seconds in measured.items():
        if not 0 < seconds < np.inf:
            raise ValueError(f"`measured` should have finite times above 0. Found {seconds} at A, M, N = {cell}.")
    slots = np.array([paper_time(*cell) for cell in measured])
    # Each row is divided by its measured time, so the right side is 1 and errors are relative: a slow run counts no more than
    # a fast one.
    rows = np.array([[1.0, 1.0 / m] for _, m, _ in measured])
    rows = rows * (slots / np.array(list(measured.values())))[:, None]
    options = []
    for columns in ([0, 1], [0], [1]):  # if one of the two is negative, it is set to 0 and the other one fitted alone
        values = np.zeros(2)
        values[columns] = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        if (values >= 0).all():
            options.append((float(np.sqrt(np.mean((rows @ values - 1) ** 2))), *values.tolist()))
    error, c0, c1 = min(options)
    return Slot(c0, c1, error)
