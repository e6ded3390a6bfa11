"""Optimizers whose update of a parameter depends on the gradients of others are told from those that take each alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from nwise.program.apart import mixes
from nwise.training.late import MuonWithAdam
from ranks.habits import Normed


class Sgd(Optimizer):
    """Gradient descent."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad))

    def direction(self, p: Tensor, g: Tensor) -> Tensor:
        return g


class Trust(Sgd):
    """A norm of each tensor alone, as LAMB has."""

    def direction(self, p: Tensor, g: Tensor) -> Tensor:
        return g * p.norm() / g.norm()


class Noisy(Sgd):
    """Draws random numbers for each tensor."""

    def direction(self, p: Tensor, g: Tensor) -> Tensor:
        return g + torch.rand_like(g) + random.random() + np.random.rand()  # noqa: NPY002


class Started(Sgd):
    """Makes its state at once, and counts in a list."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.calls: list[None] = []
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"momentum": torch.zeros_like(p)}

    def direction(self, p: Tensor, g: Tensor) -> Tensor:
        self.calls.append(None)
        return self.state[p]["momentum"].mul_(0.9).add_(g)


class Ended(Normed):
    """Frees something of its own, so a copy must not end."""

    def __del__(self) -> None:
        raise AssertionError


class Clipping(torch.optim.AdamW):
    """Clips by the norm of all gradients; Adam's update hides a factor that stays."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.most = 1.0

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], self.most)
        return super().step(closure)


class Adapting(Sgd):
    """Takes its rate from the sum of all inner products of gradients and moves, as D-Adaptation and Prodigy do."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters)
        self.first: dict[Tensor, Tensor] = {}
        self.rate = 1e-6

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.first.setdefault(p, p.detach().clone())
                self.rate = max(self.rate, float((p.grad * (self.first[p] - p)).sum() / p.grad.norm()))
        super().step()

    def direction(self, p: Tensor, g: Tensor) -> Tensor:
        return self.rate * g


def parameters(dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(0)
    return list(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)).to(dtype).parameters())


def warming(optimizer: Optimizer) -> Optimizer:
    """An optimizer whose first rate is 0, and whose `step` is a scheduler's."""
    LambdaLR(optimizer, lambda step: step / 10)
    return optimizer


def muon(values: list[Any]) -> Optimizer:
    groups = [{"params": values}]
    return MuonWithAdam(groups, values[:1], lr=1e-3, muon_lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def used(optimizer: Optimizer) -> Optimizer:
    for _ in range(2):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: Normed(parameters()),
        lambda: Normed(parameters()[:1]),
        lambda: Normed([{"params": [p]} for p in parameters()]),
        lambda: Normed(parameters(torch.bfloat16), lr=1e-4),
        lambda: warming(Normed(parameters())),
        lambda: Clipping(parameters()),
        lambda: used(Clipping(parameters())),
        lambda: Adapting(parameters()),
    ],
)
def test_optimizers_that_mix_parameters_are_found(optimizer: Callable[[], Optimizer]) -> None:
    """Regression: each process had a norm of its own, so two trained otherwise than one, without a word."""
    assert mixes(optimizer())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: torch.optim.Adam(parameters()),
        lambda: Sgd(parameters()),
        lambda: Trust(parameters()),
        lambda: Noisy(parameters()),
        lambda: used(Started(parameters())),
        lambda: muon(parameters()),
        lambda: LBFGS(parameters()),  # cannot be told without a closure
    ],
)
def test_other_optimizers_are_not_blamed(optimizer: Callable[[], Optimizer]) -> None:
    assert not mixes(optimizer())


def test_closures_and_ends() -> None:
    assert mixes(LBFGS(parameters()), closure=True)
    optimizer: Any = Ended(parameters())
    try:
        assert not mixes(optimizer)
    finally:
        del Ended.__del__


def test_a_trial_leaves_no_trace() -> None:
    """Neither values, states, random numbers nor the hooks of all optimizers."""
    values = parameters()
    optimizer = Started(values)
    noisy = Noisy(values)
    before = [p.clone() for p in values], torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    calls: list[Any] = []
    hook = register_optimizer_step_post_hook(lambda *_: calls.append(None))
    try:
        assert not mixes(optimizer)
        assert not mixes(warming(noisy))
    finally:
        hook.remove()
    assert calls == optimizer.calls == []
    assert all(map(torch.equal, values, before[0]))
    assert all(p.grad is None and not optimizer.state[p]["momentum"].any() for p in values)
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert str(np.random.get_state()) == before[3]  # noqa: NPY002
