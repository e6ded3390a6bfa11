"""A small network whose easy samples leave early: trained at every depth, calibrated, saved as one file, loaded and asked.

pip install '.[app]'; python examples/exits.py
"""

from pathlib import Path

import torch
from torch import nn

import nwise
from nwise.app.data import batch_indices, digits
from nwise.app.training.calibrate import calibrate, count_work, observe, outcome
from nwise.exits import EarlyExit


def main(path: Path = Path("digits-with-exits.pt"), steps: int = 200) -> tuple[float, float]:
    """Train, save and load; return the accuracy with exits and the share of the operations that it takes."""
    torch.manual_seed(0)
    train, test = digits()
    blocks = [
        nn.Sequential(nn.Conv2d(16 if k else 1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for k in range(4)
    ]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    stages = nwise.split(model, at=["1", "2", "3"])
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)) for _ in range(3)]
    pipe = nwise.Pipeline(stages, heads, strategy=nwise.strategy("2-wise-mean", heads="all"))
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    for step in range(steps):
        x, y = train.batch(batch_indices(len(train), 64, seed=0, step=step))
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()

    # Half of the test set chooses the threshold, the other half says what it is worth.
    work = count_work(pipe, test.batch(torch.arange(1))[0])
    seen = observe(pipe, test, batch_size=100)
    fit, held_out = (seen.part(torch.arange(first, len(test), 2)) for first in (0, 1))
    thresholds = calibrate(fit, work, fit.accuracy - 0.005)
    result = outcome(held_out, work, thresholds)
    torch.save(EarlyExit(pipe.stages, pipe.heads, thresholds, "classes"), path)

    network = torch.load(path, weights_only=False)  # takes nwise, but no pipeline
    x, _ = test.batch(torch.arange(8))
    print("stages at which eight digits leave:", network.answers(x).stage.tolist())
    return result.accuracy, result.work


if __name__ == "__main__":
    accuracy, work = main()
    print(f"accuracy {100 * accuracy:.1f} %, with {100 * work:.0f} % of the operations")
