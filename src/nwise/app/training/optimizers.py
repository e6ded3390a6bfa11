"""Optimizers and learning rates from a configuration, and the other parts that start fresh with a phase of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nwise.app.recipes import Adam, Recipe, Sgd
from nwise.checkpoint import add_momenta
from nwise.pipeline import Pipeline
from nwise.strategies import Strategy
from nwise.training import Clip, Fused, MuonWithAdam, NonFiniteGuard, extrapolate, hidden_matrices, predict, settle


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
        matrices: those that Muon trains, if the configuration has it (`nwise.training.late.hidden_matrices`).
    """
    given = list(parameters)
    groups: list[dict[str, Any]] = [g for g in given if isinstance(g, dict)] or [{"params": given}]
    kept = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    # Fused: one pass over a parameter instead of one per operation, a fifth of a small Transformer's step.
    lr = config.lr
    decay = config.weight_decay
    optimizer: torch.optim.Optimizer
    if isinstance(config, Sgd):
        momentum = config.momentum
        nesterov = config.nesterov
        optimizer = torch.optim.SGD(kept, lr, momentum, weight_decay=decay, nesterov=nesterov, fused=True)
        if config.momentum:
            # Fused SGD needs all momenta or none, and a head may have no gradient before a later step (rotating strategies).
            add_momenta(optimizer)
    else:
        betas = (config.beta1, config.beta2)
        eps = config.eps
        if config.muon_lr:
            optimizer = MuonWithAdam(kept, matrices, lr, config.muon_lr, betas, eps, decay)
        elif config.nesterov:
            optimizer = torch.optim.NAdam(kept, lr=lr, betas=betas, eps=eps, weight_decay=decay)
        else:
            optimizer = torch.optim.Adam(kept, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=True)
    if config.extrapolate:
        extrapolate(optimizer)
    if config.predict:
        predict(optimizer, config.predict)
    return optimizer


def rate_factor(config: Sgd | Adam, step: int, num_steps: int) -> float:
    """Return the factor of the learning rate at a step of a phase, counted from 0.

    >>> rate_factor(Sgd(drops=(0.5, 0.75)), 60, 100), rate_factor(Adam(warmup_steps=100), 99, 1000)
    (0.1, 0.1)
    """
    if isinstance(config, Sgd):
        return float(f"1e-{sum(step >= round(share * num_steps) for share in config.drops)}")
    if not config.warmup_steps:
        return 1.0
    return float(min((step + 1) ** -0.5, (step + 1) * config.warmup_steps**-1.5))


class LearningRate:
    """The learning-rate schedule of one phase of training, with some number of steps and of epochs between evaluations."""

    def __init__(
        self, config: Sgd | Adam, optimizer: torch.optim.Optimizer, num_steps: int, eval_every: float = 1
    ) -> None:
        self._config = config
        self._optimizer = optimizer
        self._num_steps = num_steps
        self._initial = [group["lr"] for group in optimizer.param_groups]
        epochs = config.plateau_epochs if isinstance(config, Sgd) else None
        self._patience = None if epochs is None else max(1, round(epochs / eval_every))  # evaluations
        self._best = math.inf  # of the test loss on plateaus
        self._bad = 0
        self._drops = 0
        self._set(0)

    def _set(self, step: int) -> None:
        self._step = step
        factor = rate_factor(self._config, step, self._num_steps) * float(f"1e-{self._drops}")
        for group, initial in zip(self._optimizer.param_groups, self._initial, strict=True):
            group["lr"] = initial * factor

    def step(self) -> None:
        """Set the rate after an update."""
        self._set(self._step + 1)

    def evaluated(self, loss: float) -> None:
        """Set the rate after an evaluation of the last head."""
        self._best, self._bad = (loss, 0) if loss < self._best else (self._best, self._bad + 1)
        if self._bad == self._patience:
            self._drops += 1
            self._bad = 0
            self._set(self._step)

    def state(self) -> dict[str, Any]:
        """Return the numbers that determine later rates."""
        return {"drops": self._drops, "best": self._best, "num_bad_epochs": self._bad}

    def restore(self, state: dict[str, Any], steps: int) -> None:
        """Resume from a result of `state` after some steps of this phase, even if the configured rate has changed.

        Raises:
            ValueError: `state` lacks the number of drops.
        """
        drops = state.get("drops")
        if not isinstance(drops, int) or not 0 <= drops < 1000:
            found = f"Found {state}; resume from another checkpoint."
            raise ValueError(f"The state of a rate should have its drops. {found}")
        if self._patience is not None and {"best", "num_bad_epochs"} <= set(state):
            self._best = state["best"]
            self._bad = state["num_bad_epochs"]
            self._drops = drops
        self._set(steps)

    @property
    def value(self) -> float:
        """The present learning rate."""
        return float(self._optimizer.param_groups[0]["lr"])


class Phase:
    """An optimizer, its learning rate, and the treatment of gradients before an update.

    The pipeline is about to make one of the phase's steps; `report` receives the facts if a loss or gradient is not finite.
    """

    def __init__(
        self, recipe: Recipe, pipe: Pipeline, number: int, steps: range, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self._pipe = pipe
        config = recipe.optimizer if number == 0 else recipe.then or recipe.optimizer
        groups = parameter_groups(pipe, config.lr, recipe.stage_lr)
        by_muon = isinstance(config, Adam) and config.muon_lr
        self.optimizer = make_optimizer(config, groups, hidden_matrices(pipe) if by_muon else ())
        self.rate = LearningRate(config, self.optimizer, len(steps), recipe.eval_every)
        self.clip = None if recipe.clip is None else Clip(pipe, recipe.clip, recipe.clip_by)
        self.guard = NonFiniteGuard(pipe, recipe.on_nan, report)

    def update(self) -> list[int]:
        """Update the parameters; return the stages of this process whose update is skipped."""
        skipped = self.guard()
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return skipped

    def drain(self) -> None:
        """Update the parameters by the gradients that are still due under a delay; predicted weights become actual ones."""
        while self._pipe.drain():
            self.update()
        settle(self.optimizer)


def check_phases(recipe: Recipe, pipe: Pipeline, rules: Sequence[Strategy]) -> list[set[int]]:
    """Return the heads that each phase needs; ValueError if one cannot clip, or skip updates, as the recipe says."""
    needed = []
    for rule in reversed(rules):  # so the first one is in force in the end
        if rule != pipe.strategy:
            pipe.strategy = rule
        if recipe.clip is not None:
            Clip(pipe, recipe.clip, recipe.clip_by)
        NonFiniteGuard(pipe, recipe.on_nan)
        needed.append(pipe.needed_heads())
    return needed[::-1]
