"""What the stages of a rank receive in a step, for its first micro-batches: enough to compute the step again, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from nwise._torch import version
from nwise.flow import StageFlow
from nwise.microbatch import Parts, Weight
from nwise.schedule.actions import Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.graph import clones
from nwise.stage.stage import Stage
from nwise.stage.tape import Cotangents, Tape
from nwise.tensors import Tensors, each, like
from nwise.terms import modules_of

_FEW = 2  # micro-batches that are kept


@dataclass
class Work:
    """A micro-batch at a stage.

    Args:
        microbatch: its index.
        flow: the stage's work for it.
        inputs: what F gets.
        target: the target.
        weight: share of the micro-batch in the stage's loss.
        share: share of the micro-batch in the samples.
        messages: gradients from the next stage, by index.
    """

    microbatch: int
    flow: StageFlow
    inputs: Tensors
    target: Tensors | None
    weight: Weight
    share: float
    messages: dict[int, Cotangents] = field(default_factory=dict)


class Received:
    """Keeps what the stages of this rank receive for two micro-batches of a mini-batch, until all their gradients are there.

    Args:
        stages: the stages.
        schedule: what is executed.
        number: number of the step.
        parts: its micro-batches.

    Attributes:
        schedule, number: as given.
        last: number of the call after which all gradients are there.
        tasks: numbers of the tasks of each stage, in the order of the rank.
        work: the micro-batches of each stage.
        buffers: values of the buffers of each stage, its head and its loss before the step.
        counts: number of samples of each micro-batch; empty if nwise has not cut them.
        versions: of the trainable parameters, before the step.
        alone: whether there is one micro-batch in all.
        seeds: seed of the step's random numbers, and the index of its first micro-batch.
        begin: when the step began, in seconds of `time.perf_counter`.
    """

    def __init__(self, stages: Sequence[Stage], schedule: Schedule, number: int, parts: Parts) -> None:
        self.schedule = schedule
        self.number = number
        self.stages = {stage.index: stage for stage in stages}
        self.last = number + schedule.oldest
        self.tasks: dict[int, list[int]] = {k: [] for k in self.stages}
        self.work: dict[int, dict[int, Work]] = {k: {} for k in self.stages}
        self.buffers = {k: [b.clone() for b in buffers_of(stage)] for k, stage in self.stages.items()}
        self.counts = [size for size in parts.sizes if parts.whole and len(parts.sizes) > 1][:_FEW]
        self.versions = {p: version(p) for stage in stages for p in (*stage.learns, *stage.head_learns)}
        self.alone = len(parts.sizes) == 1
        self.seeds = (0, 0)
        self.begin = time.perf_counter()

    def note(self, task: int, number: int, tape: Tape, given: Mapping[Any, Any]) -> None:
        """Keep what a stage has received for a task that is about to run (`Engine.received`)."""
        action = self.schedule.graph.tasks[task]
        m = tape.microbatch
        batch = tape.batch
        if number != self.number or m >= _FEW:
            return
        work = self.work[action.stage]
        k = action.stage
        if action.kind is Kind.FORWARD:
            inputs = each(given[None], Tensor.detach)
            work[m] = Work(m, tape.flow, inputs, batch.targets[m], batch.weights[m][k], batch.samples[m])
            self.seeds = batch.draws.seed, batch.draws.first
        elif action.kind is not Kind.HEAD:
            for q in given.keys() - work[m].messages:
                work[m].messages[q] = clones(given[q])  # a pass may write over them
        self.tasks[k].append(task)


def buffers_of(stage: Stage) -> list[Tensor]:
    """Return the buffers of a stage, its head and its loss."""
    modules = [stage.module, *([] if stage.head is None else [stage.head]), *modules_of(stage.loss_fn).values()]
    return list(dict.fromkeys(chain.from_iterable(one.buffers() for one in modules)))


def joined(work: Sequence[Work], counts: Sequence[int], way: int = 0, *, first: bool = False) -> Work:
    """Return micro-batches of one flow as one.

    Args:
        work: the micro-batches.
        counts: number of samples of each.
        way: which of the dimensions that fit has the samples, 0 for the first or -1 for the last. Default: 0.
        first: whether it is the first stage, whose inputs have them in dimension 0, as targets do. Default: False.

    Raises:
        ValueError: tensors differ, and no dimension has the samples.
    """

    def together(parts: Sequence[Any], way: int, *, adds: bool = False) -> Any:
        whole: list[Any] = (
            [] if parts[0] is None else [join(xs, counts, way, adds=adds) for xs in zip(*parts, strict=True)]
        )
        return None if parts[0] is None else like(parts[0], whole)

    messages = {q: together([one.messages[q] for one in work], way, adds=True) for q in work[0].messages}
    inputs = together([one.inputs for one in work], 0 if first else way)
    target = together([one.target for one in work], 0)
    weight = sum(one.weight for one in work)
    share = sum(one.share for one in work)
    return Work(0, work[0].flow, inputs, target, weight, share, messages)


def join(xs: Sequence[Any], counts: Sequence[int], way: int, *, adds: bool = False) -> Tensor | None:
    """Join a tensor of each micro-batch along the dimension of the samples; `adds` says that they are gradients."""
    #     counts 2, 3      [2, 5], [3, 5]     samples in dimension 0
    #                      [7], [7]           the same for all samples, if equal; gradients of it add up
    #                      [8, 5], [12, 5]    samples of four rows each, in an unknown order
    if any(x is None for x in xs):
        return None
    sizes = [[x.size(d) for x in xs] for d in range(xs[0].dim())]
    rows = [d for d, found in enumerate(sizes) if found == [found[0] // counts[0] * count for count in counts]]
    if dims := [d for d in rows if sizes[d] == counts]:
        return torch.cat(list(xs), dims[way])
    if adds and not rows:
        return cast(Tensor, sum(xs))
    if adds or any(not torch.equal(x, xs[0]) for x in xs):
        raise ValueError("no dimension has the samples of the micro-batches")
    return cast(Tensor, xs[0])
