"""A phase of training: what is made anew when the strategy changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nwise.pipeline import Pipeline
from nwise.recipes import Recipe
from nwise.training.clip import Clip
from nwise.training.finite import Finite
from nwise.training.optimizers import Rate, optimizer_of, parameter_groups


@dataclass(frozen=True, slots=True)
class Phase:
    """An optimizer with its rate, and what is done with gradients before an update."""

    optimizer: torch.optim.Optimizer
    rate: Rate
    clip: Clip | None
    finite: Finite

    @classmethod
    def of(
        cls, recipe: Recipe, pipe: Pipeline, number: int, steps: range, tell: Callable[[dict[str, Any]], None]
    ) -> Phase:
        """As the recipe says.

        Args:
            recipe: the configuration.
            pipe: about to make one of the phase's steps.
            number: of the phase, from 0.
            steps: of the phase.
            tell: given the facts if something is not finite.
        """
        config = recipe.optimizer if number == 0 else recipe.then or recipe.optimizer
        optimizer = optimizer_of(config, parameter_groups(pipe, config.lr, recipe.stage_lr))
        rate = Rate(config, optimizer, len(steps), recipe.eval_every)
        clip = None if recipe.clip is None else Clip(pipe, recipe.clip, recipe.clip_by)
        return cls(optimizer, rate, clip, Finite(pipe, recipe.on_nan, tell))

    def update(self) -> list[int]:
        """With the gradients that are there; the stages of this process whose update is left out."""
        left_out = self.finite()
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return left_out


def check_phases(recipe: Recipe, pipe: Pipeline, num_steps: int) -> None:
    """Refuse before the first step what a later phase would refuse.

    Args:
        recipe: the configuration.
        pipe: before its first step.
        num_steps: of all phases.

    Raises:
        ValueError: a phase cannot clip, or leave out updates, as the recipe says.
    """
    for first, _ in pipe.strategy.phases(stop=num_steps):
        pipe.steps = first
        if recipe.clip is not None:
            Clip(pipe, recipe.clip, recipe.clip_by)
        Finite(pipe, recipe.on_nan)
    pipe.steps = 0
