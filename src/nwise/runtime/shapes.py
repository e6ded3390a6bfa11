"""Shapes of messages: of a stage's outputs, inferred on fake tensors without computing, and of the gradients that come back."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nwise.randomness import seeded
from nwise.runtime.channel import Spec, make_specs, spec_names
from nwise.tape import Cotangents
from nwise.tensors import Tensors, names, run_module, with_names


def output_specs(module: nn.Module, inputs: tuple[Spec, ...], device: torch.device, index: int) -> tuple[Spec, ...]:
    """Infer the shapes of a stage's outputs from the shapes of its inputs, for one micro-batch.

    Raises:
        ValueError: the shape of the stage's output depends on the values of its input.

    >>> from nwise.runtime.channel import Spec
    >>> output_specs(nn.Linear(4, 2), (Spec((8, 4), torch.float32),), torch.device("cpu"), 0)[0].shape
    (8, 2)
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Run a copy, because a module may store results; it takes no memory, because fakes replace its tensors.
    tensors = [*module.parameters(), *module.buffers()]
    double = copy.deepcopy(module, {id(t): mode.from_tensor(t) for t in tensors})
    try:
        with mode, torch.no_grad(), seeded(0, device), torch.compiler.set_stance("force_eager"):
            given = with_names((s.empty(device) for s in inputs), spec_names(inputs))
            outputs = run_module(double, given, f"The output of stage {index}")
    except Exception as error:
        shapes = ", ".join(f"{list(s.shape)} {s.dtype}" for s in inputs)
        raise ValueError(
            f"Stage {index} should take {shapes} and give an output whose shape follows from that. Found {type(error).__name__}: "
            f"{error}"
        ) from error
    return make_specs(outputs)


def carrying(specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """Select the tensors of an activation that can have a gradient; a message back has exactly these."""
    return tuple(s for s in specs if s.carries)


def check_names(stage: int, made: Cotangents, specs: tuple[Spec, ...]) -> None:
    """Raise ValueError unless a stage's outputs have the names that the next process expects."""
    if names(cast(Tensors, made)) != spec_names(specs):
        raise ValueError(
            f"Stage {stage} should return the same names for equal shapes. Found {names(cast(Tensors, made))} after "
            f"{spec_names(specs)}."
        )


def packed(message: Cotangents, inputs: tuple[Spec, ...], device: torch.device) -> tuple[Tensors, list[int]]:
    """Return the tensors to send back, with zeros where there is no gradient, and the indices of these zeros."""
    gradients = [g for g, s in zip(message, inputs, strict=True) if s.carries]
    absent = [i for i, g in enumerate(gradients) if g is None]
    pairs = zip(gradients, carrying(inputs), strict=True)
    return tuple(torch.zeros(s.shape, dtype=s.dtype, device=device) if g is None else g for g, s in pairs), absent


def unpacked(tensors: Tensors, outputs: tuple[Spec, ...]) -> Cotangents:
    """Return the received gradient of each output, None for outputs that carry none."""
    parts = iter(tensors)
    return tuple(next(parts) if spec.carries else None for spec in outputs)


def to_json(specs: tuple[Spec, ...]) -> Any:
    """Convert specs to JSON values."""
    return [[list(s.shape), str(s.dtype).removeprefix("torch."), s.name] for s in specs]


def from_json(value: Any) -> tuple[Spec, ...]:
    """Convert the result of `to_json` back to specs."""
    return tuple(Spec(tuple(shape), getattr(torch, dtype), name) for shape, dtype, name in value)
