"""Optimizers and learning-rate schedules from a configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from nwise.app.recipes import Adam, Sgd
from nwise.checkpoint import add_momenta
from nwise.pipeline import Pipeline
from nwise.training import Fused, MuonWithAdam, extrapolate

_PLATEAU = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # of ReduceLROnPlateau


def parameter_groups(pipe: Pipeline, lr: float, factors: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Return this process's parameters; with a factor of the learning rate per stage, one group per stage and its head."""
    if not factors:
        return [{"params": list(pipe.parameters())}]
    groups = []
    for k, factor in enumerate(factors):
        head = pipe.heads.get(k)
        parameters = [*pipe.stages[k].parameters(), *(head.parameters() if head is not None else ())]
        if parameters:
            groups.append({"params": parameters, "lr": factor * lr})
    return groups


def make_optimizer(
    config: Sgd | Adam,
    parameters: Iterable[nn.Parameter] | Sequence[dict[str, Any]],
    matrices: Mapping[nn.Parameter, Fused | None] | Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Make a torch optimizer with a configuration's settings.

    Args:
        config: the optimizer's configuration.
        parameters: the parameters, or groups of them with their own settings.
        matrices: those that Muon trains, if the configuration has it (`nwise.training.late.hidden_matrices`); default: none.
    """
    given = list(parameters)
    groups: list[dict[str, Any]] = [g for g in given if isinstance(g, dict)] or [{"params": given}]
    kept = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    # Fused: one pass over a parameter instead of one per operation, a fifth of a small Transformer's step.
    fused = not any(hasattr(p, "device_mesh") for group in kept for p in group["params"])  # no DTensor
    lr, weight_decay = config.lr, config.weight_decay
    optimizer: torch.optim.Optimizer
    if isinstance(config, Sgd):
        optimizer = torch.optim.SGD(
            kept,
            lr=lr,
            momentum=config.momentum,
            weight_decay=weight_decay,
            nesterov=config.nesterov,
            fused=fused,
        )
        if config.momentum:
            # Fused SGD needs all momenta or none, and a head may have no gradient before a later step (rotating strategies).
            add_momenta(optimizer)
    else:
        betas, eps = (config.beta1, config.beta2), config.eps
        if config.muon_lr:
            optimizer = MuonWithAdam(kept, matrices, lr, config.muon_lr, betas, eps, weight_decay)
        elif config.nesterov:
            optimizer = torch.optim.NAdam(kept, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        else:
            optimizer = torch.optim.Adam(kept, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
    if config.extrapolate:
        extrapolate(optimizer)
    return optimizer


def rate_factor(config: Sgd | Adam, step: int, num_steps: int) -> float:
    """Return the factor of the learning rate at a step.

    Args:
        config: the optimizer's configuration.
        step: the step, counted from 0 within the phase.
        num_steps: number of steps of the phase.

    >>> rate_factor(Sgd(drops=(0.5, 0.75)), 60, 100), rate_factor(Adam(warmup_steps=100), 99, 1000)
    (0.1, 0.1)
    """
    if isinstance(config, Sgd):
        return float(f"1e-{sum(step >= round(share * num_steps) for share in config.drops)}")
    if not config.warmup_steps:
        return 1.0
    return float(min((step + 1) ** -0.5, (step + 1) * config.warmup_steps**-1.5))


class LearningRate:
    """The learning-rate schedule of one phase of training.

    Args:
        config: the optimizer's configuration.
        optimizer: the optimizer whose rate is set.
        num_steps: number of steps of the phase.
        eval_every: epochs between two evaluations; default 1.
    """

    def __init__(
        self, config: Sgd | Adam, optimizer: torch.optim.Optimizer, num_steps: int, eval_every: float = 1
    ) -> None:
        self._optimizer = optimizer
        self._num_drops = 0
        self._by_step = LambdaLR(optimizer, lambda step: rate_factor(config, step, num_steps))
        epochs = config.plateau_epochs if isinstance(config, Sgd) else None
        self._by_loss = None
        if epochs is not None:
            # torch drops the rate after one bad evaluation more than its patience.
            patience = max(1, round(epochs / eval_every)) - 1
            self._by_loss = ReduceLROnPlateau(optimizer, factor=0.1, patience=patience, threshold=0.0)

    def step(self) -> None:
        """Set the rate after an update."""
        if self._by_loss is None:
            self._by_step.step()

    def evaluated(self, loss: float) -> None:
        """Set the rate after an evaluation of the last head."""
        if self._by_loss is not None:
            best, bad = self._by_loss.best, self._by_loss.num_bad_epochs
            self._by_loss.step(loss)
            # Counted here, because a group's own rate may be too small to be lowered.
            self._num_drops += self._by_loss.best == best and bad + 1 > self._by_loss.patience

    def state(self) -> dict[str, Any]:
        """Return the numbers that determine later rates."""
        state: dict[str, Any] = {"drops": self._num_drops}
        if self._by_loss is not None:
            state.update({name: getattr(self._by_loss, name) for name in _PLATEAU})
        return state

    def restore(self, state: dict[str, Any], steps: int) -> None:
        """Resume from a result of `state`, even if the configured rate has changed.

        Args:
            state: the state of an earlier run's rate.
            steps: steps of this phase that are done.

        Raises:
            ValueError: `state` lacks the number of drops.
        """
        drops = state.get("drops")
        if not isinstance(drops, int) or not 0 <= drops < 1000:
            raise ValueError(f"The state of a rate should have its drops. Found {state}.")
        groups = self._optimizer.param_groups
        if self._by_loss is None:
            self._by_step.last_epoch = steps
            schedules = zip(groups, self._by_step.base_lrs, self._by_step.lr_lambdas, strict=True)
            for group, base, factor in schedules:
                group["lr"] = base * factor(steps)
        elif set(_PLATEAU) <= set(state):
            self._num_drops = drops
            for group in groups:
                for _ in range(drops):  # one after the other, bitwise as in the run
                    lower = group["lr"] * self._by_loss.factor
                    group["lr"] = lower if group["lr"] - lower > self._by_loss.eps else group["lr"]
            for name in _PLATEAU:
                setattr(self._by_loss, name, state[name])

    @property
    def value(self) -> float:
        """The present learning rate."""
        return float(self._optimizer.param_groups[0]["lr"])
