"""Captured steps on a CPU, where a recorder replaces the CUDA graph; `test_gpu.py` tests them with the graph itself."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import nwise
from launch import results
from nwise.app.recipes import ConvNet, recipe
from nwise.app.training import Trainer
from nwise.capture import capture
from nwise.flow import flows_for
from nwise.program.arguments import capture_of
from nwise.runtime.ledger import same as same_specs
from nwise.runtime.post import messages_of
from nwise.runtime.processes import Processes
from nwise.schedule.named import choose
from ranks import captured as ranks
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


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_processes_record_what_lies_between_their_messages(num_ranks: int, tmp_path: Path) -> None:
    """Every bit is that of an eager step in one process; a rank that cannot replay does not disturb the others.

    It takes seconds, because processes start.
    """
    ranks.check(results(num_ranks, "captured.py", tmp_path, str(num_ranks)))


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
    narrow = ConvNet(num_stages=4, filters=4)
    config = replace(recipe("digits"), model=narrow, max_steps=9, strategy=strategy, microbatches=2, device="cpu")
    config = replace(config, defer_batchnorm=True)
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
    assert list(kind.drawing) == [{("stage", 0, 0): 2, ("stage", 1, 0): 2, ("stage", 2, 0): 2, ("stage", 3, 0): 1}]


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
        assert _equal(one, other), what
        assert replays(captured)


def test_a_change_counts_though_its_step_was_refused() -> None:
    """Regression: a hook refused the step after a change, and the next one replayed what was recorded before it."""
    plain, captured = pipelines(lambda: layers(lambda: nn.Dropout(0.5)))
    for pipe in (plain, captured):
        train(pipe)
        layer(pipe, 1, 2).p = 0.1
    hook = layer(captured, 1).register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="should have no hooks"):
        train(captured, steps=1)
    hook.remove()
    assert _equal(train(plain), train(captured))


def test_strategies_take_turns() -> None:
    """A step that is recorded does not belong to the calls that the engine follows."""
    plain, captured = pipelines(layers)
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        x = torch.randn(6, 4, generator=generator)
        for pipe in (plain, captured):
            pipe.strategy = ("2-wise", "end-to-end")[step % 2]
            pipe.step(x, target=x)
            for p in pipe.parameters():
                if p.grad is not None:
                    p.data -= 0.1 * p.grad
            pipe.zero_grad()
    assert replays(captured) == 2
    assert _equal(list(plain.state_dict().values()), list(captured.state_dict().values()))


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
def test_what_cannot_be_captured_runs_eagerly(stage: nn.Module, cause: str) -> None:
    pipes = pipelines(with_stage(stage))
    plain = train(pipes[0])
    with pytest.warns(UserWarning, match=cause):
        captured = train(pipes[1])
    assert _equal(plain, captured)
    assert not replays(pipes[1])


def test_replicas_are_refused() -> None:
    processes = cast(Processes, SimpleNamespace(size=4, num_ranks=2))
    with pytest.raises(ValueError, match="whole stages without replicas.* Found 4 processes for 2 ranks; start 2"):
        capture_of([], processes, None, always=False)


def test_segments_by_hand() -> None:
    """A rank's tasks between two messages, of two micro-batches end to end on two ranks."""
    chosen = choose("gpipe", flows_for(nwise.strategy("end-to-end"), 2, 2), (0, 1))
    names = []
    for rank in range(2):
        for receives, tasks, send in messages_of(chosen, rank, same_specs).segments[0]:
            arcs = [arc.action for arc in (*receives, send) if arc is not None]
            computed = [str(chosen.graph.tasks[task]) for task in tasks]
            names.append(" ".join([*map(str, arcs[: len(receives)]), *computed, *map(str, arcs[len(receives) :])]))
    assert names[:4] == ["F0(0) SX0(0)", "F0(1) SX0(1)", "RG0(0.0) W0(0)", "RG0(1.0) W0(1)"]
    assert names[4:] == ["RX1(0) F1(0) H1(0)", "RX1(1) F1(1) H1(1) B1(0.0) SG1(0.0)", "B1(1.0) SG1(1.0)"]


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


