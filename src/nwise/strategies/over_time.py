"""Strategies with late gradients (`Delayed`, `Hogwild`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """Greedy asynchronous updates (section 2, figure 1), simulated: as if no stage waited, and gradients were applied on arrival.

    The training loop stays the same, `Pipeline.step` and then the optimizer's step. But `step` leaves on stage ``k`` the
    gradients of an earlier mini-batch, whose forward came `nwise.staleness` updates before. With end-to-end credit and M = 1 that
    is ``2 (A - 1 - k)`` updates. The first steps leave none, and `Pipeline.drain` gives the last ones.

    A backward pass uses the activations of its forward and the weights that are in memory when it runs. No copy of the weights is
    made, so the gradient is that of no one set of weights. Only tensors that share memory with a parameter are read anew: a cast,
    as autocast makes it, or another value computed from a parameter stays that of the forward. `recompute` changes no gradient,
    but its second forward needs copies of the weights of the first. `torch.utils.checkpoint` is refused, and a checkpoint makes
    the passes that are due with the weights of its moment.

    Args:
        base: strategy whose order is relaxed, or its name; default: end-to-end.
        weights: those of a backward pass: ``"memory"`` (default), or ``"forward"``, copies of those of its forward (weight
            stashing), which make gradients exact, though late.
        ages: ``"greedy"`` (default), or ``"least"``, the least with which no stage waits if mini-batches enter at the pace of the
            busiest stage: ``A - 1 - k`` instead of ``2 (A - 1 - k)``.

    >>> strategy("2-wise-hogwild-forward-least") == Hogwild("2-wise", weights="forward", ages="least")
    True
    """

    pattern = r"(?:([^@]+)-)?hogwild(-forward)?(-least)?"
    examples = ("hogwild", "2-wise-hogwild", "hogwild-forward-least")

    weights: Literal["memory", "forward"] = "memory"
    ages: Literal["greedy", "least"] = "greedy"

    def _check(self) -> None:
        super()._check()
        if self.weights not in ("memory", "forward"):
            raise ValueError(f"`weights` should be 'memory' or 'forward'. Found {self.weights!r}.")
        if self.ages not in ("greedy", "least"):
            raise ValueError(f"`ages` should be 'greedy' or 'least'. Found {self.ages!r}.")

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Hogwild:
        form = {"weights": "forward" if match[2] else "memory", "ages": "least" if match[3] else "greedy"}
        return cls(strategy(match[1] or "end-to-end"), **(form | options))

    @property
    def name(self) -> str:
        base = "" if self.base == EndToEnd() else f"{self.base.name}-"
        return f"{base}hogwild{'-forward' * (self.weights == 'forward')}{'-least' * (self.ages == 'least')}"

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def stashes(self) -> bool:
        return self.weights == "forward"


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

    # A delay of 1, mini-batches b0, b1, b2:
    #
    #     call        step   step   step   drain
    #     forwards    b0     b1     b2     -
    #     gradients   none   b0     b1     b2       those of b0 at the parameters of its call

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
