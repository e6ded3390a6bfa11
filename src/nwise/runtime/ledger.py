"""The ledger: numbers of all ranks on rank 0, without anybody waiting for them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nwise.runtime.world import World

_KEPT = 8  # messages on their way before a rank waits for the oldest


class Ledger:
    """A column of every rank, now and then.

    All ranks make one, and put columns of the same length in at the same steps.

    Args:
        world: the processes.
        length: of a column.
    """

    def __init__(self, world: World, length: int) -> None:
        self._group = world.new_group(backend="gloo")  # of its own, so that it meets no other messages
        self._length = length
        self._sent: deque[tuple[Tensor, Any]] = deque()
        self._expected: deque[tuple[int, Tensor, list[Any]]] = deque()

    def put(self, step: int, column: list[float]) -> None:
        """This rank's numbers of a step."""
        values = torch.tensor(column, dtype=torch.float64)
        if dist.get_rank():
            if len(self._sent) >= _KEPT:
                self._sent.popleft()[1].wait()
            self._sent.append((values, dist.isend(values, 0, group=self._group)))
            return
        table = torch.zeros(dist.get_world_size(), self._length, dtype=torch.float64)
        table[0] = values
        works = [dist.irecv(table[rank], rank, group=self._group) for rank in range(1, len(table))]
        self._expected.append((step, table, works))

    def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
        """What has come from all ranks since the last call: steps with their tables, ``[ranks, length]``.

        Args:
            wait: until everything is there; else only what is there already. Other ranks wait until theirs has left.
        """
        while wait and self._sent:
            self._sent.popleft()[1].wait()
        found = []
        while self._expected and (wait or all(work.is_completed() for work in self._expected[0][2])):
            step, table, works = self._expected.popleft()
            for work in works:
                work.wait()
            found.append((step, table))
        return found
