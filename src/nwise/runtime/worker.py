"""One stage at work on one mini-batch.

The runtime brings a worker its inputs and messages, names the next action, and carries the result to a neighbour:

              inputs                      outputs of F
    stage k-1 ------> worker of stage k ------> stage k+1
              <------                   <------
        message of I or B               messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nwise.microbatch import Batch
from nwise.randomness import derive
from nwise.schedule.actions import Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage import Cotangents, Stage, Tape
from nwise.tensors import Tensors


class Worker:
    """A stage at work on one mini-batch.

    Args:
        stage: the stage, which does the tensor work.
        schedule: the schedule.
        turn: index of the mini-batch in the schedule's cycle.
        batch: the data.
        versions: copies of the parameters for passes that come after an update; default: none.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        turn: int,
        batch: Batch,
        versions: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.stage = stage
        self.inputs: dict[int, Tensors] = {}
        self.messages: dict[int, dict[int, Cotangents]] = {}
        self._flows, self._batch, self._versions = schedule.flows[turn], batch, versions
        self._continued = schedule.continued
        self._left = {m: schedule.passes[turn][stage.index, m] for m in range(len(self._flows))}
        # Micro-batches are numbered over all replicas, so each draws the same numbers however the mini-batch is shared out.
        numbers = range(batch.first, batch.first + len(self._flows))
        self._seeds = [derive(batch.seed, "stage", stage.index, number) for number in numbers]
        heads = [flow.stages[stage.index].head for flow in self._flows]
        self._head_seeds = [
            derive(batch.seed, "head", stage.index, number) if runs else 0
            for number, runs in zip(numbers, heads, strict=True)
        ]
        self._tapes: dict[int, Tape] = {}
        self._losses: list[tuple[float, Tensor]] = []

    def run(self, action: Action) -> Tensors | Cotangents:
        """Run a computation; return the outputs of F, the message of I or B, and nothing for H and W."""
        kind, k, m, q, _, _ = action
        stage, flow, batch = self.stage, self._flows[m].stages[k], self._batch
        if kind is Kind.FORWARD:
            continued, seed = action in self._continued, self._seeds[m]
            tape, outputs = stage.forward(self.inputs.pop(m), flow, self._left[m], seed, self._versions, continued)
            if flow.head or self._left[m]:
                self._tapes[m] = tape
            return outputs
        if kind is Kind.HEAD:
            weight = batch.weights[m][k]
            loss = stage.run_head(self._tapes[m], batch.targets[m], flow, weight, self._head_seeds[m])
            self._losses.append((weight, loss))
            batch.losses[k, m] = loss
            if not self._left[m]:
                del self._tapes[m]
            return ()
        # Messages stay until the micro-batch's last pass, because several passes may use the same one.
        cotangent = flow.weights if q is None else flow.messages[q]
        assert cotangent is not None
        messages = self.messages.get(m, {})
        received = [messages.get(p, ()) for p in range(len(cotangent.received))]
        self._left[m] -= 1
        tape = self._tapes[m]
        if not self._left[m]:
            self.messages.pop(m, None)
            del self._tapes[m]
        shared = flow.fused is not None and kind is not Kind.BOTH and q in (flow.fused, None)
        return stage.backward(
            tape,
            cotangent,
            received,
            inputs=q is not None,
            weights=kind is not Kind.INPUT_GRAD,
            shared=shared,
            continued=action in self._continued,
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


def stack_losses(losses: Sequence[Tensor | None]) -> Tensor:
    """Return the losses as a tensor ``[A]``, with nan where a head did not run."""
    like = next((loss for loss in losses if loss is not None), torch.zeros(()))
    nan = torch.full_like(like, torch.nan)
    return torch.stack([nan if loss is None else loss for loss in losses])
