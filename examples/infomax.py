"""Greedy InfoMax (Löwe et al. 2019) on patches of digits: a loop of three optimizers and three walks, and the same in one step.

python examples/infomax.py        # the difference of the two after three updates, then 300 updates without labels
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.app.data import batch_indices, digits
from unsupervised import probe

PATCH, STRIDE, GRID, NEGATIVES = 4, 2, 3, 8  # an image of 8 x 8 gives 3 x 3 patches
WIDTHS = (16, 16, 32)


def patches(x: Tensor) -> Tensor:
    """Return overlapping patches, beside each other in the batch dimension."""
    cut = x.unfold(2, PATCH, STRIDE).unfold(3, PATCH, STRIDE)  # [N, 1, 3, 3, 4, 4]
    return cut.flatten(2, 3).transpose(1, 2).flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions before a sum."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.skip, self.first = nn.Conv2d(before, after, 1), nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.skip(x) + self.second(self.first(x.relu()).relu())
        return result


class Predict(nn.Module):
    """The code of every patch, and what the code of the patch above predicts for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.predict = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = x.mean((2, 3)).unflatten(0, (-1, GRID, GRID))
        return code[:, 1:], self.predict(code[:, :-1])


def contrast(outputs: tuple[Tensor, Tensor], negatives: Tensor) -> Tensor:
    """Return how badly the predictions tell the patch below from patches anywhere in the batch (InfoNCE)."""
    code, predicted = (each.flatten(0, 2) for each in outputs)
    wrong = code[negatives % len(code)]  # [positions, negatives, width]
    scores = torch.cat([(predicted * code).sum(1, keepdim=True), (wrong @ predicted.unsqueeze(2)).squeeze(2)], 1)
    return functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


def network() -> tuple[list[nn.Module], list[nn.Module]]:
    """Return three encoders and the module of each loss."""
    torch.manual_seed(0)
    encoders = [Residual(before, after) for before, after in zip((1, *WIDTHS), WIDTHS, strict=False)]
    return list(encoders), [Predict(width) for width in WIDTHS]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return patches, and the negatives of every position. They come with the batch, so all processes have the same."""
    images, _ = digits()
    x, _ = images.batch(batch_indices(len(images), 32, seed=0, step=step))
    drawn = torch.Generator().manual_seed(step)
    return patches(x), torch.randint(2**30, (len(x) * (GRID - 1) * GRID, NEGATIVES), generator=drawn)


def plain(encoders: list[nn.Module], predictors: list[nn.Module], steps: int) -> None:
    """Train as the paper's code does: detach, then a walk and an optimizer for every module."""
    optimizers = [
        torch.optim.Adam([*e.parameters(), *p.parameters()], lr=1e-3) for e, p in zip(encoders, predictors, strict=True)
    ]
    for step in range(steps):
        x, negatives = batch(step)
        for encoder, predictor, optimizer in zip(encoders, predictors, optimizers, strict=True):
            x = encoder(x.detach())
            optimizer.zero_grad()
            contrast(predictor(x), negatives).backward()
            optimizer.step()


def staged(encoders: list[nn.Module], predictors: list[nn.Module], steps: int) -> nwise.Pipeline:
    """Train the same in one step for all modules; under torchrun each process has one."""
    stages = [*encoders[:-1], nn.Sequential(encoders[-1], predictors[-1])]
    pipe = nwise.Pipeline(stages, predictors[:-1], contrast, "local", seed=0)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    for step in range(steps):
        x, negatives = batch(step)
        pipe.step(x, target=negatives)
        optimizer.step()
        optimizer.zero_grad()
    return pipe


def difference(steps: int = 3) -> float:
    """Return the largest difference of the weights after some updates by both loops."""
    ours, theirs = network(), network()
    staged(*ours, steps)
    plain(*theirs, steps)
    pairs = [nn.ModuleList([*first, *second]).parameters() for first, second in (ours, theirs)]
    return max(float((a - b).detach().abs().max()) for a, b in zip(*pairs, strict=True))


def mean_codes(encoders: list[nn.Module], x: Tensor) -> Tensor:
    """Return the mean code of every patch, beside each other for an image."""
    return nn.Sequential(*encoders)(patches(x)).mean((2, 3)).unflatten(0, (len(x), -1)).flatten(1)


if __name__ == "__main__":
    print(f"largest difference of the weights after three updates: {difference():.1e}")
    for steps in (0, 300):
        encoders, predictors = network()
        staged(encoders, predictors, steps)
        accuracy = probe(partial(mean_codes, encoders))
        print(f"accuracy of a linear classifier on the codes after {steps} updates: {100 * accuracy:.1f} %")