class Longest(nn.Linear):
    """Remembers the longest batch that it has seen."""

    longest = 1

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, len(x))
        return super().forward(x) / self.longest


def test_what_a_new_kind_of_step_changes_concerns_the_others() -> None:
    """Regression: the first step with a longer batch changed an attribute, and shorter batches replayed the one before."""
    pipes = pipelines(with_stage(Longest(4, 4)))
    for size in (3, 5, 3):
        same(pipes, size=size, steps=4)


def test_too_many_shapes_run_eagerly() -> None:
    _, pipe = pipelines(layers)

    def run() -> None:
        for size in range(2, 14):
            train(pipe, size=size, steps=3)

    with pytest.warns(UserWarning, match="at most 8 kinds of steps") as caught:
        run()
    assert [warning.filename for warning in caught] == [__file__]
    assert replays(pipe) == 8


def test_many_changes_end_capture() -> None:
    """A number that changes in every step would be recorded in every step."""
    _, pipe = pipelines(lambda: layers(lambda: nn.Dropout(0.5)))

    def run() -> None:
        for step in range(12):
            layer(pipe, 1, 2).p = 0.5 - step / 100
            train(pipe, steps=1)

    with pytest.warns(UserWarning, match="changed 8 times in close succession") as caught:
        run()
    assert [warning.filename for warning in caught] == [__file__]


class Hidden(nn.Linear):
    """Keeps a hidden state in a tuple."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.state = (torch.zeros(6, 4),)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x) + self.state[0])
        self.state = (y.detach(),)
        return y


class Late(nn.Linear):
    """Writes an attribute that only its class has, from the third call on: while the step is recorded."""

    hidden: Tensor | None = None
    seen = [0]  # noqa: RUF012 - of the class, which nwise does not look at

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.hidden is not None:
            y = y + 0.5 * self.hidden
        self.seen[0] += 1
        if self.seen[0] >= 3:
            self.hidden = y.detach()
        return y


class Generating(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.random.random() < 0.5 else x


class Global(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 else x


@pytest.mark.parametrize(
    ("kind", "cause"), [(Hidden, "state"), (Late, "hidden"), (Generating, "draws"), (Global, "draws")]
)
def test_states_of_python_are_refused_and_left_as_they_were(kind: type[nn.Module], cause: str) -> None:
    """A state in a container, a new attribute and a module's own generator were frozen; a failed recording left its writes."""
    random.seed(0)
    plain = train(pipelines(lambda: [*layers()[:2], kind(), layers()[3]])[0], steps=8)
    random.seed(0)
    pipe = pipelines(lambda: [*layers()[:2], kind(), layers()[3]])[1]
    with pytest.warns(UserWarning, match=f"cannot be.*({cause})"):
        captured = train(pipe, steps=8)
    assert _equal(plain, captured)


class Scaled(nn.Linear):
    scale = 1.0
    options = (1.0,)
    table = torch.arange(8.0)

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.loud = [nn.Dropout(0.5)]
        self.shift = self.table[:4]

    def forward(self, x: Tensor) -> Tensor:
        y = self.loud[0](super().forward(x)) + self.shift
        return y * self.scale * self.options[0]


