"""Gradient clipping by the norm of all gradients, of each stage, or of the stages that learn from the same losses.

If a loss's gradient travels through only N stages, stages learn at different scales, and one norm over all of them lets a
single loss dominate. ``"loss"`` clips together the stages that learn from the same losses, and the head of a loss if only
that head learns from it. Only the processes of a group wait for each other. The groups of 2-wise with three stages::

    stages and heads   0        0's head    1        1's head    2
    learn from loss    1        0           2        1           2
    ``"loss"``         first    second      third    first       third
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from nwise.pipeline import Pipeline
from nwise.runtime.sums import Sums
from nwise.strategies import Strategy

__all__ = ["Clip", "ClipBy", "clip_grad_norm_", "clip_groups"]

ClipBy = Literal["global", "stage", "loss"]
ParamGroup = tuple[int, bool]  # a stage's own parameters (False) or its head's (True)


def clip_groups(pipe: Pipeline, by: ClipBy, strategy: Strategy | None = None) -> list[tuple[ParamGroup, ...]]:
    """Return the groups of parts that share a norm, by default for the strategy of the next step; `by` as for `Clip`.

    >>> stages, heads = [nn.Linear(2, 2) for _ in range(3)], [nn.Linear(2, 2) for _ in range(2)]
    >>> pipe = Pipeline(stages, heads, strategy="2-wise")
    >>> clip_groups(pipe, "loss")
    [((0, False), (1, True)), ((0, True),), ((1, False), (2, False))]
    """
    if by not in ("global", "stage", "loss"):
        raise ValueError(f"`clip_by` should be global, stage or loss. Found {by!r}.")
    credit = cycle_credit(strategy or pipe.strategy, pipe.num_stages)
    # A column of the credit matrix has the losses that a stage learns from. Equal columns make a group.
    groups: dict[object, list[ParamGroup]] = defaultdict(list)
    for stage in range(pipe.num_stages):
        for is_head in (False, True) if stage in pipe.heads else (False,):
            losses = (stage,) if is_head else tuple(credit[:, stage].nonzero().flatten().tolist())
            groups[{"global": None, "stage": stage, "loss": losses}[by]].append((stage, is_head))
    return sorted(tuple(sorted(group)) for group in groups.values())


def cycle_credit(strategy: Strategy, num_stages: int) -> Tensor:
    """Return the absolute credit summed over a cycle of a strategy, ``[A, A]``."""
    return torch.stack([strategy.credit(num_stages, turn) for turn in range(strategy.turns)]).double().abs().sum(0)


def squared_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the squared norm of the gradients, on the CPU; in float64, where the order of the sum hardly matters."""
    # The sum of squares overflows in float16 at norms of 256.
    gradients = [g.float() if g.dtype is torch.float16 else g for p in parameters if (g := p.grad) is not None]
    return nn.utils.get_total_norm(gradients).detach().double().cpu().square()


class Clip:
    """Scales the gradients of each group down to a norm.

    All processes of a pipeline make it and call it, at the same steps.

    Args:
        pipe: the pipeline; its strategy decides the groups, and another strategy changes them.
        max_norm: the largest norm of a group.
        by: ``"global"`` (default), ``"stage"`` or ``"loss"``.

    Raises:
        ValueError: `by` is something else, or `max_norm` is not above 0.
    """

    def __init__(self, pipe: Pipeline, max_norm: float, by: ClipBy = "global") -> None:
        if not max_norm > 0:
            raise ValueError(f"`max_norm` should be above 0. Found {max_norm}.")
        self._pipe = pipe
        self._max_norm = max_norm
        self._by = by
        self._follow(pipe.strategy)

    def _follow(self, strategy: Strategy) -> None:
        """Make the groups of a strategy."""
        self._strategy = strategy
        groups = clip_groups(self._pipe, self._by, strategy)
        self._groups = [(tuple(sorted({stage for stage, _ in group})), group) for group in groups]
        self._shared = [stages for stages, _ in self._groups if len(stages) > 1]
        self._sums = Sums(self._pipe.processes, self._shared)

    def __call__(self) -> Tensor:
        """Clip the gradients of the last step; return the norms before, of the groups with stages in this process."""
        if self._pipe.strategy != self._strategy:
            self._follow(self._pipe.strategy)
        processes = self._pipe.processes
        owned = self._owned()
        # Without shared groups no rank waits for another, so there is no call to announce.
        if self._shared:
            processes.announce("clipping")
        mine = [(stages, group) for stages, group in self._groups if set(stages) & set(processes.here)]
        # One number per part, zero for a part in another process. So each sum has its terms in the same order on any number
        # of processes, and the norm is bitwise the same.
        rows = [(stages, torch.stack([squared_norm(owned[part]) for part in group])) for stages, group in mine]
        norms = [squares.sum().sqrt() for squares in self._sums(rows)]
        for (_, group), norm in zip(mine, norms, strict=True):
            for parameters in (owned[part] for part in group if owned[part]):
                kind = norm if parameters[0].dtype in (torch.float64, torch.complex128) else norm.float()
                nn.utils.clip_grads_with_norm_(parameters, self._max_norm, kind)
        return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)

    def _owned(self) -> dict[ParamGroup, list[nn.Parameter]]:
        """Return the parameters of every part; one that heads share belongs to the first part that has it."""
        owned: dict[ParamGroup, list[nn.Parameter]] = {}
        seen: set[nn.Parameter] = set()
        for stage, is_head in (part for _, group in self._groups for part in group):
            module = self._pipe.heads.get(stage) if is_head else self._pipe.stages[stage]
            # With the parameters that another part has already left out: a shared one counts once in the global norm.
            owned[stage, is_head] = [] if module is None else [p for p in module.parameters() if p not in seen]
            seen.update(owned[stage, is_head])
        return owned


def clip_grad_norm_(pipe: Pipeline, max_norm: float, by: ClipBy = "global") -> Tensor:
    """Scale the gradients of the last step down to a norm, the same on any number of processes; all processes call it.

    torch's function of this name sees the stages of one process only.

    Args:
        pipe: the pipeline.
        max_norm: the largest norm.
        by: norm of all gradients (``"global"``, the default), of each ``"stage"`` with its head, or of the stages that learn from
            the same ``"loss"``.

    Returns:
        The norm before, float64: one number under ``"global"``, otherwise one for each group with stages in this process.

    Raises:
        ValueError: `by` is something else, or `max_norm` is not above 0.

    >>> stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
    >>> pipe = Pipeline(stages, [nn.Linear(2, 2)], strategy="2-wise")
    >>> losses = pipe.step(torch.ones(1, 2), target=torch.zeros(1, dtype=torch.long))
    >>> norm = clip_grad_norm_(pipe, 0.1)
    >>> torch.allclose(nn.utils.get_total_norm([p.grad for p in pipe.parameters() if p.grad is not None]), torch.tensor(0.1))
    True
    """
    norms = Clip(pipe, max_norm, by)()
    return norms[0] if by == "global" else norms
