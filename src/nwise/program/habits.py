"""What a training loop does with the gradients between two steps, to warn of habits that spoil training in silence.

- The optimizer has only the main network's parameters, so the heads never learn.
- Under several processes torch's `clip_grad_norm_` sees the stages of its own process, so each process scales its gradients by
  another factor.
- Under several processes a scheduler that follows a loss gets nan where the loss is not computed, so the rates go apart. A loop
  that skips an update if the loss is not finite never trains the stages there.
- Under several processes an optimizer with a norm over all parameters has that of its process.

A look compares a few tensors with copies of them; it costs something at the steps 1, 2, 4, 8, ... only, and an optimizer is tried
once.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nwise._torch import versions
from nwise.checks import warn
from nwise.looks import is_due
from nwise.runtime.processes import Processes
from nwise.stage.stage import Stage, learning
from nwise.tensors import sample

_LAST_LOSS = "the last loss of `pipe.processes.table({k: losses[k:k + 1] for k in pipe.processes.here})`"
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
        self._gradient: tuple[Tensor, Tensor, Tensor] | None = None  # a parameter, its gradient, and some of its values
        # Those that have called `_at_update`; None before its hook.
        self._tried: weakref.WeakSet[Optimizer] | None = None
        self._factor: float | None = None  # by which the gradient had been scaled at the last update
        self._rate = self._first_rate = 0.0  # of the parameter
        self._updated = False  # whether an optimizer has updated any parameter since the last look
        self._posted: list[int] = []  # the numbers of steps whose factors this process has posted
        self._warned = self._warned_of_heads = False
        processes.before_close(self.look_at_factors)

    def after_step(self) -> None:
        """Note the gradients that a step or nwise's own clipping leaves."""
        if self._processes.size > 1 and self._tried is None:
            self._tried, update = weakref.WeakSet(), weakref.WeakMethod(self._at_update)
            hook = register_optimizer_step_pre_hook(lambda *arguments: _call(update, *arguments))
            weakref.finalize(self, hook.remove)
        if not self._looks:
            return
        if not self._versions and not self._warned_of_heads:
            graded = [p for p in learning(self.stages) if p.grad is not None]
            self._versions = dict(zip(graded, versions(graded), strict=True))
        if self._processes.size > 1 and not self._warned:
            self._gradient = _sample(learning(self.stages))

    def _at_update(self, optimizer: Optimizer, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Note the factor and the rate, just before an update; before the first one, try the optimizer."""
        if self._tried is not None and optimizer not in self._tried:
            self._tried.add(optimizer)
            self._try(optimizer, closure=len(args) > 1 or "closure" in named)
        if self._gradient is None:
            return
        parameter, *gradient = self._gradient
        learns = set(learning(self.stages))
        for group in optimizer.param_groups:
            self._updated = self._updated or not learns.isdisjoint(group["params"])
            if any(p is parameter for p in group["params"]):
                self._factor, self._rate = _factor(*gradient), float(group["lr"]) if "lr" in group else 0.0
                self._first_rate = self._first_rate or self._rate

    def _try(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Warn of an optimizer that mixes parameters, of which this process has a part."""
        from nwise.program.mixing import mixes

        updates = {p for group in optimizer.param_groups for p in group["params"]}
        apart = self._processes.num_ranks > 1 and updates.intersection(learning(self.stages))
        if apart and mixes(optimizer, closure=closure):
            warn(
                "An optimizer should update each parameter by its own gradient alone under several processes, because each "
                f"process has the parameters of its stages only. Found {type(optimizer).__name__}, whose updates depend on the "
                "gradients of other parameters, as by a norm over all of them, and differ from those of one process; train in "
                "one process, or use an optimizer without such a norm after `nwise.clip_grad_norm_(pipe, max_norm)`. This "
                "warning appears once."
            )

    def before_step(self) -> None:
        """Warn if the loop has left out heads or scaled the gradients of each process by another factor."""
        if self._looks and self._versions:
            self._look_at_heads()
        if self._looks and self._processes.size > 1:
            rate = self._rate / self._first_rate if self._first_rate else None
            if self._factor is None and self._gradient is not None:  # an update by hand
                self._factor = _factor(*self._gradient[1:])
            updated = None if self._gradient is None else self._updated
            self._processes.post(f"factor/{self._steps}", [self._factor, rate, updated])
            self._posted.append(self._steps)
            self._gradient, self._factor, self._updated = None, None, False
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
            warn(
                f"Heads should be trained with their stages. Found gradients of the heads of stages {found} that no "
                "optimizer has used in two updates; give the optimizer `pipe.parameters()`, or freeze these heads "
                "(`requires_grad_(False)`). This warning appears once."
            )

    def look_at_factors(self) -> None:
        """Compare by which factor each process has scaled its gradients, once all have said so; wait for none."""
        while self._posted and (factors := self._processes.posted(f"factor/{self._posted[0]}")) is not None:
            step = self._posted.pop(0)
            *numbers, updated = zip(*factors, strict=True)
            scaled, rates = map(_apart, numbers)
            said = ""
            if scaled:
                said = (
                    f"All processes should scale their gradients alike. Found a factor of {scaled} after step {step}, because "
                    "torch's `clip_grad_norm_` sees the stages of one process only; use `nwise.clip_grad_norm_(pipe, max_norm)`."
                )
            elif rates:
                said = (
                    f"All processes should change their learning rates alike. Found a factor of {rates} between the first rate "
                    f"and that of step {step}, as of a scheduler that follows a loss, which is nan in other processes; give it "
                    f"{_LAST_LOSS}."
                )
            elif True in updated and False in updated:
                said = (
                    f"All processes should update their parameters after the same steps. Found an update after step {step} on "
                    f"rank {updated.index(True)}, but none on rank {updated.index(False)}, as of a loop that skips it if a loss "
                    f"is not finite, which is nan in other processes; look at {_LAST_LOSS}."
                )
            if said and not self._warned:
                self._warned = True
                warn(f"{said} This warning appears once.")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the tensors of a comparison and the hook."""
        return {**self.__dict__, "_versions": {}, "_gradient": None, "_tried": None}


def _held() -> set[Tensor]:
    """Return the parameters of all optimizers of this process."""
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    return {p for one in optimizers for group in getattr(one, "param_groups", ()) for p in group["params"]}


def _call(method: weakref.WeakMethod[Any], *arguments: Any) -> None:
    if (bound := method()) is not None:
        bound(*arguments)


def _sample(parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the last parameter whose gradient has values, the gradient, and some of the values."""
    found = None
    for p in parameters:
        if p.grad is not None and p.grad.layout is torch.strided and p.grad.numel() > 1:
            found = p, p.grad
    return None if found is None else (*found, sample(found[1]))


def _apart(numbers: Sequence[float | None]) -> str:
    """Say which ranks have the least and the largest number, if these differ; None does not count."""
    known = [(number, rank) for rank, number in enumerate(numbers) if number is not None]
    (low, first), (high, second) = (min(known), max(known)) if known else ((1.0, 0), (1.0, 0))
    apart = high - low > 1e-3 * max(abs(high), abs(low))
    return f"{low:.3g} on rank {first} and of {high:.3g} on rank {second}" if apart else ""


def _factor(gradient: Tensor, before: Tensor) -> float | None:
    """Return the factor by which a gradient has been scaled; None if it was set to zero or changed otherwise."""
    now, before = sample(gradient).double(), before.double()
    square = before.square().sum()
    factor = (now * before).sum() / square
    same = bool(((now - factor * before).abs() <= 1e-2 * factor.abs() * before.abs()).all())
    return float(factor) if square and factor and same else None
