"""Validated settings of optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from nwise.checks import check_at_least, check_limits, check_range


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
    predict: int = 0
    """Updates by which gradients are late: forwards run at weights that the last update predicts for then. 0: no prediction."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr)
        check_range("momentum", self.momentum, 1, least=True)
        if self.nesterov and not self.momentum:
            raise ValueError("`nesterov` needs a momentum above 0. Found 0.")
        check_range("weight_decay", self.weight_decay, least=True)
        _check_predict(self)
        for share in self.drops:
            check_range("drops", share, 1)
        check_limits(plateau_epochs=self.plateau_epochs)
        if self.drops and self.plateau_epochs:
            raise ValueError(
                "`drops` should be empty with `plateau_epochs`, which lowers the rate itself. Found "
                f"{self.drops}; set one of them."
            )


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
    predict: int = 0
    """Updates by which gradients are late: forwards run at weights that the last update predicts for then. 0: no prediction."""
    muon_lr: float = 0.0
    """Learning rate of Muon for the matrices of hidden layers; Adam, with decoupled weight decay, trains the rest. 0: no Muon."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr)
        check_range("beta1", self.beta1, 1, least=True)
        check_range("beta2", self.beta2, 1, least=True)
        check_range("eps", self.eps)
        check_range("weight_decay", self.weight_decay, least=True)
        _check_predict(self)
        check_at_least(0, warmup_steps=self.warmup_steps)
        check_range("muon_lr", self.muon_lr, least=True)
        if self.muon_lr and self.nesterov:
            raise ValueError("`nesterov` should be off with `muon_lr`, because Muon looks ahead anyway. Found both.")


def _check_predict(config: Sgd | Adam) -> None:
    check_at_least(0, predict=config.predict)
    if config.predict and config.extrapolate:
        raise ValueError(
            f"`predict` should be 0 with `extrapolate`, which predicts by one update. Found {config.predict}; set one of them."
        )
