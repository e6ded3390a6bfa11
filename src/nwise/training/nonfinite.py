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
from nwise.runtime.sums import Sums
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
        self._pipe = pipe
        self._policy = policy
        self._report = report
        self._follow(pipe.strategy)
        self._buffers: dict[Tensor, Tensor] = {}

    def _follow(self, strategy: Strategy) -> None:
        """Note which stages learn together under a strategy."""
        if self._policy == "skip" and (strategy.delay or strategy.asynchronous):
            raise ValueError(
                "`on_nan` should be stop or ignore under a delay, because heads learn from a mini-batch some steps before the "
                f"stages do, so no update is that of one mini-batch. Found skip with {strategy.name!r}."
            )
        self._strategy = strategy
        credit = cycle_credit(strategy, self._pipe.num_stages)
        # For every loss, the stages that learn from it, and that of its head; for every stage, whether its own loss trains it.
        # 2-wise with three stages:
        #
        #     loss        0      1      2
        #     learners    0      0 1    1 2
        #     trains      no     no     yes
        self._learners = [{*row.nonzero().flatten().tolist(), j} for j, row in enumerate(credit)]
        self._trains = credit.diagonal().bool().tolist()
        if self._policy == "skip":
            sets = [tuple(sorted(group)) for group in self._learners]
            self._sums = Sums(self._pipe.processes, sets, replicas=True)

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
        # For every stage of this process, whether its gradients are bad, and whether its head's loss or gradients are.
        bad = {
            k: (_is_bad(self._pipe.stages[k]), bool(self._wrong_losses(k)) or _is_bad(self._pipe.heads.get(k)))
            for k in self._pipe.processes.here
        }
        if self._policy == "skip":
            return self._skip(bad)
        # Report the loss rather than the gradients it caused: an infinite loss may make all gradients of its stages nan.
        if wrong := sorted((k for k, flags in bad.items() if any(flags)), key=lambda k: not self._wrong_losses(k)):
            self._stop(wrong[0])
        return []

    def check_parameters(self) -> None:
        """Raise NotFiniteError if a value to be saved is not finite, and the policy is to stop; all processes call it.

        An update may overflow, and gradients for later steps are not checked yet.
        """
        if self._policy != "stop":
            return
        names: dict[Tensor, str] = {p: name for name, p in self._pipe.named_parameters()}
        late = [(names.get(p), g) for call in self._pipe.pending_gradients() for p, g in call.items()]
        saved = [*(("parameter", name, p) for p, name in names.items()), *(("late gradient of", *one) for one in late)]
        for what, name, values in saved:
            if not bool(values.isfinite().all()):
                raise NotFiniteError(
                    f"The {what} {name!r} should be finite to be saved. Found that it is not after step "
                    f"{self._pipe.steps}; lower the rate or clip, and resume from the checkpoint before."
                )

    def _wrong_losses(self, stage: int) -> list[int]:
        """Return the micro-batches whose loss is not finite."""
        losses = self._pipe.microbatch_losses.items()
        return [m for (k, m), loss in losses if k == stage and not math.isfinite(loss)]

    def _skip(self, bad: dict[int, tuple[bool, bool]]) -> list[int]:
        """Drop the gradients of all stages that share a loss with a bad one; return those of this process."""
        # A bad loss spoils every stage that learns from it, and a bad gradient may come from any loss of its stage. So each
        # loss counts its bad stages, on all processes: they see the same counts, and skip the same updates. A head learns
        # from its own loss alone.
        rows = {}
        for j, group in enumerate(self._learners):
            if group & set(bad):
                count = sum(main or (k == j and head) for k, (main, head) in bad.items() if k in group)
                rows[j] = tuple(sorted(group)), torch.tensor([float(count)])
        self._pipe.processes.announce("a `NonFiniteGuard`")
        sums = self._sums([*rows.values()])
        bad_losses = {j for j, total in zip(rows, sums, strict=True) if total}
        left_out = [k for k in bad if any(k in self._learners[j] and (j != k or self._trains[k]) for j in bad_losses)]
        heads = [self._pipe.heads[str(j)] for j in bad_losses & set(bad) if j in self._pipe.heads]
        for module in (*(self._pipe.stages[k] for k in left_out), *heads):
            for parameter in module.parameters():
                parameter.grad = None
            for buffer in module.buffers():
                if buffer in self._buffers:
                    buffer.copy_(self._buffers[buffer])
        return left_out

    def _stop(self, stage: int) -> None:
        wrong = self._wrong_losses(stage)
        losses = self._pipe.microbatch_losses
        # A bad gradient of a stage under a delay belongs to an earlier mini-batch; heads learn from the newest.
        is_late = not wrong and _is_bad(self._pipe.stages[stage])
        step = self._pipe.steps - 1 - (int(self._pipe.staleness[stage].max()) if is_late else 0)
        what = f"The gradient of stage {stage} or its head"
        value = "nan or infinite values"
        if wrong:
            what = f"The loss of stage {stage}'s head"
            value = f"{float(losses[stage, wrong[0]])} in micro-batch {wrong[0]}"
        rows: list[dict[str, Any]] = []
        facts = {
            "step": step,
            "stage": stage,
            "head": stage if wrong else None,
            "microbatch": wrong[0] if wrong else None,
            "losses": {f"stage {k}, micro-batch {m}": str(float(loss)) for (k, m), loss in losses.items()},
            "parameters": rows,
        }
        for owner, module in (("model", self._pipe.stages[stage]), (f"heads.{stage}", self._pipe.heads.get(stage))):
            for name, p in () if module is None else module.named_parameters():
                row: dict[str, Any] = {"name": f"{owner}.{plain_name(name)}", "not_finite": int((~p.isfinite()).sum())}
                if p.grad is not None and p.numel():
                    row["gradient_not_finite"] = int((~p.grad.isfinite()).sum())
                    row["gradient_largest"] = str(float(p.grad.nan_to_num(0, 0, 0).abs().max()))
                rows.append(row)
        if self._report is not None:
            self._report(facts)
        raise NotFiniteError(
            f"{what} should be a finite number. Found {value} of step {step}; lower the rate, clip, or skip such "
            "mini-batches (`on_nan`)."
        )


def _is_bad(module: nn.Module | None) -> bool:
    return module is not None and not math.isfinite(squared_norm([*module.parameters()]))
