"""A program stays until something changes, and every change that a user may make takes effect at the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise.strategies import Strategy


def pipeline(strategy: str | Strategy = "2-wise") -> nwise.Pipeline:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    return nwise.Pipeline(
        stages, [nn.Linear(3, 3), nn.Linear(3, 3), None], strategy=strategy, num_microbatches=2
    ).double()


def batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3), torch.tensor([0, 1, 2, 0])


def gradients(pipe: nwise.Pipeline) -> list[Tensor | None]:
    pipe.zero_grad()
    x, y = batch()
    pipe.step(x, target=y)
    return [p.grad for p in pipe.parameters()]


def replace(pipe: nwise.Pipeline) -> None:
    pipe.stages[1].__setitem__(0, nn.Linear(3, 3).double())  # type: ignore[operator]


def replace_parameter(pipe: nwise.Pipeline) -> None:
    pipe.stages[0][0].weight = nn.Parameter(torch.eye(3, dtype=torch.float64))  # type: ignore[index]


def put_parameter(pipe: nwise.Pipeline) -> None:
    pipe.stages[0][0]._parameters["weight"] = nn.Parameter(torch.eye(3, dtype=torch.float64))  # type: ignore[index]


CHANGES: dict[str, Callable[[nwise.Pipeline], object]] = {
    "a layer is replaced": replace,
    "a layer is added": lambda pipe: pipe.stages[2].append(nn.Linear(3, 3).double()),  # type: ignore[operator]
    "a parameter is replaced": replace_parameter,
    "a parameter is put in its place": put_parameter,
    "a parameter is frozen": lambda pipe: next(pipe.stages[1].parameters()).requires_grad_(False),
    "a stage is replaced": lambda pipe: pipe.stages.__setitem__(0, nn.Linear(3, 3).double()),
    "a head is replaced": lambda pipe: pipe.heads.__setitem__(1, nn.Linear(3, 3).double()),
    "a hook is registered": lambda pipe: next(pipe.parameters()).register_hook(lambda gradient: 2 * gradient),
    "the strategy is set": lambda pipe: setattr(pipe, "strategy", "end-to-end"),
    "M is set": lambda pipe: setattr(pipe, "num_microbatches", 4),
    "the order is set": lambda pipe: setattr(pipe, "schedule", "1f1b"),
    "everything is cast": lambda pipe: pipe.to(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_take_effect_at_the_next_step(change: str) -> None:
    """After the change, a pipeline that has made steps has the gradients of a copy that has made none."""
    pipe = pipeline()
    for _ in range(3):
        gradients(pipe)
    torch.manual_seed(1)
    CHANGES[change](pipe)
    fresh = copy.deepcopy(pipe)  # looks everything up
    if change == "a hook is registered":
        CHANGES[change](fresh)  # torch copies no hooks
    for found, expected in zip(gradients(pipe), gradients(fresh), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_layer_that_is_compiled_later_is_noticed() -> None:
    pipe = pipeline()
    gradients(pipe)
    structure = pipe._structure
    nwise.compile_module(pipe.stages[0][0], backend="eager")  # type: ignore[index]
    pipe._survey()
    assert pipe._structure is not structure


def test_nothing_is_looked_up_again_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline()
    gradients(pipe)
    monkeypatch.setattr("nwise.stage.stage.Stage.survey", None)
    monkeypatch.setattr("nwise.program.program.flows_for", None)
    gradients(pipe)


@dataclass(frozen=True, eq=False)
class Weighted(Strategy):
    """A strategy with a list inside, which its user may change."""

    weights: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])

    @property
    def name(self) -> str:
        return "weighted"

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return torch.diag(torch.tensor(self.weights, dtype=torch.float64))


def test_strategies_are_frozen_and_what_is_inside_them_takes_effect_by_refresh() -> None:
    rule = Weighted()
    pipe = pipeline(rule)
    before = gradients(pipe)[0]
    assert before is not None
    with pytest.raises(FrozenInstanceError):
        rule.weights = [2.0, 1.0, 1.0]  # type: ignore[misc]
    rule.weights[0] = 2.0
    pipe.refresh()
    torch.testing.assert_close(gradients(pipe)[0], 2 * before)
