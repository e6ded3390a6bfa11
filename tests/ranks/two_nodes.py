"""A few steps, for launchers on two nodes; writes digests."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ranks.common import batches, closed, digests, pipeline, trained, write


def case(num_stages: int) -> Any:
    """Digests after ten steps."""
    pipe = pipeline(num_stages, "2-wise", 2)
    trained(pipe, "adam", batches(10))
    return closed(pipe, digests(pipe))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(case(int(sys.argv[2])))
