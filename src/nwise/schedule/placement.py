"""Placement: the rank that runs each stage.

8 stages on 4 ranks    stage   0  1  2  3  4  5  6  7

contiguous             rank    0  0  1  1  2  2  3  3     fewest messages
interleaved            rank    0  1  2  3  0  1  2  3     interleaved 1F1B
v                      rank    0  1  2  3  3  2  1  0     ZB-V and DualPipeV: rank 0 has the first stage and the last
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from nwise.checks import hint

__all__ = ["PLACEMENTS", "Placement", "check_name", "make_placement", "parse_placement"]

PLACEMENTS = ("contiguous", "interleaved", "v")
Placement = tuple[int, ...]


def parse_placement(text: str) -> str | list[int]:
    """Parse a placement of the command line: a name, or ranks like ``0,1,1,0``.

    Raises:
        ValueError: the text has a part that is not a number.
    """
    if "," not in text:
        return text
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ValueError(f"`placement` should be a name, or ranks like 0,1,1,0. Found {text!r}.")
    return [int(part) for part in text.split(",")]


def check_name(placement: str) -> None:
    """Raise ValueError unless `placement` is one of `PLACEMENTS`."""
    if placement == "balanced":
        raise ValueError(
            "`placement` should be ranks if the stages are unequal. Found 'balanced', which is gone; "
            "`nwise.planning.assign.balanced` makes them by the work of the stages, and `nwise.plan` cuts the network itself."
        )
    if placement not in PLACEMENTS:
        raise ValueError(
            f"`placement` should be one of {', '.join(PLACEMENTS)}, or a rank for every stage. Found {placement!r}."
            f"{hint(placement, PLACEMENTS)}"
        )


def make_placement(placement: str | Sequence[int], num_stages: int, num_ranks: int) -> Placement:
    """Return the rank of every stage.

    Args:
        placement: one of `PLACEMENTS`, or a rank for every stage.
        num_stages: number of stages, A.
        num_ranks: number of ranks, at most A.

    Raises:
        ValueError: the placement is unknown, has another number of stages, or leaves a rank without a stage.

    >>> make_placement("v", 6, 3)
    (0, 1, 2, 2, 1, 0)
    """
    if not 1 <= num_ranks <= num_stages:
        raise ValueError(
            f"The number of ranks should be from 1 to the {num_stages} stages. Found {num_ranks}; start fewer processes, or cut "
            "the network into more stages."
        )
    stages = range(num_stages)
    if isinstance(placement, str):
        check_name(placement)
        if placement == "contiguous":
            return tuple(k * num_ranks // num_stages for k in stages)
        if placement == "interleaved":
            return tuple(k % num_ranks for k in stages)
        # Down and up again: k mod 2 R, counted from the nearer end. With R = 3 that is 0 1 2 2 1 0.
        return tuple(min(k % (2 * num_ranks), 2 * num_ranks - 1 - k % (2 * num_ranks)) for k in stages)
    ranks = tuple(placement)
    if len(ranks) != num_stages or any(isinstance(r, bool) or not isinstance(r, Integral) for r in ranks):
        raise ValueError(f"`placement` should be a rank for each of the {num_stages} stages. Found {placement!r}.")
    if set(ranks) != set(range(num_ranks)):
        raise ValueError(
            f"`placement` should give every rank from 0 to {num_ranks - 1} a stage, and no other rank. Found {placement!r}."
        )
    return tuple(map(int, ranks))
