"""Measured times of a planned pipeline's first steps, beside the expected ones."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from nwise.program.summary import table
from nwise.runtime.engine import Recorder
from nwise.runtime.processes import Processes
from nwise.schedule.actions import COMPUTATIONS, Action

if TYPE_CHECKING:
    from nwise.planning.plan import Plan

__all__ = ["Observer", "compared"]

_WARMUP = 2  # steps that are not counted: the first allocate memory
_STEPS = 5


class Observer:
    """Records the first steps on this rank, then compares those of all ranks with the plan.

    It does nothing where the processes are not the plan's devices.

    Args:
        plan: the plan.
        processes: the processes.
    """

    def __init__(self, plan: Plan, processes: Processes) -> None:
        fits = processes.num_ranks == len(plan.devices) > 1
        self._plan: Plan | None = plan if fits and plan.measured is not None else None
        self._processes = processes
        self._begins: dict[int, float] = {}
        self._busy: dict[int, float] = defaultdict(float)

    def through(self, recorder: Recorder | None) -> Recorder | None:
        """Return a recorder of this step that also calls another one."""
        if self._plan is None:
            return recorder

        def record(step: int, action: Action, begin: float, end: float) -> None:
            self._begins.setdefault(step, begin)
            if action.kind in COMPUTATIONS:
                self._busy[step] += end - begin
            if recorder is not None:
                recorder(step, action, begin, end)

        return record

    def look(self) -> None:
        """Report the first steps once there are enough of them; all ranks call it together, after every step."""
        # A step lasts until the next one begins, so the last of them is not counted.
        if self._plan is None or len(self._begins) <= _WARMUP + _STEPS:
            return
        steps = sorted(self._begins)[_WARMUP:]
        seconds = median(self._begins[after] - self._begins[before] for before, after in pairwise(steps))
        busy = median(self._busy[step] for step in steps[:-1])
        per_rank = self._processes.by_place("the first steps", [seconds, busy])
        if self._plan.report is not None and self._processes.is_first:
            self._plan.report(compared(self._plan, per_rank[0][0], [one[1] for one in per_rank]))
        self._plan = None


def compared(plan: Plan, seconds: float, busy: list[float]) -> str:
    """Return a text that compares measured times with those of the plan.

    Args:
        plan: the plan.
        seconds: measured seconds of a step.
        busy: measured seconds of a step in which each device computes.
    """
    title = f"A step takes {plan.show(seconds)}, where {plan.show(plan.seconds)} were expected."
    rows = [
        [str(i), plan.show(expected), plan.show(one)]
        for i, (expected, one) in enumerate(zip(plan.busy, busy, strict=True))
    ]
    if plan.measured is not None and plan.measured.device.startswith("cuda"):  # the host does not wait for its kernels
        return title
    rest = "The rest of a step is waiting, messages and the optimizer."
    return "\n".join([title, *table([["device", "busy, expected", "measured"], *rows]), rest])
