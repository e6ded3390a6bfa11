"""Thresholds of early exits: from the heads' answers on samples that no training step has seen.

A threshold is good if its head answers the samples that leave there as well as later heads would. `observe` runs every
head on every sample once; everything after that is arithmetic on two tables, so many thresholds can be tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nwise.app.data import Images
from nwise.app.training.evaluation import head_outputs
from nwise.exits import Confidence, confidence_of, confidences, head_output
from nwise.modes import evaluating
from nwise.pipeline import Pipeline
from nwise.tensors import as_tuple, run_module

__all__ = ["Outcome", "Seen", "Work", "calibrate", "count_work", "cross_validated", "observe", "outcome"]

_CANDIDATES = 200  # thresholds that are tried


@dataclass(frozen=True)
class Seen:
    """Confidence and correctness of every exit for every sample, ``[samples, exits]``; the last exit is the whole network's."""

    stages: tuple[int, ...]
    confidence: Tensor
    right: Tensor

    def part(self, samples: Tensor) -> Seen:
        return Seen(self.stages, self.confidence[samples], self.right[samples])

    @property
    def accuracy(self) -> float:
        """Share of right answers of the whole network."""
        return float(self.right[:, -1].double().mean())


@dataclass(frozen=True)
class Work:
    """Floating-point operations for one sample: of every stage, ``[A]``, and of the heads, by stage."""

    stages: Sequence[int]
    heads: Mapping[int, int]


@dataclass(frozen=True)
class Outcome:
    """Accuracy and work under some thresholds.

    Args:
        accuracy: share of right answers.
        work: operations per sample, as a share of the main network's; above 1 if heads cost more than exits save.
        leaving: share of the samples that leave at every exit, the last one included.
    """

    accuracy: float
    work: float
    leaving: tuple[float, ...]


def observe(pipe: Pipeline, data: Images, batch_size: int, confidence: Confidence = None) -> Seen:
    """Run every trained head on every sample of data that training has not seen.

    The heads and the last stage return logits ``[B, classes]``. `confidence` is as for `Pipeline.exit`; a function gets the
    output alone.

    Raises:
        ValueError: the loss has no default confidence, or an output is not ``[B, classes]``.
    """
    exits = (*sorted(pipe.needed_heads()), pipe.num_stages - 1)
    rules = confidences(pipe.loss_fns, exits, confidence)
    sure, right = [], []
    with evaluating(pipe):
        for outputs, target in head_outputs(pipe, data, batch_size, exits):
            answers = [confidence_of(rules[k], outputs[k], (), k) for k in exits]
            if wrong := [list(logits.shape) for logits, _ in answers if logits.dim() != 2 or logits.shape[1] < 2]:
                raise ValueError(f"Exits should have outputs [B, classes] to calibrate. Found shape {wrong[0]}.")
            sure.append(torch.stack([sure for _, sure in answers], dim=1).cpu())
            right.append(torch.stack([logits.argmax(1) == target for logits, _ in answers], dim=1).cpu())
    return Seen(exits, torch.cat(sure), torch.cat(right))


def count_work(pipe: Pipeline, example: Tensor) -> Work:
    """Count the operations of every stage and head for one sample, from a batch of one."""
    stages, heads, hidden = [], {}, as_tuple(example, "`example`")
    with evaluating(pipe):
        for k, stage in enumerate(pipe.stages):
            with FlopCounterMode(display=False) as counter:
                hidden = run_module(stage, hidden, f"The output of stage {k}")
            stages.append(counter.get_total_flops())
            if k in pipe.heads:
                with FlopCounterMode(display=False) as counter:
                    head_output(pipe.heads, k, hidden, None)
                heads[k] = counter.get_total_flops()
    return Work(stages, heads)


def outcome(seen: Seen, work: Work, thresholds: Mapping[int, float]) -> Outcome:
    """Return the accuracy and the work on samples that leave from some confidence on, by stage; other heads do not run.

    >>> two = Seen((0, 1), torch.tensor([[0.9, 0.9], [0.6, 0.8]]), torch.tensor([[True, True], [False, True]]))
    >>> outcome(two, Work([50, 50], {0: 10}), {0: 0.8})
    Outcome(accuracy=1.0, work=0.85, leaving=(0.5, 0.5))
    """
    count = len(seen.right)
    stays = torch.ones(count, dtype=torch.bool)
    right, operations, done = 0, 0, 0
    leaving = []
    for i, k in enumerate(seen.stages):
        here, last = int(stays.sum()), i == len(seen.stages) - 1
        operations += here * sum(work.stages[done : k + 1])
        done = k + 1
        if not last and k in thresholds:
            operations += here * work.heads[k]
        # A sample whose confidence is nan leaves at the end only.
        leaves = stays if last else stays & (seen.confidence[:, i] >= thresholds.get(k, math.inf))
        right += int((leaves & seen.right[:, i]).sum())
        leaving.append(int(leaves.sum()) / count)
        stays = stays & ~leaves
    return Outcome(right / count, operations / count / sum(work.stages), tuple(leaving))


def calibrate(seen: Seen, work: Work, accuracy: float) -> dict[int, float]:
    """Return the threshold, the same for every exit, with the least work that keeps an accuracy on the samples.

    One number cannot fit the samples too well: thresholds that were chosen for each exit alone lost another half a point on
    samples that they had not seen (`benchmarks/exits`).

    `accuracy` is the share of right answers to keep; the network's own is enough. The thresholds are by stage; there are none if
    exits save no work.
    """
    wanted = min(accuracy, seen.accuracy)
    levels = torch.linspace(0, 1, _CANDIDATES, dtype=torch.float64)
    bounds = sorted(set(torch.nanquantile(seen.confidence[:, :-1].flatten().double(), levels).tolist()))
    options = [{}, *(dict.fromkeys(seen.stages[:-1], bound) for bound in bounds)]
    results = [outcome(seen, work, option) for option in options]
    kept = [(result.work, n) for n, result in enumerate(results) if result.accuracy >= wanted]
    return options[min(kept)[1]]  # of equal ones the first, which is that without exits


def cross_validated(seen: Seen, work: Work, drop: float) -> Outcome:
    """Return the outcome on samples that calibration has not used: each half's thresholds apply to the other half.

    `drop` is the accuracy that may be lost, as a share.
    """
    parts = [seen.part(torch.arange(start, len(seen.right), 2)) for start in (0, 1)]
    shares, results = [], []
    for fitted, tested in (parts, parts[::-1]):
        shares.append(len(tested.right) / len(seen.right))
        results.append(outcome(tested, work, calibrate(fitted, work, fitted.accuracy - drop)))

    def mean(*numbers: float) -> float:
        return sum(share * number for share, number in zip(shares, numbers, strict=True))

    leaving = tuple(map(mean, *(result.leaving for result in results)))
    return Outcome(mean(*(r.accuracy for r in results)), mean(*(r.work for r in results)), leaving)
