"""Ways to compress messages between stages, beside the bf16 of the library: ``Pipeline(..., compress=Int8())``."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import torch
from torch import Tensor

from nwise.runtime.compression import Compression
from nwise.runtime.shapes import Spec
from nwise.tensors import Tensors

__all__ = ["Int8", "TopK", "named"]


class Int8:
    """Sends values as one of 255 multiples of a step; a sample's step follows from its largest absolute value.

    Tensors of fewer than two dimensions stay as they are.

    >>> codes, size = Int8().compress(torch.tensor([[1.0, -0.5], [0.0, 0.0]]))
    >>> codes.tolist(), size.shape
    ([[127, -64], [0, 0]], torch.Size([2]))
    """

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        if len(spec.shape) < 2:
            return (spec,)
        return Spec(spec.shape, torch.int8), Spec(spec.shape[:1], torch.promote_types(spec.dtype, torch.float32))

    def compress(self, tensor: Tensor) -> Tensors:
        if tensor.dim() < 2:
            return (tensor,)
        rows = tensor.detach().flatten(1)
        largest = rows.abs().amax(-1) if rows.numel() else rows.new_zeros(tensor.shape[:1])
        step = largest.to(torch.promote_types(tensor.dtype, torch.float32)) / 127
        # A sample of zeros has no step. If a value is not finite, neither is its sample's step, so the other end sees
        # it. A step below the smallest representable number is rounded, so a code may be too large.
        codes = (rows / step.where(step != 0, 1).unsqueeze(-1)).round().nan_to_num(0.0, 0.0, 0.0).clamp(-127, 127)
        return codes.to(torch.int8).view(tensor.shape), step

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        codes, step = parts
        return (codes.to(step.dtype) * step.view(-1, *(1,) * (codes.dim() - 1))).to(spec.dtype)


class TopK:
    """Sends the largest values of every tensor, with their places; the rest is zero at the other end.

    Args:
        share: share of the values that travels, above 0 and at most 1. The place of each value takes four bytes.

    >>> values, places = TopK(0.5).compress(torch.tensor([1.0, -3.0, 2.0, 0.5]))
    >>> values.tolist(), places.tolist()
    ([-3.0, 2.0], [1, 2])
    """

    def __init__(self, share: float | Fraction) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"`share` should be above 0 and at most 1. Found {share}; 0.05 sends 5 % of the values.")
        self._share = Fraction(share)

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        # A fraction, because 0.07 * 100 is above 7 in floats, and both ends must find one number.
        count = math.ceil(self._share * math.prod(spec.shape))
        return Spec((count,), spec.dtype), Spec((count,), torch.int32)

    def compress(self, tensor: Tensor) -> Tensors:
        flat = tensor.detach().reshape(-1)
        places = flat.abs().topk(math.ceil(self._share * flat.numel()), sorted=False).indices.sort().values
        return flat[places], places.to(torch.int32)

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        values, places = parts
        return values.new_zeros(math.prod(spec.shape)).index_copy_(0, places.long(), values).view(spec.shape)


def named(name: str) -> str | Compression:
    """Return what `Pipeline` takes for a name, as recipes and the command line have it.

    Args:
        name: ``"none"``, ``"bf16"``, ``"int8"``, or ``"top-<p>%"`` for the largest p percent.

    Raises:
        ValueError: no compression has that name.

    >>> named("top-5%").specs(Spec((10, 10), torch.float32))[0].shape
    (5,)
    """
    if name in ("none", "bf16"):
        return name
    if name == "int8":
        return Int8()
    percent = re.fullmatch(r"top-(\d+(?:\.\d+)?)%", name)
    if percent and 0 < float(percent[1]) <= 100:
        return TopK(Fraction(percent[1]) / 100)
    raise ValueError(
        f"`compress` should be none, bf16, int8 or top-<p>%, with p above 0 and at most 100. Found {name!r}."
    )
