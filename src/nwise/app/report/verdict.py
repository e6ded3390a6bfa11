"""Verdict: the meaning of a plan, in sentences.

Times are per step. End-to-end needs the fewest steps, so a strategy saves time only if its step is shorter by more than the
factor by which it needs more steps. Only an experiment can measure that factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nwise.schedule.methods import Methods, Option, ratio

Show = Callable[[float], str]


def verdict(methods: Methods, show: Show = "{:.4g}".format) -> list[str]:
    """Describe the recommended method, its advantage, and the conditions under which the others save time.

    Args:
        methods: result of `nwise.schedule.methods.time_methods`.
        show: function that formats a time; default: four digits.

    >>> from nwise.schedule import TRANSFORMER
    >>> from nwise.schedule.methods import time_methods
    >>> result = time_methods(lambda flows, m: TRANSFORMER.split_in(m), 8, microbatches=(1, 2, 4, 8, 16), strategies=("2-wise",))
    >>> print(verdict(result)[0])
    Use zero-bubble with M = 16: 4.46 a step. No strategy between local and end-to-end has a shorter one.
    """
    baseline, chosen = methods.baseline, methods.recommended
    if baseline is None:
        return [f"No end-to-end pipeline fits the memory; of the methods that fit, {_named(chosen)} is the fastest."]
    if chosen.end_to_end:
        lines = [
            f"Use {_named(chosen)}: {show(chosen.period)} a step. No strategy between local and end-to-end has a shorter one."
        ]
    else:
        lines = [
            f"{_named(chosen)} has the shortest step between local and end-to-end, {show(chosen.period)}: "
            f"{_faster(ratio(baseline.period, chosen.period))} the best end-to-end pipeline, {_named(baseline)} "
            f"({show(baseline.period)})."
        ]
    largest = max(methods.microbatches)
    lines += [
        f"M = {largest} is the largest M that was tried for {option.name}; a larger one may be faster."
        for option in dict.fromkeys((chosen, baseline))
        if option.num_microbatches == largest > 1
    ]
    return lines + [_worth(methods, option) for option in methods.options if not option.end_to_end]


def _worth(methods: Methods, option: Option) -> str:
    """Compare a strategy with the best end-to-end pipeline."""
    assert methods.baseline is not None
    speed, name = ratio(methods.baseline.period, option.period), methods.baseline.name
    worth = f"worth it if it reaches your quality in fewer than {speed:.2f} times the steps"
    return (
        f"{option.name}: a step is {_faster(speed)} {name}; {worth if speed >= 1.005 else 'not worth its time here'}."
    )


def _faster(speed: float) -> str:
    """Describe how a step compares, given the other's time over its own."""
    factor = max(speed, 1 / speed) if speed else math.inf
    if factor < 1.005:
        return "as long as that of"
    if factor >= 2:
        return f"{factor:.2f} times as {'fast' if speed > 1 else 'slow'} as"
    return f"{100 * (factor - 1):.0f} % {'faster' if speed > 1 else 'slower'} than"


def _named(option: Option) -> str:
    return f"{option.name} with M = {option.num_microbatches}"
