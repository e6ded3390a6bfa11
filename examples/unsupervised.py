"""Unsupervised training of every stage: each head reconstructs the network's input.

The target of every loss is the input itself, ``pipe.step(x, target=x)``: an autoencoder whose encoder is
trained stage by stage, two stages at a time. A linear classifier on the frozen code then tells
how much the code knows about classes that no loss has seen.

    python examples/unsupervised.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.app.data import batch_indices, digits


def build(widths: tuple[int, ...] = (64, 48, 32, 16)) -> nwise.Pipeline:
    """An encoder in stages; every head decodes its stage's output, the last stage ends in a decoder."""
    encoders = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    heads = [nn.Linear(width, widths[0]) for width in widths[1:-1]]
    output = nn.Sequential(encoders[-1], nn.Linear(widths[-1], widths[0]))
    return nwise.Pipeline([*encoders[:-1], output], heads, functional.mse_loss, strategy="2-wise", seed=0)


def code(pipe: nwise.Pipeline, x: Tensor) -> Tensor:
    """What the encoder makes of the input, without the decoder at its end."""
    for stage in pipe.stages[:-1]:
        x = stage(x)
    encoder: nn.Module = pipe.stages[-1][0]  # type: ignore[index]
    result: Tensor = encoder(x)
    return result


def probe(encode: Callable[[Tensor], Tensor]) -> float:
    """Return the test accuracy of a linear classifier that learns the digits' labels from their codes."""
    with torch.no_grad():
        parts = [data.batch(torch.arange(len(data))) for data in digits()]
        (seen, labels), (unseen, wanted) = [(encode(x), y) for x, y in parts]
    linear = nn.Linear(seen.shape[1], 10)
    optimizer = torch.optim.Adam(linear.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        functional.cross_entropy(linear(seen), labels).backward()
        optimizer.step()
    return (linear(unseen).argmax(1) == wanted).float().mean().item()


def main(steps: int = 300) -> tuple[float, float]:
    """Train without labels; return the last loss and the accuracy of a linear classifier on the code."""
    train, _ = digits()
    pipe = build()
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    losses = torch.zeros(3)
    for step in range(steps):
        x, _ = train.batch(batch_indices(len(train), 64, seed=0, step=step))
        x = x.flatten(1)
        losses = pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:3d}  reconstruction {[round(loss, 3) for loss in losses.tolist()]}")

    accuracy = probe(lambda x: code(pipe, x.flatten(1)))
    print(f"accuracy of a linear classifier on the code of 16 numbers: {100 * accuracy:.1f} %")
    return float(losses[-1]), accuracy


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
