"""Clipping: groups of stages, their norms, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nwise
from nwise.training.clip import Clip, clip_groups, squared_norm
from ranks.common import batches, pipeline


def test_norm_is_positive() -> None:
    """A negative norm turned the gradients round."""
    pipe = nwise.Pipeline([nn.Linear(2, 2)], strategy="end-to-end")
    with pytest.raises(ValueError, match="`max_norm` should be above 0. Found -1"):
        Clip(pipe, -1.0)


def test_squares_of_half_precision_are_added_up_in_float64() -> None:
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.full_like(half, 2e4)
    assert squared_norm([half]) == pytest.approx(8e8, rel=1e-3)


def test_clip_groups() -> None:
    pipe = pipeline(3, "2-wise", 1)
    everything = tuple(sorted([(0, False), (1, False), (2, False), (0, True), (1, True)]))
    assert clip_groups(pipe, "global") == [everything]
    assert clip_groups(pipe, "stage") == [((0, False), (0, True)), ((1, False), (1, True)), ((2, False),)]
    assert clip_groups(pipe, "loss") == [((0, False), (1, True)), ((0, True),), ((1, False), (2, False))]
    with pytest.raises(ValueError, match="`clip_by` should be global, stage or loss. Found 'all'"):
        clip_groups(pipe, "all")  # type: ignore[arg-type]


def test_clip_follows_a_switch() -> None:
    """Regression: a `Clip` made before the switch kept the groups of the first strategy."""

    def train(anew: bool) -> list[torch.Tensor]:
        pipe = pipeline(3, "local", 1)
        update, clip = torch.optim.SGD(pipe.parameters(), lr=0.1), Clip(pipe, 0.05, "loss")
        for x, y in batches(4):
            if pipe.steps == 2:
                pipe.strategy = "end-to-end"
            if anew and pipe.steps == 2:
                clip = Clip(pipe, 0.05, "loss")
            pipe.step(x, target=y)
            clip()
            update.step()
            update.zero_grad()
        return [p.detach() for p in pipe.parameters()]

    assert all(map(torch.equal, train(anew=False), train(anew=True)))


def test_clipping_returns_the_norms_of_torch() -> None:
    pipe = pipeline(3, "2-wise-mean", 1).double()
    x, y = batches(1)[0]
    pipe.step(x.double(), target=y)
    gradients = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    norm = nwise.clip_grad_norm_(pipe, 0.05)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(gradients), rtol=1e-12, atol=0)
    for gradient, clipped in zip(gradients, (p.grad for p in pipe.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(clipped, gradient * (0.05 / (norm + 1e-6)), rtol=1e-12, atol=1e-15)
    norms = nwise.clip_grad_norm_(pipe, 1.0, by="stage")
    assert norms.shape == (3,)
    torch.testing.assert_close(norms.square().sum().sqrt(), torch.tensor(0.05).double(), rtol=1e-4, atol=0)
