"""Skips past a stage: a U-Net that removes noise, cut through its own forward.

What a later stage reads travels through the stages between, under a name; `nwise.split` finds it::

    x -> down -> hidden ----> middle -> hidden ----> up -> output
      `--------- x -------------------- x -----------^
         stage 0              stage 1                stage 2

In ``2-wise``, the last loss trains `middle` and `up`, and the head of `middle` trains `down`.

    python examples/unet.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.app.data import batch_indices, digits


class UNet(nn.Module):
    """Half the width, a layer of its own, and the full width again, from both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, width // 2)
        self.middle = nn.Linear(width // 2, width // 2)
        self.up = nn.Linear(width // 2 + width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.down(x))))
        output: Tensor = self.up(torch.cat([hidden, x], -1))
        return output


def build(network: nn.Module, width: int, strategy: str = "2-wise") -> nwise.Pipeline:
    """Three stages; the heads look at ``hidden`` and ignore the input, which travels with it."""
    stages = nwise.split(network, at=["middle", "up"], example=torch.zeros(2, width))
    heads = [nwise.heads.OnFirstOutput(nn.Linear(width // 2, width)) for _ in range(2)]
    return nwise.Pipeline(stages, heads, functional.mse_loss, strategy, seed=0)


def main(steps: int = 300) -> tuple[float, float]:
    """Train on noisy digits; return the mean squared errors of noisy and of cleaned test digits."""
    train, test = digits()
    generator, pipe = torch.Generator().manual_seed(0), build(UNet(64), 64)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    for step in range(steps):
        x, _ = train.batch(batch_indices(len(train), 64, seed=0, step=step))
        clean = x.flatten(1)
        losses = pipe.step(clean + torch.randn(clean.shape, generator=generator), target=clean)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:3d}  errors of the three losses {[round(loss, 3) for loss in losses.tolist()]}")

    x, _ = test.batch(torch.arange(len(test)))
    clean = x.flatten(1)
    noisy = clean + torch.randn(clean.shape, generator=generator)
    before = functional.mse_loss(noisy, clean).item()
    with torch.no_grad():
        after = functional.mse_loss(pipe(noisy), clean).item()
    print(f"mean squared error of test digits: {before:.2f} with noise, {after:.2f} cleaned")
    return before, after


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
