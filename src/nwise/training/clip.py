"""Gradient clipping: by the norm of everything, of each stage, or of what each loss trains.

Where a loss's gradient travels through N stages only, stages learn at scales of their own, and one norm over all of them
lets a single loss decide for the rest. ``"loss"`` clips the stages that learn from the same losses together, and with them
the heads of a loss that nobody else learns from. Between processes only those of a group wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from nwise._dtensor import is_dtensor
from nwise.pipeline import Pipeline

ClipBy = Literal["global", "stage", "loss"]

# A part of the parameters: a stage's own (False) or its head's (True).
Part = tuple[int, bool]


def clip_groups(pipe: Pipeline, by: ClipBy) -> list[tuple[Part, ...]]:
    """Parts whose norm is taken together, for the strategy of the next step.

    Args:
        pipe: the pipeline.
        by: see the top of this file.

    >>> stages, heads = [nn.Linear(2, 2) for _ in range(3)], [nn.Linear(2, 2) for _ in range(2)]
    >>> pipe = Pipeline(stages, heads, strategy="2-wise")
    >>> clip_groups(pipe, "loss")
    [((0, False), (1, True)), ((0, True),), ((1, False), (2, False))]
    """
    if by not in ("global", "stage", "loss"):
        raise ValueError(f"`clip_by` should be global, stage or loss. Found {by!r}.")
    parts = [(k, False) for k in range(pipe.num_stages)] + [
        (k, True) for k in range(pipe.num_stages) if k in pipe.heads
    ]
    credit = credit_of_cycle(pipe)
    groups: dict[object, list[Part]] = defaultdict(list)
    for stage, is_head in parts:
        losses = (stage,) if is_head else tuple(credit[:, stage].nonzero().flatten().tolist())
        groups[{"global": None, "stage": stage, "loss": losses}[by]].append((stage, is_head))
    return sorted(tuple(sorted(group)) for group in groups.values())


def credit_of_cycle(pipe: Pipeline) -> Tensor:
    """Which loss trains which stage in any mini-batch of the next step's strategy: where it is not zero, ``[A, A]``."""
    now = pipe.strategy.in_force(pipe.steps)
    return torch.stack([now.credit(pipe.num_stages, turn) for turn in range(now.turns)]).abs().sum(0)


def squared_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of their gradients, in float64, so that the order of sums hardly matters; on the CPU."""
    total = torch.zeros((), dtype=torch.float64)
    for kind in _by_kind(parameters):
        norm = nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None])
        whole = norm.full_tensor() if is_dtensor(norm) else norm
        total += whole.detach().double().cpu().square()
    return total


class Clip:
    """Scales the gradients of each group down to a norm.

    Of a pipeline of several processes, all of them make it and call it, at the same steps.

    Args:
        pipe: whose gradients they are; under the strategy of its next step.
        max_norm: the largest norm of a group.
        by: which parts make a group.
    """

    def __init__(self, pipe: Pipeline, max_norm: float, by: ClipBy = "global") -> None:
        self._pipe, self._max_norm = pipe, max_norm
        self._groups = clip_groups(pipe, by)
        if pipe.team is not None:
            across = [group for group in self._groups if len(_stages(group)) > 1]
            if across and pipe.strategy.in_force(pipe.steps).asynchronous:
                raise ValueError(
                    "Under Hogwild on several processes `clip_by` should be stage, since their updates are of different "
                    f"mini-batches. Found {by!r}."
                )
            pipe.team.world.connect([_stages(group) for group in across])

    def __call__(self) -> None:
        """Clip what the last step has left in ``.grad``."""
        mine = [group for group in self._groups if self._pipe.team is None or self._pipe.team.stage in _stages(group)]
        squares = [self._squares(group) for group in mine]
        for group, norm in zip(mine, self._norms(mine, squares), strict=True):
            for part in group:
                for parameters in _by_kind(self._parameters(part)):
                    nn.utils.clip_grads_with_norm_(parameters, self._max_norm, norm)

    def _parameters(self, part: Part) -> list[nn.Parameter]:
        stage, is_head = part
        module = self._pipe.heads.of(stage) if is_head else self._pipe.stages[stage]
        return [] if module is None else list(module.parameters())

    def _squares(self, group: Sequence[Part]) -> Tensor:
        """Squared norms of the parts, those of other processes zero."""
        return torch.stack([squared_norm(self._parameters(part)) for part in group])

    def _norms(self, groups: Sequence[Sequence[Part]], squares: Sequence[Tensor]) -> list[Tensor]:
        team = self._pipe.team
        if team is not None:
            squares = team.sums([(_stages(group), values) for group, values in zip(groups, squares, strict=True)])
        return [values.sum().sqrt().float() for values in squares]


def _stages(group: Iterable[Part]) -> tuple[int, ...]:
    return tuple(sorted({stage for stage, _ in group}))


def _by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that tensor parallelism has cut up apart from the others, since no operation takes both."""
    kinds: dict[bool, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        kinds[is_dtensor(p)].append(p)
    return list(kinds.values())
