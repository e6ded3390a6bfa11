"""Comparison of stages with the network that they were cut from, on an example: outputs, and gradients of parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nwise.modes import evaluating, training
from nwise.randomness import random_states, restoring, seeded
from nwise.tensors import Tensors, as_tuple, each, invoke, names, values_of


def refuse_difference(
    rule: str, model: nn.Module, run: Callable[[nn.Module, Tensors], Any], stages: Sequence[nn.Module], example: Tensors
) -> None:
    """Raise ValueError unless stages compute what the model does, in eval mode and, with one seed, in training mode.

    In training mode their parameters also get the model's gradients: a `detach` between two pieces shows nowhere else.

    `rule` is the first sentence of an error, and `run` calls the model with the example.
    """

    # Eval mode compares without gradients and without chance; training mode adds both.
    shared = {p for stage in stages for p in stage.parameters() if p.requires_grad}
    named = {name: p for name, p in model.named_parameters() if p in shared}

    def output(
        chain: Sequence[nn.Module], run: Callable[[nn.Module, Tensors], Any], what: str
    ) -> tuple[Tensors, list[Tensor]]:
        hidden = each(example, torch.clone)
        with _repeatable(model, example):
            for module in chain:
                hidden = as_tuple(run(module, hidden), what)
            return hidden, _gradients(hidden, [*named.values()]) if torch.is_grad_enabled() else []

    for mode, where in ((evaluating, ""), (training, " in training mode")):
        expected = None
        with mode(model, *stages), torch.set_grad_enabled(mode is training):
            try:
                expected = output([model], run, "The output of `model`")
                found = output(stages, invoke, "The output of a stage")
            except Exception as error:
                if mode is training and expected is None:  # such as batch norm of one sample: nothing to compare with
                    return
                advice = (
                    " Give the example by position, unless the first piece has these names." if names(example) else ""
                )
                reason = str(error).rstrip(".")
                raise ValueError(f"{rule} Found that they cannot{where}: {reason}.{advice}") from error
        try:
            torch.testing.assert_close(found[0], expected[0], equal_nan=True)  # up to the rounding of their dtype
        except AssertionError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{rule} Found another output for `example`{where}: {reason}") from error
        if mode is training and (other := _other(named, found[1], expected[1])):
            raise ValueError(
                f"{rule} Found another gradient of {other!r} for `example`: the model detaches, scales or hooks a value between "
                "two modules; do so in a module, and name it in `at`."
            )


def _gradients(outputs: Tensors, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a sum of outputs; zeros where there are none."""
    # Weighted, because a plain sum has no gradient behind a softmax or a norm: cos(0), cos(1), ... no symmetry cancels.
    roots = [y for y in outputs if y.requires_grad]
    weights = [torch.arange(y.numel(), device=y.device).cos().to(y.dtype).view(y.shape) for y in roots]
    none: list[Tensor | None] = [None] * len(parameters)
    found = torch.autograd.grad(roots, parameters, weights, allow_unused=True) if roots and parameters else none
    return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(parameters, found, strict=True)]


def _other(named: Mapping[str, Tensor], found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return the name of a parameter whose gradients differ by more than rounding; nothing if all agree."""
    # Against the whole norm: a gradient that is small beside the others may consist of rounding.
    eps = max((torch.finfo(p.dtype).eps for p in named.values()), default=0.0)
    bound = eps**0.5 * math.hypot(*(float(g.norm()) for g in expected))
    pairs = zip(named, found, expected, strict=True)
    return next((name for name, a, b in pairs if float((a - b).norm()) > bound), "")


@contextmanager
def _repeatable(model: nn.Module, example: Tensors) -> Iterator[None]:
    """Run the body with random numbers of one seed, then restore the generators and the model's buffers."""
    with restoring(random_states()), restoring(values_of(model.buffers())):
        random.seed(0), np.random.seed(0)  # noqa: NPY002 - networks draw from it, too
        with seeded(0, example[0].device):
            yield
