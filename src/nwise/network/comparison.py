"""Comparison of stages with the network that they were cut from, on an example."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from nwise.modes import evaluating, training
from nwise.randomness import seeded
from nwise.tensors import Tensors, as_tuple, call, each, names


def refuse_difference(
    rule: str, model: nn.Module, run: Callable[[nn.Module, Tensors], Any], stages: Sequence[nn.Module], example: Tensors
) -> None:
    """Raise ValueError unless stages compute what the model does, in eval mode and, with one seed, in training mode.

    `rule` is the first sentence of an error, and `run` calls the model with the example.
    """

    def output(chain: Sequence[nn.Module], run: Callable[[nn.Module, Tensors], Any], what: str) -> Tensors:
        hidden = each(example, torch.clone)
        with _repeatable(model, example):
            for module in chain:
                hidden = as_tuple(run(module, hidden), what)
        return hidden

    for mode, where in ((evaluating, ""), (training, " in training mode")):
        expected = None
        with mode(model, *stages):
            try:
                expected = output([model], run, "The output of `model`")
                found = output(stages, call, "The output of a stage")
            except Exception as error:
                if mode is training and expected is None:  # such as batch norm of one sample: nothing to compare with
                    return
                advice = (
                    " Give the example by position, unless the first piece has these names." if names(example) else ""
                )
                reason = str(error).rstrip(".")
                raise ValueError(f"{rule} Found that they cannot{where}: {reason}.{advice}") from error
        try:
            torch.testing.assert_close(found, expected, equal_nan=True)  # up to the rounding of their dtype
        except AssertionError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{rule} Found another output for `example`{where}: {reason}") from error


@contextmanager
def _repeatable(model: nn.Module, example: Tensors) -> Iterator[None]:
    """Run the body with random numbers of one seed, then restore the generators and the model's buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    others = random.getstate(), np.random.get_state()  # noqa: NPY002 - networks draw from it, too
    random.seed(0), np.random.seed(0)  # noqa: NPY002
    try:
        with seeded(0, example[0].device):
            yield
    finally:
        random.setstate(others[0]), np.random.set_state(others[1])  # noqa: NPY002
        for buffer, values in buffers:
            # Batch norm changes its statistics without a new version. One that is equal may be expanded and refuse a copy.
            if not buffer.is_meta and not torch.equal(buffer, values):
                buffer.copy_(values)
