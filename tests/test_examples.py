"""The worked examples: they run, they learn, and their gradients are those of the definition."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import nwise
from test_contract import assert_same, gradients

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import predsim
import quickstart
import unsupervised


def test_quickstart_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main() > 0.9
    assert "test accuracy of the last head" in capsys.readouterr().out


def test_predsim_learns() -> None:
    assert predsim.main(40) > 0.9


def test_unsupervised_heads_learn() -> None:
    loss, accuracy = unsupervised.main(200)
    assert loss < 0.5
    assert accuracy > 0.8


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_predsim_gradients_are_those_of_the_definition(num_microbatches: int) -> None:
    pipe = predsim.build()
    pipe = nwise.Pipeline(list(pipe.stages), list(pipe.heads.values()), predsim.predsim, "2-wise", num_microbatches)
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    # The similarity is between samples of one micro-batch, so the reference is cut into the same.
    expected = nwise.reference_grads(
        list(pipe.stages), list(pipe.heads.values()), predsim.predsim, x, y, pipe.credit, num_microbatches
    )
    pipe.step(x, target=y)
    assert_same(gradients(pipe), expected, 1e-12)


@pytest.mark.usefixtures("float64")
def test_reconstruction_gradients_are_those_of_the_definition() -> None:
    pipe = unsupervised.build()
    x = torch.randn(8, 64)
    expected = nwise.reference_grads(
        list(pipe.stages), list(pipe.heads.values()), torch.nn.functional.mse_loss, x, x, pipe.credit
    )
    pipe.step(x, target=x)
    assert_same(gradients(pipe), expected, 1e-12)
