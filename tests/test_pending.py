"""Late gradients that are put aside, saved and restored: a save changes nothing, whatever stands around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nwise
from nets import equal
from nwise.app.recipes import Adam
from nwise.app.training import make_optimizer
from nwise.checkpoint import Checkpoints
from nwise.modes import evaluating
from nwise.training import NonFiniteGuard, NotFiniteError
from nwise.training.late import hidden_matrices

DROPPED = "gradients? still due, lost now because"


def net(
    strategy: Any, m: int = 1, *, cut: tuple[int, ...] = (1, 1), dropout: float = 0.0, **options: Any
) -> nwise.Pipeline:
    """Blocks b0, b1, ... and an output, so many in each stage, with heads."""
    torch.manual_seed(0)
    blocks: dict[str, nn.Module] = {
        f"b{i}": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout)) for i in range(sum(cut) - 1)
    }
    blocks["out"] = nn.Linear(4, 3)
    names = iter(blocks.items())
    stages = [nwise.Chain(dict(islice(names, count))) for count in cut]
    heads = [nn.Linear(4, 3) for _ in cut[:-1]]
    return nwise.Pipeline(stages, heads, nn.functional.cross_entropy, strategy, m, seed=1, **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=numbers), torch.randint(0, 3, (6,), generator=numbers)


def train(
    pipe: nwise.Pipeline, optimizer: torch.optim.Optimizer, steps: range, after: Callable[[], object] = lambda: None
) -> dict[str, Tensor]:
    """Train; return the parameters."""
    for step in steps:
        x, y = batch(step)
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        after()
    return {name: p.detach().clone() for name, p in pipe.named_parameters()}


def sgd(pipe: nwise.Pipeline, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr)


def saved(
    folder: Path,
    strategy: Any,
    steps: int,
    make: Callable[[nwise.Pipeline], torch.optim.Optimizer] = sgd,
    cut: tuple[int, ...] = (1, 1),
) -> nwise.Pipeline:
    """A network after some steps, with a checkpoint."""
    pipe = net(strategy, cut=cut)
    optimizer = make(pipe)
    train(pipe, optimizer, range(steps))
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
        pipe = net("end-to-end-delay-1", dropout=0.5, recompute=recompute)

        def save() -> None:
            if around is not None:
                with around(pipe):
                    pipe.pending_gradients()

        def clipped_save() -> None:
            save()
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.1)

        return train(pipe, sgd(pipe), range(6), clipped_save)

    assert equal(run(None), run(MODES[mode]))


class Block(nn.Module):
    """Two layers that may run again in the backward pass."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.a, self.b, self.again = nn.Linear(4, 4), nn.Linear(4, 4), again

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)


@pytest.mark.parametrize("strategy", ["end-to-end", "end-to-end-delay-1", "2-wise-delay-2", "hogwild-forward"])
def test_checkpoint_inside_a_stage_under_a_delay(strategy: str) -> None:
    """Regression: `torch.utils.checkpoint` ran the layers again with the present weights instead of the old ones."""
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        stages = [Block(again=again), Block(again=again), nn.Linear(4, 3)]
        pipe = nwise.Pipeline(stages, [nn.Linear(4, 3) for _ in range(2)], strategy=strategy, seed=0).double()
        optimizer = sgd(pipe, 1.0)
        for step in range(6):
            x, y = batch(step)
            pipe.step(x.double(), target=y)
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: p.detach().clone() for name, p in pipe.named_parameters()})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-12, atol=1e-12)


