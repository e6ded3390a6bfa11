"""Verdict: the meaning of a plan, in sentences.

Times are per step. End-to-end needs the fewest steps, so a strategy saves time only if its step is shorter by more than the
factor by which it needs more steps. Only an experiment can measure that factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nwise.schedule.plan import Option, Plan, ratio

Show = Callable[[float], str]


def verdict(plan: Plan, show: Show = "{:.4g}".format) -> list[str]:
    """Describe the recommended method, its advantage, and the conditions under which the others save time.

    Args:
        plan: result of `nwise.schedule.plan.plan`.
        show: function that formats a time; default: four digits.

    >>> from nwise.schedule import TRANSFORMER
    >>> from nwise.schedule.plan import plan
    >>> result = plan(lambda flows, m: TRANSFORMER.split_in(m), 8, microbatches=(1, 2, 4, 8, 16), strategies=("2-wise",))
    >>> print(verdict(result)[0])
    Use zero-bubble with M = 16: 4.46 a step. No strategy between local and end-to-end has a shorter one.
    """
    baseline, own, chosen = plan.baseline, plan.own_baseline, plan.recommended
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
    if own is not baseline:
        best_own = "runs none here" if own is None else f"runs at best {_named(own)}, {show(own.period)} a step"
        lines.append(
            f"{baseline.method} keeps every layer's cotangent between I and W, which nwise's own stages do not do: of "
            f"end-to-end pipelines nwise {best_own}."
        )
    largest = max(plan.microbatches)
    lines += [
        f"M = {largest} is the largest M that was tried for {option.method}; a larger one may be faster."
        for option in dict.fromkeys((chosen, baseline))
        if option.num_microbatches == largest > 1
    ]
    return lines + [_worth(plan, option) for option in plan.options if not option.end_to_end and option.runs]


def _worth(plan: Plan, option: Option) -> str:
    """Compare a strategy with the best end-to-end pipeline, and with the best one that nwise runs itself."""
    baselines = [r for r in dict.fromkeys((plan.baseline, plan.own_baseline)) if r is not None]
    compared = ", ".join(f"{_faster(ratio(r.period, option.period))} {r.method}" for r in baselines)
    worth = [
        f"against {r.method} if it reaches your quality in fewer than {ratio(r.period, option.period):.2f} times the steps"
        for r in baselines
        if ratio(r.period, option.period) >= 1.005
    ]
    return f"{option.name}: a step is {compared}; " + (
        f"worth it {', '.join(worth)}." if worth else "not worth its time here."
    )


def _faster(speed: float) -> str:
    """Describe how a step compares, given the other's time over its own."""
    percent = 100 * (max(speed, 1 / speed) - 1) if speed else math.inf
    if percent < 0.5:
        return "as long as that of"
    return f"{percent:.0f} % {'faster' if speed > 1 else 'slower'} than"


def _named(option: Option) -> str:
    return f"{option.method} with M = {option.num_microbatches}"
