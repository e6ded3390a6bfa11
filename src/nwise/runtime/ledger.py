"""The ledger: numbers of all ranks on rank 0, without anybody waiting for them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nwise.runtime.world import World

_KEPT = 8  # columns on their way before a rank waits for the oldest


class Ledger:
    """A column of every rank, now and then.

    All ranks make one, and put columns of the same length in at the same steps.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._group = world.new_group(backend="gloo")  # of its own, so that it meets no other messages
        self._under_way: deque[tuple[int, list[Tensor], Any]] = deque()

    def put(self, step: int, column: list[float]) -> None:
        """This rank's numbers of a step."""
        values = torch.tensor(column, dtype=torch.float64)
        rows = None if dist.get_rank() else [torch.zeros_like(values) for _ in range(dist.get_world_size())]
        # A collective, since gloo's receives do not say that they are done until somebody waits for them.
        work = dist.gather(values, rows, 0, group=self._group, async_op=True)
        self._under_way.append((step, rows or [values], work))

    def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
        """What has come from all ranks since the last call: steps with their tables, ``[ranks, length]``; on rank 0.

        Args:
            wait: until everything is there; else only what is there already. Other ranks wait until theirs has left.
        """
        found = []
        while self._under_way and (wait or len(self._under_way) > _KEPT or self._under_way[0][2].is_completed()):
            step, rows, work = self._under_way.popleft()
            work.wait()
            if not dist.get_rank():
                found.append((step, torch.stack(rows)))
        return found
