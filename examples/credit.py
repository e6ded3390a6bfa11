"""Six ways to train, each twice: with plain autograd, as papers do it, and as a matrix of `nwise.Credit`.

    python examples/credit.py

In a matrix ``C[j][k]`` is the weight of loss j for stage k. A head always learns from its own loss with weight 1. The program
trains both forms for three updates and prints the largest difference of their weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nwise

A, WIDTH, CLASSES = 4, 8, 3
Modules = Sequence[nn.Module]


def network() -> tuple[list[nn.Module], list[nn.Module]]:
    """Return four stages, whose last one has the network's output, and three heads."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(A - 1)]
    return [*stages, nn.Linear(WIDTH, CLASSES)], [nn.Linear(WIDTH, CLASSES) for _ in range(A - 1)]


class Scale(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grad, None


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x, whose gradient will be multiplied."""
    result: Tensor = Scale.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


# 1. Deep supervision (Lee et al. 2015): the sum of the losses of all exits.
def deep_supervision(stages: Modules, heads: Modules, x: Tensor, y: Tensor, step: int) -> None:
    """Add the losses of all exits."""
    losses = []
    for stage, head in zip(stages, [*heads, nn.Identity()], strict=True):
        x = stage(x)
        losses.append(cross_entropy(head(x), y))
    torch.stack(losses).sum().backward()


DEEP_SUPERVISION = nwise.Credit([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])


# 2. Gradient equilibrium (Li et al. 2019): each stage takes the mean over the exits above it, not their sum.
def equilibrium(stages: Modules, heads: Modules, x: Tensor, y: Tensor, step: int) -> None:
    """Scale the gradient before and after each head."""
    losses = []
    for k, (stage, head) in enumerate(zip(stages, [*heads, nn.Identity()], strict=True)):
        x = scaled(stage(x), 1 / (A - k))
        losses.append(cross_entropy(head(x), y) if k < A - 1 else cross_entropy(x, y))
        x = scaled(x, A - k - 1)
    torch.stack(losses).sum().backward()


EQUILIBRIUM = nwise.Credit([[float(k <= j) / (A - k) for k in range(A)] for j in range(A)])


# 3. A reach for each loss: the loss of stage 2 goes back to stage 1, the last one to the input. One forward is enough for nwise;
# plain autograd runs two stages twice, or keeps the graph for a second walk.
def reach(stages: Modules, heads: Modules, x: Tensor, y: Tensor, step: int) -> None:
    """Run two stages twice."""
    first = stages[0](x)
    auxiliary = heads[2](stages[2](stages[1](first.detach())))
    output = stages[3](stages[2](stages[1](first)))
    (cross_entropy(auxiliary, y) + cross_entropy(output, y)).backward()


REACH = nwise.Credit([[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]])


# 4. An adversary (Ganin et al. 2016): head 1 learns to tell two domains apart, and the stages below it learn to hide them.
def adversary(stages: Modules, heads: Modules, x: Tensor, y: Tensor, step: int) -> None:
    """Reverse the gradient of a head."""
    features = stages[1](stages[0](x))
    domain = heads[1](scaled(features, -0.5))
    output = stages[3](stages[2](features))
    (cross_entropy(domain, domains(y)) + cross_entropy(output, y)).backward()


def domains(y: Tensor) -> Tensor:
    """Return the domain of each sample: the first half of a mini-batch is of domain 0."""
    return (torch.arange(len(y)) >= len(y) // 2).long()


ADVERSARY = nwise.Credit([[0, 0, 0, 0], [-0.5, -0.5, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])


# 5. Other layers in every step (LISA, Pan et al. 2024): the last loss trains two stages, chosen anew.
PAIRS = list(combinations(range(A), 2))


def chosen(step: int) -> int:
    """Return the number of a step's pair of stages."""
    return random.Random(step).randrange(len(PAIRS))


def sampled_layers(stages: Modules, heads: Modules, x: Tensor, y: Tensor, step: int) -> None:
    """Freeze the other stages."""
    for k, stage in enumerate(stages):
        stage.requires_grad_(k in PAIRS[chosen(step)])
    cross_entropy(nn.Sequential(*stages)(x), y).backward()


@dataclass(frozen=True)
class SampledLayers(nwise.Strategy):
    """The last loss trains two stages, others in every step."""

    @property
    def turns(self) -> int:
        return len(PAIRS)

    def turn(self, step: int, microbatch: int) -> int:
        return chosen(step)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        matrix = torch.zeros(num_stages, num_stages, dtype=torch.float64)
        matrix[-1, list(PAIRS[turn])] = 1
        return matrix


# 6. From local to end-to-end: the weight moves from a stage's own loss to the last one in the course of the training.
SHARES = 3  # updates until the last loss has all weight


def growing(stages: Modules, heads: Modules, x: Tensor, y: Tensor, step: int) -> None:
    """Walk through the whole network, then through each stage alone."""
    share = min(step, SHARES) / SHARES
    (share * cross_entropy(nn.Sequential(*stages)(x), y)).backward()
    for stage, head in zip(stages[:-1], heads, strict=True):
        x = stage(x.detach())
        cross_entropy(head(scaled(x, 1 - share)), y).backward()
    ((1 - share) * cross_entropy(stages[-1](x.detach()), y)).backward()


@dataclass(frozen=True)
class Growing(nwise.Strategy):
    """Local training that becomes end-to-end training."""

    @property
    def turns(self) -> int:
        return SHARES + 1

    def turn(self, step: int, microbatch: int) -> int:
        return min(step, SHARES)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        share = turn / SHARES
        matrix = (1 - share) * torch.eye(num_stages, dtype=torch.float64)
        matrix[-1] += share
        return matrix


Loop = Callable[[Modules, Modules, Tensor, Tensor, int], None]
WAYS: dict[str, tuple[Loop, nwise.Strategy]] = {
    "deep supervision": (deep_supervision, DEEP_SUPERVISION),
    "gradient equilibrium": (equilibrium, EQUILIBRIUM),
    "a reach for each loss": (reach, REACH),
    "an adversary": (adversary, ADVERSARY),
    "sampled layers": (sampled_layers, SampledLayers()),
    "local to end-to-end": (growing, Growing()),
}


def trained(name: str, *, plain: bool, updates: int = 3) -> list[Tensor]:
    """Train by one form; return the weights of stages and heads."""
    loop, strategy = WAYS[name]
    stages, heads = network()
    weights = list(nn.ModuleList([*stages, *heads]).parameters())
    optimizer = torch.optim.SGD(weights, lr=0.5)
    losses: list[Any] = [cross_entropy] * A
    if name == "an adversary":
        losses[1] = lambda output, y: cross_entropy(output, domains(y))
    pipe = nwise.Pipeline(stages, heads, losses, strategy)
    for step in range(updates):
        x, y = torch.randn(12, WIDTH), torch.randint(CLASSES, (12,))
        if plain:
            loop(stages, heads, x, y, step)
        else:
            pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in weights]


def difference(name: str) -> float:
    """Return the largest difference of the weights after three updates by the two forms."""
    pairs = zip(trained(name, plain=True), trained(name, plain=False), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    for name in WAYS:
        print(f"{name:24}{difference(name):.1e}")
