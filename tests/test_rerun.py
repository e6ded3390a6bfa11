"""Forwards that are run again see what the first one saw."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nwise
from nets import Tally
from nwise.schedule.actions import Action


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
