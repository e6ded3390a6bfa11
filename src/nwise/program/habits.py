"""What a training loop does with the gradients between two steps, to warn of two habits that spoil training in silence.

- The optimizer has only the main network's parameters, so the heads never learn.
- Under several processes torch's `clip_grad_norm_` sees the stages of its own process, so each process scales its gradients by
  another factor.

A look compares a few tensors with copies of them; it costs something at the steps 1, 2, 4, 8, ... only.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nwise._looks import is_due
from nwise._torch import versions
from nwise.checks import outside
from nwise.runtime.processes import Processes
from nwise.stage.stage import Stage, learning
from nwise.tensors import sample

_UPDATES = 2  # updates without a head after which there is a warning


class Habits:
    """Looks at the gradients after a step and before the next one.

    Args:
        processes: the processes.
        stages: the stages of this process.
    """

    def __init__(self, processes: Processes, stages: Sequence[Stage]) -> None:
        self.stages, self._processes = stages, processes
        self._steps = 0
        self._looks = False  # whether the last step was number 1, 2, 4, 8, ...
        self._left_out: dict[int, int] = {}  # updates in a row without the head, by stage
        self._versions: dict[Tensor, int] = {}  # of parameters with gradients, at the last look
        self._gradient: tuple[Tensor, Tensor] | None = None  # a gradient and some of its values
        self._posted: list[int] = []  # the numbers of steps whose factors this process has posted
        self._warned = self._warned_of_heads = False
        processes.before_close(self.look_at_factors)

    def after_step(self) -> None:
        """Note the gradients that a step or nwise's own clipping leaves."""
        if not self._looks:
            return
        if not self._versions and not self._warned_of_heads:
            graded = [p for p in learning(self.stages) if p.grad is not None]
            self._versions = dict(zip(graded, versions(graded), strict=True))
        if self._processes.size > 1 and not self._warned:
            self._gradient = _sample(p.grad for p in learning(self.stages))

    def before_step(self) -> None:
        """Warn if the loop has left out heads or scaled the gradients of each process by another factor."""
        if self._looks and self._versions:
            self._look_at_heads()
        if self._looks and self._processes.size > 1:
            factor, self._gradient = None if self._gradient is None else _factor(*self._gradient), None
            self._processes.post(f"factor/{self._steps}", factor)
            self._posted.append(self._steps)
        self.look_at_factors()
        self._steps += 1
        self._looks = is_due(self._steps)

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
            self._warned_of_heads = True
            warnings.warn(
                f"Heads should be trained with their stages. Found gradients of the heads of stages {found} that no "
                "optimizer has used in two updates; give the optimizer `pipe.parameters()`, or freeze these heads "
                "(`requires_grad_(False)`). This warning appears once.",
                stacklevel=outside(),
            )

    def look_at_factors(self) -> None:
        """Compare by which factor each process has scaled its gradients, once all have said so; wait for none."""
        while self._posted and (factors := self._processes.posted(f"factor/{self._posted[0]}")) is not None:
            step = self._posted.pop(0)
            known = [(factor, rank) for rank, factor in enumerate(factors) if factor is not None]
            (low, first), (high, second) = (min(known), max(known)) if known else ((1.0, 0), (1.0, 0))
            if high - low > 1e-3 * max(abs(high), abs(low)) and not self._warned:
                self._warned = True
                warnings.warn(
                    f"All processes should scale their gradients alike. Found a factor of {low:.3g} on rank {first} and of "
                    f"{high:.3g} on rank {second} after step {step}, because torch's `clip_grad_norm_` sees the stages of one "
                    "process only; use `nwise.clip_grad_norm_(pipe, max_norm)`. This warning appears once.",
                    stacklevel=outside(),
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the tensors of a comparison."""
        return {**self.__dict__, "_versions": {}, "_gradient": None}


def _held() -> set[Tensor]:
    """Return the parameters of all optimizers of this process."""
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    return {p for one in optimizers for group in getattr(one, "param_groups", ()) for p in group["params"]}


def _sample(gradients: Iterable[Tensor | None]) -> tuple[Tensor, Tensor] | None:
    """Return the last gradient that has values, and some of them."""
    found = None
    for gradient in gradients:
        if gradient is not None and gradient.layout is torch.strided and gradient.numel() > 1:
            found = gradient
    return None if found is None else (found, sample(found))


def _factor(gradient: Tensor, before: Tensor) -> float | None:
    """Return the factor by which a gradient has been scaled; None if it was set to zero or changed otherwise."""
    now, before = sample(gradient).double(), before.double()
    square = before.square().sum()
    factor = (now * before).sum() / square
    same = bool(((now - factor * before).abs() <= 1e-2 * factor.abs() * before.abs()).all())
    return float(factor) if square and factor and same else None
