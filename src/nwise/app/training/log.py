"""The records of steps, gathered on rank 0 from all processes of a pipeline without making any of them wait."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nwise.pipeline import Pipeline
from nwise.runtime.processes import Processes

_KEPT = 8  # number of columns on their way before a rank waits for the oldest


class StepLog:
    """Losses, learning rates and staleness of logged steps; with several processes rank 0 receives them later."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._ready: list[tuple[int, dict[str, Any]]] = []
        self._ages: dict[int, Tensor] = {}  # of the steps that are still to come
        self._gather = None if pipe.processes.size == 1 else AsyncGather(pipe.processes)

    def put(self, step: int, losses: Tensor, lr: float, seconds: float) -> None:
        """Add a step and the time at which it ended; all processes add the same steps."""
        if self._gather is None:
            self._ready.append((step, _record(losses, lr, seconds, self._pipe.staleness)))
            return
        # A stage whose head does not run, or that another process holds, has no share of a loss.
        shares = [float(self._pipe.loss_shares.get(k, 0.0)) for k in range(self._pipe.num_stages)]
        sums = [loss * share if share else 0.0 for loss, share in zip(losses.tolist(), shares, strict=True)]
        self._gather.put(step, [lr, seconds, *sums, *shares])
        if self._pipe.processes.is_first:
            self._ages[step] = self._pipe.staleness  # another strategy may be in force when the step arrives

    def take(self, *, wait: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """Return the steps that are complete, with their values, on rank 0; with `wait`, all steps that were added."""
        if self._gather is None:
            ready, self._ready = self._ready, []
            return ready
        return [(step, _summary(table, self._ages.pop(step))) for step, table in self._gather.take(wait=wait)]


def _summary(table: Tensor, ages: Tensor) -> dict[str, Any]:
    """Add up the processes' shares of each stage's loss."""
    sums, shares = table[:, 2:].sum(0).chunk(2)
    losses = torch.where(shares > 0, sums / shares, torch.nan)
    return _record(losses, float(table[0, 0]), float(table[0, 1]), ages)


def _record(losses: Tensor, lr: float, seconds: float, ages: Tensor) -> dict[str, Any]:
    stale = {"staleness": ages.tolist()} if ages.any() else {}
    return {"loss": losses.tolist(), "lr": lr, "seconds": seconds, **stale}


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
