"""A small network whose easy samples leave early: trained at every depth, calibrated, saved as one file, loaded and asked.

pip install '.[app]'; python examples/exits.py
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

import nwise
from nwise import exits
from nwise.app.data import batch_indices, digits


def outcome(pipe: nwise.Pipeline, x: Tensor, y: Tensor, threshold: float) -> tuple[float, float]:
    """Return the accuracy, and the share of the stages that a sample takes on average."""
    answers = exits.exit(pipe, x, threshold=threshold)
    right = (answers.output.argmax(1) == y).double().mean()
    return float(right), float((answers.stage + 1).double().mean()) / pipe.num_stages


def calibrate(pipe: nwise.Pipeline, x: Tensor, y: Tensor, drop: float) -> float:
    """Return the threshold with the fewest stages that loses no more accuracy than `drop`; one for all exits fits best."""
    results = {bound: outcome(pipe, x, y, bound) for bound in (*(n / 50 for n in range(51)), math.inf)}
    least = results[math.inf][0] - drop
    return min((depth, bound) for bound, (accuracy, depth) in results.items() if accuracy >= least)[1]


def main(path: Path = Path("digits-with-exits.pt"), steps: int = 200) -> tuple[float, float]:
    """Train, save and load; return the accuracy with exits and the share of the stages that it takes."""
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
    fit, held_out = (test.batch(torch.arange(first, len(test), 2)) for first in (0, 1))
    threshold = calibrate(pipe, *fit, drop=0.005)
    accuracy, depth = outcome(pipe, *held_out, threshold)
    torch.save(exits.EarlyExit(pipe.stages, pipe.heads, dict.fromkeys(range(3), threshold), "classes"), path)

    network = torch.load(path, weights_only=False)  # takes nwise, but no pipeline
    x, _ = test.batch(torch.arange(8))
    print("stages at which eight digits leave:", network.answers(x).stage.tolist())
    return accuracy, depth


if __name__ == "__main__":
    accuracy, depth = main()
    print(f"accuracy {100 * accuracy:.1f} %, with {100 * depth:.0f} % of the stages")
