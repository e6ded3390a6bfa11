"""Plan: which strategy and how many micro-batches are fastest, against the best end-to-end pipelines.

A W that follows an I of the same cotangent costs less if the I keeps the cotangent of every layer, as zero-bubble
pipelines do; nwise's own stages walk the chain again. Where that makes a method slower, it is listed in both prices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nwise.flow import Flow, flows_for
from nwise.schedule.baselines import BASELINES, timed_method
from nwise.schedule.best import DoesNotFit
from nwise.schedule.bounds import resource_bound
from nwise.schedule.costs import Chains, Costs, check_counts
from nwise.schedule.timed import CLOSE, Timed, check_memory, rounded
from nwise.strategies import EndToEnd, Local, Strategy, Switch
from nwise.strategies import strategy as strategy_of

STRATEGIES = ("local", "2-wise", "3-wise", "4-wise", "5-wise")
# Flows of a method, and M, to the costs of one micro-batch.
CostsOf = Callable[[Sequence[Flow], int], Costs]


@dataclass(frozen=True)
class Option:
    """A method at a number of micro-batches.

    Args:
        name: a strategy's or a baseline's.
        num_microbatches: M.
        timed: its schedule.
        walked: whether it is slower because chains are walked again.
    """

    name: str
    num_microbatches: int
    timed: Timed
    walked: bool = False

    @property
    def method(self) -> str:
        """Its name, with how it is priced if that matters."""
        return self.name + (" (walked)" if self.walked else "")

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
        """Whether its gradients cross borders and are not stale, so that steps may be compared with end-to-end's."""
        return self.name != "local" and (self.end_to_end or not strategy_of(self.name).asynchronous)

    @property
    def runs(self) -> bool:
        """Whether nwise's own stages can run it at this price."""
        return not self.timed.stores_cotangents

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "method": self.method,
            "microbatches": self.num_microbatches,
            "period": self.period,
            "lower_bound": self.timed.lower_bound,
            "order": self.timed.order,
            "in_flight": list(self.timed.in_flight),
            "peak_bytes": list(self.timed.peak_bytes),
            "end_to_end": self.end_to_end,
            "nwise_runs_it": self.runs,
        }


@dataclass(frozen=True)
class Plan:
    """What was found.

    Args:
        num_stages: A.
        microbatches: numbers M that were tried.
        options: every method at its best M, the fastest first.
        skipped: methods that do not fit the memory at any M, with the bytes a stage that they would need.
    """

    num_stages: int
    microbatches: tuple[int, ...]
    options: tuple[Option, ...]
    skipped: dict[str, float]

    @property
    def baseline(self) -> Option | None:
        """The fastest end-to-end pipeline; of equal ones one that nwise runs, with the fewest micro-batches in flight."""
        return min((option for option in self.options if option.end_to_end), key=_preference, default=None)

    @property
    def own_baseline(self) -> Option | None:
        """The fastest end-to-end pipeline that nwise runs."""
        return min(
            (option for option in self.options if option.end_to_end and option.runs), key=_preference, default=None
        )

    @property
    def recommended(self) -> Option:
        """The fastest step among end-to-end pipelines and strategies whose gradients cross borders.

        End-to-end needs the fewest steps, so it is recommended wherever it is not slower; strategies only at the price at
        which nwise runs them. Local training and Hogwild are left out: their steps are nearly always the fastest, and
        whether their quality is enough is not a question of time.
        """
        crossing = [option for option in self.options if option.end_to_end or (option.runs and option.comparable)]
        return min(crossing or self.options, key=_preference)

    def speedup(self, option: Option) -> float:
        """Time of the fastest end-to-end pipeline over the option's; nan if there is none."""
        return float("nan") if self.baseline is None else ratio(self.baseline.period, option.period)


def ratio(time: float, other: float) -> float:
    """How many times as long; 1 for two that take no time."""
    return time / other if other else 1.0 if not time else float("inf")


