"""One stage at work on one mini-batch, and the runtime of one process, which has a worker for every stage.

A runtime brings a worker its inputs and messages, names the next action, and carries the result to a neighbour:

              inputs                      outputs of F
    stage k-1 ------> worker of stage k ------> stage k+1
              <------                   <------
        message of I or B               messages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nwise.flow import Cotangent, Flow, StageFlow
from nwise.microbatch import Batch, Tensors
from nwise.randomness import derive
from nwise.schedule.actions import Action, Kind
from nwise.stage import Cotangents


class Workable(Protocol):
    """A stage as a runtime sees it: `nwise.stage.Stage`, or a timed wait instead of it."""

    @property
    def index(self) -> int:
        """The stage's index, from 0."""

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
        self,
        microbatch: int,
        cotangent: Cotangent,
        received: Sequence[Cotangents],
        *,
        inputs: bool,
        weights: bool,
        shared: bool = False,
    ) -> Cotangents:
        """I, W or B."""

    def clear(self) -> None:
        """Free everything."""


class Worker:
    """A stage at work on one mini-batch.

    Args:
        stage: the stage, which does the tensor work.
        flows: the flow of every micro-batch.
        batch: the data.
        passes: number of backward passes of the stage for each micro-batch; see `count_passes`.
    """

    def __init__(
        self, stage: Workable, flows: Sequence[Flow], batch: Batch, passes: Mapping[tuple[int, int], int]
    ) -> None:
        self.stage = stage
        self.inputs: dict[int, Tensors] = {}
        self.messages: dict[int, dict[int, Cotangents]] = {}
        self._flows = flows
        self._batch = batch
        self._passes_left = Counter(passes)
        self._losses: list[tuple[float, Tensor]] = []

    def run(self, action: Action) -> Tensors | Cotangents:
        """Run a computation; return the outputs of F, the message of I or B, and nothing for H and W."""
        kind, k, m, q, _ = action
        stage, flow, batch = self.stage, self._flows[m].stages[k], self._batch
        if kind is Kind.FORWARD:
            seed = derive(batch.seed, "stage", k, batch.first + m)
            versions = batch.versions.get((k, m))
            return stage.forward(m, self.inputs.pop(m), flow, self._passes_left[k, m], seed, versions)
        if kind is Kind.HEAD:
            weight = batch.weights[m][k]
            seed = derive(batch.seed, "head", k, batch.first + m)
            loss = stage.run_head(m, batch.targets[m], flow, weight, seed)
            self._losses.append((weight, loss))
            batch.losses[k, m] = loss
            return ()
        # Messages stay until the micro-batch's last pass, because several passes may use the same one.
        cotangent = flow.cotangent(q)
        messages = self.messages.get(m, {})
        received = [messages.get(p, ()) for p in range(len(cotangent.received))]
        self._passes_left[k, m] -= 1
        if not self._passes_left[k, m]:
            self.messages.pop(m, None)
        shared = flow.fused is not None and (q == flow.fused or q is None) and kind is not Kind.BOTH
        return stage.backward(
            m, cotangent, received, inputs=q is not None, weights=kind is not Kind.INPUT_GRAD, shared=shared
        )

    @property
    def loss(self) -> Tensor | None:
        """The loss of the stage's head, its mean over the micro-batches in which it ran; None if it did not run."""
        if len(self._losses) < 2:
            return self._losses[0][1] if self._losses else None
        return torch.stack([loss * weight for weight, loss in self._losses]).sum() / self.share

    @property
    def share(self) -> float:
        """The weight of the micro-batches in which the head ran, as a share of the mini-batch."""
        return sum(weight for weight, _ in self._losses)


def execute(
    stages: Sequence[Workable],
    order: Sequence[Action],
    flows: Sequence[Flow],
    batch: Batch,
    on_action: Callable[[Action], None] | None = None,
) -> Tensor:
    """Run one mini-batch in one process and fill every ``.grad``.

    Args:
        stages: the stages.
        order: every computation of the mini-batch, each after its requirements (`Schedule.one_process`).
        flows: the flow of every micro-batch.
        batch: the data.
        on_action: called after each action, to watch or to count.

    Returns:
        The losses, ``[A]``; nan where a head did not run.
    """
    passes = count_passes(order)
    workers = [Worker(stage, flows, batch, passes) for stage in stages]
    workers[0].inputs.update(enumerate(batch.inputs))
    try:
        for action in order:
            k, m = action.stage, action.microbatch
            result = workers[k].run(action)
            if action.kind is Kind.FORWARD:
                if k + 1 < len(workers):
                    workers[k + 1].inputs[m] = result  # type: ignore[assignment]
            elif action.message is not None:
                workers[k - 1].messages.setdefault(m, {})[action.message] = result
            if on_action is not None:
                on_action(action)
    finally:
        for stage in stages:
            stage.clear()
    return stack_losses([worker.loss for worker in workers])


def count_passes(actions: Iterable[Action]) -> Counter[tuple[int, int]]:
    """Count backward passes by (stage, micro-batch)."""
    return Counter((a.stage, a.microbatch) for a in actions if a.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BOTH))


def stack_losses(losses: Sequence[Tensor | None]) -> Tensor:
    """Return the losses as a tensor ``[A]``, with nan where a head did not run."""
    like = next((loss for loss in losses if loss is not None), torch.zeros(()))
    result = torch.full((len(losses),), torch.nan, dtype=like.dtype, device=like.device)
    for k, loss in enumerate(losses):
        if loss is not None:
            result[k] = loss
    return result
