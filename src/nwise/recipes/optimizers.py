"""Validated settings of optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass


def check_range(name: str, number: float, low: float, high: float, *, least: bool = False) -> None:
    """Raise ValueError unless a number is above `low` (with `least`, at least `low`) and below `high`."""
    if not (low < number < high or (least and number == low)):
        between = f"{'at least' if least else 'above'} {low:g}" + (f" and below {high:g}" if high < math.inf else "")
        raise ValueError(f"`{name}` should be a finite number {between}. Found {number}.")


def check_count(name: str, count: int | None, least: int = 1) -> None:
    """Raise ValueError if there is a count and it is below `least`."""
    if count is not None and count < least:
        raise ValueError(f"`{name}` should be at least {least}. Found {count}.")


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Stochastic gradient descent whose learning rate drops."""

    lr: float = 0.1
    """Initial learning rate."""
    momentum: float = 0.9
    """Momentum."""
    weight_decay: float = 2e-4
    """Weight decay."""
    drops: tuple[float, ...] = ()
    """Divide the rate by 10 at these shares of the phase's steps."""
    plateau_epochs: int | None = None
    """Divide the rate by 10 after this many epochs without a lower test loss of the last head; None for never."""
    nesterov: bool = False
    """Look ahead along the momentum (Nesterov), which helps late gradients."""
    extrapolate: bool = False
    """Add the change between the last two updates once more, a correction for gradients that are one update late."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0, math.inf)
        check_range("momentum", self.momentum, 0, 1, least=True)
        if self.nesterov and not self.momentum:
            raise ValueError("`nesterov` needs a momentum above 0. Found 0.")
        check_range("weight_decay", self.weight_decay, 0, math.inf, least=True)
        for share in self.drops:
            check_range("drops", share, 0, 1)
        check_count("plateau_epochs", self.plateau_epochs)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam, at a constant learning rate or with the Transformer's warm-up."""

    lr: float = 1e-3
    """Learning rate; with `warmup_steps`, the factor before min(step^-0.5, step * warmup_steps^-1.5)."""
    beta1: float = 0.9
    """Decay of the running mean of the gradient."""
    beta2: float = 0.999
    """Decay of the running mean of its square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Weight decay."""
    warmup_steps: int = 0
    """Steps of warm-up; 0 for a constant rate."""
    nesterov: bool = False
    """Look ahead along the momentum (NAdam), which helps late gradients."""
    extrapolate: bool = False
    """Add the change between the last two updates once more, a correction for gradients that are one update late."""
    muon_lr: float = 0.0
    """Learning rate of Muon for the matrices of hidden layers; Adam, with decoupled weight decay, trains the rest. 0: no Muon."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0, math.inf)
        check_range("beta1", self.beta1, 0, 1, least=True)
        check_range("beta2", self.beta2, 0, 1, least=True)
        check_range("eps", self.eps, 0, math.inf)
        check_range("weight_decay", self.weight_decay, 0, math.inf, least=True)
        check_count("warmup_steps", self.warmup_steps, 0)
        check_range("muon_lr", self.muon_lr, 0, math.inf, least=True)
        if self.muon_lr and self.nesterov:
            raise ValueError("`nesterov` should be off with `muon_lr`, because Muon looks ahead anyway. Found both.")
