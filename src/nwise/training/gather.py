"""Collects numbers of all ranks on rank 0 without making a rank wait."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nwise.runtime.processes import Processes

_KEPT = 8  # number of columns on their way before a rank waits for the oldest


class AsyncGather:
    """Gathers a column of numbers from every rank at chosen steps.

    All ranks, at least two, make it together and put in columns of the same length at the same steps.
    """

    def __init__(self, processes: Processes) -> None:
        self._group = processes.new_group()  # a separate group: no other messages mix in
        self._under_way: deque[tuple[int, list[Tensor], Any]] = deque()

    def put(self, step: int, column: list[float]) -> None:
        """Send this rank's numbers of a step to rank 0."""
        values = torch.tensor(column, dtype=torch.float64)
        rows = None if dist.get_rank() else [torch.zeros_like(values) for _ in range(dist.get_world_size())]
        # A collective, because gloo's receives do not report that they are done until a thread waits for them.
        work = dist.gather(values, rows, 0, group=self._group, async_op=True)
        self._under_way.append((step, rows or [values], work))

    def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
        """Return the steps whose columns have arrived on rank 0 since the last call, with tables ``[ranks, length]``.

        Other ranks get nothing. With `wait`, every column has arrived on rank 0 afterwards, and left the other ranks.
        """
        tables = []
        while self._under_way and (wait or len(self._under_way) > _KEPT or self._under_way[0][2].is_completed()):
            step, rows, work = self._under_way.popleft()
            work.wait()
            if not dist.get_rank():
                tables.append((step, torch.stack(rows)))
        return tables
