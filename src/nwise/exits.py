"""Early exits: a sample leaves the network at the first head that is confident of its answer.

::

                stage 0 ------> stage 1 ------> stage 2 ------> output
                   |               |
                 head 0          head 1
                   |               |
    B samples   the sure ones   the sure ones   the rest
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nwise.by_stage import HeadDict
from nwise.certainty import (
    Confidence,
    Rule,
    checked_confidence,
    confidence,
    confidence_of,
    confidences,
    default_confidence,
)
from nwise.microbatch import batch_size
from nwise.modes import evaluating
from nwise.pipeline import Pipeline
from nwise.runtime.processes import Processes
from nwise.tensors import Input, Tensors, as_inputs, each, run_module

__all__ = [
    "Answers",
    "Confidence",
    "EarlyExit",
    "confidence",
    "confidence_of",
    "confidences",
    "default_confidence",
    "exit",
]

Bounds = float | Mapping[int, float]  # one for all exits, or one by stage


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to a batch whose samples left at different depths.

    Args:
        output: output of the head at which each sample left, ``[B, ...]``.
        stage: index of that head's stage, ``[B]``; the last stage's head is the network's own output.
        confidence: its confidence, ``[B]``.
    """

    output: Tensor
    stage: Tensor
    confidence: Tensor


def exit(
    pipe: Pipeline, *inputs: Input, threshold: Bounds = 0.9, confidence: Confidence = None, **named: Tensor
) -> Answers:
    """Let samples exit at the first confident head, in evaluation mode; all processes call it and get the answers.

    Args:
        pipe: the pipeline.
        inputs, named: inputs of its first stage, as for `Pipeline.step`.
        threshold: confidence from which a sample exits: one for all trained heads, or one by stage for each that runs.
        confidence: a name or function (`confidence_of`); default: that of the loss.

    Raises:
        ValueError: a threshold is not from 0 to 1 (or inf), no head is trained, or the loss has no confidence.

    >>> import nwise
    >>> stages = [nn.Linear(2, 4), nn.Linear(4, 2)]
    >>> pipe = nwise.Pipeline(stages, [nn.Linear(4, 2)])
    >>> exit(pipe, torch.zeros(3, 2), threshold=0.0).stage
    tensor([0, 0, 0])
    """
    thresholds = check_threshold(threshold, pipe.needed_heads())
    rules = confidences(pipe.loss_fns, thresholds, confidence)
    device = next((p.device for p in pipe.parameters()), None)
    with evaluating(pipe), pipe.processes.watched("`exit`"):
        given = as_inputs(inputs, named, "The input of `exit`")
        return answer(pipe.stages, pipe.heads, given, thresholds, rules, pipe.processes, device)


def answer(
    stages: Sequence[nn.Module] | nn.ModuleList,
    heads: HeadDict,
    inputs: Tensors,
    thresholds: Mapping[int, float],
    rules: Mapping[int, Rule],
    processes: Processes,
    device: torch.device | None,
) -> Answers:
    """Run the stages in order on the samples that have not left; every process of the pipeline gets all answers.

    `thresholds` has for every exit the confidence from which a sample leaves, and `rules` the confidence of every exit and of the
    last stage. The `device` of this process's stages is that of the inputs if it is None.

    Raises:
        ValueError: there is no sample, or a stage's output has no dimension of samples.
    """
    # `rows` are the places in the batch of the samples that are still here. Of five, two leave at stage 0:
    #
    #     stage 0    rows 0 1 2 3 4    leave 1 3
    #     stage 1    rows 0 2 4        leave 0 2 4        together: 1 3 0 2 4, sorted at the end
    size = batch_size(inputs, "The input of `exit`")
    last = len(stages) - 1
    if not size:
        raise ValueError("The input of `exit` should have at least one sample. Found none.")
    rows = torch.arange(size)
    hidden = inputs
    device = device or inputs[0].device
    parts: list[tuple[Tensor, ...]] = []  # row, output, stage and confidence of the samples that leave at a stage
    for k in processes.here:
        if k and k - 1 not in processes.here:
            # Samples that have left are not sent. With none left there is no second message, and the stage does not run.
            (rows,) = processes.receive(processes.stage_rank(k - 1))
            if len(rows):
                hidden = each(processes.receive(processes.stage_rank(k - 1)), lambda x: x.to(device))
        if len(rows):
            seen = hidden
            hidden = run_module(stages[k], hidden, f"The output of stage {k}")
            if k == last or k in thresholds:
                output = hidden if k == last else heads.run(k, hidden)
                logits, sure = confidence_of(rules[k], output, seen, k, getattr(stages[k], "input_names", ()))
                if len(logits) != len(rows):
                    raise ValueError(
                        f"Stage {k}'s head or output should have {len(rows)} samples along dimension 0 to exit, as its input "
                        f"has. Found shape {list(logits.shape)}; keep positions in another dimension."
                    )
                leaves = torch.ones_like(sure, dtype=torch.bool) if k == last else sure >= thresholds[k]
                here = leaves.cpu()
                if here.any():  # else the tensors stay as they are, without a copy
                    parts.append((rows[here], logits[leaves], torch.full_like(rows[here], k), sure[leaves]))
                    rows = rows[~here]
                    hidden = _select(hidden, ~leaves, k)
        if k < last and k + 1 not in processes.here:
            processes.send((rows,), processes.stage_rank(k + 1))
            if len(rows):
                processes.send(hidden, processes.stage_rank(k + 1))
    return _together(parts, device, processes)