ACTIONS: dict[str, tuple[Callable[[nwise.Pipeline], object], bool]] = {
    "to the same device": (lambda pipe: pipe.to("cpu"), True),
    "float of float": (lambda pipe: pipe.float(), True),
    "double": (lambda pipe: pipe.double(), False),
    "weights": (lambda pipe: pipe.load_state_dict({k: v.clone() for k, v in pipe.state_dict().items()}), False),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_late_gradients_stay_or_are_reported(action: str, tmp_path: Path) -> None:
    """Regression: each of these dropped them without a word, even those that `resume` had just restored."""
    pipe = saved(tmp_path, "end-to-end-delay-2", 3)
    resumed = net("end-to-end-delay-2")
    Checkpoints(tmp_path, resumed).resume()
    act, keeps = ACTIONS[action]
    for one in (pipe, resumed):
        with nullcontext() if keeps else pytest.warns(UserWarning, match=DROPPED):
            act(one)
        assert one.drain() == keeps


def test_resume_undoes_gradients_and_optimizer_state(tmp_path: Path) -> None:
    """Regression: after a return to a checkpoint, the gradient of the failed step was added to the first new one."""
    pipe = net("2-wise")
    optimizer = torch.optim.Adam(pipe.parameters(), 0.1)
    checkpoints = Checkpoints(tmp_path, pipe, optimizer)
    checkpoints.save()  # before the optimizer has any state
    expected = train(pipe, optimizer, range(3))
    pipe.step(batch(0)[0] * 100, target=batch(0)[1])
    assert checkpoints.resume() is not None
    assert equal(train(pipe, optimizer, range(3)), expected)


def test_adagrad_resumes(tmp_path: Path) -> None:
    """Its state begins when it is made, so a parameter without a saved state must get another one."""
    pipe = net("2-wise")
    Checkpoints(tmp_path, pipe, torch.optim.Adagrad(pipe.heads.parameters())).save()
    again = net("2-wise")
    optimizer = torch.optim.Adagrad(again.parameters())
    Checkpoints(tmp_path, again, optimizer).resume()
    train(again, optimizer, range(1))


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
    kept = pipe.pending_gradients()
    for _ in range(2):
        pipe.steps = 3
        assert pipe.restore_pending(kept)
        pipe.step(torch.tensor([[10.0]]))
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
        pipe.zero_grad()
        assert [g.item() for call in kept for g in call.values()] == [2, 3]
    assert not pipe.restore_pending([])
    assert not pipe.drain(), "nothing replaces everything"


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
    train(other, sgd(other), range(5, 6))


def test_resume_at_a_switch_drops_as_the_run_did(tmp_path: Path) -> None:
    whole = saved(tmp_path, "2-wise-delay-1", 3, cut=(1, 1, 1))
    whole.strategy = "end-to-end-delay-1"
    with pytest.warns(UserWarning, match=DROPPED):
        expected = train(whole, sgd(whole), range(3, 6))
    again = net("end-to-end-delay-1", cut=(1, 1, 1))
    resumed = Checkpoints(tmp_path, again).resume()
    assert resumed is not None
    changed = "strategy 2-wise-delay-1 -> end-to-end-delay-1"
    assert resumed.changes == f"{changed}; dropped the late gradients of 1 mini-batch"
    assert equal(train(again, sgd(again), range(3, 6)), expected)


def test_strategy_set_after_resume_drops_with_a_warning(tmp_path: Path) -> None:
    saved(tmp_path, "2-wise-delay-1", 2, cut=(1, 1, 1))
    again = net("2-wise-delay-1", cut=(1, 1, 1))
    Checkpoints(tmp_path, again).resume()
    again.strategy = nwise.strategy("3-wise-mean-delay-1")
    with pytest.warns(UserWarning, match=DROPPED):
        train(again, sgd(again), range(2, 3))


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


def test_late_gradient_that_is_not_finite_is_not_saved() -> None:
    """Regression: it waited in the checkpoint, so every resume failed."""
    pipe = nan_at_zero()
    guard = NonFiniteGuard(pipe)
    pipe.step(torch.ones(1, 2))
    guard.check_parameters()
    pipe.step(torch.zeros(1, 2))
    with pytest.raises(
        NotFiniteError, match=r"The late gradient of 'stages.0.a.weight' should be finite to be saved\."
    ):
        guard.check_parameters()


def test_report_names_the_mini_batch_of_a_late_gradient() -> None:
    pipe, facts = nan_at_zero(), dict[str, Any]()
    guard = NonFiniteGuard(pipe, report=facts.update)
    for x in (torch.ones(1, 2), torch.zeros(1, 2)):
        pipe.step(x)
        guard()
    pipe.step(torch.ones(1, 2))
    with pytest.raises(NotFiniteError, match="of step 1;"):
        guard()
    assert facts["step"] == 1


def test_rmsprop_with_new_momentum_begins_anew(tmp_path: Path) -> None:
    """Regression: KeyError at the first update."""
    saved(tmp_path, "2-wise", 2, lambda pipe: torch.optim.RMSprop(pipe.parameters(), 0.01))
    again = net("2-wise")
    optimizer = torch.optim.RMSprop(again.parameters(), 0.01, momentum=0.9)
    resumed = Checkpoints(tmp_path, again, optimizer).resume()
    assert resumed is not None
    assert resumed.changes == "optimizer RMSprop -> RMSprop with momentum, with fresh state"
    train(again, optimizer, range(2, 3))


def test_optimizer_of_fewer_parameters_resumes(tmp_path: Path) -> None:
    """Regression: state of a parameter that the optimizer does not have, so `state_dict` raised KeyError."""
    saved(tmp_path, "2-wise", 2, lambda pipe: torch.optim.Adam(pipe.parameters(), 0.01))
    again = net("2-wise")
    again.stages[0].requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in again.parameters() if p.requires_grad], 0.01)
    Checkpoints(tmp_path, again, optimizer).resume()
    assert len(optimizer.state_dict()["state"]) == 2, "those of the last stage; the head does not learn"
    train(again, optimizer, range(2, 3))


