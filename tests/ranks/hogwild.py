"""Hogwild: staleness of every step, and digests after the last gradients have been used."""

from __future__ import annotations

import sys
from typing import Any

import torch

import nwise
from ranks.common import batches, closed, digests, make_optimizer, pipeline, write

STRATEGIES = ("hogwild", "2-wise-hogwild", "3-wise-mean-hogwild", "rotating-2-hogwild")
STEPS = 15
# Stage 1 hands on what it does not learn from, and is done with its own long before that is there.
HANDED_ON = nwise.Hogwild(nwise.Credit([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]))
CASES: list[tuple[str | nwise.Strategy, int, str, tuple[int, ...]]] = [
    *((name, m, optimizer, ()) for name in STRATEGIES for m, optimizer in ((1, "sgd"), (2, "adam"))),
    ("hogwild", 1, "sgd", (1,)),
    ("3-wise-hogwild", 1, "adam", (2,)),
    (HANDED_ON, 1, "sgd", ()),
]


def case(
    num_stages: int, strategy: str | nwise.Strategy, num_microbatches: int, optimizer: str, frozen: tuple[int, ...]
) -> Any:
    """Digests and ages after fifteen steps."""
    pipe = pipeline(num_stages, strategy, num_microbatches, frozen=frozen)
    update = make_optimizer(optimizer, pipe)
    ages, finished = [], 0
    stage = 0 if pipe.team is None else pipe.team.stage
    for x, y in batches(STEPS):
        pipe.step(x, target=y)
        finished += any(p.grad is not None for p in pipe.stages[stage].parameters())
        update.step()
        update.zero_grad()
        ages.append(pipe.staleness.tolist())
    while pipe.drain():
        finished += 1
        update.step()
        update.zero_grad()
        ages.append(pipe.staleness.tolist())
    found = {"digests": digests(pipe), "ages": ages, "finished": finished}
    return closed(pipe, found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write([case(int(sys.argv[2]), *found) for found in CASES])