class EarlyExit(nn.Module):
    """A copy of a trained network with its exits, in evaluation mode; it needs neither a pipeline nor a trainer.

    Args:
        stages: the main network.
        heads: heads by the index of their stage.
        thresholds: for every exit the confidence from which a sample leaves, by stage.
        confidence: how confidence follows from an output, for all exits: a name or a function, as for `confidence_of`. Give the
            one that `exit` used; `default_confidence` returns it for a loss.

    >>> stages = [nn.Linear(2, 4), nn.Linear(4, 2)]
    >>> network = EarlyExit(stages, {0: nn.Linear(4, 2)}, {0: 0.0}, "classes")
    >>> network.answers(torch.zeros(3, 2)).stage
    tensor([0, 0, 0])
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | nn.ModuleList,
        heads: Mapping[int, nn.Module] | HeadDict,
        thresholds: Mapping[int, float],
        confidence: Confidence = None,
    ) -> None:
        super().__init__()
        self.confidence = checked_confidence(confidence)
        if any(k not in heads for k in thresholds):
            raise ValueError(
                f"`thresholds` should be of stages with a head, {sorted(map(int, heads))}. Found {sorted(thresholds)}."
            )
        self.stages = nn.ModuleList(copy.deepcopy(list(stages)))
        self.heads = HeadDict({str(k): copy.deepcopy(heads[k]) for k in sorted(thresholds)})
        self.thresholds = dict(thresholds)
        self.eval()

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Return the outputs alone."""
        return self.answers(*inputs, **named).output

    def answers(self, *inputs: Tensor, **named: Tensor) -> Answers:
        """Return the outputs, the stages at which the samples left, and how sure they were."""
        given = as_inputs(inputs, named, "The input")
        count = len(self.stages)
        # One process holds all stages, whatever the pipeline had.
        rules = dict.fromkeys(range(count), self.confidence)
        return answer(self.stages, self.heads, given, self.thresholds, rules, Processes(count), None)


def check_threshold(threshold: Bounds, exits: Collection[int]) -> dict[int, float]:
    """Return the threshold of every exit: one for all, or one for each by its stage; other heads do not run.

    Raises:
        ValueError: a threshold is not from 0 to 1 (or inf), its stage has no trained head, or there is no exit.
    """
    by_stage = dict(threshold) if isinstance(threshold, Mapping) else dict.fromkeys(exits, threshold)
    for k, value in by_stage.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and (0 <= value <= 1 or value == math.inf)):
            raise ValueError(
                f"`threshold` should be a probability, or inf for an exit that no sample takes. Found {value!r}."
            )
        if k not in exits:
            raise ValueError(
                f"`threshold` should be for stages whose head is trained, {sorted(exits)}. Found one for stage {k!r}; train "
                "all heads (`heads='all'`), or leave it out."
            )
    if not by_stage and exits:
        raise ValueError(f"`threshold` should be for at least one of the stages {sorted(exits)}. Found none.")
    if not by_stage:
        raise ValueError(
            "Early exits should have heads that the strategy trains. Found none; train with `2-wise`, `local` or "
            "`deep-supervision`, or with `heads='all'`."
        )
    return by_stage


def _select(hidden: Tensors, stays: Tensor, stage: int) -> Tensors:
    """Return the part of a stage's outputs that belongs to the samples that stay."""
    if any(not x.dim() or len(x) != len(stays) for x in hidden):
        found = [list(x.shape) for x in hidden]
        raise ValueError(f"Stage {stage} should return {len(stays)} samples along dimension 0. Found {found}.")
    return each(hidden, lambda x: x[stays])


def _together(parts: list[tuple[Tensor, ...]], device: torch.device, processes: Processes) -> Answers:
    """Collect the answers of all processes on the first one, and send them back to the others."""
    mine = _joined(parts, device)
    first, *others = processes.ranks
    if processes.rank != first:
        processes.send(mine, first)
        return Answers(*(x.to(device) for x in processes.receive(first)))
    every = [mine, *(processes.receive(rank) for rank in others)]
    # The answers lie in the order of leaving; the rows say where each sample was in the batch.
    rows, *columns = _joined([part for part in every if part], device)
    order = rows.argsort()
    output, stage, sure = (x[order] for x in columns)
    for rank in others:
        processes.send((output, stage, sure), rank)
    return Answers(output, stage, sure)


def _joined(parts: list[tuple[Tensor, ...]], device: torch.device) -> tuple[Tensor, ...]:
    if len({output.shape[1:] for _, output, *_ in parts}) > 1:
        found = ", ".join(f"{list(output.shape[1:])} of stage {int(stage[0])}" for _, output, stage, _ in parts)
        raise ValueError(f"All exits should return outputs of one shape for a sample. Found {found}.")
    return tuple(torch.cat([x.to(device) for x in column]) for column in zip(*parts, strict=True))
