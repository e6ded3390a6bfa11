"""Captured steps on a CPU, where a recorder replaces the CUDA graph; `test_gpu.py` tests them with the graph itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise.app.recipes import ConvNet, recipe
from nwise.app.training import Trainer
from nwise.capturing import capture
from recorder import CpuGraphs

cross_entropy = nn.functional.cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore:With . micro-batches, batch norm")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "make_graphs", CpuGraphs)


def layers(extra: Callable[[], nn.Module] = nn.Identity, stage: nn.Module | None = None) -> list[nn.Module]:
    """Four stages, of which stage 2 may be replaced."""
    torch.manual_seed(0)
    made: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), extra()) for _ in range(4)]
    return made if stage is None else [*made[:2], type(stage)(4, 4), made[3]]


def pipelines(
    make: Callable[[], list[nn.Module]] = layers,
    loss: Any = nn.functional.mse_loss,
    strategy: str | nwise.Strategy = "2-wise",
    m: int = 1,
    **options: Any,
) -> list[nwise.Pipeline]:
    """A pipeline that runs its steps eagerly, and one that captures them."""
    made = []
    for captured in (False, True):
        stages, heads = make(), [nn.Linear(4, 4) for _ in range(3)]
        pipe = nwise.Pipeline(stages, heads, loss, strategy, m, seed=0, **options)
        made.append(nwise.defer_batchnorm(nwise.capture(pipe) if captured else pipe))
    return made


def train(
    pipe: nwise.Pipeline, steps: int = 6, target: Callable[[int], Tensor] | None = None, size: int = 6
) -> list[Tensor]:
    """Losses and weights of some steps: by default the first is compared, two run eagerly, the others are replayed."""
    generator = torch.Generator().manual_seed(1)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(steps):
        x = torch.randn(size, 4, generator=generator)
        y = torch.randn(size, 4, generator=generator) if target is None else target(step)
        losses = pipe.step(x, target=y)
        shares = torch.tensor(list(pipe.loss_shares.values()))
        seen += [losses.detach().clone(), *pipe.microbatch_losses.values(), shares]
        update.step()
        update.zero_grad()
    return seen + [x.detach().clone() for x in pipe.state_dict().values()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


def replays(pipe: nwise.Pipeline) -> int:
    assert isinstance(pipe.runner, capture.Capture)
    return sum(kind.recording is not None for kind in pipe.runner._kinds.values())


def labels(step: int) -> Tensor:
    return torch.arange(6) % 4


def ignoring(step: int) -> Tensor:
    """The first micro-batch of two has no terms in step 3."""
    y = torch.randint(0, 4, (6,), generator=torch.Generator().manual_seed(step))
    y[: step % 4] = -100
    return y


class Injecting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return nwise.inject(y, 0.1 * y.square().mean())


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 0.5]))
CASES: dict[str, dict[str, Any]] = {
    "probes": {"strategy": nwise.strategy("local", heads="all"), "m": 2},
    "recomputed dropout": {"make": lambda: layers(nn.Dropout), "strategy": "end-to-end", "m": 2, "recompute": True},
    "recomputed dropout of two passes": {"make": lambda: layers(nn.Dropout), "m": 2, "recompute": True},
    "dropout": {"make": lambda: layers(nn.Dropout), "m": 2},
    "batch norm": {"make": lambda: layers(lambda: nn.BatchNorm1d(4)), "m": 2},
    "losses inside": {"make": lambda: layers(stage=Injecting(4, 4)), "strategy": "3-wise-mean", "m": 2},
    "ignored targets": {"loss": cross_entropy, "m": 2, "target": ignoring},
    "weights of classes": {"loss": WEIGHTED, "strategy": "3-wise-mean", "m": 2, "target": ignoring},
    "autocast": {"m": 2, "autocast": True},
}
for name in ("local", "2-wise", "3-wise-mean", "end-to-end", "deep-supervision", "rotating-2"):
    CASES |= {f"{name}, M = {m}": {"strategy": name, "m": m} for m in (1, 3)}


@pytest.mark.parametrize("name", CASES)
def test_captured_steps_are_bitwise_those_of_eager_ones(name: str) -> None:
    case = dict(CASES[name])
    target, autocast = case.pop("target", None), case.pop("autocast", False)
    pipes = pipelines(**case)
    # Around the whole loop, where torch keeps the weights that it has cast.
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_equal(*(train(pipe, 9, target) for pipe in pipes))
    assert replays(pipes[1])


def test_recipe_with_capture_trains_the_same() -> None:
    small = replace(recipe("digits"), model=ConvNet(num_stages=4, filters=4), max_steps=9, microbatches=2, device="cpu")
    config = replace(small, strategy="local@4,end-to-end", defer_batchnorm=True)
    runs = []
    for captured in (False, True):
        trainer = Trainer(replace(config, capture=captured))
        trainer.train()
        runs.append(trainer.pipe)
    assert_equal(*([*pipe.state_dict().values()] for pipe in runs))
    assert replays(runs[1])


def test_gradients_are_added_to_and_losses_stay() -> None:
    """A replay writes to the same memory each time; what a gradient held before, and what it was, is put aside."""
    pipes, x, found = pipelines(), torch.randn(6, 4), []
    for pipe in pipes:
        first: Any = next(pipe.parameters())
        train(pipe, steps=4)
        first.grad = torch.ones_like(first)
        losses = pipe.step(x, target=x)
        before = losses.tolist()[1:]
        pipe.step(2 * x, target=x)
        first.grad = first.grad.view_as(first.grad)  # the same memory, another object
        pipe.step(x, target=x)
        assert losses.tolist()[1:] == before
        found.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
        pipe.zero_grad(set_to_none=False)
        pipe.step(x, target=x)
        found[-1] += [p.grad for p in pipe.parameters() if p.grad is not None]
    torch.testing.assert_close(*found)


def test_a_head_of_several_stages_accumulates_once() -> None:
    """Its parameters are listed once for each stage, and each place added the gradient again."""
    head, x = nn.Linear(4, 4), torch.randn(6, 4)
    pipe = nwise.Pipeline(layers(), [head] * 3, nn.MSELoss(), "2-wise", seed=0)
    nwise.capture(pipe)
    for _ in range(5):
        pipe.zero_grad()
        pipe.step(x, target=x)
    assert head.weight.grad is not None
    once = head.weight.grad.clone()
    pipe.step(x, target=x)
    assert replays(pipe)
    torch.testing.assert_close(head.weight.grad, 2 * once)


def part(pipe: nwise.Pipeline, name: str) -> Any:
    return pipe.stages.get_submodule(name)


CHANGES: dict[str, Callable[[nwise.Pipeline], object]] = {
    "a frozen parameter": lambda pipe: part(pipe, "2.0").weight.requires_grad_(False),
    "another layer": lambda pipe: part(pipe, "1").__setitem__(1, nn.Sigmoid()),
    "another parameter": lambda pipe: setattr(part(pipe, "0.0"), "weight", nn.Parameter(torch.eye(4))),
    "another strategy": lambda pipe: setattr(pipe, "strategy", "end-to-end"),
    "other coefficients": lambda pipe: setattr(pipe, "strategy", nwise.Geometric(0.9)),
    "a mode": lambda pipe: part(pipe, "1.2").eval(),
    "statistics of inference": lambda pipe: pipe(torch.ones(6, 4)),
}
AFTER_REFRESH: dict[str, Callable[[nwise.Pipeline], object]] = {
    "a rate of dropout": lambda pipe: setattr(part(pipe, "1.2"), "p", 0.1),
    "the memory of a weight": lambda pipe: setattr(part(pipe, "0.0").weight, "data", torch.ones(4, 4)),
    "weights of classes": lambda pipe: setattr(pipe.loss_fns[0], "weight", torch.tensor([1.0, 5.0, 1.0, 1.0])),
}


@pytest.mark.parametrize("what", [*CHANGES, *AFTER_REFRESH])
def test_changes_of_modules_and_strategies_are_recorded_again(what: str) -> None:
    """What a module or loss holds beside its modules and parameters stays as it was, unless the caller refreshes."""
    found = []
    for captured in (False, True):
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 1.0]))
        stages = [layers(nn.Dropout)[0], layers(nn.Dropout)[1], *layers(lambda: nn.BatchNorm1d(4))[2:]]
        heads = [nn.Linear(4, 4) for _ in range(3)]
        pipe = nwise.Pipeline(stages, heads, loss, nwise.Geometric(0.3), seed=0)
        pipe = nwise.capture(pipe) if captured else pipe
        found.append(train(pipe, 5, labels))
        (CHANGES | AFTER_REFRESH)[what](pipe)
        if what in AFTER_REFRESH:
            pipe.refresh()
        found[-1] += train(pipe, 5, labels)
    assert_equal(*found)
    assert replays(pipe)


def test_strategies_and_shapes_take_turns() -> None:
    """A step that is recorded does not belong to the calls that the engine follows; each kind has its own recording."""
    pipes = pipelines()
    for step in range(12):
        for pipe in pipes:
            pipe.strategy = ("2-wise", "end-to-end")[step % 2]
        assert_equal(*(train(pipe, steps=1) for pipe in pipes))
    for size in (3, 4, 5):
        assert_equal(*(train(pipe, steps=4, size=size) for pipe in pipes))
    assert replays(pipes[1]) == 5


def test_too_many_shapes_and_changes_run_eagerly() -> None:
    """A parameter that is frozen and freed in turn would be recorded in every step. Each is said once."""
    _, pipe = pipelines()
    first = next(pipe.parameters())
    for size in range(2, 10):
        train(pipe, size=size, steps=4)
    with pytest.warns(UserWarning, match="at most 8 kinds of steps") as caught:
        train(pipe, size=10)
    train(pipe, size=11)
    assert [warning.filename for warning in caught] == [__file__]
    assert replays(pipe) == 8
    for step in range(8):
        first.requires_grad_(step % 2 == 1)
        train(pipe, steps=1)
    first.requires_grad_(False)
    with pytest.warns(UserWarning, match="changed 8 times in close succession") as caught:
        train(pipe)
    first.requires_grad_(True)
    train(pipe)
    assert [warning.filename for warning in caught] == [__file__]


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 0.5)


class Masking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.where(x[x > 0].sum() > 0, 0)


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


@pytest.mark.parametrize(
    ("stage", "cause"),
    [
        (Reading(4, 4), "Stage 2 reads a value"),
        (Drawing(4, 4), "Stage 2 draws random numbers on the CPU"),
        (Masking(4, 4), "Stage 2 calls `index`, whose result has a shape"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly(stage: nn.Module, cause: str) -> None:
    pipes = pipelines(lambda: layers(stage=stage))
    random.seed(0)
    eager = train(pipes[0])
    random.seed(0)
    with pytest.warns(UserWarning, match=cause):
        captured = train(pipes[1])
    assert_equal(eager, captured)
    assert not replays(pipes[1])


def test_losses_that_may_be_undefined_for_a_micro_batch_run_eagerly() -> None:
    """A class of weight 0 alone in a micro-batch: its loss is 0/0, and 0 times its gradient was nan."""

    def target(step: int) -> Tensor:
        return torch.tensor([0, 0, 1, 2, 3, 1])

    pipes = pipelines(loss=nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 1])), m=3)
    eager = train(pipes[0], target=target)
    with pytest.warns(UserWarning, match="reads a value"):
        captured = train(pipes[1], target=target)
    assert_equal(eager, captured)
    _, pipe = pipelines(loss=cross_entropy, m=2)
    train(pipe, steps=5, target=labels)
    assert pipe.step(torch.randn(6, 4), target=torch.full((6,), -100))[-1].isnan(), "known on the device alone"
    assert all(p.grad is None or not p.grad.any() for p in pipe.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pipe: part(pipe, "1.0").register_forward_hook(lambda *_: None), "no hooks.*Linear"),
        (lambda pipe: part(pipe, "1.0").weight.register_hook(lambda g: g), r"no hooks.*parameter of shape \[4, 4\]"),
        (lambda pipe: setattr(pipe, "strategy", "end-to-end-delay-1"), "strategy without a delay"),
        (None, "on a GPU. Found a pipeline on the device cpu"),
    ],
)
def test_what_a_recording_would_leave_out_is_refused(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pipe = pipelines()
    monkeypatch.undo() if change is None else change(pipe)
    with pytest.raises(ValueError, match=message):
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_several_processes_and_compression_are_refused() -> None:
    pipe = cast(nwise.Pipeline, SimpleNamespace(processes=SimpleNamespace(size=4), compress="none"))
    with pytest.raises(ValueError, match="all stages in one process.* Found 4 processes; start one"):
        nwise.capture(pipe)
    with pytest.raises(ValueError, match="Found `compress`"):
        pipelines(compress="bf16")


def test_names_of_inputs_and_a_step_that_failed() -> None:
    class Two(nn.Linear):
        def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
            return super().forward(a) + (b if b is not None else -cast(Tensor, c))

    fails = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("once")
        return nn.functional.mse_loss(output, target)

    pipes, x, z = pipelines(lambda: [Two(4, 4), *layers(nn.Dropout)[1:]], loss), torch.randn(6, 4), torch.randn(6, 4)
    pipes[1].load_state_dict(pipes[0].state_dict())
    for step in range(9):
        found = []
        for pipe in pipes:
            if fails := step == 2:
                with pytest.raises(ValueError, match="once"):
                    pipe.step(a=x, b=z, target=x)
                fails = False
            pipe.zero_grad()
            pipe.step(**({"a": x, "b": z} if step < 6 else {"a": x, "c": z}), target=x)
            found.append([p.grad for p in pipe.parameters() if p.grad is not None])
        assert_equal(*found)
    assert replays(pipes[1]) == 2
