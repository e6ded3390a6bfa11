"""A few steps, for launchers on two nodes; writes digests."""

from __future__ import annotations

import sys

import torch

from ranks.common import batches, digests, pipeline, trained, write


def case(num_stages: int) -> dict[str, str]:
    """Digests after ten steps."""
    pipe = pipeline(num_stages, "2-wise", 2)
    trained(pipe, "adam", batches(10))
    found = digests(pipe)
    if pipe.team is not None:
        pipe.team.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(case(int(sys.argv[2])))
