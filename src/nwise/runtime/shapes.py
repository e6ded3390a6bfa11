"""Shapes of messages: they come with the data, because only a stage that runs knows the shape of its output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from nwise.tensors import names

__all__ = ["Spec"]


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor, and its name if it has one.

    Args:
        shape, dtype, name: of the tensor.
        order: its dimensions as they lie in memory, the outermost first; default: as in the shape. With ``channels_last`` these
            are 0, 2, 3, 1. Kernels sum in another order for another layout, so a message keeps its own.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    order: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the values, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Allocate the tensor."""
        return self.of_memory(torch.empty(prod(self.shape), dtype=self.dtype, device=device))

    def of_memory(self, values: Tensor) -> Tensor:
        """Return the tensor whose values lie in memory like these, of one dimension."""
        if not self.order:
            return values.view(self.shape)
        memory = values.view([self.shape[i] for i in self.order])
        return memory.permute(sorted(range(len(self.order)), key=self.order.__getitem__))

    def in_memory(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this one with its dimensions as they lie in memory, so contiguous."""
        return tensor.permute(self.order) if self.order else tensor

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        return f"{name}{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


Specs = tuple[Spec, ...]


def make_spec(tensor: Tensor, name: str = "") -> Spec:
    """Return the spec of a tensor; raise ValueError for a nested one, which has none."""
    if tensor.is_nested:
        raise ValueError(
            "Tensors under several processes should have a shape that all of them know. Found a nested tensor; pass its values "
            "and offsets as two tensors, or train in one process."
        )
    return Spec(tuple(tensor.shape), tensor.dtype, name)


def make_specs(tensors: Sequence[Tensor]) -> Specs:
    """Return the specs of tensors, with their names."""
    return tuple(map(make_spec, tensors, names(tensors) or ("",) * len(tensors)))


def with_layout(spec: Spec, tensor: Tensor) -> Spec:
    """Return the spec of a tensor with the order of its dimensions, if they fill memory without gaps.

    >>> images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    >>> with_layout(make_spec(images), images).order
    (0, 2, 3, 1)
    """
    if tensor.is_contiguous():
        return spec
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return replace(spec, order=order) if tensor.permute(order).is_contiguous() else spec


def spec_names(specs: Sequence[Spec]) -> tuple[str, ...]:
    """Return the names of tensors with these specs; none if they are given by position."""
    return tuple(spec.name for spec in specs if spec.name)


def describe(specs: Sequence[Spec]) -> str:
    """Describe specs in words.

    >>> describe([Spec((4, 2), torch.float32, "x"), Spec((), torch.int64)])
    'x: float32 [4, 2]; int64 []'
    """
    return "; ".join(map(str, specs)) or "nothing"


class Signature(tuple[tuple["Specs", str], ...]):
    """What the micro-batches of a mini-batch look like: the specs of the model's inputs, and the dtype of autocast, if any.

    >>> four, three = make_specs([torch.ones(4, 2)]), make_specs([torch.ones(3, 2)])
    >>> str(Signature([(four, ""), (four, ""), (three, "")]))
    '2 of float32 [4, 2], 1 of float32 [3, 2]'
    """

    def __str__(self) -> str:
        groups = [(len(list(equal)), *label) for label, equal in itertools.groupby(self)]
        return ", ".join(
            f"{count} of {describe(inputs)}" + (f" under autocast to {autocast}" if autocast else "")
            for count, inputs, autocast in groups
        )


def check_sendable(tensors: Sequence[Tensor], stage: int, device: torch.device) -> None:
    """Raise ValueError unless the outputs of a stage can travel to another process: dense values, on the device of the stages."""
    for t in tensors:
        if kind := _unsendable(t, device):
            raise ValueError(
                f"The output of stage {stage} should be dense tensors on the device {device.type!r}, because another process "
                f"receives their values. Found a tensor that is {kind}; return dense tensors that describe it, such as its "
                "values and offsets, or let the next stage make it."
            )


def _unsendable(tensor: Tensor, device: torch.device) -> str:
    """Return why a tensor cannot travel; nothing if it can."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.device.type != device.type:
        return f"on the device {tensor.device.type!r}"
    # Torch's own subclasses are plain values, such as `nn.Parameter`.
    known = type(tensor).__module__.partition(".")[0] == "torch"
    return "" if known else f"a {type(tensor).__name__}, a class that would not travel with its values"


def to_json(specs: Sequence[Spec | None]) -> Any:
    """Convert specs to JSON values."""
    return [s and [s.shape, str(s.dtype).removeprefix("torch."), s.name, s.order] for s in specs]


def from_json(value: Any) -> tuple[Spec | None, ...]:
    """Convert the result of `to_json` back to specs."""
    return tuple(one and Spec(tuple(one[0]), getattr(torch, one[1]), one[2], tuple(one[3])) for one in value)
