"""`nwise.split` and `nwise.Chain`: stages that keep the names of the network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise


class Blocks(nn.Module):
    """A network with a list of blocks, as many are written."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.output = nn.Linear(4, 11)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.output(x)
        return 2 * y if self.twice else y


def test_a_sequence_is_cut_where_it_is_asked() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2))
    stages = nwise.split(model, at=["2.1", "3"], example=torch.randn(2, 3))
    assert [list(stage.pieces()) for stage in stages] == [["0", "1", "2.0"], ["2.1"], ["3"]]
    assert {n for stage in stages for n in stage.state_dict()} == set(model.state_dict())
    x = torch.randn(5, 3)
    y = x
    for stage in stages:
        y = stage(y)
    assert torch.equal(y, model(x))
    assert stages[0].get_submodule("0") is model[0]


def test_a_list_of_blocks_is_unrolled() -> None:
    model = Blocks()
    stages = nwise.split(model, at=["blocks.2"], example=torch.randint(0, 11, (2, 5)))
    assert [list(stage.pieces()) for stage in stages] == [
        ["embed", "blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3", "output"],
    ]
    state = {n: t for stage in stages for n, t in stage.state_dict().items()}
    Blocks().load_state_dict(state, strict=True)


def test_a_split_network_trains() -> None:
    stages = nwise.split(Blocks(), at=["blocks.1", "blocks.2", "blocks.3"])
    heads = [nn.Linear(4, 11) for _ in range(3)]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    pipe = nwise.Pipeline(stages, heads, loss, "2-wise")
    pipe.step(torch.randint(0, 11, (3, 5)), target=torch.randint(0, 11, (3, 5)))
    assert pipe.stages[0].embed.weight.grad is not None  # type: ignore[union-attr]


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "at", "example", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), ["7"], None, "`at` should name pieces of the network: 0. Found '7'"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0"], None, r"each once and not the first.*Found \['0'\]"),
        (nn.Sequential(*[nn.Linear(2, 2)] * 3), ["2", "1"], None, r"in the order they run.*Found \['2', '1'\]"),
        (nn.Linear(2, 2), [2, 4], None, r"a list of module names, such as .* Found \[2, 4\]"),
        (nn.Linear(2, 2), 4, None, "a list of module names.* Found 4"),
        (nn.Linear(2, 2), ["x"], None, "should be an nn.Sequential or have child modules.*Found no children"),
        (Loose(), ["b"], None, "Found 'scale' outside of them; move it into a module of its own"),
        (Blocks(twice=True), ["blocks.1"], torch.zeros(2, 3, dtype=torch.long), "Found another output for `example`"),
        (
            nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)}),
            ["b"],
            torch.zeros(2, 2),
            "in the order they were registered.*Found that they cannot",
        ),
    ],
)
def test_refusals(model: nn.Module, at: Any, example: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        nwise.split(model, at, example=example)


def test_a_chain_needs_a_piece() -> None:
    with pytest.raises(ValueError, match="at least one module. Found none"):
        nwise.Chain({})
