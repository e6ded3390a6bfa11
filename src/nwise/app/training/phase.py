"""A phase of training: the parts that start fresh when the strategy changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nwise.app.recipes import Adam, Recipe
from nwise.app.training.optimizers import LearningRate, make_optimizer, parameter_groups
from nwise.pipeline import Pipeline
from nwise.strategies import Strategy
from nwise.training import Clip, NonFiniteGuard, hidden_matrices


class Phase:
    """An optimizer, its learning rate, and the treatment of gradients before an update.

    The pipeline is about to make one of the phase's steps; `report` receives the facts if a loss or gradient is not finite.
    """

    def __init__(
        self, recipe: Recipe, pipe: Pipeline, number: int, steps: range, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self._pipe = pipe
        config = recipe.optimizer if number == 0 else recipe.then or recipe.optimizer
        groups = parameter_groups(pipe, config.lr, recipe.stage_lr)
        by_muon = isinstance(config, Adam) and config.muon_lr
        self.optimizer = make_optimizer(config, groups, hidden_matrices(pipe) if by_muon else ())
        self.rate = LearningRate(config, self.optimizer, len(steps), recipe.eval_every)
        self.clip = None if recipe.clip is None else Clip(pipe, recipe.clip, recipe.clip_by)
        self.guard = NonFiniteGuard(pipe, recipe.on_nan, report)

    def update(self) -> list[int]:
        """Update the parameters; return the stages of this process whose update is skipped."""
        skipped = self.guard()
        if self.clip is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return skipped

    def drain(self) -> None:
        """Update the parameters by the gradients that are still due under a delay."""
        while self._pipe.drain():
            self.update()


def check_phases(recipe: Recipe, pipe: Pipeline, rules: Sequence[Strategy]) -> list[set[int]]:
    """Return the heads that each phase needs; ValueError if one cannot clip, or skip updates, as the recipe says."""
    needed = []
    for rule in reversed(rules):  # so the first one is in force in the end
        if rule != pipe.strategy:
            pipe.strategy = rule
        if recipe.clip is not None:
            Clip(pipe, recipe.clip, recipe.clip_by)
        NonFiniteGuard(pipe, recipe.on_nan)
        needed.append(pipe.needed_heads())
    return needed[::-1]
