"""Forwards that are run again see what the first one saw."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nwise
from nets import Tally
from nwise.schedule import Costs, best
from nwise.schedule.actions import PASSES, Action, Kind
from nwise.schedule.recompute import recomputing
from nwise.schedule.validation import validate


class Counting(nn.Module):
    """Dropout, batch statistics and a count of forwards: each would show a second forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.4)
        self.forwards = Tally()

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.count += 1
        y: Tensor = self.drop(torch.tanh(self.norm(self.linear(x))))
        return y


@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
@pytest.mark.parametrize(
    ("strategy", "reruns"),
    [
        # Actions of the same stage that follow each other share a graph: F0 H0 W0  F1 H1 W1 ...
        ("local", [0, 0, 0, 0]),
        # F0  F1 H1 I1  W0  F2 H2 I2  W1  F3 H3 B3  W2
        ("2-wise", [1, 1, 1, 0]),
        # F0  F1  F2 H2 I2  I1  W0  F3 H3 B3  B2  W1
        ("3-wise", [1, 2, 1, 0]),
        # F0 H0  F1 H1  F2 H2  F3 H3 B3  I2  I1  W0  W1  W2
        ("4-wise-mean", [1, 2, 2, 0]),
        ("end-to-end", [1, 1, 1, 0]),
        ("hogwild-forward-least", [0.6, 0.8, 0.8, 0]),
    ],
)
def test_recomputation_runs_when_others_have_run_and_changes_nothing(strategy: str, reruns: list[float]) -> None:
    stages = [Counting(5) for _ in range(4)]
    heads = [nn.Sequential(nn.Dropout(0.2), nn.Linear(5, 5)) for _ in range(3)]
    plain = nwise.Pipeline(copy.deepcopy(stages), copy.deepcopy(heads), cross_entropy, strategy, 2, seed=3)
    again = nwise.Pipeline(stages, heads, cross_entropy, strategy, 2, seed=3, recompute=True)
    optimizers = [torch.optim.SGD(pipe.parameters(), lr=0.1) for pipe in (plain, again)]
    for _ in range(5):
        x, y = torch.randn(6, 5), torch.randint(0, 5, (6,))
        losses = [pipe.step(x, target=y) for pipe in (plain, again)]
        assert torch.equal(losses[0].nan_to_num(), losses[1].nan_to_num())
        for (name, p), q in zip(plain.named_parameters(), again.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.buffers(), again.buffers(), strict=True):
        assert torch.equal(a, b)
    assert [stage.forwards.count for stage in stages] == [5 * 2 * (1 + more) for more in reruns]


class Warming(nn.Module):
    """A layer that grows with every forward, so a forward that is run again must see the old count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        forwards: Tensor = self.forwards.add_(1)  # type: ignore[operator]
        y: Tensor = self.linear(x) * forwards.clone()
        return y


def test_every_forward_of_a_micro_batch_sees_the_same_buffers() -> None:
    """Stage 1 of 3-wise runs three times (see above); the second must not change the buffers of the third."""
    stages = [Warming() for _ in range(4)]
    x, y = torch.randn(6, 5), torch.randint(0, 5, (6,))
    found = []
    for recompute in (False, True):
        heads = [nn.Identity() for _ in range(3)]
        pipe = nwise.Pipeline(copy.deepcopy(stages), heads, cross_entropy, "3-wise", recompute=recompute)
        pipe.step(x, target=y)
        found.append([p.grad for p in pipe.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("strategy", ["2-wise", "4-wise-mean"])
def test_recomputation_keeps_no_outputs_without_their_graph(strategy: str) -> None:
    """Only the head needs them; a forward that runs again makes new ones."""
    stages, heads = [nn.Linear(5, 5) for _ in range(4)], [nn.Linear(5, 5) for _ in range(3)]
    pipe = nwise.Pipeline(stages, heads, cross_entropy, strategy, 2, recompute=True)
    kept: list[bool] = []

    def look(action: Action) -> None:
        assert pipe._engine is not None
        tapes = pipe._engine.flying[0].tapes[action.stage].values()
        kept.append(any(tape.outputs and not tape.tracked and not tape.head_left for tape in tapes))

    pipe.on_action = look
    pipe.step(torch.randn(6, 5), target=torch.randint(0, 5, (6,)))
    assert kept
    assert not any(kept)


@pytest.mark.parametrize(
    "strategy", ["local", "2-wise", "3-wise-mean", "end-to-end", "end-to-end-delay-1", "rotating-2"]
)
@pytest.mark.parametrize("placement", [(0, 0, 0, 0), (0, 1, 1, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("m", [1, 3])
def test_second_forwards_are_tasks_that_clock_and_memory_see(strategy: str, placement: tuple[int, ...], m: int) -> None:
    costs = Costs(2.0, 1.0, 1.0, 1.0, activation_bytes=100.0)
    plain = best(strategy, num_stages=4, num_microbatches=m, costs=costs, placement=placement)
    again = recomputing(plain)
    validate(again)
    assert recomputing(again) == again
    tasks, turns = again.graph.tasks, len(again.flows)
    for rank, numbers in enumerate(again.by_rank):
        kinds = [tasks[n].kind for n in numbers]
        forwards = kinds.count(Kind.RECOMPUTE)
        assert [n for n in numbers if tasks[n].kind is not Kind.RECOMPUTE] == list(plain.by_rank[rank])
        assert again.busy[rank] == pytest.approx(plain.busy[rank] + 2.0 * forwards / turns)
        for n, after in pairwise(numbers):
            if tasks[n].kind is Kind.RECOMPUTE:
                assert tasks[after].kind in PASSES
                assert tasks[after] == tasks[n]._replace(kind=tasks[after].kind), "right before its pass"
    assert again.period >= plain.period
    assert max(again.peak_bytes) <= max(plain.peak_bytes)


def test_a_pipeline_runs_the_tasks_of_its_list() -> None:
    stages, heads = [nn.Linear(5, 5) for _ in range(4)], [nn.Linear(5, 5) for _ in range(3)]
    pipe = nwise.Pipeline(stages, heads, cross_entropy, "3-wise", 2, recompute=True)
    done: list[Action] = []
    pipe.on_action = done.append
    pipe.step(torch.randn(6, 5), target=torch.randint(0, 5, (6,)))
    assert pipe._chosen is not None
    assert done == [action for action in pipe._chosen[2].actions[0] if action.kind is not Kind.UPDATE]
    assert any(action.kind is Kind.RECOMPUTE for action in done)


class Moving(nn.Linear):
    """Puts another tensor into the place of its mean in each forward."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) - self.mean
        self.mean = 0.5 * self.mean + y.detach().mean(0)
        return y


def test_a_buffer_that_a_forward_replaces_is_that_of_the_first_run() -> None:
    """Regression: the second run found the buffer that the first had put there, and moved it once more."""
    stages, heads = [Moving() for _ in range(4)], [nn.Linear(5, 5) for _ in range(3)]
    x, y = torch.randn(6, 5), torch.randint(0, 5, (6,))
    found = []
    for recompute in (False, True):
        pipe = nwise.Pipeline(
            copy.deepcopy(stages), copy.deepcopy(heads), cross_entropy, "3-wise", 2, recompute=recompute, checks="never"
        )
        for _ in range(2):
            pipe.step(x, target=y)
        found.append([*(p.grad for p in pipe.main_parameters()), *pipe.buffers()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))
