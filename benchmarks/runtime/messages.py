"""One rank of the limit: the time of gloo's messages alone, between as many neighbours at once as a pipeline has.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.runtime.messages MIB[,MIB...]

Pairs of neighbours send a tensor there and back, all at the same moments, with 20 ms of rest in between; prints a JSON line
for each size with the median one-way time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.runtime.device import sharpen_timers
from nwise.runtime.launch import start

ROUNDS, WARM = 60, 10


def one_way(mib: float, alone: bool) -> float:
    """Measure the seconds of a message, the median over rounds and pairs.

    Args:
        mib: its size; 0 for 8 bytes.
        alone: only the first pair sends.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    other = rank ^ 1
    tensor, buffer = (torch.zeros(max(1, int(mib * 2**17)), dtype=torch.float64) for _ in range(2))
    takes_part = other < size and (not alone or rank < 2)
    times = []
    for _ in range(ROUNDS):
        time.sleep(0.02)
        dist.barrier()
        if not takes_part:
            continue
        posted = dist.irecv(buffer, other)
        assert posted is not None
        if rank < other:
            start_time = time.perf_counter()
            sent = dist.isend(tensor, other)
            posted.wait()
            times.append((time.perf_counter() - start_time) / 2)
        else:
            posted.wait()
            sent = dist.isend(tensor, other)
        assert sent is not None
        sent.wait()
    times_by_rank: list[list[float]] = [[] for _ in range(size)]
    dist.all_gather_object(times_by_rank, times[WARM:])
    return statistics.median(value for values in times_by_rank for value in values)


if __name__ == "__main__":
    sharpen_timers()
    torch.set_num_threads(1)
    start()
    for mib in map(float, sys.argv[1].split(",")):
        record = {"stages": dist.get_world_size(), "message_mib": mib}
        record |= {"one_way_ms": 1e3 * one_way(mib, False), "alone_ms": 1e3 * one_way(mib, True)}
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)
