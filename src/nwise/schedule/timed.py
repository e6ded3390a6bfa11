"""A schedule with its exact period, its lower bound and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nwise.schedule.bounds import delay_bound, lower_bound, resource_bound
from nwise.schedule.costs import Costs
from nwise.schedule.memory import peak_bytes
from nwise.schedule.network import network
from nwise.schedule.period import period
from nwise.schedule.schedule import Schedule, Word

CLOSE = 1e-9  # periods that differ by less than this share are equal


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
    def lists(self) -> tuple[Word, ...]:
        """All actions of every rank, in order."""
        return self.schedule.lists

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For every stage the largest number of micro-batches in flight: forward done, last use still to come."""
        return self.schedule.in_flight

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound on the time per mini-batch, for any order of these actions on these ranks."""
        schedule, costs = self.schedule, self.costs
        flows, placement = schedule.flows, schedule.placement
        bound = resource_bound(flows, costs, placement)
        if self.period * len(flows) > bound * (1 + CLOSE):
            if schedule.oldest:
                bound = delay_bound(flows, costs, placement, schedule.ages)
            else:
                bound = max(bound, lower_bound(flows, costs, self.period * len(flows), placement))
        return bound / len(flows)

    @property
    def optimal(self) -> bool:
        """Whether the period meets the lower bound, up to rounding."""
        return self.period <= self.lower_bound * (1 + CLOSE)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of every rank (`nwise.schedule.memory`)."""
        return peak_bytes(self.schedule, self.costs)

    @property
    def rank(self) -> tuple[float, int, bool, int]:
        """Sort key, smallest for the best schedule: period, micro-batches in flight, message order, number of actions."""
        actions = sum(map(len, self.schedule.words))
        return (rounded(self.period), max(self.in_flight), not self.schedule.first_in_first_out, actions)


def timed(schedule: Schedule, costs: Costs) -> Timed:
    """Return a schedule with its exact period."""
    return Timed(schedule, costs, period(network(schedule, costs)) / len(schedule.flows))


def check_memory(memory: float | None) -> None:
    """Raise ValueError unless `memory` is None or above 0."""
    if memory is not None and not memory > 0:
        raise ValueError(f"`memory` should be a number of bytes above 0. Found {memory!r}.")


def rounded(time: float) -> float:
    """Return a time without its last digits, so times that differ only by rounding compare as equal."""
    return float(f"{time:.9e}")
