"""What users of other pipelines ran into: each case runs in one process too, and gives the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from ranks.common import batches, closed, digests, network, trained, write
from ranks.edges import clipped

A = 3


def first_place(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that takes the first of two targets."""
    return functional.cross_entropy(output, target[0])


def second_of(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """One that takes the second."""
    return functional.mse_loss(output, target[1])


def several_targets(strategy: str = "2-wise-mean") -> Any:
    """Stage 0 learns labels, stage 1 numbers, stage 2 labels, all from one tuple."""
    stages, heads = network(A)
    pipe = nwise.Pipeline(stages, heads, [first_place, second_of, first_place], strategy, 2, seed=0)
    generator = torch.Generator().manual_seed(1)
    data: Any = [(x, (y, torch.randn(len(x), 4, generator=generator))) for x, y in batches(4, sizes=(8, 7))]
    trained(pipe, "sgd", data)
    return closed(pipe, digests(pipe))


class Begins(nn.Module):
    """Gives its output, and once more for the stage after the next."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.tanh()


class HandsOn(Begins):
    """Does not look at the skip."""

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.inner(x).relu(), skip


class Joins(nn.Module):
    """Takes both, as the last stage and as every head do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        result: Tensor = self.inner(x + skip)
        return result


def skipping() -> tuple[list[nn.Module], list[nn.Module]]:
    """Three stages with a skip from the first to the last."""
    torch.manual_seed(0)
    return [Begins(), HandsOn(), Joins()], [Joins(), Joins()]


def skip(strategy: str) -> Any:
    """Gradients travel through the skip as far as the strategy says."""
    pipe = nwise.Pipeline(*skipping(), functional.cross_entropy, strategy, 2, seed=0)
    trained(pipe, "sgd", batches(3))
    return closed(pipe, digests(pipe))


def accumulated() -> Any:
    """Two steps of other lengths before each update: the second only adds to what the first has found."""

    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + x.mean(1, keepdim=True)

    torch.manual_seed(0)
    heads: list[nn.Module] = [nn.Linear(6, 6) for _ in range(A - 1)]
    pipe = nwise.Pipeline([Averages() for _ in range(A)], heads, functional.mse_loss, "2-wise", 2, seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for length in (5, 3):
            x = torch.randn(4, length, 6, generator=generator)
            pipe.step(x, target=x.flip(1))
        update.step()
        update.zero_grad()
    return closed(pipe, digests(pipe))


def clipped_with_a_rank_without_gradients(by: Any) -> Any:
    """Stage 0 is frozen, and under 2-wise its head does not run."""
    stages, heads = network(A)
    stages[0].requires_grad_(False)
    return clipped(by, nwise.Pipeline(stages, heads, functional.cross_entropy, "2-wise", seed=0))


CASES: dict[str, Callable[[], Any]] = {
    "several targets": several_targets,
    "skip, end-to-end": lambda: skip("end-to-end"),
    "skip, 2-wise": lambda: skip("2-wise"),
    "skip, local": lambda: skip("local"),
    "accumulated lengths": accumulated,
    "clipped globally, a rank without": lambda: clipped_with_a_rank_without_gradients("global"),
    "clipped by loss, a rank without": lambda: clipped_with_a_rank_without_gradients("loss"),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        print(name, file=sys.stderr, flush=True)
        found[name] = case()
    write(found)