def plan(
    costs_of: CostsOf,
    num_stages: int,
    *,
    microbatches: Sequence[int],
    strategies: Sequence[str] = STRATEGIES,
    memory: float | None = None,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Plan:
    """Try every method at every number of micro-batches.

    Args:
        costs_of: the costs of one micro-batch, given a method's flows (for its heads and its cut) and M.
        num_stages: A.
        microbatches: numbers M to try.
        strategies: names; windows of all stages and more are end-to-end and left out.
        memory: bytes that every stage may use at most; default: any.
        progress: wraps the list of things to try.

    Raises:
        DoesNotFit: nothing fits the memory; a ValueError too.

    >>> costs = Costs(1, 0.5, 1, 1, overhead=0.02)
    >>> found = plan(lambda flows, m: costs.split_in(m), 8, microbatches=(1, 2, 4, 8, 16))
    >>> found.recommended.method, found.recommended.num_microbatches
    ('zero-bubble', 16)
    """
    if not microbatches:
        raise ValueError("`microbatches` should hold at least one number to try. Found none.")
    check_counts(num_stages=num_stages)
    check_memory(memory)
    found: dict[tuple[str, Chains], list[Option]] = {}
    least: dict[str, float] = {}
    todo = [(name, chains, m) for name, chains in _methods(strategies, num_stages) for m in microbatches]
    for name, chains, m in progress(todo):
        flows = flows_for(EndToEnd() if name in BASELINES else strategy_of(name), num_stages, m)
        costs = costs_of([batch[0] for batch in flows], m)
        known = min((option.period for option in found.get((name, chains), [])), default=float("inf"))
        if resource_bound(flows, costs) / len(flows) > known * (1 + CLOSE):
            continue  # whatever the order, it is not faster than the same with another M
        timed = _time(name, num_stages=num_stages, num_microbatches=m, costs=costs, chains=chains, memory=memory)
        if isinstance(timed, DoesNotFit):
            least[name] = min(timed.least, least.get(name, timed.least))
        else:
            found.setdefault((name, chains), []).append(Option(name, m, timed))
    if not found:
        name, needed = min(least.items(), key=lambda item: item[1])
        raise DoesNotFit(f"{name}, the smallest of all methods,", needed, memory or 0.0)
    fastest = {
        key: min(options, key=lambda o: (rounded(o.period), o.num_microbatches)) for key, options in found.items()
    }
    ranked = sorted(_told_apart(fastest), key=_preference)
    skipped = {name: size for name, size in least.items() if not any(option.name == name for option in ranked)}
    return Plan(num_stages, tuple(microbatches), tuple(ranked), skipped)


def _methods(strategies: Sequence[str], num_stages: int) -> list[tuple[str, Chains]]:
    """Rivals, nwise's own end-to-end, and strategies that are not end-to-end at this depth, in both prices."""
    methods: list[tuple[str, Chains]] = [(name, "stored") for name in BASELINES]
    methods += [("zero-bubble", "walked"), ("end-to-end", "walked")]
    for rule in dict.fromkeys(map(strategy_of, strategies)):
        if not _computes(rule, EndToEnd(), num_stages):
            local = _computes(rule, Local(), num_stages)
            methods += [("local", "walked")] if local else [(rule.name, "stored"), (rule.name, "walked")]
    return list(dict.fromkeys(methods))


def _computes(rule: Strategy, other: Strategy, num_stages: int) -> bool:
    """Whether two strategies are the same at this number of stages."""
    if isinstance(rule, Switch):
        raise ValueError(
            f"`strategies` should each hold at every step. Found {rule.name!r}, which switches; give its parts, one by one."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of windows longer than the network
        credits = [rule.credit(num_stages, turn) for turn in range(rule.turns)]
    return not rule.asynchronous and all(torch.equal(credit, other.credit(num_stages)) for credit in credits)


def _told_apart(fastest: dict[tuple[str, Chains], Option]) -> Iterator[Option]:
    """In one price what nwise runs as fast as anybody could, in both what it does not."""
    for (name, chains), option in fastest.items():
        other = fastest.get((name, "walked" if chains == "stored" else "stored"))
        if other is None:
            yield option
        elif chains == "walked":
            yield replace(option, walked=rounded(option.period) > rounded(other.period))
        elif rounded(option.period) < rounded(other.period):
            yield option


def _preference(option: Option) -> tuple[float, bool, bool, int]:
    """The smallest is the best: the fastest; then end-to-end, what nwise runs, and little in flight."""
    return (rounded(option.period), not option.end_to_end, not option.runs, max(option.timed.in_flight))


def _time(name: str, **options: Any) -> Timed | DoesNotFit:
    try:
        return timed_method(name, **options)
    except DoesNotFit as error:
        return error
