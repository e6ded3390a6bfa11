"""Which loss trains which stage: the base class of all strategies, and their names."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from nwise._errors import hint

Heads = Literal["live", "all"]


@dataclass(frozen=True)
class Strategy(ABC):
    """A rule that gives every stage its losses.

    Args:
        heads: ``"live"`` runs only the heads whose loss some stage needs; ``"all"`` trains the others
            too, as probes on detached activations, so every depth can be scored.

    Attributes:
        pattern: regular expression of the names that `strategy` parses into this class; empty for none.
        examples: such names, for error messages.
    """

    pattern: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    heads: Heads = field(default="live", kw_only=True)

    def __post_init__(self) -> None:
        if self.heads not in ("live", "all"):
            raise ValueError(f"`heads` should be 'live' or 'all'. Found {self.heads!r}.")
        self._check()

    def _check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse arguments that name no strategy."""

    @property
    def name(self) -> str:
        """The text that `nwise.strategy` parses back into this strategy, options aside; of a custom one, its class."""
        return type(self).__name__

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Strategy:
        """Make the strategy of a name.

        Args:
            match: of the name with `pattern`.
            options: of the class, by keyword.
        """
        del match
        return cls(**options)

    @abstractmethod
    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        """The credit matrix, float64 of shape ``[num_stages, num_stages]``, of one turn of the cycle."""

    @property
    def turns(self) -> int:
        """Length of the cycle of matrices; 1 unless the strategy rotates."""
        return 1

    def turn(self, step: int, microbatch: int) -> int:
        """Which matrix of the cycle holds at a step and micro-batch."""
        del step, microbatch
        return 0

    def in_force(self, step: int) -> Strategy:
        """The strategy in force at a step; another one than this only for `Switch`."""
        del step
        return self

    def next_switch(self, step: int) -> int | None:
        """The first step after `step` at which another strategy is in force."""
        del step
        return None

    def phases(self, first: int = 0, stop: int = sys.maxsize) -> Iterator[tuple[int, int]]:
        """First step, and the one after the last, of each strategy in force from `first` until `stop`."""
        while first < stop:
            switch = self.next_switch(first)
            last = stop if switch is None else min(switch, stop)
            yield first, last
            first = last

    def caution(self, num_stages: int) -> str | None:
        """A warning for whoever uses the strategy with so many stages; None if there is none."""
        del num_stages
        return None

    @property
    def asynchronous(self) -> bool:
        """Whether updates are applied the moment gradients arrive (`Hogwild`)."""
        return False


def strategy(text: str | Strategy, **options: Any) -> Strategy:
    """Parse the name of a strategy.

    Args:
        text: one of ``local``, ``<n>-wise``, ``<n>-wise-mean``, ``end-to-end``, ``deep-supervision``,
            ``geometric-<decay>``, ``blocks-<size>``, ``rotating-<size>[-microbatch]``,
            ``credit-<row>;<row>...`` (numbers separated by commas), ``hogwild``,
            ``<strategy>-hogwild``, ``<strategy>@<step>,<strategy>`` (a `Switch`); what a custom class has as `Strategy.pattern`;
            or a `Strategy`.
        options: keyword options of the class, such as ``heads="all"``.

    Raises:
        ValueError: the text names no strategy.
        TypeError: it is neither a text nor a strategy.

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
    known = list(_with_names(Strategy))  # type: ignore[type-abstract]  # only its subclasses are made
    for kind in known:
        match = re.fullmatch(kind.pattern, text)
        if match:
            return kind.from_match(match, **options)
    examples = [name for kind in known for name in kind.examples]
    raise ValueError(f"`strategy` should be one like {', '.join(examples)}. Found {text!r}.{hint(text, examples)}")


def _with_names(kind: type[Strategy]) -> Iterator[type[Strategy]]:
    """All subclasses that have names, in the order in which they were defined."""
    for child in kind.__subclasses__():
        if child.pattern:
            yield child
        yield from _with_names(child)
