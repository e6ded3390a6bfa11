"""Captured steps: on a CPU with a recorder in the place of the CUDA graph; `test_gpu.py` has the tests with the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise import capture
from nwise.app.recipes import recipe
from nwise.app.training import Trainer
from recorder import CpuGraphs


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "make_graphs", CpuGraphs)


def layers(*extra: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *(make() for make in extra)) for _ in range(4)]


def pipelines(
    make: Callable[[], list[nn.Module]],
    loss: Any = nn.functional.mse_loss,
    strategy: str | nwise.Strategy = "2-wise",
    m: int = 1,
    **options: Any,
) -> list[nwise.Pipeline]:
    made = []
    for captured in (False, True):
        stages = make()
        heads: list[nn.Module] = [nn.Linear(4, 4) for _ in range(3)]
        made.append(nwise.Pipeline(stages, heads, loss, strategy, m, seed=0, capture=captured, **options))
    return made


def train(
    pipe: nwise.Pipeline, steps: int = 6, target: Callable[[int], Tensor] | None = None, size: int = 6
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        x = torch.randn(size, 4, generator=generator)
        y = torch.randn(size, 4, generator=generator) if target is None else target(step)
        losses = pipe.step(x, target=y)
        seen += [
            losses.detach().clone(),
            *pipe.microbatch_losses.values(),
            torch.tensor(list(pipe.loss_shares.values())),
        ]
        update.step()
        update.zero_grad()
    return seen + [x.detach() for x in pipe.state_dict().values()]


def same(pipes: list[nwise.Pipeline], **options: Any) -> None:
    plain, captured = (train(pipe, **options) for pipe in pipes)
    assert len(plain) == len(captured)
    for one, other in zip(plain, captured, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    assert replays(pipes[1])


def layer(pipe: nwise.Pipeline, stage: int, place: int = 0) -> Any:
    return list(pipe.stages[stage].children())[place]


def replays(pipe: nwise.Pipeline) -> int:
    assert pipe._capture is not None
    return sum(kind.recording is not None for kind in pipe._capture._kinds.values())


@pytest.mark.parametrize("strategy", ["local", "2-wise", "3-wise-mean", "end-to-end", "deep-supervision", "rotating-2"])
@pytest.mark.parametrize("m", [1, 3])
def test_bitwise_equal(strategy: str, m: int) -> None:
    same(pipelines(layers, strategy=strategy, m=m), steps=8)


def test_probes_autocast_and_injected_losses() -> None:
    same(pipelines(layers, strategy=nwise.strategy("local", heads="all"), m=2), steps=5)
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # around the whole loop, where torch keeps the bf16 weights of the first step
        same(pipelines(layers, m=2), steps=5)

    class Injecting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return nwise.inject(y, 0.1 * y.square().mean())

    def target(step: int) -> Tensor:
        return torch.tensor([0, 1, -100, -100, 2, 3])

    stages = with_stage(Injecting(4, 4))
    same(pipelines(stages, nn.functional.cross_entropy, "3-wise-mean", m=2), steps=6, target=target)


@pytest.mark.parametrize("strategy", ["2-wise", "local@4,end-to-end"])
def test_recipe_with_capture_trains_the_same(strategy: str) -> None:
    config = replace(
        recipe("digits"), max_steps=9, strategy=strategy, microbatches=2, device="cpu", defer_batchnorm=True
    )
    runs = []
    for captured in (False, True):
        trainer = Trainer(replace(config, capture=captured))
        trainer.train()
        runs.append(trainer.pipe)
    for one, other in zip(runs[0].state_dict().values(), runs[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert replays(runs[1])


def test_dropout_batch_norm_and_recomputation() -> None:
    for recompute in (False, True):
        same(pipelines(lambda: layers(lambda: nn.Dropout(0.5)), m=2, recompute=recompute))
    same(pipelines(lambda: layers(lambda: nn.BatchNorm1d(4))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipes = [nwise.defer_batchnorm(pipe) for pipe in pipelines(lambda: layers(lambda: nn.BatchNorm1d(4)), m=2)]
    same(pipes)


def test_parts_that_draw_are_noted_when_they_end() -> None:
    """A second run restores the state that its first one found, so a later look at the part before it saw no draws."""
    _, pipe = pipelines(lambda: layers(lambda: nn.Dropout(0.5)), strategy="end-to-end", recompute=True)
    train(pipe, steps=4)
    assert pipe._capture is not None
    (kind,) = pipe._capture._kinds.values()
    assert kind.drawing == {("stage", 0, 0): 2, ("stage", 1, 0): 2, ("stage", 2, 0): 2, ("stage", 3, 0): 1}


def test_ignored_targets_weight_micro_batches_on_the_device() -> None:
    def target(step: int, ignored: int = -100) -> Tensor:
        y = torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(step))
        y[: step % 4] = ignored  # the first micro-batch of two has no terms in step 3
        return y

    same(pipelines(layers, nn.functional.cross_entropy, m=2), steps=8, target=target)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 0.5]), ignore_index=2)
    same(pipelines(layers, weighted, "3-wise-mean", m=2), steps=8, target=partial(target, ignored=2))


def test_gradients_are_added_to() -> None:
    plain, captured = pipelines(layers)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for pipe in (plain, captured):
        for _ in range(3):
            pipe.step(x, target=y)
            pipe.zero_grad()
    own = torch.ones(4, 4)
    for pipe in (plain, captured):
        layer(pipe, 0).weight.grad = own.clone()
        for _ in range(3):
            pipe.step(x, target=y)
    for p, q in zip(plain.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    for pipe in (plain, captured):
        pipe.zero_grad(set_to_none=False)
    for pipe in (plain, captured):
        pipe.step(x, target=y)
    for p, q in zip(plain.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


def test_losses_stay_valid() -> None:
    _, pipe = pipelines(layers)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    for _ in range(3):
        losses = pipe.step(x, target=y)
    before = losses.tolist()[1:]
    pipe.step(2 * x, target=y)
    assert losses.tolist()[1:] == before


def test_changes_are_recorded_again() -> None:
    """A rate of dropout, evaluation mode, frozen parameters, another strategy and other weights take effect."""
    plain, captured = pipelines(lambda: layers(lambda: nn.Dropout(0.5)))

    def change(what: int, pipe: nwise.Pipeline) -> None:
        dropout = layer(pipe, 1, 2)
        if what == 1:
            dropout.p = 0.1
        elif what == 2:
            dropout.eval()
        elif what == 3:
            layer(pipe, 2).weight.requires_grad_(False)
        elif what == 4:
            pipe.strategy = "end-to-end"
        elif what == 5:
            layer(pipe, 0).weight.data = torch.ones(4, 4)

    for what in range(6):
        for pipe in (plain, captured):
            change(what, pipe)
        one, other = (train(pipe, steps=4) for pipe in (plain, captured))
        assert all(torch.equal(a, b) or (a.isnan() == b.isnan()).all() for a, b in zip(one, other, strict=True)), what
        assert replays(captured)


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 0.5)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Masking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[x > 0].sum()


def with_stage(stage: nn.Module) -> Callable[[], list[nn.Module]]:
    return lambda: [*layers()[:2], type(stage)(4, 4), layers()[3]]


@pytest.mark.parametrize(
    ("stage", "cause"),
    [
        (Reading(4, 4), "Stage 2 reads a value"),
        (Counting(4, 4), r"Counting.calls` changes"),
        (Masking(4, 4), "Stage 2 calls `index`, whose result has a shape"),
    ],
)
def test_what_cannot_be_captured_runs_as_always(stage: nn.Module, cause: str) -> None:
    pipes = pipelines(with_stage(stage))
    plain = train(pipes[0])
    with pytest.warns(UserWarning, match=cause):
        captured = train(pipes[1])
    assert all(torch.equal(a, b) or (a.isnan() == b.isnan()).all() for a, b in zip(plain, captured, strict=True))
    assert not replays(pipes[1])


def test_refused_before_anything_runs() -> None:
    def make(**options: Any) -> nwise.Pipeline:
        return nwise.Pipeline(layers(), [nn.Linear(4, 4) for _ in range(3)], nn.MSELoss(), capture=True, **options)

    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match="Found `checks='always'`"):
        make(checks="always")
    with pytest.raises(ValueError, match="Found `compress`"):
        make(compress="bf16")
    with pytest.raises(ValueError, match="strategy without a delay"):
        make(strategy="end-to-end-delay-1").step(x, target=x)
    pipe = make()
    layer(pipe, 1).register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="no hooks.*Linear"):
        pipe.step(x, target=x)
    pipe = make()
    layer(pipe, 1).weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"no hooks.*parameter of shape \[4, 4\]"):
        pipe.step(x, target=x)
    pipe = make()
    node = torch.autograd.graph.get_gradient_edge(layer(pipe, 1).weight).node
    node.register_prehook(lambda gradients: gradients)
    with pytest.raises(ValueError, match=r"no hooks.*parameter of shape \[4, 4\]"):
        pipe.step(x, target=x)


def test_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pipe = nwise.Pipeline(layers(), [nn.Linear(4, 4) for _ in range(3)], nn.MSELoss(), capture=True)
    with pytest.raises(ValueError, match="on a GPU. Found a pipeline on the device cpu"):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_other_shapes_have_their_own_recordings() -> None:
    plain, captured = pipelines(layers)
    for size in (3, 4, 5):
        same([plain, captured], size=size, steps=4)
    assert replays(captured) == 3
