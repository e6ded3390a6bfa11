"""A micro-batch at a stage: what its passes need, and the cotangents that they start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nwise.flow import Cotangent, StageFlow
from nwise.microbatch import Batch
from nwise.stage.kept import Kept
from nwise.stage.rerun import FirstRun
from nwise.stage.weights import Weights
from nwise.tensors import Tensors, address

__all__ = ["Cotangents", "Messages", "Tape"]

# One gradient per output of a stage; None stands for zero.
Cotangents = tuple[Tensor | None, ...]
# Those from the next stage that a pass reads, by index.
Messages = Mapping[int, Cotangents]


@dataclass(slots=True)
class Tape:
    """One micro-batch at one stage, from the arrival of its inputs to its last pass.

    Args:
        flow: the stage's work for the micro-batch.
        batch: the mini-batch.
        microbatch: index of the micro-batch.
        passes_left: number of backward passes that will follow; the last one frees the graph.
        weights: the parameters of its forward and passes.
        recomputed: whether its forward runs again; default: False.
        inputs: inputs of the forward, which are leaves of its graph.
        outputs: outputs of the forward.
        first: the state of the first forward, if it runs again; otherwise None.
        tracked: whether `outputs` have a graph.
        head_left: whether the head is still to run.
        own: gradient of the stage's own loss to its outputs.
        kept: cotangents that an I has kept for a later W.
    """

    flow: StageFlow
    batch: Batch
    microbatch: int
    passes_left: int
    weights: Weights
    recomputed: bool = False
    inputs: Tensors = ()
    outputs: Tensors = ()
    first: FirstRun | None = None
    tracked: bool = False
    head_left: bool = False
    own: Cotangents = ()
    kept: Kept | None = None

    def start(self, cotangent: Cotangent, messages: Messages) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs from which a walk starts, each with its gradient ``own * d + sum_p received[p] * messages[p]``.

        The walk may write over the gradients, as the backward of a fused kernel does, so one that another pass reads is copied.
        """
        terms = [(cotangent.own, self.own)] if cotangent.own else []
        for p, weight in enumerate(cotangent.received):
            if weight:
                terms.append((weight, messages[p]))
        roots = []
        seeds = []
        for i, output in enumerate(self.outputs):
            total: Tensor | None = None
            for weight, gradients in terms if output.requires_grad else ():
                part = gradients[i]
                if part is not None and total is not None:
                    total = torch.add(total, part, alpha=weight)
                elif part is not None:
                    total = part if weight == 1 else part * weight
            if total is not None:
                roots.append(output)
                seeds.append(total.clone() if cotangent.shared else total)
        return roots, seeds

    def clone_if_aliased(self, gradients: Cotangents, messages: Messages) -> Cotangents:
        """Return gradients of a pass that share no memory with what a later pass of this micro-batch reads."""
        held = [self.own, *messages.values()]
        if self.kept is not None:
            held += [part.gradients for part in self.kept.parts]
        memory: set[int | None] = {None}
        for source in held:
            memory.update(map(address, source))
        return tuple([None if g is None else g.clone() if address(g) in memory else g for g in gradients])
