"""Plan: which strategy and how many micro-batches are fastest, against the best end-to-end pipelines.

A W that follows an I of the same cotangent costs less if the I keeps the cotangent of every layer, as zero-bubble
pipelines do; nwise's own stages walk the chain again. Where that makes a method slower, it is listed in both prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nwise.credit import EndToEnd, Local, NWise, Strategy
from nwise.flow import Flow
from nwise.schedule.best import DoesNotFit, Timed, best, flows_of
from nwise.schedule.bounds import resource_bound
from nwise.schedule.costs import Chains, Costs
from nwise.schedule.rivals import RIVALS, rival
from nwise.strategy import strategy as strategy_of

STRATEGIES = ("local", "2-wise", "3-wise", "4-wise", "5-wise")
# Flows of a method, and M, to the costs of one micro-batch.
CostsOf = Callable[[Sequence[Flow], int], Costs]


@dataclass(frozen=True)
class Option:
    """A method at a number of micro-batches.

    Args:
        name: a strategy's or a rival's.
        num_microbatches: M.
        timed: its schedule.
        again: whether it is slower because chains are walked again.
    """

    name: str
    num_microbatches: int
    timed: Timed
    again: bool = False

    @property
    def method(self) -> str:
        """Its name, with how it is priced if that matters."""
        return self.name + (" (walked)" if self.again else "")

    @property
    def period(self) -> float:
        """Time per mini-batch."""
        return self.timed.period

    @property
    def end_to_end(self) -> bool:
        """Whether it computes the gradients of ordinary training."""
        return self.name in RIVALS or strategy_of(self.name) == EndToEnd()

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
        options: every method at its best M, the fastest first.
        skipped: methods that do not fit the memory at any M, with the bytes a stage that they would need.
    """

    num_stages: int
    options: tuple[Option, ...]
    skipped: dict[str, float]

    @property
    def rival(self) -> Option | None:
        """The fastest end-to-end pipeline."""
        return next((option for option in self.options if option.end_to_end), None)

    @property
    def recommended(self) -> Option:
        """The fastest step among end-to-end pipelines and strategies whose gradients cross borders.

        End-to-end needs the fewest steps, so it is recommended wherever it is not slower; strategies only at the price at
        which nwise runs them. Local training is left out: its step is nearly always the fastest, and whether its
        quality is enough is not a question of time.
        """
        crossing = [option for option in self.options if option.end_to_end or (option.runs and option.name != "local")]
        return min(crossing or self.options, key=lambda option: (_rounded(option), not option.end_to_end))

    def speedup(self, option: Option) -> float:
        """Time of the fastest end-to-end pipeline over the option's; nan if there is none."""
        return float("nan") if self.rival is None else self.rival.period / option.period

    def verdict(self, show: Callable[[float], str] = "{:.4g}".format) -> list[str]:
        """Who wins, by how much, and what has to be true for the others to be worth it; sentences.

        Args:
            show: a time as text.
        """
        rival, chosen = self.rival, self.recommended
        if rival is None:
            return [f"No end-to-end pipeline fits the memory; of what does, {_named(chosen)} is the fastest."]
        if chosen.end_to_end:
            lines = [
                f"Use {_named(chosen)}: no strategy with a window has a shorter step, and end-to-end needs the fewest."
            ]
        else:
            lines = [
                f"{_named(chosen)} has the shortest step, {_percent(self.speedup(chosen))} faster than the best "
                f"end-to-end pipeline, {_named(rival)}."
            ]
        if not rival.runs:
            own = next((o for o in self.options if o.end_to_end and o.runs), None)
            lines.append(
                f"{rival.method} needs every layer's cotangent stored between I and W, which nwise's own stages do not do"
                + (
                    f"; the fastest end-to-end pipeline that nwise runs is {_named(own)}, {show(own.period)} a step."
                    if own
                    else "."
                )
            )
        for option in self.options:
            if not option.end_to_end and option.runs:
                lines.append(self._worth(option))
        return lines

    def _worth(self, option: Option) -> str:
        speedup = self.speedup(option)
        if speedup <= 1:
            return f"{option.name} is not worth its time here: its step is {_percent(1 / speedup)} slower than end-to-end's."
        return (
            f"{option.name} is worth it if it reaches your quality in fewer than {speedup:.2f} times the steps that "
            "end-to-end needs."
        )


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
    found: dict[tuple[str, Chains], list[Option]] = {}
    least: dict[str, float] = {}
    todo = [(name, chains, m) for name, chains in _methods(strategies, num_stages) for m in microbatches]
    for name, chains, m in progress(todo):
        known = min((option.period for option in found.get((name, chains), [])), default=float("inf"))
        if _at_least(name, m, costs_of, num_stages) >= known:
            continue  # whatever the order, it is not faster than the same with another M
        timed = _time(name, chains, m, costs_of, num_stages, memory)
        if isinstance(timed, DoesNotFit):
            least[name] = min(timed.least, least.get(name, timed.least))
        else:
            found.setdefault((name, chains), []).append(Option(name, m, timed))
    if not found:
        name, needed = min(least.items(), key=lambda item: item[1])
        raise DoesNotFit(f"{name}, the smallest of all methods,", needed, memory or 0.0)
    fastest = {key: min(options, key=lambda o: (_rounded(o), o.num_microbatches)) for key, options in found.items()}
    ranked = sorted(_told_apart(fastest), key=lambda o: (_rounded(o), not o.end_to_end))
    return Plan(
        num_stages, tuple(ranked), {name: least[name] for name in least if not any(o.name == name for o in ranked)}
    )


