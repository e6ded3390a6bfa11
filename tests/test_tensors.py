"""Tensors between stages: those that carry gradients, and calls that leave their inputs unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nwise
from nets import X, Y


def test_head_outputs_of_in_place_head_raise() -> None:
    """Regression: under end-to-end such a head never ran in a step, but it spoilt the scores of later stages."""
    heads = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3)) for _ in range(2)]
    pipe = nwise.Pipeline([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)], heads, strategy="end-to-end")
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="The head of stage 0 should not change its input or target in place"),
    ):
        pipe.head_outputs(X)


def test_complex_activations_carry_gradients() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(self.linear(x))

    class Magnitude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.abs())

    first = Spectrum()
    stages = [first, Magnitude()]
    pipe = nwise.Pipeline(stages, None, strategy="end-to-end")
    expected = nwise.reference_grads(stages, None, nn.functional.cross_entropy, X, Y, pipe.credit)
    pipe.step(X, target=Y)
    assert first.linear.weight.grad is not None
    torch.testing.assert_close(first.linear.weight.grad, expected["stages.0.linear.weight"])
