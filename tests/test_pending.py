"""Late gradients that are put aside, saved and restored: a save changes nothing, whatever stands around it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nets import equal
from nwise.app.recipes import Adam
from nwise.app.training import make_optimizer
from nwise.checkpoint import Checkpoints
from nwise.compression import named
from nwise.modes import evaluating
from nwise.training import NonFiniteGuard, NotFiniteError
from nwise.training.late import hidden_matrices
from ranks.common import batches
from ranks.resume import WIDTH, pipeline

DROPPED = "gradients? still due, lost now because"


BATCHES = batches(9, WIDTH)


def net(strategy: Any, m: int = 1, *, cut: tuple[int, ...] = (2, 2), **options: Any) -> nwise.Pipeline:
    return pipeline(cut, strategy, m, **options)


def train(pipe: nwise.Pipeline, steps: range, optimizer: Any = None, after: Callable[[], object] = lambda: None) -> Any:
    """Train, by default with large steps of SGD; return the parameters."""
    optimizer = optimizer or torch.optim.SGD(pipe.parameters(), 0.5)
    for x, y in BATCHES[steps.start : steps.stop]:
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        after()
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


def saved(folder: Path, strategy: Any, steps: int, make: Any = None, cut: tuple[int, ...] = (2, 2)) -> nwise.Pipeline:
    """A network after some steps, with a checkpoint."""
    pipe = net(strategy, cut=cut)
    optimizer = make and make(pipe)
    train(pipe, range(steps), optimizer)
    Checkpoints(folder, pipe, optimizer).save()
    return pipe


MODES: dict[str, Callable[[nwise.Pipeline], AbstractContextManager[Any]]] = {
    "train": lambda pipe: nullcontext(),
    "eval": evaluating,
    "inference": lambda pipe: torch.inference_mode(),
    "autocast": lambda pipe: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_save_does_not_depend_on_modes_around_it(mode: str, *, recompute: bool) -> None:
    """Regression: in `eval` late gradients had no dropout, and in inference mode there were none, both in silence."""

    def run(around: Callable[[nwise.Pipeline], AbstractContextManager[Any]] | None) -> dict[str, Tensor]:
        pipe = net("end-to-end-delay-1", recompute=recompute)

        def clipped_save() -> None:
            if around is not None:
                with around(pipe):
                    pipe.pending_gradients()
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.1)

        return train(pipe, range(6), after=clipped_save)

    assert equal(run(None), run(MODES[mode]))


@pytest.mark.parametrize("strategy", ["2-wise", "2-wise-delay-1"])
def test_resume_undoes_gradients_and_optimizer_state(strategy: str, tmp_path: Path) -> None:
    """Regression: after a return to a checkpoint, the gradient of the failed step was added to the first new one."""
    pipe = net(strategy)
    optimizer = torch.optim.Adam(pipe.parameters(), 0.1)
    checkpoints = Checkpoints(tmp_path, pipe, optimizer)
    checkpoints.save()  # before the optimizer has any state
    expected = train(pipe, range(3), optimizer)
    pipe.step(BATCHES[0][0] * 100, target=BATCHES[0][1])
    assert checkpoints.resume() is not None
    assert not pipe.has_pending
    assert equal(train(pipe, range(3), optimizer), expected)


def by_hand() -> nwise.Pipeline:
    """y = w x and loss = y under a delay of two, after three steps: the gradients 2 and 3 of x are due."""
    pipe = nwise.Pipeline([nn.Linear(1, 1, bias=False)], None, lambda y, t: y.mean(), "end-to-end-delay-2")
    for b in range(3):
        pipe.step(torch.tensor([[1.0 + b]]))
    pipe.zero_grad()
    return pipe


def test_pending_gradients_are_copies() -> None:
    """Regression: the tensors became `.grad` itself, so clipping changed the caller's copies."""
    pipe = by_hand()
    (weight,) = pipe.parameters()
    weight.grad = torch.tensor([[7.0]])
    kept = pipe.pending_gradients()
    assert weight.grad == 7, "what the caller has added stays"
    pipe.zero_grad()
    for _ in range(2):
        pipe.steps = 3
        assert pipe.restore_pending(kept)
        weight.grad = torch.ones(1, 1)
        pipe.step(torch.tensor([[10.0]]))
        assert weight.grad == 1 + 2, "they are added"
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
        pipe.zero_grad()
        assert [g.item() for call in kept for g in call.values()] == [2, 3]
    assert not pipe.restore_pending([])
    assert not pipe.drain(), "nothing replaces everything"