def test_muon_resumes_in_another_cut(tmp_path: Path) -> None:
    """The last matrix of a stage without one in the stage after it changes from Muon to AdamW. Regression: KeyError."""

    def make(*cut: tuple[str, ...]) -> tuple[nwise.Pipeline, torch.optim.Optimizer]:
        torch.manual_seed(0)
        pieces: dict[str, nn.Module] = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 3), "norm": nn.LayerNorm(3)}
        stages = [nwise.Chain({name: pieces[name] for name in names}) for names in cut]
        pipe = nwise.Pipeline(stages, None, strategy="end-to-end", seed=0)
        return pipe, make_optimizer(Adam(muon_lr=0.02), pipe.parameters(), hidden_matrices(pipe))

    pipe, optimizer = make(("a", "b"), ("norm",))
    train(pipe, optimizer, range(2))
    Checkpoints(tmp_path, pipe, optimizer).save()
    again, optimizer = make(("a",), ("b", "norm"))
    Checkpoints(tmp_path, again, optimizer).resume()
    train(again, optimizer, range(2, 4))


@pytest.mark.parametrize("part", ["stage", "layer"])
def test_save_after_a_part_was_replaced(part: str, tmp_path: Path) -> None:
    """Regression: KeyError whose message was a tensor."""
    pipe: Any = net("end-to-end-delay-1")
    x, y = batch(0)
    pipe.step(x, target=y)
    if part == "stage":
        pipe.stages[0] = copy.deepcopy(pipe.stages[0])
    else:
        pipe.pending_gradients()  # an earlier checkpoint
        pipe.stages[0].b0[0] = copy.deepcopy(pipe.stages[0].b0[0])
    with pytest.warns(UserWarning, match="gradients"):
        Checkpoints(tmp_path, pipe).save()


def test_failed_step_drops_gradients_that_a_save_has_put_aside() -> None:
    """They belong to steps after the mini-batches that the failure has dropped, and would come alone."""
    pipe = net("end-to-end-delay-1")
    train(pipe, sgd(pipe), range(2))
    assert pipe.pending_gradients()
    with pytest.raises((RuntimeError, ValueError)):
        pipe.step(torch.randn(6, 5), target=batch(0)[1])
    assert not pipe.drain()


def test_recorder_sees_only_steps() -> None:
    pipe, steps = net("end-to-end-delay-1"), list[int]()
    train(pipe, sgd(pipe), range(2))
    pipe.recorder = lambda step, *rest: steps.append(step)
    train(pipe, sgd(pipe), range(2, 3))
    steps.clear()
    pipe.pending_gradients()
    assert not steps


def test_checkpoints_keep_the_errors_of_compression(tmp_path: Path) -> None:
    """Regression: each save dropped the values that were still to travel."""
    states = []
    for every in (1, 100):
        pipe = net("end-to-end", compress="top-30%")
        checkpoints = Checkpoints(tmp_path / str(every), pipe)
        states.append(train(pipe, sgd(pipe), range(6), lambda c=checkpoints, e=every, p=pipe: p.steps % e or c.save()))  # type: ignore[misc]
    assert equal(*states)


def test_first_stage_may_have_any_method() -> None:
    """Regression: a stage with a method `entry` was taken for a chain."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def entry(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.entry(x) * mask

    pipe = nwise.Pipeline([First(), nn.Linear(4, 2)], None, lambda y, t: y.square().mean(), "end-to-end")
    pipe.step(torch.randn(3, 4), torch.ones(3, 4))


def test_step_that_fails_before_its_first_action_drops_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either half alone would be added to the gradients of another step."""
    pipe = net("end-to-end-delay-2")
    train(pipe, sgd(pipe), range(3))
    assert pipe.pending_gradients()
    train(pipe, sgd(pipe), range(3, 4))

    def fail(x: Tensor) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "clone", fail)
        with pytest.raises(MemoryError):
            train(pipe, sgd(pipe), range(4, 5))
    assert pipe.forget_pending() == 0


def test_failed_drain_drops_gradients_that_a_save_has_put_aside() -> None:
    """With ages that differ, passes of a mini-batch come before gradients of earlier ones."""
    pipe = net("hogwild-forward", cut=(1, 1, 1))
    train(pipe, sgd(pipe), range(4))
    assert len(pipe.pending_gradients()) > 1

    def stop(step: int, *rest: object) -> None:
        if step == 6:
            raise KeyboardInterrupt

    pipe.recorder = stop
    train(pipe, sgd(pipe), range(4, 5))
    assert pipe.drain()
    with pytest.raises(KeyboardInterrupt):
        pipe.drain()
    assert not pipe.drain()


def test_drain_after_a_write_leaves_nothing() -> None:
    """The gradients were made for other weights."""
    pipe = net("end-to-end-delay-1")
    train(pipe, sgd(pipe), range(2))
    with torch.no_grad():
        for p in pipe.parameters():
            p.mul_(0.5)
    with pytest.warns(UserWarning, match=DROPPED):
        pipe.drain()
    assert {p.grad for p in pipe.parameters()} == {None}