def _methods(strategies: Sequence[str], num_stages: int) -> list[tuple[str, Chains]]:
    """Rivals, nwise's own end-to-end, and strategies that are not end-to-end at this depth, in both prices."""
    methods: list[tuple[str, Chains]] = [(name, "stored") for name in RIVALS]
    methods += [("zero-bubble", "walked"), ("end-to-end", "walked")]
    for name in dict.fromkeys(strategies):
        rule = strategy_of(name)
        if rule in (NWise(1), Local()):
            methods.append(("local", "walked"))
        elif rule != EndToEnd() and not (isinstance(rule, NWise) and rule.n >= num_stages):
            methods += [(name, "stored"), (name, "walked")]
    return methods


def _told_apart(fastest: dict[tuple[str, Chains], Option]) -> Iterator[Option]:
    """In one price what nwise runs as fast as anybody could, in both what it does not."""
    for (name, chains), option in fastest.items():
        other = fastest.get((name, "walked" if chains == "stored" else "stored"))
        if other is None:
            yield option
        elif chains == "walked":
            yield replace(option, again=_rounded(option) > _rounded(other))
        elif _rounded(option) < _rounded(other):
            yield option


def _rounded(option: Option) -> float:
    """The period without what is rounding."""
    return float(f"{option.period:.9e}")


def _at_least(name: str, m: int, costs_of: CostsOf, num_stages: int) -> float:
    """Time per mini-batch of the busiest stage."""
    flows = flows_of(_strategy(name), num_stages, m)
    return resource_bound(flows, costs_of([batch[0] for batch in flows], m)) / len(flows)


def _strategy(name: str) -> Strategy:
    return EndToEnd() if name in RIVALS else strategy_of(name)


def _time(
    name: str, chains: Chains, m: int, costs_of: CostsOf, num_stages: int, memory: float | None
) -> Timed | DoesNotFit:
    rule = _strategy(name)
    costs = costs_of([batch[0] for batch in flows_of(rule, num_stages, m)], m)
    if name in RIVALS:
        found = rival(name, num_stages=num_stages, num_microbatches=m, costs=costs, chains=chains)
        needed = max(found.peak_bytes)
        return found if memory is None or needed <= memory else DoesNotFit(name, needed, memory)
    try:
        return best(rule, num_stages=num_stages, num_microbatches=m, costs=costs, chains=chains, memory=memory)
    except DoesNotFit as error:
        return error


def _named(option: Option) -> str:
    return f"{option.method} with M = {option.num_microbatches}"


def _percent(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return f"{percent:.0f} %" if percent >= 2 else f"{percent:.1f} %"
