"""One step of a pipeline: a mini-batch through the engine, as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nwise.microbatch import Parts, Results
from nwise.randomness import StepSeeds, preserved
from nwise.runtime.engine import Engine
from nwise.runtime.structure import Structure, deferred_norms, restored_on_error
from nwise.schedule.actions import Action
from nwise.schedule.schedule import Schedule
from nwise.terms import Terms

__all__ = ["Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A step to run.

    Args:
        number: number of the step.
        seed: its seed.
        parts: its micro-batches, of all replicas.
        terms: counter of each stage's loss.
        schedule: what is executed.
        structure: modules and trainable parameters.
        engine: what runs it.
        on_action: function called after each action, or None.
        judge: function called at the end of a step that is compared, whose errors are those of the step; or None.
    """

    number: int
    seed: int
    parts: Parts
    terms: Sequence[Terms]
    schedule: Schedule
    structure: Structure
    engine: Engine
    on_action: Callable[[Action], None] | None
    judge: Callable[[], None] | None

    def run(self, draws: StepSeeds) -> Results:
        """Run the step: fill every ``.grad``, and return the rest; a step that raises restores what it has changed."""
        batch = self.parts.batch(self.terms, self.schedule.num_microbatches, draws)
        engine = self.engine
        # In a context of autocast around the whole loop, torch would use the bf16 weights of the first step in all steps.
        torch.clear_autocast_cache()
        restored = restored_on_error(self.structure.stateful, self.structure.learns)
        with restored, preserved(engine.device):
            engine.follow(self.schedule, self.number)
            if self.judge is not None and engine.received is None:
                from nwise.runtime.received import Received  # only the first step is compared

                engine.received = Received(engine.stages, self.schedule, self.number, self.parts)
            engine.run(self.schedule, self.number, batch, self.on_action)
            if self.judge is not None:
                self.judge()
        return batch.results(len(self.terms))

    def record(self, parts: Parts, draws: StepSeeds) -> Results:
        """Run only what a recording can hold, on micro-batches of the same kind, without a look at any value.

        Args:
            parts: the micro-batches.
            draws: what seeds its random numbers.
        """
        batch = parts.batch(self.terms, self.schedule.num_microbatches, draws, on_device=True)
        norms = deferred_norms(self.structure.stateful)
        for norm in norms:
            norm.begin()
        self.engine.record(self.schedule, self.number, batch)
        for norm in norms:
            norm.commit()
        return batch.results(self.schedule.num_stages)
