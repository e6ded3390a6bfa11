"""Strategies with late gradients (`Delayed`, `Hogwild`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nwise.strategies.base import Strategy, strategy
from nwise.strategies.matrices import EndToEnd


@dataclass(frozen=True)
class _Late(Strategy):
    """A strategy whose gradients may be of an earlier mini-batch than the newest.

    Args:
        base: strategy that says which loss trains which stage, or its name; default: end-to-end.
    """

    base: Strategy = field(default_factory=EndToEnd)

    def _check(self) -> None:
        object.__setattr__(self, "base", strategy(self.base))
        if self.base.heads == "all":
            object.__setattr__(self, "heads", "all")
        if isinstance(self.base, _Late):
            raise ValueError(
                f"`base` should be a strategy with one credit matrix or a cycle of them. Found {self.base.name!r}, whose "
                "gradients are late already; pass its `base`."
            )

    @property
    def turns(self) -> int:
        return self.base.turns

    def turn(self, step: int, microbatch: int) -> int:
        return self.base.turn(step, microbatch)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return self.base.credit(num_stages, turn)

    def caution(self, num_stages: int) -> str | None:
        return self.base.caution(num_stages)


@dataclass(frozen=True)
class Hogwild(_Late):
    """Greedy asynchronous updates (section 3): no stage waits, so the age of the gradients differs from stage to stage.

    The training loop stays the same, `Pipeline.step` and then the optimizer's step. But `step` leaves on stage ``k`` the
    gradients of an earlier mini-batch, at the parameters of its forward, which have been updated `nwise.staleness` times since.
    With end-to-end credit and M = 1 that is ``A - 1 - k`` times. The first steps leave none, and `Pipeline.drain` gives the last
    ones.

    Args:
        base: strategy whose order is relaxed, or its name; default: end-to-end.
    """

    pattern = r"(?:([^@]+)-)?hogwild"
    examples = ("hogwild", "2-wise-hogwild")

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Hogwild:
        return cls(strategy(match[1] or "end-to-end"), **options)

    @property
    def name(self) -> str:
        return "hogwild" if self.base == EndToEnd() else f"{self.base.name}-hogwild"

    @property
    def asynchronous(self) -> bool:
        return True


@dataclass(frozen=True)
class Delayed(_Late):
    """Gradients that are a given number of mini-batches old, the same on all stages.

    Call s of `Pipeline.step` runs the forwards of mini-batch s and leaves the gradient of mini-batch s - d, at the parameters of
    call s - d: exact, of one consistent set of weights, and d updates old. Heads learn without delay. With ``d = 1`` and as many
    micro-batches as stages, an end-to-end pipeline has no bubble at any depth (PipeDream-2BW, Narayanan et al. 2021). The first
    d calls leave no gradient, and `Pipeline.drain` gives the last ones. The first stage keeps copies of the inputs of d + 1
    mini-batches, so a loader may reuse their memory.

    Args:
        base: strategy that says which loss trains which stage, or its name; default: end-to-end.
        by: the delay d, at least 0; 0 is the strategy itself. Default: 1.

    >>> Delayed("2-wise", by=2).name
    '2-wise-delay-2'
    """

    pattern = r"([^@]+)-delay-(\d+)"
    examples = ("end-to-end-delay-1",)

    by: int = 1

    def _check(self) -> None:
        super()._check()
        if isinstance(self.by, bool) or not isinstance(self.by, int) or not 0 <= self.by <= 64:
            raise ValueError(f"`by`, the delay in mini-batches, should be an integer from 0 to 64. Found {self.by!r}.")

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Delayed:
        return cls(strategy(match[1]), int(match[2]), **options)

    @property
    def name(self) -> str:
        return f"{self.base.name}-delay-{self.by}"

    @property
    def delay(self) -> int:
        return self.by