@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
@pytest.mark.parametrize(
    ("cut", "m"), [((1, 1, 1, 1), 2), ((2, 2), 1), ((4,), 1)], ids=["another M", "two stages", "one stage"]
)
def test_hogwild_resumes_with_other_ages(cut: tuple[int, ...], m: int, tmp_path: Path) -> None:
    """Regression: the first step dropped them and advised to drain before the change."""
    saved(tmp_path, "hogwild", 5, cut=(1, 1, 1, 1))
    other = net("hogwild", m, cut=cut)
    resumed = Checkpoints(tmp_path, other).resume()
    assert resumed is not None
    assert "dropped the late gradients of 6 mini-batches" in resumed.changes
    train(other, range(5, 6))


def test_resume_at_a_switch_drops_as_the_run_did(tmp_path: Path) -> None:
    whole = saved(tmp_path, "2-wise-delay-1", 3, cut=(1, 1, 2))
    whole.strategy = "end-to-end-delay-1"
    with pytest.warns(UserWarning, match=DROPPED):
        expected = train(whole, range(3, 6))
    again = net("end-to-end-delay-1", cut=(1, 1, 2))
    resumed = Checkpoints(tmp_path, again).resume()
    assert resumed is not None
    changed = "strategy 2-wise-delay-1 -> end-to-end-delay-1"
    assert resumed.changes == f"{changed}; dropped the late gradients of 1 mini-batch"
    assert equal(train(again, range(3, 6)), expected)


class Odd(nwise.Strategy):
    """A strategy whose name says nothing."""

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        del turn
        return nwise.NWise(2).credit(num_stages)


@pytest.mark.parametrize("strategy", [Odd(), nwise.Delayed(Odd(), by=1)])
def test_strategy_that_no_name_stands_for_resumes(strategy: nwise.Strategy, tmp_path: Path) -> None:
    """Regression: `resume` parsed the saved name."""
    saved(tmp_path, strategy, 2)
    for other in (net(strategy), net("2-wise")):
        assert Checkpoints(tmp_path, other).resume() is not None
        assert other.steps == 2


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_sparse_late_gradients_are_saved(tmp_path: Path) -> None:
    """Regression: a RuntimeError about memory formats at every save."""

    def fresh() -> nwise.Pipeline:
        torch.manual_seed(0)
        first = nwise.Chain({"embed": nn.Embedding(7, 4, sparse=True), "mean": Mean()})
        return nwise.Pipeline([first, nwise.Chain({"out": nn.Linear(4, 3)})], None, strategy="end-to-end-delay-1")

    pipe, again = fresh(), fresh()
    pipe.step(torch.randint(0, 7, (6, 2)), target=torch.arange(6) % 3)
    Checkpoints(tmp_path, pipe).save()
    Checkpoints(tmp_path, again).resume()
    gradients = []
    for one in (pipe, again):
        assert one.drain()
        gradient = next(one.parameters()).grad
        assert gradient is not None
        gradients.append(gradient.to_dense())
    assert torch.equal(*gradients)


def nan_at_zero() -> nwise.Pipeline:
    """The loss |y| is 0 at y = 0, but its gradient is nan."""
    torch.manual_seed(0)
    stage = nwise.Chain({"a": nn.Linear(2, 2, bias=False)})
    return nwise.Pipeline([stage], None, lambda y, t: y.square().sum().sqrt(), "end-to-end-delay-1")


def test_late_gradient_that_is_not_finite_is_named_and_not_saved() -> None:
    """Regression: it waited in the checkpoint, so every resume failed."""
    facts = dict[str, Any]()
    for saves in (False, True):
        pipe = nan_at_zero()
        guard = NonFiniteGuard(pipe, report=facts.update)
        for x in (torch.ones(1, 2), torch.zeros(1, 2)):
            guard.check_parameters()
            pipe.step(x)
            guard()
        if saves:
            with pytest.raises(
                NotFiniteError, match="late gradient of 'stages.0.a.weight' should be finite to be saved"
            ):
                guard.check_parameters()
        else:
            pipe.step(torch.ones(1, 2))
            with pytest.raises(
                NotFiniteError, match="The gradient of stage 0 or its head should be a finite .* of step 1;"
            ):
                guard()
            assert facts["step"] == 1


