"""The runtime of one process: executes an order of actions, stage after stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwise.flow import Flow, StageFlow
from nwise.microbatch import Tensors
from nwise.randomness import derive
from nwise.schedule.actions import Action, Kind
from nwise.stage import Cotangents, Stage

# Messages that wait, by (receiving stage, micro-batch) and then by message.
Mailbox = dict[tuple[int, int], dict[int, Cotangents]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One mini-batch, cut up.

    Args:
        inputs: the model's input, per micro-batch.
        targets: the targets, per micro-batch; None where there are none.
        weights: the share of each micro-batch in each stage's loss, ``[M][A]``.
        seed: of the step; every action derives its own from it.
        versions: parameters to use in the place of the current ones, by (stage, micro-batch).
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Tensors | None]
    weights: Sequence[Sequence[float]]
    seed: int
    versions: Mapping[tuple[int, int], Mapping[str, Tensor]]


def execute(
    stages: Sequence[Stage],
    order: Sequence[Action],
    flows: Sequence[Flow],
    batch: Batch,
    on_action: Callable[[Action], None] | None = None,
) -> Tensor:
    """Run one mini-batch and fill every ``.grad``.

    Args:
        stages: the stages.
        order: every computation of the mini-batch, none before what it needs (`Schedule.one_process`).
        flows: the flow of every micro-batch.
        batch: the data.
        on_action: called after each action, to watch or to count.

    Returns:
        The losses, ``[A]``; nan where a head did not run.
    """
    passes = Counter((a.stage, a.microbatch) for a in order if a.kind not in (Kind.FORWARD, Kind.HEAD))
    activations: dict[tuple[int, int], Tensors] = {(0, m): x for m, x in enumerate(batch.inputs)}
    received: Mailbox = {}
    losses: list[list[tuple[float, Tensor]]] = [[] for _ in stages]
    try:
        for action in order:
            k, m = action.stage, action.microbatch
            stage, flow = stages[k], flows[m].stages[k]
            if action.kind is Kind.FORWARD:
                seed = derive(batch.seed, "stage", k, m)
                versions = batch.versions.get((k, m))
                outputs = stage.forward(m, activations.pop((k, m)), flow, passes[k, m], seed, versions)
                activations[k + 1, m] = outputs
            elif action.kind is Kind.HEAD:
                weight = batch.weights[m][k]
                seed = derive(batch.seed, "head", k, m)
                losses[k].append((weight, stage.run_head(m, batch.targets[m], flow, weight, seed)))
            else:
                _backward(stage, flow, action, received)
            if on_action is not None:
                on_action(action)
    finally:
        for stage in stages:
            stage.clear()
    return _mean_losses(losses)


def _backward(stage: Stage, flow: StageFlow, action: Action, received: Mailbox) -> None:
    k, m, q = action.stage, action.microbatch, action.message
    cotangent = flow.cotangent(q)
    messages = received.get((k, m), {})
    gradients = stage.backward(
        m,
        cotangent,
        [messages.get(p, ()) for p in range(len(cotangent.received))],
        inputs=q is not None,
        weights=action.kind is not Kind.INPUT_GRAD,
    )
    if q is not None:
        received.setdefault((k - 1, m), {})[q] = gradients
    if not stage.holds(m):
        received.pop((k, m), None)


def _mean_losses(losses: Sequence[Sequence[tuple[float, Tensor]]]) -> Tensor:
    """Weighted by the share of the micro-batches in which the head ran."""
    like = next((loss for parts in losses for _, loss in parts), torch.zeros(()))
    result = torch.full((len(losses),), torch.nan, dtype=like.dtype, device=like.device)
    for k, parts in enumerate(losses):
        if len(parts) == 1:
            result[k] = parts[0][1]
        elif parts:
            share = sum(weight for weight, _ in parts)
            result[k] = torch.stack([loss * weight for weight, loss in parts]).sum() / share
    return result
