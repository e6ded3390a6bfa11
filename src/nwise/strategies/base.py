"""The base class of all strategies, and the parser of their names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from nwise.checks import hint

__all__ = ["Strategy", "example_names", "strategy"]

Heads = Literal["live", "all"]


@dataclass(frozen=True)
class Strategy(ABC):
    """A rule that assigns losses to stages.

    Args:
        heads: ``"live"`` (default) runs only the heads whose loss a stage needs; ``"all"`` trains the others
            too, as probes on detached activations, so every depth can be scored.

    Attributes:
        pattern: regular expression of the names that `strategy` parses into this class; empty for none.
        examples: names that match the pattern, for error messages.
    """

    pattern: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    heads: Heads = field(default="live", kw_only=True)

    def __post_init__(self) -> None:
        if self.heads not in ("live", "all"):
            raise ValueError(f"`heads` should be 'live' or 'all'. Found {self.heads!r}.")
        self._check()

    def _check(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise ValueError for invalid arguments."""

    @property
    def name(self) -> str:
        """Name that `nwise.strategy` parses back into this strategy, without options; by default the class and its arguments."""
        values = [f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.name != "heads"]
        return type(self).__name__ + (f"({', '.join(values)})" if values else "")

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Strategy:
        """Make the strategy with a name.

        Args:
            match: match of the name with `pattern`.
            options: keyword options of the class.
        """
        return cls(**options)

    @abstractmethod
    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        """Return the credit matrix of one turn of the cycle, float64 of shape ``[num_stages, num_stages]``."""

    @property
    def turns(self) -> int:
        """Length of the cycle of credit matrices; 1 unless the strategy rotates."""
        return 1

    def turn(self, step: int, microbatch: int) -> int:
        """Return the index of the credit matrix in the cycle for a step and micro-batch."""
        return 0

    def caution(self, num_stages: int) -> str | None:
        """Return a warning about the use of the strategy with this number of stages, or None."""
        return None

    @property
    def delay(self) -> int:
        """Number of updates by which all gradients are late (`Delayed`)."""
        return 0

    @property
    def asynchronous(self) -> bool:
        """Whether gradients are as old as if each was applied the moment it arrives (`Hogwild`)."""
        return False

    @property
    def stashes(self) -> bool:
        """Whether late backward passes use copies of the weights of their forward, instead of those in memory."""
        return True


def strategy(text: str | Strategy, **options: Any) -> Strategy:
    """Parse the name of a strategy.

    Args:
        text: a `Strategy`, or a name that matches the `pattern` of a strategy's class; `example_names` lists at
            least one of each. Numbers may differ: ``3-wise``, ``geometric-0.9``.
        options: keyword options of the class, such as ``heads="all"``.

    Raises:
        ValueError: the name is unknown, or has strategies that follow each other; or an option contradicts the base of a late
            strategy.
        TypeError: the argument is neither a text nor a strategy.

    >>> strategy("2-wise")
    NWise(heads='live', n=2, reduce='last')
    """
    if isinstance(text, Strategy):
        made = replace(text, **options) if options else text
        if made.heads != options.get("heads", made.heads):
            raise ValueError(
                f"`heads` of {made.name!r} should be 'all', as its `base` says. Found {options['heads']!r}; give the option to "
                "the base."
            )
        return made
    if not isinstance(text, str):
        raise TypeError(
            "`strategy` should be a text or a `nwise.Strategy`, such as `nwise.Credit(matrix)`. "
            f"Found {type(text).__name__}."
        )
    # The newest class first: the cell of a notebook may have defined it once more, and a delay or Hogwild reads its end of a name
    # before the strategy inside reads the rest.
    for kind in reversed(list(_with_names(Strategy))):  # type: ignore[type-abstract]  # only its subclasses are made
        match = re.fullmatch(kind.pattern, text)
        if match:
            return kind.from_match(match, **options)
    if "@" in text:
        raise ValueError(
            f"`strategy` should be the same at every step. Found {text!r}; pass one of its parts, and set `pipe.strategy` to the "
            "next one between two steps. Recipes and `nwise train` take them all at once."
        )
    examples = example_names()
    numbers = re.findall(r"\d+(?:\.\d+)?", text)
    close = hint(text, [_with_numbers(example, numbers) for example in examples])
    raise ValueError(f"`strategy` should be one like {', '.join(examples)}. Found {text!r}.{close}")


def _with_numbers(example: str, numbers: Sequence[str]) -> str:
    """Put the numbers that were given into an example."""
    given = iter(numbers)
    return re.sub(r"\d+(?:\.\d+)?", lambda match: next(given, match[0]), example)


def example_names() -> list[str]:
    """Return at least one example name of every strategy, including those of custom classes.

    >>> example_names()[:3]
    ['end-to-end', 'local', '2-wise']
    """
    kinds = _with_names(Strategy)  # type: ignore[type-abstract]
    return list(dict.fromkeys(name for kind in kinds for name in kind.examples))


def _with_names(kind: type[Strategy]) -> Iterator[type[Strategy]]:
    """Iterate over all subclasses with names of their own, in the order of their definitions."""
    for child in kind.__subclasses__():
        if vars(child).get("pattern"):
            yield child
        yield from _with_names(child)
