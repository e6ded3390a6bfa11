"""Values of all stages in every process: losses, and scores of the heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nwise.checks import warn
from nwise.modes import evaluating
from nwise.tensors import as_inputs

if TYPE_CHECKING:
    from nwise.pipeline import Pipeline
    from nwise.program.program import Program

__all__ = ["gather", "score"]


def gather(pipe: Program, values: Tensor | Mapping[int, float]) -> Tensor:
    """Return a number of every stage, ``[A]``, the same in all processes; see `Pipeline.gather`."""
    given = dict(enumerate(values.tolist())) if isinstance(values, Tensor) else values
    if isinstance(values, Tensor) and values.shape != (pipe.num_stages,):
        raise ValueError(
            f"`values` should have a number for each of the {pipe.num_stages} stages, as the losses of `step`, or be a "
            f"dictionary by stage. Found shape {list(values.shape)}."
        )
    ran = pipe.loss_shares if isinstance(values, Tensor) else {}
    rows = {
        k: torch.tensor([float(given.get(k, torch.nan)), k in ran], dtype=torch.float64) for k in pipe.processes.here
    }
    numbers, runs = pipe.processes.table(rows).unbind(1)
    for k in torch.nonzero(numbers.isnan() & (runs > 0)).flatten().tolist():
        warn(f"The loss of stage {k} should be a number, because its head ran. Found nan: training has diverged there.")
    return numbers


def score(pipe: Pipeline, batches: Iterable[Any], metric: Callable[[Any, Any], Any]) -> Tensor:
    """Return the mean of a metric for every trained head, ``[A]``, the same in all processes; see `Pipeline.score`."""
    trained = pipe.needed_heads() | {pipe.num_stages - 1}
    sums = {k: 0.0 for k in pipe.processes.here if k in trained}
    size = 0
    with evaluating(pipe):
        for inputs, target in batches:
            given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
            outputs = pipe.head_outputs(*given, only=trained)
            samples = len(as_inputs(given, {}, "The inputs of a batch")[0])
            size += samples
            for k in sums:
                sums[k] += samples * float(metric(outputs[k], target))
    if not size:
        raise ValueError("`batches` should have at least one batch of inputs and a target. Found none.")
    return gather(pipe, {k: total / size for k, total in sums.items()})
