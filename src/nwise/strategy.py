"""Strategies: relaxed in order (Hogwild), changing over time (Switch), and named by a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from nwise.credit import (
    Blocks,
    Credit,
    DeepSupervision,
    EndToEnd,
    Geometric,
    Local,
    NWise,
    Rotating,
    Strategy,
)
from nwise.hint import hint


@dataclass(frozen=True)
class Hogwild(Strategy):
    """Greedy asynchronous updates (section 3): each is applied the moment its gradient arrives.

    The loop stays an ordinary one, `Pipeline.step` and then the optimizer's; but the gradients that `step`
    gives are stale: stage ``k`` computed them with parameters that have been updated since,
    `nwise.staleness` times. With end-to-end credit that is ``A - 1 - k`` times.

    Args:
        base: the credit that is relaxed; a strategy or its name.
    """

    base: Strategy = field(default_factory=EndToEnd)

    def _check(self) -> None:
        object.__setattr__(self, "base", strategy(self.base))
        if self.base.heads == "all":
            object.__setattr__(self, "heads", "all")
        if isinstance(self.base, Hogwild | Switch):
            raise ValueError(
                f"`base` should be a strategy of one credit matrix or a cycle of them. Found {self.base.name!r}; "
                "put `Hogwild` inside `Switch` instead."
            )

    @property
    def name(self) -> str:
        return "hogwild" if self.base == EndToEnd() else f"{self.base.name}-hogwild"

    @property
    def turns(self) -> int:
        return self.base.turns

    def turn(self, step: int, microbatch: int) -> int:
        return self.base.turn(step, microbatch)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return self.base.credit(num_stages, turn)

    def caution(self, num_stages: int) -> str | None:
        return self.base.caution(num_stages)

    @property
    def asynchronous(self) -> bool:
        return True


@dataclass(frozen=True)
class Switch(Strategy):
    """One strategy up to a step, another one from there on (the paper's fine-tuning, section 4.2).

    The paper also discards the heads, resets the optimizer and sets the rate at that moment; the
    optimizer belongs to the caller, so the trainer does it (`nwise.training.Trainer`), and so should
    a loop of one's own, together with `Pipeline.discard_heads`.

    Args:
        at: first step, counted from 0, of the second strategy.
        before: the first strategy or its name, by default local.
        after: the second strategy or its name, by default end-to-end.

    >>> Switch(10).in_force(9).name, Switch(10).in_force(10).name
    ('local', 'end-to-end')
    """

    at: int
    before: Strategy = field(default_factory=Local)
    after: Strategy = field(default_factory=EndToEnd)

    def _check(self) -> None:
        object.__setattr__(self, "before", strategy(self.before))
        object.__setattr__(self, "after", strategy(self.after))
        if isinstance(self.at, bool) or not isinstance(self.at, int) or self.at < 1:
            raise ValueError(
                f"`at`, the first step of the second strategy, should be at least 1. Found `at = {self.at}`."
            )
        if isinstance(self.before, Switch):
            raise ValueError("`before` should not be a `Switch`. Nest a second switch in `after`, with a later step.")
        if isinstance(self.after, Switch) and self.after.at <= self.at:
            raise ValueError(f"A second switch should come after the first at {self.at}. Found `at = {self.after.at}`.")

    @property
    def name(self) -> str:
        return f"{self.before.name}@{self.at},{self.after.name}"

    @property
    def turns(self) -> int:
        return self.before.turns

    def in_force(self, step: int) -> Strategy:
        inner = self.before if step < self.at else self.after.in_force(step)
        return replace(inner, heads="all") if self.heads == "all" else inner

    def next_switch(self, step: int) -> int | None:
        return self.at if step < self.at else self.after.next_switch(step)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return self.before.credit(num_stages, turn)


def _rows(text: str) -> list[list[float]]:
    """``"1,0;0.5,1"`` as rows of numbers."""
    try:
        return [[float(value) for value in row.split(",")] for row in text.split(";")]
    except ValueError as error:
        raise ValueError(f"`credit-` should be followed by rows like 1,0;0.5,1. Found {text!r}.") from error


_NAMES: dict[str, Callable[..., Strategy]] = {
    r"end-to-end": lambda **options: EndToEnd(**options),
    r"local": lambda **options: Local(**options),
    r"(\d+)-wise": lambda n, **options: NWise(int(n), **options),
    r"(\d+)-wise-mean": lambda n, **options: NWise(int(n), reduce="mean", **options),
    r"deep-supervision": lambda **options: DeepSupervision(**options),
    r"geometric-(\d*\.?\d+(?:e-?\d+)?)": lambda decay, **options: Geometric(float(decay), **options),
    r"blocks-(\d+)": lambda size, **options: Blocks(int(size), **options),
    r"rotating-(\d+)": lambda size, **options: Rotating(int(size), **options),
    r"rotating-(\d+)-microbatch": lambda size, **options: Rotating(int(size), every="microbatch", **options),
    r"credit-(.+)": lambda rows, **options: Credit(_rows(rows), **options),
    r"hogwild": lambda **options: Hogwild(**options),
    r"([^@]+)-hogwild": lambda base, **options: Hogwild(strategy(base), **options),
    r"([^@]+)@(\d+),(.+)": lambda before, at, after, **options: Switch(
        int(at), strategy(before), strategy(after), **options
    ),
}

EXAMPLES = (
    "local, 2-wise, 3-wise-mean, end-to-end, deep-supervision, geometric-0.5, blocks-2, rotating-2, "
    "rotating-2-microbatch, credit-1,0;1,1, hogwild, 2-wise-hogwild, local@500,end-to-end"
)


def strategy(text: str | Strategy, **options: Any) -> Strategy:
    """The strategy that a text names.

    Args:
        text: one of ``local``, ``<n>-wise``, ``<n>-wise-mean``, ``end-to-end``, ``deep-supervision``,
            ``geometric-<decay>``, ``blocks-<size>``, ``rotating-<size>[-microbatch]``,
            ``credit-<row>;<row>...`` (numbers separated by commas), ``hogwild``,
            ``<strategy>-hogwild``, ``<strategy>@<step>,<strategy>`` (a `Switch`); or a `Strategy`.
        options: keyword options of the class, such as ``heads="all"``.

    Raises:
        ValueError: the text names no strategy.

    >>> strategy("2-wise")
    NWise(heads='live', n=2, reduce='last')
    >>> strategy("local@500,end-to-end").name
    'local@500,end-to-end'
    """
    if isinstance(text, Strategy):
        return replace(text, **options) if options else text
    if not isinstance(text, str):
        raise TypeError(
            "`strategy` should be a text or a `nwise.Strategy`, such as `nwise.Credit(matrix)`. "
            f"Found {type(text).__name__}."
        )
    for pattern, build in _NAMES.items():
        match = re.fullmatch(pattern, text)
        if match:
            return build(*match.groups(), **options)
    raise ValueError(f"`strategy` should be one like {EXAMPLES}. Found {text!r}.{hint(text, EXAMPLES.split(', '))}")
