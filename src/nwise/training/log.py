"""The records of steps, gathered from all processes of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nwise.pipeline import Pipeline
from nwise.runtime.ledger import Ledger


class StepLog:
    """Losses, learning rates and staleness of logged steps; with several processes rank 0 receives them later.

    Args:
        pipe: the pipeline whose steps are logged.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._ready: list[tuple[int, dict[str, Any]]] = []
        self._ledger = None if pipe.team is None else Ledger(pipe.team.world)

    def put(self, step: int, losses: Tensor, lr: float, seconds: float) -> None:
        """Add a step and the time at which it ended; all processes add the same steps."""
        ages = self._pipe.staleness
        if self._ledger is None:
            stale = {"staleness": ages.tolist()} if ages.any() else {}
            self._ready.append((step, {"loss": losses.tolist(), "lr": lr, "seconds": seconds, **stale}))
            return
        assert self._pipe.team is not None
        stage, share = self._pipe.team.stage, self._pipe.team.share
        loss = float(losses[stage])
        # A rank whose head does not run has no share of a loss.
        column = [0.0, 0.0] if loss != loss and not share else [loss * share, share]
        self._ledger.put(step, [*column, lr, seconds, *map(float, ages[stage].tolist())])

    def take(self, *, wait: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """Return the steps that are complete, with their values; on rank 0.

        Args:
            wait: whether to wait for all steps that were added.
        """
        if self._ledger is None:
            ready, self._ready = self._ready, []
            return ready
        return [(step, self._summary(table)) for step, table in self._ledger.take(wait=wait)]

    def _summary(self, table: Tensor) -> dict[str, Any]:
        """Add up the replicas' shares of each stage's loss."""
        by_stage = table.unflatten(0, (self._pipe.num_stages, -1))
        sums = by_stage.sum(1)
        losses = torch.where(sums[:, 1] > 0, sums[:, 0] / sums[:, 1], torch.nan)
        ages = by_stage[:, 0, 4:].long()
        stale = {"staleness": ages.tolist()} if ages.any() else {}
        return {"loss": losses.tolist(), "lr": float(table[0, 2]), "seconds": float(table[0, 3]), **stale}
