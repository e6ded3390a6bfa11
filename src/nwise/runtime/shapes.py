"""Shapes of messages: they come with the data, because only a stage that runs knows the shape of its output.

The first message of a shape follows a header that describes it. Later ones travel without: both ends then know their form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from nwise.stage.tape import Cotangents
from nwise.tensors import Tensors, names, with_names

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

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient can travel through the tensor."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self, device: torch.device) -> Tensor:
        """Allocate the tensor."""
        if not self.order:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        memory = torch.empty([self.shape[i] for i in self.order], dtype=self.dtype, device=device)
        return memory.permute(sorted(range(len(self.order)), key=self.order.__getitem__))

    def in_memory(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this one with its dimensions as they lie in memory, so contiguous."""
        return tensor.permute(self.order) if self.order else tensor

    def zeros(self, device: torch.device) -> Tensor:
        """Make the tensor of zeros."""
        return self.empty(device).zero_()

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


@dataclass(frozen=True)
class Form:
    """What the tensors of a message look like."""

    specs: Specs
    parts: Specs  # of the tensors that travel instead of them; the same without compression

    @classmethod
    def of(cls, tensors: Tensors) -> Form:
        """Return the form of a message that travels as it is."""
        specs = make_specs(tensors)
        return cls(specs, specs)

    def zeros(self, device: torch.device) -> Tensors:
        """Return tensors like those of the message."""
        return with_names([spec.zeros(device) for spec in self.specs], self.names)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors; none if they are given by position."""
        return spec_names(self.specs)

    @cached_property
    def num_bytes(self) -> int:
        """Size of what travels, in bytes."""
        return sum(spec.num_bytes for spec in self.parts)

    # Compare without making specs of the tensors: the other end is waiting.

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether tensors look like those of the message."""
        return names(tensors) == self.names and _equal(tensors, self.specs)

    def carries(self, parts: Sequence[Tensor]) -> bool:
        """Tell whether tensors look like those that travel, after `fits`."""
        return self.parts is self.specs or _equal(parts, self.parts)


def _equal(tensors: Sequence[Tensor], specs: Specs) -> bool:
    return len(tensors) == len(specs) and all(
        t.shape == s.shape and t.dtype is s.dtype for t, s in zip(tensors, specs, strict=True)
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


HEADER = Spec((1024,), torch.uint8)


def write_header(value: Any) -> Tensors:
    """Return tensors that say a value, serialisable as JSON: one like `HEADER`, and a second one if that is too short.

    >>> read_header(write_header({"shape": [4, 2]})[0])
    {'shape': [4, 2]}
    >>> first, second = write_header("long " * 1000)
    >>> read_header(first), len(second)
    (5002, 5002)
    """
    # Spaces fill the 1024 bytes, which JSON ignores at the end:
    #
    #     short    {"shape": [4, 2]}_________________
    #     long     5002______________________________    and then 5002 bytes
    text, (size,) = json.dumps(value).encode(), HEADER.shape
    if len(text) <= size:
        return (_bytes(text.ljust(size)),)
    return _bytes(str(len(text)).encode().ljust(size)), _bytes(text)


def read_header(tensor: Tensor) -> Any:
    """Return the value of a tensor of `write_header`; of the first of two the length of the second."""
    return json.loads(bytes(tensor.tolist()))


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def to_json(specs: Sequence[Spec]) -> Any:
    """Convert specs to JSON values."""
    return [[list(s.shape), str(s.dtype).removeprefix("torch."), s.name, list(s.order)] for s in specs]


def from_json(value: Any) -> Specs:
    """Convert the result of `to_json` back to specs."""
    return tuple(Spec(tuple(shape), getattr(torch, dtype), name, tuple(order)) for shape, dtype, name, order in value)


def with_gradients(specs: Specs) -> Specs:
    """Select the tensors of an activation that can have a gradient; a message back has exactly these."""
    return tuple(s for s in specs if s.has_gradient)


def packed(message: Cotangents, inputs: Specs, device: torch.device) -> tuple[Tensors, list[int]]:
    """Return the tensors to send back, with zeros where there is no gradient, and the indices of these zeros."""
    #     inputs      float hidden     int mask        float bias
    #     message     gradient         None            None           the bias has no gradient in this pass
    #     packed      gradient                         zeros          absent = [1]
    gradients = [g for g, s in zip(message, inputs, strict=True) if s.has_gradient]
    absent = [i for i, g in enumerate(gradients) if g is None]
    pairs = zip(gradients, with_gradients(inputs), strict=True)
    return tuple(s.zeros(device) if g is None else g for g, s in pairs), absent


def unpacked(tensors: Tensors, outputs: Specs) -> Cotangents:
    """Return the received gradient of each output, None for outputs that carry none."""
    parts = iter(tensors)
    return tuple(next(parts) if spec.has_gradient else None for spec in outputs)
