"""Schedules as CSV, in the format of torch's pipelines: one row per rank, one cell per action.

    0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3          stage, kind, micro-batch; a B that is split is an I and a W
    ,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3         empty cells are waits, which the lists imply

Two actions that torch overlaps, such as ``(0F4;3B1)OVERLAP_F_B``, are taken one after the other.
"""

from __future__ import annotations

import re
from collections import Counter

from nwise.flow import flows_for
from nwise.schedule import Action, Kind, Schedule, arrange, validate
from nwise.strategies import EndToEnd

__all__ = ["read_csv", "write_csv"]

_CELL = re.compile(r"(\d+)([FIWB])(\d+)", re.ASCII)
# Cells of torch's longer format, for messages and parameters that are sharded; the lists imply the messages.
_IMPLIED = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|(WAIT_)?SEND_[FB]|RECV_[FB])\d*", re.ASCII)
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_LARGEST = 4096  # stages or micro-batches


def read_csv(text: str, name: str = "csv") -> Schedule:
    """Return the end-to-end schedule that a text describes.

    Args:
        text: the text.
        name: name of the schedule; default: csv.

    Raises:
        ValueError: a cell is invalid, a stage is on two ranks, or the schedule cannot run.

    >>> schedule = read_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1")
    >>> print(*schedule.work[1])
    F1(0) H1(0) B1(0.0) F1(1) H1(1) B1(1.0) U1
    """
    lines = text.removeprefix("\ufeff").splitlines()  # some files begin with a byte order mark
    rows = [[cell for text in line.split(",") for cell in _cells(text)] for line in lines if line]
    placement: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for stage, _, _ in row:
            if placement.setdefault(stage, rank) != rank:
                raise ValueError(
                    f"A stage should be on one rank. Found stage {stage} on {placement[stage]} and {rank}."
                )
    size = 1 + max(placement, default=-1)
    microbatches = 1 + max((m for row in rows for _, _, m in row), default=-1)
    if not 0 < size <= _LARGEST or not 0 < microbatches <= _LARGEST or len(placement) < size:
        raise ValueError(
            f"A schedule should have actions of every stage and micro-batch, {_LARGEST} of each at most. Found "
            f"{len(placement)} of {size} stages and {microbatches} micro-batches."
        )
    flows = flows_for(EndToEnd(), size, microbatches)
    split = Counter((stage, m) for row in rows for stage, kind, m in row if kind == "W")
    lists = [
        [
            action
            for stage, kind, m in row
            for action in _actions(stage, kind, m, last=stage == size - 1, split=(stage, m) in split)
        ]
        for row in rows
    ]
    schedule = arrange(name, flows, lists, tuple(placement[stage] for stage in range(size)))
    validate(schedule)
    return schedule


def write_csv(schedule: Schedule) -> str:
    """Return the text of an end-to-end schedule.

    Raises:
        ValueError: the schedule is of another strategy, or has a delay.

    >>> from nwise.schedule import Costs, baseline
    >>> print(write_csv(baseline("1f1b", num_stages=2, num_microbatches=2, costs=Costs(1, 0, 1, 1))))
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    <BLANKLINE>
    """
    if schedule.flows != flows_for(EndToEnd(), schedule.num_stages, schedule.num_microbatches) or schedule.oldest:
        raise ValueError("A schedule should be end-to-end and without delay to be written as CSV. Found another one.")
    lines = []
    for actions in schedule.work:
        kinds = ["B" if a.stage == 0 and a.kind is Kind.WEIGHT_GRAD else a.kind.value for a in actions]
        named = zip(actions, kinds, strict=True)
        lines.append(",".join([f"{a.stage}{kind}{a.microbatch}" for a, kind in named if kind in "FIWB"]) + "\n")
    return "".join(lines)


def _cells(text: str) -> list[tuple[int, str, int]]:
    """Parse a cell: no action, one, or two that overlap."""
    if _IMPLIED.fullmatch(text.strip()):
        return []
    overlap = _OVERLAP.fullmatch(text.strip())
    parts = overlap[1].split(";") if overlap else [text.strip()] if text.strip() else []
    cells = [_CELL.fullmatch(part) for part in parts]
    if not all(cells):
        raise ValueError(f"A cell should be a stage, one of F, I, W, B, and a micro-batch, like 0F0. Found {text!r}.")
    return [(int(match[1]), match[2], int(match[3])) for match in cells if match]


def _actions(stage: int, kind: str, m: int, *, last: bool, split: bool) -> list[Action]:
    """Translate an action; the first stage has no gradient to its input, and the last one a head."""
    if kind == "F":
        return [Action(Kind.FORWARD, stage, m), *([Action(Kind.HEAD, stage, m)] if last else [])]
    if stage == 0:
        return [] if kind == "I" and split else [Action(Kind.WEIGHT_GRAD, 0, m)]
    message = None if kind == "W" else 0
    return [Action({"I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD, "B": Kind.BOTH}[kind], stage, m, message)]
