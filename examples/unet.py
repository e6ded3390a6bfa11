"""Skips past a stage: a U-Net that removes noise, with dictionaries between its stages.

What a later stage reads travels through the stages between, under a name. The entries of a dictionary are the
keyword arguments of the next stage::

    x -> Down -> hidden ----> Middle -> hidden ----> Up -> output
            `--> full ------------------- full ------^
         stage 0              stage 1                stage 2

In ``2-wise``, the last loss trains `Middle` and `Up`: its gradient through ``full`` does not reach `Down`, which
the head of `Middle` trains.

    python examples/unet.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.app.data import batch_indices, digits


class Down(nn.Module):
    """Half the width, and what the way up reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width // 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": torch.tanh(self.layer(x)), "full": x}


class Middle(nn.Module):
    """A layer of its own; `full` passes through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: Tensor, full: Tensor) -> dict[str, Tensor]:
        return {"hidden": torch.tanh(self.layer(hidden)), "full": full}


class Up(nn.Module):
    """The full width again, from both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width // 2 + width, width)

    def forward(self, hidden: Tensor, full: Tensor) -> Tensor:
        output: Tensor = self.layer(torch.cat([hidden, full], -1))
        return output


def build(width: int = 64, strategy: str = "2-wise") -> nwise.Pipeline:
    """Three stages; the heads look at ``hidden`` and ignore ``full``."""
    stages = [Down(width), Middle(width // 2), Up(width)]
    heads = [nwise.heads.OnFirstOutput(nn.Linear(width // 2, width)) for _ in range(2)]
    return nwise.Pipeline(stages, heads, functional.mse_loss, strategy, seed=0)


def main(steps: int = 300) -> tuple[float, float]:
    """Train on noisy digits; return the mean squared errors of noisy and of cleaned test digits."""
    train, test = digits()
    generator, pipe = torch.Generator().manual_seed(0), build()
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
