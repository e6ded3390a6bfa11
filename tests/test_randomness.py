"""Random numbers depend on seed, step, stage and micro-batch alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nwise
from nets import X, Y, perceptron, three
from test_contract import pipeline


def test_dropout_depends_on_seed_step_and_micro_batch_alone() -> None:
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)]
    heads = [nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)) for _ in range(2)]
    x, y = torch.randn(6, 8), torch.randint(0, 8, (6,))

    def losses(seed: int, strategy: str = "local", noise: int = 0) -> list[Tensor]:
        torch.manual_seed(noise)
        pipe = nwise.Pipeline(stages, heads, cross_entropy, strategy, 2, seed=seed)
        return [pipe.step(x, target=y) for _ in range(2)]

    first = losses(1)
    assert all(torch.equal(a, b) for a, b in zip(first, losses(1, noise=7), strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], losses(2)[0])
    # what other heads run does not change a loss
    assert torch.equal(first[0][2], losses(1, "end-to-end")[0][2])


def test_every_stage_head_and_micro_batch_draws_its_own_numbers() -> None:
    masks: list[Tensor] = []

    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = nn.functional.dropout(torch.ones(64), 0.5)
            masks.append(mask)
            return x * mask

    pipe = nwise.Pipeline([Mask(), Mask()], [Mask()], lambda y, t: y.mean(), nwise.Local(heads="all"), 2, seed=0)
    for _ in range(3):
        if pipe.steps == 1:
            masks.clear()  # the first step also compares copies
        pipe.step(torch.randn(4, 64))
    assert len(masks) == 2 * 2 * 3
    assert len({mask.numpy().tobytes() for mask in masks}) == 12


def test_step_leaves_global_generator_unchanged() -> None:
    net = perceptron(2)
    x, y = net.draw(4)
    pipe = pipeline(net, "local")
    before = torch.get_rng_state()
    pipe.step(x, target=y)
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_of_numpy_draws_what_the_integer_draws() -> None:
    """It drew other numbers, and a checkpoint with it could not be written."""

    def loss(seed: Any) -> Tensor:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Dropout(), nn.Linear(8, 3))]
        return nwise.Pipeline(stages, strategy="end-to-end", seed=seed).step(X, target=Y)

    assert torch.equal(loss(np.int64(3)), loss(3))
    pipe = three("local", seed=0)
    pipe.seed = np.int64(3)  # type: ignore[assignment]
    assert type(pipe.seed) is int
