"""Trains with an optimizer and losses that have state of all kinds, and saves it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.checkpoint import Checkpoints
from ranks.common import closed, write


class Scaled(torch.optim.SGD):
    """Scales gradients by numbers in its groups and in nested state of many types."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factors"] = [torch.zeros(2), torch.zeros(2, dtype=torch.complex128)]
                    state["nested"] = {"a.b": (None, "text", float("inf")), 0: {1, 2}, "dtype": torch.float16}
                    state["more"] = (
                        torch.arange(6).view(2, 3).t(),
                        torch.zeros(0),
                        torch.ones(2).bool(),
                        p.shape,
                        1 + 2j,
                    )
                    state["step"] = 0
                state["step"] += 1
                state["factors"][0] += p.grad.abs().sum()
                p.grad *= 1 + 0.1 * state["step"] / group["count"] + 0.01 * state["factors"][0][1]
        super().step()


class Centred(nn.Module):
    """Cross-entropy of outputs less their running mean, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    centre: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output - self.centre, target)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * output.mean(0))
        return loss


def make(loss: Any, cut: tuple[str, ...] = ("a", "b")) -> tuple[nwise.Pipeline, list[Any]]:
    """Layers of one letter each, in stages."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(4, 4) for name in "abc"}
    output = {"output": nn.Linear(4, 3)}
    stages = [nwise.Chain({n: layers[n] for n in names} | (output if names is cut[-1] else {})) for names in cut]
    heads = [nn.Linear(4, 3) for _ in cut[1:]]
    losses = list(loss) if isinstance(loss, list) else [loss] * len(cut)
    return nwise.Pipeline(stages, heads, losses, "2-wise-mean", seed=0), losses


def train(pipe: nwise.Pipeline, optimizer: torch.optim.Optimizer, steps: int, rate: Any = None) -> None:
    for _ in range(steps):
        random = torch.Generator().manual_seed(pipe.steps)
        x = torch.randn(5, 4, generator=random).to(next(pipe.parameters()).dtype)
        pipe.step(x, target=torch.randint(3, (5,), generator=random))
        optimizer.step()
        optimizer.zero_grad()
        if rate is not None:
            rate.step()


def main(folder: Path, steps: int) -> tuple[nwise.Pipeline, torch.optim.Optimizer, list[Any]]:
    """Resume, train, save."""
    pipe, losses = make([Centred(), Centred()])
    names = {p: name for name, p in pipe.named_parameters()}
    weights = [p for p, name in names.items() if name.endswith("weight")]
    biases = [p for p, name in names.items() if name.endswith("bias")]
    optimizer = Scaled([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.2}])
    checkpoints = Checkpoints(folder, pipe, optimizer)
    checkpoints.resume()
    train(pipe, optimizer, steps)
    if steps:
        checkpoints.save()
    return pipe, optimizer, losses


if __name__ == "__main__":
    _, _, folder, steps = sys.argv
    pipe, optimizer, losses = main(Path(folder), int(steps))
    names: dict[Tensor, str] = {p: name for name, p in pipe.named_parameters()}
    factors = {names[p]: state["factors"][0].tolist() for p, state in optimizer.state.items()}
    write(closed(pipe, {"factors": factors, "centre": losses[pipe.processes.here[0]].centre.tolist()}))
