"""Losses and gradients that are nan or infinite: stop, skip the update, or ignore them.

stop    end all processes and report the place (`NotFiniteError`, ``post-mortem.json``)
skip    skip the update of all stages and heads that share a loss with it, on all replicas, as if there had been no such
        mini-batch; not under a delay, where heads learn from a mini-batch some steps before the stages do
ignore  do not check
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nwise._torch import plain_name
from nwise.pipeline import Pipeline
from nwise.strategies import Strategy
from nwise.training.clip import cycle_credit, squared_norm

Policy = Literal["stop", "skip", "ignore"]


class NotFiniteError(ArithmeticError):
    """A loss or gradient is nan or infinite, and the policy is to stop."""


class NonFiniteGuard:
    """Checks losses and gradients after each step; another strategy changes which updates are skipped together.

    All processes of a pipeline make it and call it, at the same steps. Under ``skip`` the processes whose stages share a loss
    wait for each other after every step; the others do not.

    Args:
        pipe: the pipeline whose losses and gradients are checked.
        policy: ``"stop"`` (default), ``"skip"`` or ``"ignore"``; see `nwise.training.nonfinite`.
        report: receives the facts before the process stops.

    Raises:
        ValueError: the policy is unknown, or is ``"skip"`` under a delay.
    """

    def __init__(
        self, pipe: Pipeline, policy: Policy = "stop", report: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        if policy not in ("stop", "skip", "ignore"):
            raise ValueError(f"`on_nan` should be stop, skip or ignore. Found {policy!r}.")
        self._pipe, self._policy, self._report = pipe, policy, report
        self._follow(pipe.strategy)
        pipe.warns_of_divergence = False  # this guard reports it
        self._buffers: dict[Tensor, Tensor] = {}

    def _follow(self, strategy: Strategy) -> None:
        """Note which stages learn together under a strategy."""
        if self._policy == "skip" and (strategy.delay or strategy.asynchronous):
            raise ValueError(
                "`on_nan` should be stop or ignore under a delay, because heads learn from a mini-batch some steps before the "
                f"stages do, so no update is that of one mini-batch. Found skip with {strategy.name!r}."
            )
        self._strategy = strategy
        size = range(self._pipe.num_stages)
        credit = cycle_credit(strategy, len(size))
        # For every loss, the stages that learn from it; for every stage, whether its own loss trains it.
        self._learners = [{k for k in size if credit[j, k]} | {j} for j in size]
        self._trains = [bool(credit[j, j]) for j in size]
        if self._policy == "skip":
            self._pipe.processes.connect([tuple(sorted(group)) for group in self._learners], replicas=True)

    def remember(self) -> None:
        """Copy the buffers that a skipped mini-batch must not change; called before a step."""
        if self._policy == "skip":
            self._buffers = {b: b.detach().clone() for b in self._pipe.buffers()}

    def __call__(self) -> list[int]:
        """Check everything between a step and its update, and drop the gradients of skipped updates.

        Returns:
            The stages of this process whose own update is skipped.

        Raises:
            NotFiniteError: a loss or gradient is not finite, and the policy is to stop.
        """
        if self._policy == "ignore":
            return []
        if self._pipe.strategy != self._strategy:
            self._follow(self._pipe.strategy)
        bad = {k: (self._is_bad(self._pipe.stages[k]), self._head_is_bad(k)) for k in self._pipe.processes.here}
        if self._policy == "stop":
            wrong = [k for k, flags in bad.items() if any(flags)]
            if wrong:  # report the loss rather than the gradients it caused
                self._stop(next((k for k in wrong if self._wrong_losses(k)), wrong[0]))
            return []
        return self._skip(bad)

    def check_parameters(self) -> None:
        """Check the values to be saved, if the policy is to stop: an update may overflow, and late gradients are not checked yet.

        All processes call it.

        Raises:
            NotFiniteError: a parameter of this process, or its gradient for a later step, is not finite.
        """
        if self._policy != "stop":
            return
        names: dict[Tensor, str] = {p: name for name, p in self._pipe.named_parameters()}
        saved: list[tuple[str, Tensor, Tensor]] = [("parameter", p, p) for p in names]
        saved += [("late gradient of", p, g) for call in self._pipe.pending_gradients() for p, g in call.items()]
        for what, p, values in saved:
            if not bool(values.isfinite().all()):
                raise NotFiniteError(
                    f"The {what} {names.get(p)!r} should be finite to be saved. Found that it is not after step "
                    f"{self._pipe.steps}; lower the rate or clip, and resume from the checkpoint before."
                )

    def _is_bad(self, module: nn.Module | None) -> bool:
        return module is not None and not math.isfinite(squared_norm(module.parameters()))

    def _head_is_bad(self, stage: int) -> bool:
        return bool(self._wrong_losses(stage)) or self._is_bad(self._pipe.heads.get(stage))

    def _wrong_losses(self, stage: int) -> list[int]:
        """Return the micro-batches whose loss is not finite."""
        losses = self._pipe.microbatch_losses.items()
        return [m for (k, m), loss in losses if k == stage and not math.isfinite(loss)]

    def _skip(self, bad: dict[int, tuple[bool, bool]]) -> list[int]:
        """Drop the gradients of all stages that share a loss with a bad one; return those of this process."""
        # A bad loss spoils every stage that learns from it, and a bad gradient may come from any loss of its stage. So each
        # loss counts its bad stages, on all processes: they see the same counts, and skip the same updates. A head learns
        # from its own loss alone.
        rows = []
        losses = [j for j, group in enumerate(self._learners) if group & set(bad)]
        for j in losses:
            count = sum(main or (k == j and head) for k, (main, head) in bad.items() if k in self._learners[j])
            rows.append((tuple(sorted(self._learners[j])), torch.tensor([float(count)])))
        self._pipe.processes.begin("a `NonFiniteGuard`")
        sums = self._pipe.processes.sums(rows, replicas=True)
        bad_losses = {j for j, total in zip(losses, sums, strict=True) if total}
        left_out = [k for k in bad if any(k in self._learners[j] and (j != k or self._trains[k]) for j in bad_losses)]
        for k in left_out:
            self._forget(self._pipe.stages[k])
        for j in bad_losses & set(bad):
            self._forget(self._pipe.heads.get(j))
        return left_out

    def _forget(self, module: nn.Module | None) -> None:
        for parameter in () if module is None else module.parameters():
            parameter.grad = None
        for buffer in () if module is None else module.buffers():
            if buffer in self._buffers:
                buffer.copy_(self._buffers[buffer])

    def _stop(self, stage: int) -> None:
        wrong, losses = self._wrong_losses(stage), self._pipe.microbatch_losses
        # A bad gradient of a stage under a delay belongs to an earlier mini-batch; heads learn from the newest.
        is_late = not wrong and self._is_bad(self._pipe.stages[stage])
        step = self._pipe.steps - 1 - (int(self._pipe.staleness[stage].max()) if is_late else 0)
        microbatch = wrong[0] if wrong else None
        what = f"The loss of stage {stage}'s head" if wrong else f"The gradient of stage {stage} or its head"
        value = f"{float(losses[stage, wrong[0]])} in micro-batch {microbatch}" if wrong else "nan or infinite values"
        facts = {
            "step": step,
            "stage": stage,
            "head": stage if wrong else None,
            "microbatch": microbatch,
            "losses": {f"stage {k}, micro-batch {m}": str(float(loss)) for (k, m), loss in losses.items()},
            "parameters": self._parameters(stage),
        }
        if self._report is not None:
            self._report(facts)
        raise NotFiniteError(
            f"{what} should be a finite number. Found {value} of step {step}; lower the rate, clip, or skip such "
            "mini-batches (`on_nan`)."
        )

    def _parameters(self, stage: int) -> list[dict[str, Any]]:
        """Describe each of a stage's parameters and gradients."""
        rows = []
        for owner, module in (("model", self._pipe.stages[stage]), (f"heads.{stage}", self._pipe.heads.get(stage))):
            for name, p in () if module is None else module.named_parameters():
                row: dict[str, Any] = {"name": f"{owner}.{plain_name(name)}", "not_finite": int((~p.isfinite()).sum())}
                if p.grad is not None and p.numel():
                    row["gradient_not_finite"] = int((~p.grad.isfinite()).sum())
                    row["gradient_largest"] = str(float(p.grad.nan_to_num(0, 0, 0).abs().max()))
                rows.append(row)
        return rows
