"""Trains three steps, in the second of which a stage's output or gradient is not finite; says which stages were left out."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.training import NonFiniteGuard
from ranks.common import batches, closed, write


class Breaks(nn.Module):
    """Gives nan, or a gradient of nan, while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.what = nn.Linear(6, 6), nn.BatchNorm1d(6), ""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y * float("nan") if self.what == "value" else (y * 0).sqrt() + y if self.what == "gradient" else y


def trained(strategy: str, what: str = "gradient") -> dict[str, Any]:
    """The last of four stages breaks; for each step the stages left out, and those that have not changed."""
    torch.manual_seed(0)
    stages = [Breaks() for _ in range(4)]
    first, _, then = strategy.partition(", then ")
    pipe = nwise.Pipeline(stages, [nn.Linear(6, 4) for _ in range(3)], strategy=first, seed=1)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    finite = NonFiniteGuard(pipe, "skip")
    left_out, same = [], []
    for step, (x, y) in enumerate(batches(3)):
        if then and step == 1:
            pipe.strategy = then
        stages[3].what = what if step == 1 else ""
        before = {k: [x.clone() for x in stages[k].state_dict().values()] for k in pipe.processes.here}
        finite.remember()
        pipe.step(x, target=y)
        left_out.append(finite())
        update.step()
        update.zero_grad()
        same.append([k for k, old in before.items() if all(map(torch.equal, old, stages[k].state_dict().values()))])
    ok = all(bool(p.isfinite().all()) for p in pipe.parameters())
    return closed(pipe, {"left_out": left_out, "same": same, "finite": ok})


if __name__ == "__main__":
    torch.set_num_threads(1)
    write({strategy: trained(strategy) for strategy in sys.argv[2:]})
