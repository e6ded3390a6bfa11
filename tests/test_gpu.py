"""What only a GPU can show; `NWISE_REHEARSE=cpu` runs the same on a CPU, so the tests themselves are tested."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise import exits
from nwise.app.recipes import recipe
from nwise.app.training import Trainer
from nwise.capturing import capture
from nwise.capturing.capture import Capture
from nwise.compression import named
from recorder import CpuGraphs

DEVICE = "cuda" if torch.cuda.is_available() else os.environ.get("NWISE_REHEARSE", "")
pytestmark = pytest.mark.skipif(not DEVICE, reason="needs a GPU")
STRATEGIES = ("local", "2-wise-mean", "end-to-end", "deep-supervision", "end-to-end-delay-1", "rotating-2")


@pytest.fixture(autouse=True)
def _recorder_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(capture, "make_graphs", CpuGraphs)


def pipeline(strategy: str, device: str, m: int = 2, dtype: torch.dtype = torch.float64) -> nwise.Pipeline:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)]
    heads: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    pipe = nwise.Pipeline(stages, heads, nn.functional.mse_loss, strategy, m, seed=0)
    return pipe.to(device, dtype)


def trained(pipe: nwise.Pipeline, device: str, steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    dtype = next(pipe.parameters()).dtype
    for _ in range(steps):
        x, y = (torch.randn(6, 8, generator=generator).to(device, dtype) for _ in range(2))
        pipe.step(x, target=y)
        update.step()
        update.zero_grad()
    return [p.detach().cpu() for p in pipe.parameters()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_agrees_with_the_cpu(strategy: str) -> None:
    for ours, theirs in zip(
        trained(pipeline(strategy, DEVICE), DEVICE), trained(pipeline(strategy, "cpu"), "cpu"), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_end_to_end_is_plain_autograd_bit_for_bit() -> None:
    pipe = pipeline("end-to-end", DEVICE, m=1, dtype=torch.float32)
    x, y = torch.randn(6, 8, device=DEVICE), torch.randn(6, 8, device=DEVICE)
    pipe.step(x, target=y)
    ours = [p.grad.clone() for p in pipe.main_parameters() if p.grad is not None]
    pipe.zero_grad()
    nn.functional.mse_loss(nn.Sequential(*pipe.stages)(x), y).backward()
    theirs = [p.grad for p in pipe.main_parameters() if p.grad is not None]
    assert len(ours) == 16
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("strategy", ["2-wise", "3-wise-mean"])
def test_dropout_is_the_same_again_and_recomputed(strategy: str) -> None:
    def run(recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(3)]
        heads: list[nn.Module] = [nn.Linear(8, 8) for _ in range(2)]
        pipe = nwise.Pipeline(stages, heads, nn.functional.mse_loss, strategy, 2, seed=0, recompute=recompute)
        return trained(pipe.to(DEVICE), DEVICE)

    first = run(False)
    assert all(map(torch.equal, first, run(False)))
    assert all(map(torch.equal, first, run(True)))


@pytest.mark.parametrize("compress", ["bf16", "int8", "top-20%"])
def test_compressed_messages_and_exits(compress: str) -> None:
    stages: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    heads: list[nn.Module] = [nn.Linear(8, 8) for _ in range(2)]
    pipe = nwise.Pipeline(stages, heads, nn.functional.mse_loss, "2-wise-mean", compress=named(compress)).to(DEVICE)
    assert all(p.isfinite().all() for p in trained(pipe, DEVICE))
    answers = exits.exit(pipe, torch.randn(5, 8, device=DEVICE), threshold=0.3, confidence="classes")
    assert answers.output.shape == (5, 8)
    assert answers.output.device.type == DEVICE


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_recipe_trains_and_trains_the_same_again(precision: Literal["float32", "bf16"]) -> None:
    config = replace(recipe("digits"), device=DEVICE, max_steps=6, precision=precision)
    losses = []
    for _ in range(2):
        trainer = Trainer(config)
        assert trainer.device.type == DEVICE
        last = trainer.train().heads[-1]
        assert last is not None
        losses.append(last.loss)
    assert losses[0] == losses[1]
    assert 0 < losses[0] < 2.5


def captured_pipeline(
    strategy: str, *, capture: bool, m: int = 2, loss: Any = nn.functional.cross_entropy, **options: Any
) -> nwise.Pipeline:
    torch.manual_seed(0)
    stages: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3 if k == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        for k in range(3)
    ]
    stages.append(nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 10)))
    heads: list[nn.Module] = [nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 10)) for _ in range(3)]
    pipe = nwise.Pipeline(stages, heads, loss, strategy, m, seed=0, **options)
    return nwise.defer_batchnorm(nwise.capture(pipe) if capture else pipe).to(DEVICE)


def losses_and_weights(pipe: nwise.Pipeline, precision: torch.dtype, steps: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        x = torch.randn(12, 3, 8, 8, generator=generator).to(DEVICE)
        y = torch.randint(0, 10, (12,), generator=generator).to(DEVICE)
        y[: step % 3] = -100
        with torch.autocast(DEVICE, precision, enabled=precision != torch.float32):
            found.append(pipe.step(x, target=y).detach().clone())
        nwise.clip_grad_norm_(pipe, 1.0)
        update.step()
        update.zero_grad()
    return [x.float().cpu() for x in (*found, *pipe.state_dict().values())]


@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("strategy", "m", "recompute"),
    [
        ("local", 1, False),
        ("2-wise", 1, False),
        ("3-wise-mean", 2, False),
        ("end-to-end", 2, True),
        ("rotating-2", 2, True),
    ],
)
def test_captured_steps_are_bitwise_those_of_eager_ones(
    strategy: str, m: int, recompute: bool, precision: torch.dtype
) -> None:
    """With dropout, batch norm, micro-batches of unequal weights, clipping and momentum."""
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        pipes = [captured_pipeline(strategy, m=m, recompute=recompute, capture=capture) for capture in (False, True)]
        eager, captured = (losses_and_weights(pipe, precision) for pipe in pipes)
    finally:
        torch.backends.cudnn.deterministic = deterministic
    for one, other in zip(eager, captured, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    assert isinstance(pipes[1].runner, Capture)
    assert any(kind.recording is not None for kind in pipes[1].runner._kinds.values())


def test_a_loss_that_reads_a_value_is_not_captured() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) * (1.0 if output.sum().item() else 0.5)

    pipes = [captured_pipeline("2-wise", m=1, loss=loss, capture=capture) for capture in (False, True)]
    eager = losses_and_weights(pipes[0], torch.float32)
    with pytest.warns(UserWarning, match="The head of stage 1 reads a value"):
        captured = losses_and_weights(pipes[1], torch.float32)
    for one, other in zip(eager, captured, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_random_numbers_outside_stay_as_they_were() -> None:
    pipe = captured_pipeline("2-wise", m=1, capture=True)
    losses_and_weights(pipe, torch.float32, steps=5)
    torch.manual_seed(3)
    before = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)
    losses_and_weights(pipe, torch.float32, steps=2)
    assert torch.equal(before, torch.rand(4, device=DEVICE))