OPTIMIZERS: dict[str, tuple[Any, Any, str]] = {
    # Its state begins when it is made, so a parameter without a saved state must get another one.
    "of more parameters": (
        lambda pipe: torch.optim.Adagrad(pipe.heads.parameters()),
        lambda pipe: torch.optim.Adagrad(pipe.parameters()),
        "",
    ),
    "of fewer parameters": (
        lambda pipe: torch.optim.Adam(pipe.parameters(), 0.01),
        lambda pipe: torch.optim.Adam(pipe.stages[1].parameters(), 0.01),
        "the state of model.blocks.0.0.bias, .* is dropped, which the optimizer does not update",
    ),
    "of another kind": (
        lambda pipe: torch.optim.Adam(pipe.parameters()),
        lambda pipe: torch.optim.SGD(pipe.parameters()),
        "optimizer Adam -> SGD, with fresh state",
    ),
    "with momentum": (
        lambda pipe: torch.optim.RMSprop(pipe.parameters(), 0.01),
        lambda pipe: torch.optim.RMSprop(pipe.parameters(), 0.01, momentum=0.9),
        "optimizer RMSprop -> RMSprop with momentum, with fresh state",
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_optimizer_trains_after_a_resume(name: str, tmp_path: Path) -> None:
    """Regression: KeyError at the first update, or in `state_dict`."""
    before, after, changes = OPTIMIZERS[name]
    saved(tmp_path, "2-wise", 2, before)
    again = net("2-wise")
    optimizer = after(again)
    resumed = Checkpoints(tmp_path, again, optimizer).resume()
    assert resumed is not None
    assert re.fullmatch(changes, resumed.changes)
    assert optimizer.state_dict()["state"].keys() <= {*range(len(optimizer.param_groups[0]["params"]))}
    train(again, range(2, 3), optimizer)


def test_muon_resumes_in_another_cut(tmp_path: Path) -> None:
    """The last matrix of a stage without one in the stage after it changes from Muon to AdamW. Regression: KeyError."""

    def make(*cut: tuple[str, ...]) -> tuple[nwise.Pipeline, torch.optim.Optimizer]:
        torch.manual_seed(0)
        pieces = {"a": nn.Linear(WIDTH, 5), "b": nn.Linear(5, 4), "norm": nn.LayerNorm(4)}
        stages = [nwise.Chain({name: pieces[name] for name in names}) for names in cut]
        pipe = nwise.Pipeline(stages, None, strategy="end-to-end", seed=0)
        return pipe, make_optimizer(Adam(muon_lr=0.02), pipe.parameters(), hidden_matrices(pipe))

    pipe, optimizer = make(("a", "b"), ("norm",))
    train(pipe, range(2), optimizer)
    Checkpoints(tmp_path, pipe, optimizer).save()
    again, optimizer = make(("a",), ("b", "norm"))
    Checkpoints(tmp_path, again, optimizer).resume()
    train(again, range(2, 4), optimizer)


@pytest.mark.parametrize("part", ["stage", "layer"])
def test_save_after_a_part_was_replaced(part: str, tmp_path: Path) -> None:
    """Regression: KeyError whose message was a tensor."""
    pipe: Any = net("end-to-end-delay-1")
    pipe.step(BATCHES[0][0], target=BATCHES[0][1])
    if part == "stage":
        pipe.stages[0] = copy.deepcopy(pipe.stages[0])
    else:
        pipe.pending_gradients()  # an earlier checkpoint
        block = pipe.stages[0].get_submodule("blocks.0")
        block[0] = copy.deepcopy(block[0])
    with pytest.warns(UserWarning, match="gradients"):
        Checkpoints(tmp_path, pipe).save()


def test_recorder_sees_only_steps() -> None:
    pipe, steps = net("end-to-end-delay-1"), list[int]()
    train(pipe, range(2))
    pipe.recorder = lambda step, *rest: steps.append(step)
    train(pipe, range(2, 3))
    steps.clear()
    pipe.pending_gradients()
    assert not steps


def test_checkpoints_keep_the_errors_of_compression(tmp_path: Path) -> None:
    """Regression: each save dropped the values that were still to travel."""
    states = []
    for every in (1, 100):
        pipe = net("end-to-end", compress=named("top-30%"))
        checkpoints = Checkpoints(tmp_path / str(every), pipe)
        states.append(train(pipe, range(6), after=lambda c=checkpoints, e=every, p=pipe: p.steps % e or c.save()))  # type: ignore[misc]
    assert equal(*states)


def test_step_that_fails_before_its_first_action_drops_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either half alone would be added to the gradients of another step."""
    pipe = net("end-to-end-delay-2")
    train(pipe, range(3))
    assert pipe.pending_gradients()
    train(pipe, range(3, 4))

    def fail(x: Tensor) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "clone", fail)
        with pytest.raises(MemoryError):
            train(pipe, range(4, 5))
    assert pipe.forget_pending() == 0


def test_failed_drain_drops_gradients_that_a_save_has_put_aside() -> None:
    """With ages that differ, passes of a mini-batch come before gradients of earlier ones."""
    pipe = net("hogwild-forward", cut=(1, 1, 2))
    train(pipe, range(4))
    assert len(pipe.pending_gradients()) > 1

    def stop(step: int, *rest: object) -> None:
        if step == 6:
            raise KeyboardInterrupt

    pipe.recorder = stop
    train(pipe, range(4, 5))
    assert pipe.drain()
    with pytest.raises(KeyboardInterrupt):
        pipe.drain()
    assert not pipe.drain()
