"""Methods compared: every strategy at its best number of micro-batches, beside the best end-to-end pipelines."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwise.checks import check_at_least
from nwise.flow import Flow
from nwise.schedule.baselines import BASELINES, SEVERAL_STAGES, method_flows, stages_on, timed_method
from nwise.schedule.bounds import resource_bound
from nwise.schedule.costs import Costs
from nwise.schedule.find import DoesNotFit
from nwise.schedule.named import RULES
from nwise.schedule.placement import make_placement
from nwise.schedule.timing import CLOSE, Timed, rounded
from nwise.strategies import EndToEnd, Local, Strategy
from nwise.strategies import strategy as parse

__all__ = ["STRATEGIES", "Methods", "Option", "is_late", "ratio", "same_gradients", "time_methods"]

STRATEGIES = ("local", "2-wise", "3-wise", "4-wise", "rotating-2-microbatch", "end-to-end-delay-1")
# A function from the flows of a method and M to the costs of one micro-batch.
CostsOf = Callable[[Sequence[Flow], int], Costs]


@dataclass(frozen=True)
class Option:
    """A method with a number of micro-batches.

    Args:
        name: name of a strategy or baseline.
        num_microbatches: number of micro-batches, M.
        timed: the schedule with its period.
    """

    name: str
    num_microbatches: int
    timed: Timed

    @property
    def period(self) -> float:
        """Time per mini-batch."""
        return self.timed.period

    @property
    def end_to_end(self) -> bool:
        """Whether it computes the gradients of ordinary training."""
        return self.name in (*BASELINES, "end-to-end")

    @property
    def comparable(self) -> bool:
        """Whether gradients cross boundaries and none is late, so a step is comparable with an end-to-end one."""
        return self.name != "local" and (self.end_to_end or not is_late(parse(self.name)))

    def as_json(self) -> dict[str, Any]:
        """Return the option as plain values."""
        return {
            "method": self.name,
            "microbatches": self.num_microbatches,
            "period": self.period,
            "lower_bound": self.timed.lower_bound,
            "order": self.timed.order,
            "in_flight": list(self.timed.in_flight),
            "peak_bytes": list(self.timed.peak_bytes),
            "end_to_end": self.end_to_end,
        }


@dataclass(frozen=True)
class Methods:
    """The compared methods, and the recommended one.

    Args:
        microbatches: numbers of micro-batches that were tried.
        options: every method at its best M, the fastest first.
        skipped: methods that do not fit the memory at any M, with the bytes that a rank needs.
    """

    microbatches: tuple[int, ...]
    options: tuple[Option, ...]
    skipped: dict[str, float]

    @property
    def baseline(self) -> Option | None:
        """The fastest end-to-end pipeline; of equal ones the one with fewer micro-batches in flight."""
        return min((option for option in self.options if option.end_to_end), key=_preference, default=None)

    @property
    def recommended(self) -> Option:
        """The method with the fastest step among end-to-end pipelines and strategies whose gradients cross boundaries.

        End-to-end needs the fewest steps, so it is recommended unless it is slower. Local training and late gradients count only
        if nothing else fits the memory: their steps are nearly always the fastest, at a cost in quality.
        """
        crossing = [option for option in self.options if option.comparable]
        return min(crossing or self.options, key=_preference)

    def speedup(self, option: Option) -> float:
        """Return the time of the fastest end-to-end pipeline over that of an option; nan without such a pipeline."""
        return float("nan") if self.baseline is None else ratio(self.baseline.period, option.period)


def ratio(time: float, other: float) -> float:
    """Return the ratio of two times; 1 if both are 0."""
    return time / other if other else 1.0 if not time else float("inf")


def time_methods(
    stage_costs: CostsOf,
    num_stages: int,
    *,
    microbatches: Sequence[int],
    strategies: Sequence[str] = STRATEGIES,
    memory: float | None = None,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Methods:
    """Time every method with every number of micro-batches.

    Args:
        stage_costs: function from the flows of a method (for its heads and its cut) and M to the costs of one micro-batch.
        num_stages: number of stages, A.
        microbatches: numbers of micro-batches to try.
        strategies: names of strategies; those that are end-to-end at this depth are left out.
        memory: limit per rank in bytes; default: none.
        progress: wrapper of the list of tasks, such as a progress bar; default: none.

    Raises:
        ValueError: a number is out of range, or a strategy is unknown.
        DoesNotFit: no method fits the memory; a ValueError too.

    >>> costs = Costs(1, 0.5, 1, 1, overhead=0.02)
    >>> result = time_methods(lambda flows, m: costs.split_in(m).cut_in(len(flows[0].stages) // 8), 8, microbatches=(1, 8, 16))
    >>> result.recommended.name, result.recommended.num_microbatches
    ('rotating-2-microbatch', 8)
    """
    if not microbatches:
        raise ValueError("`microbatches` should contain at least one number to try. Found none.")
    check_at_least(1, num_stages=num_stages)
    for m in microbatches:
        check_at_least(1, microbatches=m)
    options: dict[str, list[Option]] = {}
    least: dict[str, float] = {}  # bytes that a rank needs, of methods that do not fit
    todo = [(name, m) for name in _methods(strategies, num_stages) for m in microbatches]
    for name, m in progress(todo):
        size = stages_on(num_stages, name)
        flows = method_flows(name, size, m)
        try:
            costs = stage_costs([batch[0] for batch in flows], m)
        except ValueError:
            if name not in SEVERAL_STAGES:
                raise
            continue  # the network has too few pieces for several stages on a rank
        known = min((option.period for option in options.get(name, [])), default=float("inf"))
        placement = make_placement(RULES[name].placement if name in RULES else "contiguous", size, num_stages)
        if resource_bound(flows, costs, placement) / len(flows) > known * (1 + CLOSE):
            continue  # no order with this M can be faster than the known one with another M
        try:
            timed = timed_method(
                name, num_stages=size, num_ranks=num_stages, num_microbatches=m, costs=costs, memory=memory
            )
        except DoesNotFit as error:
            least[name] = min(error.least, least.get(name, error.least))
            continue
        options.setdefault(name, []).append(Option(name, m, timed))
    if not options:
        name, needed = min(least.items(), key=lambda item: item[1])
        raise DoesNotFit(f"{name}, the smallest of all methods", needed, memory or 0.0)
    fastest = [min(group, key=lambda o: (rounded(o.period), o.num_microbatches)) for group in options.values()]
    ranked = sorted(fastest, key=_preference)
    skipped = {name: size for name, size in least.items() if name not in options}
    return Methods(tuple(microbatches), tuple(ranked), skipped)


def _methods(strategies: Sequence[str], num_stages: int) -> list[str]:
    """Return the baselines, the best order of all for end-to-end, and the strategies that are not end-to-end at this depth."""
    rules = [rule for rule in map(parse, strategies) if not same_gradients(rule, EndToEnd(), num_stages)]
    names = ["local" if same_gradients(rule, Local(), num_stages) else rule.name for rule in rules]
    return list(dict.fromkeys([*BASELINES, "end-to-end", *names]))


def same_gradients(rule: Strategy, other: Strategy, num_stages: int) -> bool:
    """Tell whether a strategy computes the same gradients as another one at this number of stages, and none of them late.

    Raises:
        ValueError: the strategy's credit has another size.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # windows longer than the network
        credits = [rule.credit(num_stages, turn) for turn in range(rule.turns)]
    return not is_late(rule) and all(torch.equal(credit, other.credit(num_stages)) for credit in credits)


def is_late(rule: Strategy) -> bool:
    """Tell whether a strategy's gradients may be of an earlier mini-batch."""
    return rule.asynchronous or rule.delay > 0


def _preference(option: Option) -> tuple[float, bool, int]:
    """Return a key that is smallest for the best option: fast, then end-to-end, with little in flight."""
    return (rounded(option.period), not option.end_to_end, max(option.timed.in_flight))
