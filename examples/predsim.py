"""A similarity-matching loss beside cross-entropy at every head ("predsim", Nøkland and Eidnes 2019).

Every head gives logits and features; the loss is
``(1 - beta) cross_entropy(logits, y) + beta mse(similarity(features), similarity(onehot(y)))``, where
``similarity`` is the matrix of cosines between centred rows. nwise needs nothing special for it: a head
may return a tuple, and the loss is given whatever the head returns.

    python examples/predsim.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.data import batch_indices, digits


class PredSimHead(nn.Module):
    """Logits from the flattened features, and a convolution of them for the similarity."""

    def __init__(self, channels: int, size: int, num_classes: int) -> None:
        super().__init__()
        self.predict = nn.Linear(channels * size * size, num_classes)
        self.similar = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.predict(x.flatten(1)), self.similar(x).flatten(1)


class PredSimOutput(nn.Module):
    """The last stage with the same pair of outputs."""

    def __init__(self, body: nn.Module, channels: int, size: int, num_classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = PredSimHead(channels, size, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self.head(self.body(x))
        return pair


def similarity(rows: Tensor) -> Tensor:
    """Cosines between the centred rows, ``[B, D] -> [B, B]``."""
    unit = functional.normalize(rows - rows.mean(dim=1, keepdim=True), dim=1)
    return unit @ unit.T


def predsim(outputs: tuple[Tensor, Tensor], target: Tensor, beta: float = 0.9) -> Tensor:
    """The two losses, weighted; samples are compared with those of their own micro-batch."""
    logits, features = outputs
    onehot = functional.one_hot(target, logits.shape[1]).to(features.dtype)
    matching = functional.mse_loss(similarity(features), similarity(onehot))
    return (1 - beta) * functional.cross_entropy(logits, target) + beta * matching


def build(num_stages: int = 3, channels: int = 16) -> nwise.Pipeline:
    """A convolutional network whose heads all see the same kind of loss."""
    bodies = [
        nn.Sequential(nn.Conv2d(1 if k == 0 else channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        for k in range(num_stages)
    ]
    stages = [*bodies[:-1], PredSimOutput(bodies[-1], channels, 8, 10)]
    heads = [PredSimHead(channels, 8, 10) for _ in range(num_stages - 1)]
    return nwise.Pipeline(stages, heads, predsim, strategy="2-wise", seed=0)


def main(steps: int = 60) -> float:
    """Train on the bundled digits and return the test accuracy."""
    train, test = digits()
    pipe = build()
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    for step in range(steps):
        x, y = train.batch(batch_indices(len(train), 64, seed=0, step=step))
        losses = pipe.step(x, target=y)  # nan for stage 0: in 2-wise training no stage learns from its loss
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:3d}  losses {[round(loss, 3) for loss in losses.tolist()]}")
    pipe.eval()
    with torch.no_grad():
        x, y = test.batch(torch.arange(len(test)))
        accuracy = (pipe(x)[0].argmax(1) == y).float().mean().item()
    print(f"test accuracy: {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
