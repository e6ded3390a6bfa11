"""Six steps of every strategy, with several M, optimizers and orders; writes digests of all parameters."""

from __future__ import annotations

import sys
from typing import Any

import torch

from nwise.schedule.named import RULES
from ranks.common import batches, closed, digests, pipeline, trained, write

STRATEGIES = (
    "local",
    "2-wise",
    "3-wise",
    "2-wise-mean",
    "end-to-end",
    "rotating-2",
    "rotating-2-microbatch",
    "local, then 2-wise",
)
CASES = [(name, *((1, "sgd"), (4, "adam"))[i % 2], "best") for i, name in enumerate(STRATEGIES)]
CASES += [
    ("2-wise" if order in ("depth-first", "skewed", "phase") else "end-to-end", 4, "adam", order) for order in RULES
]


def case(num_stages: int, strategy: str, num_microbatches: int, optimizer: str, order: Any) -> Any:
    """Digests after six steps, some of whose batches are ragged."""
    first, _, then = strategy.partition(", then ")
    pipe = pipeline(num_stages, first, num_microbatches, schedule=order)
    trained(pipe, optimizer, batches(6, sizes=(8, 8, 7, 8, 9, 9)), (3, then) if then else None)
    return closed(pipe, digests(pipe))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write([case(int(sys.argv[2]), *found) for found in CASES])
