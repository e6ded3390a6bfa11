"""The program of a pipeline: the plan of its next steps, made before any tensor work and kept until something changes.

strategy in force, M, heads, what is trained  ->  flows  ->  schedule, with the order and the placement
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

from torch import nn

from nwise.by_stage import HeadDict
from nwise.flow import Flows, flows_for
from nwise.program.summary import count, describe
from nwise.runtime.processes import Processes
from nwise.schedule.ages import strategy_ages
from nwise.schedule.named import Order, choose
from nwise.schedule.schedule import Schedule
from nwise.strategies import Strategy


class Program:
    """Flows and schedules of a pipeline.

    Args:
        processes: the processes.
        prices: costs by which orders are compared, and the memory of every rank; empty for typical costs and no limit.

    Attributes:
        shared: two names of a parameter that is in two places, or None.
    """

    def __init__(self, processes: Processes, prices: tuple[Any, ...]) -> None:
        self._processes, self._prices = processes, prices
        self.shared: tuple[str, str] | None = None
        self._trainable: tuple[bool, ...] = ()
        self._key: Any = None
        self._frozen: tuple[object, ...] = ()
        self._schedule: Schedule | None = None
        self._sizes: list[list[int]] = []

    def set_trainable(self, here: Mapping[int, bool]) -> None:
        """Record whether each stage of this process has a parameter to train.

        Several processes exchange these facts only once, so the facts must not change.

        Raises:
            ValueError: a stage has become trainable, or has been frozen.
        """
        if not self._trainable or self._processes.size == 1:
            self._trainable = tuple(self._processes.by_stage(here))
        for k, learns in here.items():
            if self._trainable[k] != learns:
                raise ValueError(
                    f"Stage {k} should stay {'frozen' if learns else 'trainable'}, because the other processes rely on "
                    f"it. Found {'some parameters' if learns else 'no parameters'} to train; make a new pipeline."
                )

    def measure(self, stages: nn.ModuleList, heads: HeadDict) -> None:
        """Count the parameters of this process's stages and heads; the first call exchanges the numbers between all processes."""
        here = {k: [count(stages[k]), count(heads.get(k))] for k in self._processes.here}
        self._sizes = self._sizes or self._processes.by_stage(here)
        for k, sizes in here.items():
            self._sizes[k] = sizes

    def summary(self, now: Strategy, step: int, num_microbatches: int, stages: nn.ModuleList, heads: HeadDict) -> str:
        """Describe a step of a strategy."""
        self.measure(stages, heads)
        sizes = [(main, head if k in heads else 0) for k, (main, head) in enumerate(self._sizes)]
        title = f"{len(sizes)} stages, {now.name}, {num_microbatches} micro-batch{'es' * (num_microbatches > 1)}"
        flow = self.flows(now, num_microbatches, heads)[step % now.turns][0]
        return describe(title, sizes, flow, now.credit(len(sizes), now.turn(step, 0)))

    def flows(self, now: Strategy, num_microbatches: int, heads: HeadDict) -> Flows:
        """Return the flows of a strategy's cycle of mini-batches, ``[cycle][M]``."""
        size = len(self._processes.placement)
        present = [*(head is not None for head in heads.by_stage(size)[:-1]), True]
        return flows_for(now, size, num_microbatches, trainable=self._trainable, heads=present)

    def needed_heads(self, strategy: Strategy, num_microbatches: int, heads: HeadDict) -> set[int]:
        """Return the stages whose auxiliary heads run in some mini-batch of a strategy's cycle."""
        flows = self.flows(strategy, num_microbatches, heads)
        return {k for batch in flows for flow in batch for k in flow.heads} - {len(self._processes.placement) - 1}

    def check_heads(self, strategy: Strategy, num_microbatches: int, heads: HeadDict) -> None:
        """Raise ValueError unless there is a head for every loss of a strategy but the last."""
        missing = [k for k in self.needed_heads(strategy, num_microbatches, heads) if k not in heads]
        if missing:
            raise ValueError(
                f"`heads` should have a head for stage {min(missing)}, whose loss {strategy.name!r} needs. Found None; see "
                "`nwise.heads` for builders."
            )

    def schedule(
        self, now: Strategy, num_microbatches: int, heads: HeadDict, order: Order, structure: object
    ) -> Schedule:
        """Return the schedule of a strategy's steps, that of the step before if nothing has changed.

        Args:
            structure: what it was made for; the same object as at the step before if no module or parameter has changed.

        Raises:
            ValueError: a head is missing, the order does not fit, or a parameter in two places would have gradients of two ages.
        """
        frozen = now, num_microbatches, order, structure
        if self._schedule is not None and self._frozen and all(map(is_, frozen, self._frozen)):
            return self._schedule
        flows = self.flows(now, num_microbatches, heads)
        key = order, flows, self._processes.placement, strategy_ages(now, flows)
        own = key, tuple(heads), self.shared
        if self._schedule is None or self._key != own:
            self.check_heads(now, num_microbatches, heads)
            schedule = choose(*key, *self._prices)
            if self.shared is not None and schedule.late_stages:
                raise ValueError(
                    f"Every parameter should belong to one stage or head under a delay. Found {self.shared[0]} again as "
                    f"{self.shared[1]}; use separate heads, as `nwise.heads.copied` makes."
                )
            self._key, self._schedule = own, schedule
            self._processes.compare(f"{now.name} with M = {num_microbatches}", (schedule.digest, flows))
        self._frozen = frozen
        return self._schedule

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle; the copy chooses its schedule again."""
        return {**self.__dict__, "_key": None, "_schedule": None, "_frozen": ()}
