"""Settings of optimizers, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass


def check_range(name: str, number: float, low: float, high: float, *, least: bool = False) -> None:
    """Check that a number is above `low` (with `least`, at least that) and below `high`.

    Raises:
        ValueError: it is not.
    """
    if not (low < number < high or (least and number == low)):
        between = f"{'at least' if least else 'above'} {low:g}" + (f" and below {high:g}" if high < math.inf else "")
        raise ValueError(f"`{name}` should be a finite number {between}. Found {number}.")


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent with rate drops."""

    lr: float = 0.1
    """Rate at the start."""
    momentum: float = 0.9
    """Momentum."""
    weight_decay: float = 2e-4
    """Weight decay."""
    drops: tuple[float, ...] = ()
    """The rate is divided by 10 at these shares of the phase's steps."""
    plateau_epochs: int | None = None
    """Divide the rate by 10 after so many epochs without a lower test loss of the last head; None for never."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0, math.inf)
        check_range("momentum", self.momentum, 0, 1, least=True)
        check_range("weight_decay", self.weight_decay, 0, math.inf, least=True)
        for share in self.drops:
            check_range("drops", share, 0, 1)
        if self.plateau_epochs is not None and self.plateau_epochs < 1:
            raise ValueError(f"`plateau_epochs` should be at least 1. Found {self.plateau_epochs}.")


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam, at a constant rate or with the Transformer's warm-up."""

    lr: float = 1e-3
    """Rate; with `warmup_steps` the factor before min(step^-0.5, step * warmup_steps^-1.5)."""
    beta1: float = 0.9
    """Decay of the mean."""
    beta2: float = 0.999
    """Decay of the square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Weight decay."""
    warmup_steps: int = 0
    """0 for a constant rate."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0, math.inf)
        check_range("beta1", self.beta1, 0, 1, least=True)
        check_range("beta2", self.beta2, 0, 1, least=True)
        check_range("eps", self.eps, 0, math.inf)
        check_range("weight_decay", self.weight_decay, 0, math.inf, least=True)
        if self.warmup_steps < 0:
            raise ValueError(f"`warmup_steps` should be at least 0. Found {self.warmup_steps}.")
