"""A plan that processes of unequal speed make together, then training by it; writes texts, speeds and digests."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from ranks.common import RANK, batches, closed, digests, trained, write

STEPS = 9  # two for memory, five that are measured, one that ends the last of these, and one more


_real_clock = time.perf_counter
_computed = 0.0  # seconds that blocks have taken so far


class Slow(nn.Module):
    """A block that takes longer on rank 1, as on a slower device: it moves the clock, so a busy machine changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Let time pass, and compute."""
        global _computed
        _computed += 1.0 if RANK else 0.25
        return self.layer(x).tanh()


def network() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Slow() for _ in range(8)), nn.Linear(6, 4))


def case(at: tuple[str, ...], placement: Any) -> Any:
    """Train by a plan, or in one process with the same cut."""
    model = network()
    stages = nwise.split(model, at=at)
    heads = nwise.heads.fitting(stages, torch.zeros(1, 6), 4)
    for head in heads:
        for p in head.parameters():
            nn.init.constant_(p, 0.1)
    pipe = nwise.Pipeline(stages, heads, strategy="2-wise", num_microbatches=2, placement=placement, seed=1)
    trained(pipe, "sgd", batches(STEPS))
    return closed(pipe, digests(pipe))


if __name__ == "__main__":
    time.perf_counter = lambda: _real_clock() + _computed
    texts: list[str] = []
    x, y = batches(1)[0]
    plan = nwise.plan(network(), x, y, microbatches=2, report=texts.append)
    write(
        {
            "at": plan.at,
            "placement": plan.placement,
            "speeds": [device.speed for device in plan.devices],
            "digests": case(plan.at, plan),
            "texts": texts,
        }
    )
