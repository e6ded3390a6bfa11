"""Your own network, 2-wise, in a plain training loop.

python examples/quickstart.py
"""

from __future__ import annotations

import torch
from torch import nn

import nwise
from nwise.app.data import batch_indices, digits
from nwise.app.training import evaluate


def main(epochs: int = 5) -> float:
    """Train on the bundled digits and return the test accuracy of the last head."""
    train, test = digits()
    model = nn.Sequential(
        nn.Flatten(),
        *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)),
        nn.Linear(64, 10),
    )
    stages = nwise.split(model, at=["2", "3", "4"])  # stages of the modules 0-1, 2, 3 and 4-5
    heads = [nn.Linear(64, 10) for _ in range(3)]
    pipe = nwise.Pipeline(stages, heads, nn.functional.cross_entropy, strategy="2-wise")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)

    for step in range(epochs * len(train) // 64):
        x, y = train.batch(batch_indices(len(train), 64, seed=0, step=step))
        losses = pipe.step(x, target=y)  # nan for stage 0: in 2-wise training no stage learns from its loss
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:3d}  losses {[round(loss, 3) for loss in losses.tolist()]}")

    score = evaluate(pipe, test, 256).heads[-1]
    assert score is not None
    print(f"test accuracy of the last head: {100 * score.accuracy:.1f} %")
    return score.accuracy


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
