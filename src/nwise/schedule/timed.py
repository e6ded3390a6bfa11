"""A schedule with its exact period, its lower bound and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nwise.schedule.bounds import lower_bound, resource_bound
from nwise.schedule.costs import Chains, Costs
from nwise.schedule.lists import Schedule, Word
from nwise.schedule.network import network
from nwise.schedule.period import period

CLOSE = 1e-9  # periods that differ by less than this share are equal


@dataclass(frozen=True)
class Timed:
    """A schedule with its costs and its period.

    Args:
        schedule: what every stage does.
        costs: of a micro-batch.
        chains: what a W costs that follows an I of the same cotangent.
        period: time per mini-batch in the steady state, exact; of a rotating strategy the mean over its cycle.
    """

    schedule: Schedule
    costs: Costs
    chains: Chains
    period: float

    @property
    def order(self) -> str:
        """Name of the order."""
        return self.schedule.order

    @property
    def lists(self) -> tuple[Word, ...]:
        """Per stage everything that it does, in order."""
        return self.schedule.lists

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage the most micro-batches whose forward has run and that are still needed."""
        return self.schedule.in_flight

    @cached_property
    def lower_bound(self) -> float:
        """Time per mini-batch that no order of these actions can be shorter than."""
        flows = self.schedule.flows
        bound = resource_bound(flows, self.costs)
        if self.period * len(flows) > bound * (1 + CLOSE):
            bound = max(bound, lower_bound(flows, self.costs, self.period * len(flows)))
        return bound / len(flows)

    @property
    def optimal(self) -> bool:
        """Whether the period meets the lower bound, up to rounding."""
        return self.period <= self.lower_bound * (1 + CLOSE)

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per stage what it keeps always and what its micro-batches in flight need."""
        return peak_bytes(self.in_flight, self.costs)

    @cached_property
    def stores_cotangents(self) -> bool:
        """Whether it is only so fast if an I keeps the cotangent of every layer for a W, which nwise's own stages do not
        (they walk the chain again)."""
        if self.chains == "walked":
            return False
        walked = period(network(self.schedule, self.costs, "walked")) / len(self.schedule.flows)
        return walked > self.period * (1 + CLOSE) and self.order != "hogwild"

    @property
    def rank(self) -> tuple[float, int, bool, int]:
        """The smallest is the best: by period, then by the most micro-batches in flight on a stage, then by
        first-in-first-out messages, then by the number of actions."""
        actions = sum(map(len, self.schedule.words))
        return (rounded(self.period), max(self.in_flight), not self.schedule.first_in_first_out, actions)


def timed(schedule: Schedule, costs: Costs, chains: Chains = "stored") -> Timed:
    """A schedule with its exact period."""
    return Timed(schedule, costs, chains, period(network(schedule, costs, chains)) / len(schedule.flows))


def peak_bytes(in_flight: Sequence[int], costs: Costs) -> tuple[float, ...]:
    """Per stage the bytes it keeps always and those of its micro-batches in flight."""
    sizes = zip(*(costs.of(n, len(in_flight)) for n in ("fixed_bytes", "activation_bytes")), strict=True)
    return tuple(fixed + each * count for (fixed, each), count in zip(sizes, in_flight, strict=True))


def check_memory(memory: float | None) -> None:
    """Refuse what is no amount of memory."""
    if memory is not None and not memory > 0:
        raise ValueError(f"`memory` should be a number of bytes above 0. Found {memory!r}.")


def rounded(time: float) -> float:
    """A time without what is rounding, to compare."""
    return float(f"{time:.9e}")
