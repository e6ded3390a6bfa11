"""A schedule with its exact period, its lower bound and its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

from nwise.schedule.actions import Action
from nwise.schedule.bounds import CLOSE, lower_bound
from nwise.schedule.clock import durations, make_clock
from nwise.schedule.costs import Costs
from nwise.schedule.memory import peak_bytes
from nwise.schedule.period import period
from nwise.schedule.schedule import Schedule

__all__ = ["CLOSE", "Timed", "check_memory", "excess", "rounded", "timed"]

Limit = float | Sequence[float] | None  # of the memory of every rank, in bytes: one for all, or one for each


@dataclass(frozen=True)
class Timed:
    """A schedule with its costs and its period.

    Args:
        schedule: the schedule.
        costs: costs of one micro-batch.
        period: exact time per mini-batch in the steady state; the mean over the cycle for a rotating strategy.
    """

    schedule: Schedule
    costs: Costs
    period: float

    @property
    def order(self) -> str:
        """Name of the order."""
        return self.schedule.order

    @property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """All that every rank does, in order, with its messages."""
        return self.schedule.actions

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Largest number of micro-batches in flight on every stage: forward done, last use still to come."""
        return self.schedule.in_flight

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound on the time per mini-batch, for any order of these actions on these ranks."""
        schedule, cycle = self.schedule, len(self.schedule.flows)
        return lower_bound(schedule.flows, self.costs, schedule.placement, schedule.ages, self.period * cycle) / cycle

    @property
    def optimal(self) -> bool:
        """Whether the period meets the lower bound, up to rounding."""
        return self.period <= self.lower_bound * (1 + CLOSE)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of every rank (`nwise.schedule.memory`)."""
        return peak_bytes(self.schedule, self.costs)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time per mini-batch that every rank computes."""
        schedule, time = self.schedule, durations(self.schedule.graph, self.costs)
        return tuple(sum(time[task] for task in tasks) / len(schedule.flows) for tasks in schedule.by_rank)

    @property
    def rank(self) -> tuple[float, int, bool, int]:
        """Sort key, smallest for the best schedule: period, micro-batches in flight, message order, number of tasks."""
        schedule = self.schedule
        return (rounded(self.period), max(self.in_flight), not schedule.first_in_first_out, len(schedule.graph.tasks))


def timed(schedule: Schedule, costs: Costs, limit: float = math.inf) -> Timed:
    """Return a schedule with its exact period; if that is above the limit, perhaps with a shorter one that is above it, too."""
    cycle = len(schedule.flows)
    return Timed(schedule, costs, period(make_clock(schedule, costs), limit * cycle) / cycle)


def check_memory(memory: Limit, num_ranks: int) -> None:
    """Raise ValueError unless `memory` is None or above 0, one number for all ranks or one for each of so many."""
    if memory is None:
        return
    several = isinstance(memory, Sequence) and not isinstance(memory, str)
    for limit in memory if several else [memory]:  # type: ignore[union-attr]
        if not isinstance(limit, Real) or not limit > 0:  # type: ignore[operator]
            raise ValueError(f"`memory` should be a number of bytes above 0. Found {limit!r}.")
    if several and num_ranks != len(memory):  # type: ignore[arg-type]
        raise ValueError(f"`memory` should be one number, or one for each of {num_ranks} ranks. Found {memory!r}.")


def excess(sizes: Sequence[float], memory: float | Sequence[float]) -> tuple[float, float, float]:
    """Return the largest share of its limit that a rank needs, with these bytes and this limit.

    >>> excess((50.0, 60.0), (100.0, 80.0))
    (0.75, 60.0, 80.0)
    """
    limits = memory if isinstance(memory, Sequence) else [memory] * len(sizes)
    return max((size / limit, size, limit) for size, limit in zip(sizes, limits, strict=True))


def rounded(time: float) -> float:
    """Return a time without its last digits, so times that differ only by rounding compare as equal."""
    return float(f"{time:.9e}")
