"""Networks of which a part is trained: adapters in two of four stages, heads on a frozen trunk, a stage without parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import nwise
from ranks.common import batches, closed, digests, write


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return y


def adapters(stages: list[nn.Module], heads: list[nn.Module]) -> None:
    """In stages 1 and 3; the others are frozen."""
    for k in (0, 2):
        stages[k].requires_grad_(False)
    for k in (1, 3):
        stages[k].set_submodule("0", Adapted(stages[k].get_submodule("0")))  # type: ignore[arg-type]


def trunk(stages: list[nn.Module], heads: list[nn.Module]) -> None:
    """All stages but the last are frozen, and every head learns."""
    for stage in stages[:-1]:
        stage.requires_grad_(False)


def empty(stages: list[nn.Module], heads: list[nn.Module]) -> None:
    """A stage has no parameters."""
    stages[1] = nn.Tanh()


CASES: dict[str, Callable[[list[nn.Module], list[nn.Module]], None]] = {
    "adapters": adapters,
    "trunk": trunk,
    "empty": empty,
}


def network() -> tuple[list[nn.Module], list[nn.Module]]:
    """Four stages with dropout, the same on every rank."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)]
    stages[-1] = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    return stages, [nn.Linear(6, 4) for _ in range(3)]


def trained(name: str, strategy: str) -> dict[str, str]:
    """Train by one optimizer of `pipe.parameters()` and one of groups; the bits of all parameters of this process."""
    stages, heads = network()
    CASES[name](stages, heads)
    pipe = nwise.Pipeline(stages, heads, strategy=strategy, num_microbatches=2, seed=1)
    optimizers = [torch.optim.SGD(pipe.groups(network={"lr": 0.1})), torch.optim.Adam(pipe.groups(heads={"lr": 0.01}))]
    for x, y in batches(4):
        pipe.gather(pipe.step(x, target=y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return closed(pipe, digests(pipe))


STRATEGIES = ("2-wise-mean", "end-to-end", "local")

if __name__ == "__main__":
    torch.set_num_threads(1)
    write({f"{name} {strategy}": trained(name, strategy) for name in CASES for strategy in STRATEGIES})
