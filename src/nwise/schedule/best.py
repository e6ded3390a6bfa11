"""The best schedule of a strategy: the shortest of several orders, with its distance from the lower bound."""

from __future__ import annotations

from collections.abc import Sequence

from nwise.flow import Flow, flows_for
from nwise.schedule import orders
from nwise.schedule.bounds import resource_bound
from nwise.schedule.costs import Costs, check_counts
from nwise.schedule.search import Search
from nwise.schedule.timed import CLOSE, Timed, check_memory, peak_bytes
from nwise.strategies import Strategy, Switch
from nwise.strategies import strategy as parse


class DoesNotFit(ValueError):
    """The memory is too small.

    Args:
        what: name of the method that does not fit.
        least: bytes that a stage needs at least.
        memory: bytes that a stage may use.
    """

    def __init__(self, what: str, least: float, memory: float) -> None:
        self.what, self.least, self.memory = what, least, memory
        super().__init__(self.message("bytes", 1.0))

    def message(self, unit: str, size: float) -> str:
        """Return the error message, with sizes in a unit of `size` bytes."""
        return (
            f"`memory` should be at least {self.least / size:,.4g} {unit} a stage, which {self.what} needs. Found "
            f"{self.memory / size:,.4g}; allow more, or cut the mini-batch into more micro-batches or the network into more "
            "stages."
        )


def best(
    strategy: str | Strategy,
    *,
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    memory: float | None = None,
) -> Timed:
    """Find the schedule with the shortest period.

    The candidates are the orders of `nwise.schedule.orders` and list schedules. Of equal periods the one with fewer
    micro-batches in flight is better, then the one with first-in-first-out messages. Under Hogwild no stage waits for an
    update, so the busiest stage determines the period.

    Args:
        strategy: a strategy or its name.
        num_stages: number of stages, A.
        num_microbatches: number of micro-batches, M.
        costs: costs of one micro-batch.
        memory: limit per stage in bytes (`Costs.activation_bytes`, `Costs.fixed_bytes`); default: none.

    Raises:
        ValueError, TypeError: an argument is invalid, or the strategy is a `Switch`.
        DoesNotFit: no order fits the memory; a ValueError too.

    >>> result = best("2-wise", num_stages=8, num_microbatches=4, costs=Costs(1, 0.5, 1, 1))
    >>> result.period, result.lower_bound, result.order, max(result.in_flight)
    (18.0, 18.0, 'skewed', 2)
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    check_memory(memory)
    if not isinstance(costs, Costs):
        raise TypeError(f"`costs` should be a nwise.schedule.Costs. Found {type(costs).__name__}.")
    rule = parse(strategy)
    if isinstance(rule, Switch):
        raise ValueError(
            f"`strategy` should be the same at every step. Found {rule.name!r}, which switches; pass one of its parts, or "
            "`strategy.in_force(step)`."
        )
    flows = flows_for(rule, num_stages, num_microbatches)
    bound = resource_bound(flows, costs) / len(flows)
    search = Search(flows, costs, memory)
    if rule.asynchronous:
        free = orders.hogwild(flows, costs, pace=bound / num_microbatches)
        if not search.fits(free):
            raise DoesNotFit("Hogwild", max(peak_bytes(free.in_flight, costs)), memory or 0.0)
        return Timed(free, costs, bound)
    return _orders(search, bound)[0]


def best_order(flows: Sequence[Sequence[Flow]], costs: Costs) -> Timed:
    """Find the best of the closed-form orders and list schedules, for some costs.

    Args:
        flows: flow of every micro-batch, ``[turns][M]``.
        costs: costs of one micro-batch.
    """
    return _orders(Search(flows, costs), resource_bound(flows, costs) / len(flows))[0]


def _orders(search: Search, bound: float) -> list[Timed]:
    """Time the closed-form orders and list schedules that fit the memory, and return them, the best first."""
    options: list[Timed] = []
    least = float("inf")
    for rule in search.rules():
        # One pass instead of two saves an overhead and a kept cotangent, so it is tried first; two passes start earlier.
        for fuse in (orders.ALL, orders.NONE):
            schedule = rule(fuse)
            if not search.fits(schedule):
                least = min(least, max(peak_bytes(schedule.in_flight, search.costs)))
                continue
            options.append(search.timed(schedule))
            # Stop at an optimal first option: it has the least memory, and first-in-first-out messages.
            if len(options) == 1 and options[0].period <= bound * (1 + CLOSE):
                return options
    if not options:
        raise DoesNotFit("the smallest order of this strategy", least, search.memory or 0.0)
    return sorted(options, key=lambda t: t.rank)
