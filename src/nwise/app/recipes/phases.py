"""Strategies that follow each other in a run, such as "local@500,end-to-end", the paper's fine-tuning (section 4.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from nwise.strategies import Heads, Strategy, strategy

Phases = tuple[tuple[int, Strategy], ...]


def parse_phases(text: str, steps_per_epoch: int = 1, heads: Heads = "live") -> Phases:
    """Parse strategies, with the steps or epochs after which the next one takes over, into first steps and strategies.

    Args:
        text: names of strategies (see `nwise.strategy`) with ``@500,`` or ``@3epochs,`` between them.
        steps_per_epoch: number of steps of an epoch.
        heads: the heads that every strategy runs.

    Raises:
        ValueError: a strategy is unknown, or the steps do not rise from at least 1.
        TypeError: the argument is no text.

    >>> [(first, rule.name) for first, rule in parse_phases("local@500,2-wise@3epochs,end-to-end", 200)]
    [(0, 'local'), (500, '2-wise'), (600, 'end-to-end')]
    """
    if not isinstance(text, str):
        raise TypeError(f"`strategy` should be a text. Found {type(text).__name__}.")
    names, times = (re.split(r"@([^@,]*),", text)[i::2] for i in (0, 1))
    firsts = [0, *(_step(time, steps_per_epoch, text) for time in times)]
    if any(before >= after for before, after in pairwise(firsts)):
        raise ValueError(
            f"`strategy` should change at steps that rise, from at least 1. Found {text!r}, which changes at "
            f"{', '.join(map(str, firsts[1:]))}."
        )
    return tuple((first, strategy(name, heads=heads)) for first, name in zip(firsts, names, strict=True))


def joined(phases: Phases) -> str:
    """Return the name that `parse_phases` parses back into these phases, apart from their heads."""
    return phases[0][1].name + "".join(f"@{first},{rule.name}" for first, rule in phases[1:])


def in_force(phases: Phases, step: int) -> Strategy:
    """Return the strategy that makes a step; before step 0, the first."""
    return [rule for first, rule in phases if first <= max(0, step)][-1]


def spans(phases: Phases, stop: int) -> Iterator[tuple[range, Strategy]]:
    """Iterate over the steps of every phase that begins before a step, and its strategy."""
    ends = [first for first, _ in phases[1:]] + [stop]
    for (first, rule), end in zip(phases, ends, strict=True):
        if first < stop:
            yield range(first, min(end, stop)), rule


def _step(time: str, steps_per_epoch: int, text: str) -> int:
    """Return the step after a number of steps, or of epochs."""
    try:
        if not time.endswith("epochs"):
            return int(time)
        if (epochs := float(time.removesuffix("epochs"))) > 0:
            return max(1, round(epochs * steps_per_epoch))
    except (ValueError, OverflowError):
        pass
    raise ValueError(
        f"`strategy` should give a number of steps or a number of epochs above 0 after '@', as in 'local@500,end-to-end' or "
        f"'local@3epochs,end-to-end'. Found {text!r}."
    )
