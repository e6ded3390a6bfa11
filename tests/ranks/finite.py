"""Trains three steps, in the second of which a stage's gradient is not finite; says which stages were left out."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.training import NonFiniteGuard
from ranks.common import batches, closed, write


class Breaks(nn.Linear):
    """Has a gradient of nan in its second forward."""

    count = 0

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        self.count += 1
        return (y * 0).sqrt() + y if self.count == 2 else y


def trained(strategy: str) -> dict[str, Any]:
    """The last of four stages breaks."""
    torch.manual_seed(0)
    stages = [Breaks(6, 6) if k == 3 else nn.Linear(6, 6) for k in range(4)]
    first, _, then = strategy.partition(", then ")
    pipe = nwise.Pipeline(stages, [nn.Linear(6, 4) for _ in range(3)], strategy=first, seed=1)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1)
    finite = NonFiniteGuard(pipe, "skip")
    left_out = []
    for step, (x, y) in enumerate(batches(3)):
        if then and step == 1:
            pipe.strategy = then
        finite.remember()
        pipe.step(x, target=y)
        left_out.append(finite())
        update.step()
        update.zero_grad()
    ok = all(bool(p.isfinite().all()) for p in pipe.parameters())
    return closed(pipe, {"left_out": left_out, "finite": ok})


if __name__ == "__main__":
    torch.set_num_threads(1)
    write({strategy: trained(strategy) for strategy in sys.argv[2:]})
