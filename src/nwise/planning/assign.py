"""Assign pieces to stages and stages to ranks, so the busiest rank has as little work as possible.

    pieces   p0 p1 | p2 p3 p4 | p5 | p6 p7      a stage is a range of pieces
    stages     0   |    1     | 2  |   3        its work depends on its place: messages and head
    ranks         0           |      1          a rank takes neighbouring stages, and may be slower than others

The search fixes a time T and walks through the stages. For every piece at which a stage may end, it keeps the least load of the
rank that has this stage, under the condition that no rank so far needs more than T. Bisection then finds the smallest T.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["balanced"]

Matrix = NDArray[np.float64]
# The first piece of every stage, and its rank.
Assignment = tuple[tuple[int, ...], tuple[int, ...]]

_CLOSE = 1e-9


def assign(tables: Sequence[Sequence[Matrix]]) -> Assignment | None:
    """Return the assignment whose busiest rank has the least work; None if there is none.

    Args:
        tables: for every rank and stage an array ``[P + 1, P + 1]``: the time of pieces a, ..., b - 1 in row a and column b,
            infinite where the stage cannot have them.

    >>> times = np.array([[np.inf, 3.0, 4.0], [np.inf, np.inf, 1.0], [np.inf] * 3])  # pieces of 3 and 1
    >>> assign([[times, times], [times, times]])
    ((0, 1), (0, 1))
    """
    known = _within(np.inf, tables)
    if known is None:
        return None
    # No assignment meets `low`, and `known` meets `high`. What is found may be better than was asked, so `high` falls to that:
    #
    #     low ........ middle ........ high      found below the middle: high moves to it; not found: low moves to the middle
    low = 0.0
    high = _busiest(known, tables)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        better = _within(middle, tables)
        if better is None:
            low = middle
        else:
            known = better
            high = _busiest(better, tables)
    return known


def balanced(work: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Return the contiguous placement whose busiest rank has the least work.

    Args:
        work: work of every stage, such as `nwise.schedule.bounds.stage_work`.
        num_ranks: number of ranks, at most that of the stages.

    >>> balanced([1, 1, 1, 4, 1], 2)
    (0, 0, 0, 1, 1)
    """
    # Each stage is one piece here, so its table allows one range only: row k, column k + 1.
    size = len(work)
    tables = [np.full((size + 1, size + 1), np.inf) for _ in work]
    for k, time in enumerate(work):
        tables[k][k, k + 1] = time
    groups = assign([tables] * num_ranks)
    assert groups is not None, "there are as many stages as ranks"
    return groups[1]


def _within(limit: float, tables: Sequence[Sequence[Matrix]]) -> Assignment | None:
    """Return an assignment in which no rank works longer than the limit; None if there is none."""
    num_ranks = len(tables)
    num_stages = len(tables[0])
    size = len(tables[0][0])
    # loads[r, p]: least work of rank r after a stage of it that ends before piece p; row -1 stands for the start. Stage k, which
    # has the pieces a, ..., p - 1, follows stage k - 1 on its rank, or is the first of the next one:
    #
    #     loads_k[r, p] = min over a of  tables[r][k][a, p] + min(loads_{k-1}[r, a], 0 if loads_{k-1}[r - 1, a] is finite)
    #
    # More than the limit counts as infinite. Less work on this rank is never a disadvantage later, so the least is enough.
    loads = np.full((num_ranks + 1, size), np.inf)
    loads[-1, 0] = 0.0
    begins: list[NDArray[np.int64]] = []
    firsts: list[NDArray[np.bool_]] = []
    for k in range(num_stages):
        new = np.full_like(loads, np.inf)
        begin = np.zeros(loads.shape, int)
        first = np.zeros(loads.shape, bool)
        for r in range(num_ranks):
            # The stage is on the rank of the one before, or the first on the next rank.
            fresh = np.where(np.isfinite(loads[r - 1]), 0.0, np.inf)
            before = np.minimum(loads[r], fresh)
            after = before[:, None] + tables[r][k]
            begin[r] = after.argmin(axis=0)
            first[r] = (fresh <= loads[r])[begin[r]]
            least = after[begin[r], np.arange(size)]
            new[r] = np.where(least <= limit, least, np.inf)
        loads = new
        begins.append(begin)
        firsts.append(first)
    if not np.isfinite(loads[num_ranks - 1, -1]):
        return None
    starts = [0] * num_stages
    ranks = [0] * num_stages
    r = num_ranks - 1
    end = size - 1
    for k in reversed(range(num_stages)):
        ranks[k] = r
        starts[k] = int(begins[k][r, end])
        r -= int(firsts[k][r, end])
        end = starts[k]
    return tuple(starts), tuple(ranks)


def _busiest(assignment: Assignment, tables: Sequence[Sequence[Matrix]]) -> float:
    starts, ranks = assignment
    ends = [*starts[1:], len(tables[0][0]) - 1]
    loads = [0.0] * len(tables)
    for k, (rank, start, end) in enumerate(zip(ranks, starts, ends, strict=True)):
        loads[rank] += float(tables[rank][k][start, end])
    return max(loads)
