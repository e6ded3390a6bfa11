"""Plans compared: every strategy and pipeline at its best cut and number of micro-batches, in one table with a verdict.

Times are per step. End-to-end needs the fewest steps, so a strategy saves time only if its step is shorter by more than the
factor by which it needs more steps. Only an experiment can measure that factor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwise.planning.devices import Device, limits
from nwise.planning.plan import ALONE, Plan
from nwise.planning.source import Source
from nwise.program.summary import table
from nwise.schedule.find import DoesNotFit
from nwise.schedule.named import BASELINES, SEVERAL_STAGES
from nwise.strategies import EndToEnd, Local, Strategy

__all__ = ["STRATEGIES", "Plans", "compare", "is_late", "ratio", "same_gradients"]

STRATEGIES = ("local", "2-wise", "3-wise", "4-wise", "rotating-2-microbatch", "end-to-end-delay-1")

_LEGEND = """* shortest step of those neither local nor late; speed: step of the best end-to-end method divided by this one's
bound: distance from the shortest possible step; held: micro-batches in flight on a stage"""


@dataclass(frozen=True)
class Plans:
    """The plans of several methods for the same devices. Printing it shows a table, the recommended cut and a verdict.

    Args:
        plans: a plan of every method, the fastest first.
        microbatches: numbers of micro-batches that were tried.
        skipped: methods that do not fit the memory, with the bytes that a device needs.
        devices: the devices.
        num_stages: number of stages.
        notes: sentences about what was left out.
    """

    plans: tuple[Plan, ...]
    microbatches: tuple[int, ...]
    skipped: dict[str, float]
    devices: tuple[Device, ...]
    num_stages: int
    notes: tuple[str, ...] = ()

    def __getitem__(self, method: str) -> Plan:
        """Return the plan of a method, by name."""
        return {plan.strategy: plan for plan in self.plans}[method]

    @property
    def baseline(self) -> Plan | None:
        """The fastest end-to-end method; of equal ones the one with fewer micro-batches in flight; None if none fits."""
        return min((plan for plan in self.plans if plan.end_to_end), key=lambda plan: plan.preference, default=None)

    @property
    def recommended(self) -> Plan:
        """The method with the fastest step among end-to-end ones and strategies whose gradients cross boundaries.

        End-to-end needs the fewest steps, so it is recommended unless it is slower. Local training and late gradients count only
        if nothing else fits the memory: their steps are nearly always the fastest, at a cost in quality.
        """
        crossing = [plan for plan in self.plans if plan.comparable]
        return min(crossing or self.plans, key=lambda plan: plan.preference)

    def speedup(self, plan: Plan) -> float:
        """Return the time of the fastest end-to-end method over that of a plan; nan without such a method."""
        return math.nan if self.baseline is None else ratio(self.baseline.seconds, plan.seconds)

    @property
    def verdict(self) -> list[str]:
        """The recommended method, its advantage, and the conditions under which the others save time, in sentences."""
        baseline = self.baseline
        chosen = self.recommended
        if baseline is None:
            return [
                f"No end-to-end method fits the memory; of those that fit, {_named(chosen)} is the fastest.",
                *self.notes,
            ]
        if chosen.end_to_end:
            lines = [
                f"Use {_named(chosen)}: {chosen.show(chosen.seconds)} a step. No strategy between local and end-to-end has a "
                "shorter one."
            ]
        else:
            lines = [
                f"{_named(chosen)} has the shortest step between local and end-to-end, {chosen.show(chosen.seconds)}: "
                f"{_faster(ratio(baseline.seconds, chosen.seconds))} the best end-to-end method, {_named(baseline)} "
                f"({chosen.show(baseline.seconds)})."
            ]
        largest = max(self.microbatches)
        lines += [
            f"M = {largest} is the largest M that was tried for {plan.strategy}; a larger one may be faster."
            for plan in ([chosen] if chosen is baseline else [chosen, baseline])
            if plan.num_microbatches == largest > 1
        ]
        worth = [self._worth(plan, baseline) for plan in self.plans if not plan.end_to_end]
        return [*lines, *worth, *self.notes]

    def _worth(self, plan: Plan, baseline: Plan) -> str:
        speed = ratio(baseline.seconds, plan.seconds)
        worth = f"worth it if it reaches your quality in fewer than {speed:.2f} times the steps"
        return (
            f"{plan.strategy}: a step is {_faster(speed)} {baseline.strategy}; "
            f"{worth if speed >= 1.005 else 'not worth its time here'}."
        )

    def __str__(self) -> str:
        several = "s" if len(self.devices) > 1 else ""
        chosen = self.recommended
        # Costs that were given have sizes if a limit asked for them.
        sizes = limits(self.devices) is not None or self.plans[0].measured is not None
        rows = [
            ["method", "M", "time" if chosen.measured is None else "ms", "speed", "bound", "held", *(["MiB"] * sizes)]
        ]
        for plan in self.plans:
            over = ratio(plan.seconds, plan.schedule.lower_bound) - 1
            speed = self.speedup(plan)
            row = [
                f"{'*' if plan is chosen else ' '} {plan.strategy}",
                str(plan.num_microbatches),
                f"{plan.seconds * (1 if plan.measured is None else 1e3):.4g}",
                "–" if math.isnan(speed) else f"{speed:.2f}",
                "optimal" if over < 1e-9 else f"+{100 * over:.1f}%",
                str(max(plan.schedule.in_flight)),
            ]
            rows.append([*row, f"{max(plan.schedule.peak_bytes) / 2**20:,.4g}"] if sizes else row)
        width = max(len(row[0]) for row in rows)
        lines = [f"{len(self.devices)} device{several}, each method at its best M"]
        lines += table([[row[0].ljust(width), *row[1:]] for row in rows])
        lines.append(_LEGEND)
        if self.skipped:
            names = ", ".join(f"{name} ({size / 2**20:,.4g} MiB)" for name, size in self.skipped.items())
            lines.append(f"Too large at any M: {names}.")
        if chosen.measured is not None:
            noise = "one round, so the noise is unknown"
            if not math.isnan(spread := chosen.measured.spread):
                noise = f"rounds differ by {100 * spread:.1f} %, and smaller differences mean nothing"
            lines.append(
                f"Measured on {chosen.measured.device}, mini-batches of {chosen.measured.batch_size}; {noise}."
            )
        if chosen.measured is not None or len(set(self.devices)) > 1:
            lines += ["", str(chosen), ""]
        return "\n".join([*lines, *(f"- {line}" for line in self.verdict)])

    def as_json(self) -> dict[str, Any]:
        """Return the plans as plain values."""
        return {
            "devices": len(self.devices),
            "recommended": self.recommended.strategy,
            "options": [{**plan.as_json(), "speedup": self.speedup(plan)} for plan in self.plans],
            "too_large": self.skipped,
            "verdict": self.verdict,
        }


def compare(
    source: Source, rules: Sequence[Strategy], num_stages: int, progress: Callable[[list[Any]], Iterable[Any]] = iter
) -> Plans:
    """Plan strategies, all pipelines of `nwise.schedule.BASELINES`, and one device alone.

    Args:
        source: what the plans are made from.
        rules: the strategies; those that are end-to-end at this depth are left out, and a note says so.
        num_stages: number of stages of a strategy, at least one for each device.
        progress: wraps the list of methods, for a progress bar; default: none.

    Raises:
        ValueError: the network has too few pieces.
        DoesNotFit: no method fits the memory; a ValueError too.
    """
    devices = source.devices
    same = [rule.name for rule in rules if same_gradients(rule, EndToEnd(), num_stages)]
    kept = [rule for rule in rules if rule.name not in same]
    methods: dict[str, Strategy | str] = {name: name for name in BASELINES} | {"end-to-end": EndToEnd()}
    methods |= {"local" if same_gradients(rule, Local(), num_stages) else rule.name: rule for rule in kept}
    todo = [(name, method, devices) for name, method in methods.items() if num_stages > 1]
    todo += [(ALONE, EndToEnd(), (device,)) for device in sorted(set(devices), key=lambda one: -one.speed)]
    plans: dict[str, Plan] = {}
    failures: dict[str, DoesNotFit] = {}
    for name, method, used in progress(todo):
        size = 1 if name == ALONE else num_stages if name not in SEVERAL_STAGES else 2 * len(devices)
        network = source.pieces(num_stages if name == ALONE else size)
        if name in plans or (name in SEVERAL_STAGES and min(map(len, network.values())) < size):
            continue  # alone, the fastest device that fits counts
        try:
            plans[name] = source.plan(name, method, network, size, used)
        except DoesNotFit as error:
            failures[name] = error
    if not plans:
        name, least = min(failures.items(), key=lambda item: item[1].least / item[1].memory)
        raise DoesNotFit(f"{name}, the smallest of all methods", least.least, least.memory)
    others = [name for name in dict.fromkeys(same) if name != "end-to-end"]
    verb = "are" if len(others) > 1 else "is"
    notes = [f"With {num_stages} stages {' and '.join(others)} {verb} end-to-end."] if others and num_stages > 1 else []
    return Plans(
        tuple(sorted(plans.values(), key=lambda plan: plan.preference)),
        tuple(sorted(network)),
        {name: error.least for name, error in failures.items() if name not in plans},
        devices,
        num_stages,
        tuple(notes),
    )


def ratio(time: float, other: float) -> float:
    """Return the ratio of two times; 1 if both are 0."""
    return time / other if other else 1.0 if not time else math.inf


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


def _faster(speed: float) -> str:
    """Describe how a step compares, given the other's time over its own."""
    factor = max(speed, 1 / speed) if speed else math.inf
    if factor < 1.005:
        return "as long as that of"
    if factor >= 2:
        return f"{factor:.2f} times as {'fast' if speed > 1 else 'slow'} as"
    return f"{100 * (factor - 1):.0f} % {'faster' if speed > 1 else 'slower'} than"


def _named(plan: Plan) -> str:
    return f"{plan.strategy} with M = {plan.num_microbatches}"
