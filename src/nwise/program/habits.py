"""What a training loop does with the gradients between two steps, to warn of habits that spoil training in silence.

- The optimizer has only the main network's parameters, so the heads never learn.
- Several processes train differently (`nwise.program.apart`).

A look compares a few tensors with copies of them; it costs something at the steps 1, 2, 4, 8, ... only.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from nwise._torch import versions
from nwise.checks import warn
from nwise.looks import looks_at
from nwise.runtime.processes import Processes
from nwise.stage.stage import Stage, learning

if TYPE_CHECKING:
    from nwise.program.apart import Apart

_UPDATES = 2  # updates without a head after which there is a warning


class Habits:
    """Looks at the gradients after a step and before the next one.

    Args:
        processes: the processes.
        stages: the stages of this process.
    """

    def __init__(self, processes: Processes, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self._steps = 0
        self._looks = False  # whether the last step was number 1, 2, 4, 8, ...
        self._left_out: dict[int, int] = {}  # updates in a row without the head, by stage
        self._versions: dict[Tensor, int] = {}  # of parameters with gradients, at the last look
        self._warned = False
        self._apart: Apart | None = None
        if processes.size > 1:
            from nwise.program.apart import Apart

            self._apart = Apart(processes, stages)

    def after_step(self) -> None:
        """Note the gradients that a step or nwise's own clipping leaves."""
        if not self._looks:
            return
        if not self._versions and not self._warned:
            graded = [p for p in learning(self.stages) if p.grad is not None]
            self._versions = dict(zip(graded, versions(graded), strict=True))
        if self._apart is not None:
            self._apart.note()

    def before_step(self) -> None:
        """Warn if the loop has left out heads, or if processes have gone apart."""
        if self._looks and self._versions:
            self._look_at_heads()
        if self._apart is not None:
            if self._looks:
                self._apart.post(self._steps)
            self._apart.look()
        self._steps += 1
        self._looks = looks_at(self._steps)

    def _look_at_heads(self) -> None:
        """Count updates in a row that change stages but not their heads."""
        before, self._versions = self._versions, {}
        moved = {p for p, now in zip(before, versions(before), strict=True) if now != before[p]}
        if not any(p in moved for stage in self.stages for p in stage.learns):
            self._versions = {p: now for p, now in before.items() if p.grad is not None}  # they accumulate
            return
        for stage in self.stages:
            heads = [p for p in stage.head_learns if p in before]
            left_out = bool(heads) and not moved.intersection(heads)
            self._left_out[stage.index] = self._left_out.get(stage.index, 0) + 1 if left_out else 0
        stays = [stage for stage in self.stages if self._left_out[stage.index] >= _UPDATES]
        # An optimizer may update the heads less often, in another phase, or by their `data`, which counts as no change.
        held = _held() if stays else set()
        if found := [stage.index for stage in stays if not held.intersection(stage.head_learns)]:
            self._warned = True
            warn(
                f"Heads should be trained with their stages. Found gradients of the heads of stages {found} that no "
                "optimizer has used in two updates; give the optimizer `pipe.parameters()`, or freeze these heads "
                "(`requires_grad_(False)`). This warning appears once."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the tensors of a comparison; a copy belongs to one process."""
        return {**self.__dict__, "_versions": {}, "_apart": None}


def _held() -> set[Tensor]:
    """Return the parameters of all optimizers of this process."""
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    return {p for one in optimizers for group in getattr(one, "param_groups", ()) for p in group["params"]}
