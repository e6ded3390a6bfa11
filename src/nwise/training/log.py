"""The records of steps, gathered from all processes of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nwise.pipeline import Pipeline
from nwise.training.gather import AsyncGather


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
        shares = [self._pipe.loss_shares.get(k, 0.0) for k in range(self._pipe.num_stages)]
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
