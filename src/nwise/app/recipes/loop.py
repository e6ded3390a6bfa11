"""The configuration of a training loop that is not nwise's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nwise.app.recipes.phases import Phases, parse_phases

Quality = Literal["loss", "accuracy", "perplexity"]


@dataclass(frozen=True, kw_only=True)
class OwnLoop:
    """What a page of results says about a loop that wrote its own log (`nwise.app.Log`).

    Args:
        name: name of the loop.
        strategy: name of its strategy; of several ``"<first>@<step>,<next>"``.
        heads: ``"live"`` or ``"all"``, as for a strategy.
        microbatches: number of micro-batches, M.
        batch_size: number of samples in a mini-batch.
        schedule: name of the order.
        quality: the score of the overview.
        seed: the pipeline's seed.
    """

    name: str
    strategy: str
    heads: Literal["live", "all"]
    microbatches: int
    batch_size: int
    schedule: str
    quality: Quality
    seed: int

    def phases(self, steps_per_epoch: int) -> Phases:
        """Return the first step of every strategy, and the strategy."""
        return parse_phases(self.strategy, steps_per_epoch, self.heads)
