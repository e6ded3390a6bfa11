"""Two scales, an exit after every block (MSDNet, Huang et al. 2018), gradient equilibrium (Li et al. 2019).

    python examples/equilibrium.py        # the difference of both loops after three updates, then the accuracy of every exit

The published loop adds the losses of all exits and calls ``backward``. Functions in the network scale the gradient of the coarse
map, so a block gets the mean over the exits above it. The staged loop keeps them, and its strategy is ``"deep-supervision"``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nwise
from credit import scaled
from nwise.app.data import batch_indices, digits

BLOCKS, FINE, COARSE = 4, 8, 16


def layer(before: int, after: int, stride: int = 1) -> nn.Module:
    """Return a convolution with its normalisation."""
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class First(nn.Module):
    """From an image to maps of two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = layer(1, FINE), layer(FINE, COARSE, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.fine(x)
        return fine, scaled(self.coarse(fine), 1 / BLOCKS)


class Block(nn.Module):
    """Maps of two scales, of which the coarse one also sees the fine one, and the one before it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.left = BLOCKS - k
        self.fine, self.down = layer(FINE, FINE), layer(FINE, COARSE, 2)
        self.coarse = layer(2 * COARSE, COARSE)

    def forward(self, fine: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor]:
        coarse = scaled(coarse, self.left)
        coarse = self.coarse(torch.cat([coarse, self.down(fine)], 1))
        return self.fine(fine), scaled(coarse, 1 / self.left)


class Exit(nn.Module):
    """A classifier on the coarse map."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(layer(COARSE, COARSE, 2), nn.Flatten(), nn.Linear(COARSE * 4, 10))

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        logits: Tensor = self.layers(coarse)
        return logits


class Last(nn.Module):
    """The last block with its exit."""

    def __init__(self, block: nn.Module, end: nn.Module) -> None:
        super().__init__()
        self.block, self.end = block, end

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        logits: Tensor = self.end(*self.block(fine, coarse))
        return logits


def network() -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the blocks and their exits."""
    torch.manual_seed(0)
    blocks = [First(), *(Block(k) for k in range(1, BLOCKS))]
    return blocks, [Exit() for _ in range(BLOCKS)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return a mini-batch of digits."""
    images, _ = digits()
    return images.batch(batch_indices(len(images), 64, seed=0, step=step))


def plain(blocks: list[nn.Module], exits: list[nn.Module], steps: int) -> None:
    """Train by the published loop."""
    optimizer = torch.optim.SGD(nn.ModuleList([*blocks, *exits]).parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step)
        maps, losses = blocks[0](x), []
        for k, end in enumerate(exits):
            maps = maps if k == 0 else blocks[k](*maps)
            losses.append(cross_entropy(end(*maps), y))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


def staged(blocks: list[nn.Module], exits: list[nn.Module], steps: int, strategy: str) -> nwise.Pipeline:
    """Train in stages; under torchrun each process has one."""
    stages = [*blocks[:-1], Last(blocks[-1], exits[-1])]
    pipe = nwise.Pipeline(stages, exits[:-1], cross_entropy, strategy, seed=0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step)
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    return pipe


def difference(steps: int = 3) -> float:
    """Return the largest difference of the weights after some updates by both loops."""
    ours, theirs = network(), network()
    staged(*ours, steps, "deep-supervision")
    plain(*theirs, steps)
    pairs = [nn.ModuleList([*first, *second]).parameters() for first, second in (ours, theirs)]
    return max(float((a - b).detach().abs().max()) for a, b in zip(*pairs, strict=True))


if __name__ == "__main__":
    print(f"largest difference of the weights after three updates: {difference():.1e}")
    _, test = digits()
    for strategy in ("deep-supervision", "2-wise-mean"):
        pipe = staged(*network(), 150, strategy)
        score = pipe.score([test.batch(torch.arange(len(test)))], lambda out, y: (out.argmax(1) == y).float().mean())
        print(f"{strategy:18}accuracy of the exits, %:", [round(100 * one, 1) for one in score.tolist()])