CHANGES: dict[str, Callable[[nwise.Pipeline], object]] = {
    "a new attribute": lambda pipe: setattr(pipe.stages[2], "scale", 0.5),
    "another tuple": lambda pipe: setattr(pipe.stages[2], "options", (3.0,)),
    "an unregistered module": lambda pipe: cast(Any, pipe.stages[2]).loud[0].eval(),
    "another view": lambda pipe: setattr(pipe.stages[2], "shift", cast(Any, pipe.stages[2]).shift[:1]),
    "another forward": lambda pipe: setattr(pipe.stages[2], "forward", lambda x: 2 * x),
    "credit": lambda pipe: setattr(pipe, "strategy", nwise.Geometric(0.9)),
    "a transposed weight": lambda pipe: setattr(layer(pipe, 0).weight, "data", layer(pipe, 0).weight.data.t()),
    "a loss's weight": lambda pipe: setattr(pipe.loss_fns[0], "weight", torch.tensor([1.0, 5.0, 1.0, 1.0])),
    "statistics of inference": lambda pipe: pipe(torch.ones(6, 4)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_that_keep_the_tasks_are_noticed(what: str) -> None:
    """The coefficients of a strategy, new attributes, containers and the weights of losses changed without effect."""

    def target(step: int) -> Tensor:
        return torch.arange(6) % 4

    found = []
    for captured in (False, True):
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 1.0]))
        stages = [*layers(lambda: nn.BatchNorm1d(4))[:2], Scaled(), layers()[3]]
        heads: list[nn.Module] = [nn.Linear(4, 4) for _ in range(3)]
        pipe = nwise.defer_batchnorm(
            nwise.Pipeline(stages, heads, loss, nwise.Geometric(0.3), seed=0, capture=captured)
        )
        before = train(pipe, steps=5, target=target)
        CHANGES[what](pipe)
        found.append([*before, *train(pipe, steps=5, target=target)])
    assert _equal(*found)
    assert replays(pipe)


def test_a_head_of_several_stages_accumulates_once() -> None:
    """Its parameters are listed once for each stage, and each place added the gradient again."""
    torch.manual_seed(0)
    head = nn.Linear(4, 4)
    pipe = nwise.Pipeline(layers(), [head] * 3, nn.MSELoss(), "2-wise", seed=0, capture=True)
    x = torch.randn(6, 4)
    for _ in range(4):
        pipe.zero_grad()
        pipe.step(x, target=x)
    assert head.weight.grad is not None
    once = head.weight.grad.clone()
    head.weight.grad = head.weight.grad.view_as(head.weight)  # the same memory, another object
    pipe.step(x, target=x)
    torch.testing.assert_close(head.weight.grad, 2 * once)


def test_losses_that_may_be_undefined_for_a_micro_batch_run_eagerly() -> None:
    """A class of weight 0 alone in a micro-batch: its loss is 0/0, and 0 times its gradient was nan."""

    def target(step: int) -> Tensor:
        return torch.tensor([0, 0, 1, 2, 3, 1])

    pipes = pipelines(layers, nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 1])), m=3)
    plain = train(pipes[0], target=target)
    with pytest.warns(UserWarning, match="reads a value"):
        captured = train(pipes[1], target=target)
    assert _equal(plain, captured)
    _, pipe = pipelines(layers, nn.functional.cross_entropy, m=2)
    train(pipe, steps=4, target=lambda step: torch.arange(6) % 4)
    with pytest.warns(UserWarning, match="Found nan in step 4"):
        pipe.step(torch.randn(6, 4), target=torch.full((6,), -100))
    assert all(p.grad is None or not p.grad.any() for p in pipe.parameters())


def test_names_of_inputs_and_a_step_that_failed() -> None:
    class Two(nn.Linear):
        def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
            return super().forward(a) + (b if b is not None else -cast(Tensor, c))

    fails = False

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if fails:
            raise ValueError("once")
        return nn.functional.mse_loss(output, target)

    def make() -> list[nn.Module]:
        return [*layers(lambda: nn.Dropout(0.5))[:0], Two(4, 4), *layers(lambda: nn.Dropout(0.5))[1:]]

    plain, captured = pipelines(make, loss)
    x, z = torch.randn(6, 4), torch.randn(6, 4)
    for step in range(8):
        for pipe in (plain, captured):
            if fails := step == 1:
                with pytest.raises(ValueError, match="once"):
                    pipe.step(a=x, b=z, target=x)
                fails = False
            pipe.zero_grad()
            pipe.step(**({"a": x, "b": z} if step < 6 else {"a": x, "c": z}), target=x)
        for p, q in zip(plain.parameters(), captured.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)
    assert replays(captured)


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(one, other, strict=True))
