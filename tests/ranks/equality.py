"""Twenty steps of every strategy, M and optimizer; writes digests of all parameters."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch

from ranks.common import batches, closed, digests, pipeline, trained, write

STRATEGIES = (
    "local",
    "2-wise",
    "3-wise",
    "2-wise-mean",
    "end-to-end",
    "rotating-2",
    "rotating-2-microbatch",
    "local@9,2-wise",
)
CASES = [*itertools.product(STRATEGIES, (1, 2, 4), ("sgd", "adam"), ("best",))]
CASES += [("2-wise", 4, "sgd", order) for order in ("depth-first", "skewed", "phase")]
CASES += [("end-to-end", 4, "adam", order) for order in ("gpipe", "1f1b", "zero-bubble-lean")]


def case(num_stages: int, strategy: str, num_microbatches: int, optimizer: str, order: str) -> Any:
    """Digests after twenty steps, some of whose batches are ragged."""
    pipe = pipeline(num_stages, strategy, num_microbatches, schedule=order)
    trained(pipe, optimizer, batches(20, sizes=(8, 8, 8, 7, 8, 9, 9)))
    return closed(pipe, digests(pipe))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write([case(int(sys.argv[2]), *found) for found in CASES])
