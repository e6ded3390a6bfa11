"""One stage at work on one mini-batch: what every runtime does with a computation of a list.

A runtime brings a stage its inputs and messages, tells it the next action, and takes away what the action has made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nwise.flow import Cotangent, Flow, StageFlow
from nwise.microbatch import Batch, Tensors
from nwise.randomness import derive
from nwise.schedule.actions import Action, Kind
from nwise.stage import Cotangents


class Workable(Protocol):
    """What a runtime needs of a stage: `nwise.stage.Stage`, or a timed wait in its place."""

    @property
    def index(self) -> int:
        """The stage's place, from 0."""

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        flow: StageFlow,
        passes: int,
        seed: int,
        versions: Mapping[str, Tensor] | None = None,
    ) -> Tensors:
        """F."""

    def run_head(self, microbatch: int, target: Tensors | None, flow: StageFlow, weight: float, seed: int) -> Tensor:
        """H."""

    def backward(
        self, microbatch: int, cotangent: Cotangent, received: Sequence[Cotangents], *, inputs: bool, weights: bool
    ) -> Cotangents:
        """I, W or B."""

    def holds(self, microbatch: int) -> bool:
        """Whether anything of a micro-batch is kept."""

    def clear(self) -> None:
        """Free everything."""


class Worker:
    """A stage with one mini-batch.

    Args:
        stage: does the tensor work.
        flows: the flow of every micro-batch.
        batch: the data.
        passes: how many backward passes the stage makes for each micro-batch, see `passes_of`.
    """

    def __init__(
        self, stage: Workable, flows: Sequence[Flow], batch: Batch, passes: Mapping[tuple[int, int], int]
    ) -> None:
        self.stage = stage
        self.inputs: dict[int, Tensors] = {}
        self.messages: dict[int, dict[int, Cotangents]] = {}
        self._flows = flows
        self._batch = batch
        self._passes = passes
        self._losses: list[tuple[float, Tensor]] = []

    def run(self, action: Action) -> Tensors | Cotangents:
        """A computation.

        Returns:
            What goes to a neighbour: the outputs of F, the message of I and B; else nothing.
        """
        kind, k, m, q, _ = action
        stage, flow, batch = self.stage, self._flows[m].stages[k], self._batch
        if kind is Kind.FORWARD:
            seed = derive(batch.seed, "stage", k, batch.first + m)
            versions = batch.versions.get((k, m))
            return stage.forward(m, self.inputs.pop(m), flow, self._passes[k, m], seed, versions)
        if kind is Kind.HEAD:
            weight = batch.weights[m][k]
            seed = derive(batch.seed, "head", k, batch.first + m)
            loss = stage.run_head(m, batch.targets[m], flow, weight, seed)
            self._losses.append((weight, loss))
            batch.losses[k, m] = loss
            return ()
        cotangent = flow.cotangent(q)
        messages = self.messages.get(m, {})
        received = [messages.get(p, ()) for p in range(len(cotangent.received))]
        made = stage.backward(m, cotangent, received, inputs=q is not None, weights=kind is not Kind.INPUT_GRAD)
        if not stage.holds(m):
            self.messages.pop(m, None)
        return made

    @property
    def loss(self) -> Tensor | None:
        """Of the stage's head: the mean over the micro-batches in which it ran; None if it did not."""
        if len(self._losses) < 2:
            return self._losses[0][1] if self._losses else None
        return torch.stack([loss * weight for weight, loss in self._losses]).sum() / self.share

    @property
    def share(self) -> float:
        """Of the whole mini-batch's loss: the weight of the micro-batches in which the head ran."""
        return sum(weight for weight, _ in self._losses)


def passes_of(actions: Iterable[Action]) -> Counter[tuple[int, int]]:
    """Backward passes by (stage, micro-batch)."""
    return Counter((a.stage, a.microbatch) for a in actions if a.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BOTH))


def losses_of(losses: Sequence[Tensor | None]) -> Tensor:
    """The losses, ``[A]``; nan where a head did not run."""
    like = next((loss for loss in losses if loss is not None), torch.zeros(()))
    result = torch.full((len(losses),), torch.nan, dtype=like.dtype, device=like.device)
    for k, loss in enumerate(losses):
        if loss is not None:
            result[k] = loss
    return result
