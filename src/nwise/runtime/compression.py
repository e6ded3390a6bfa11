"""Compressed messages: what travels between two stages instead of an activation or a gradient.

    stage k     y --> compress ---- parts ----> restore --> y'     stage k + 1
                g' <-- restore <--- parts ---- compress <-- g

The next stage computes with y', and the stage before it with g'. Gradients pass as if y' = y (straight through). This holds
between all stages, those of one process included, so the number of processes changes no number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nwise.microbatch import Tensors
from nwise.runtime.channel import Spec, make_spec
from nwise.stage import Cotangents


class Compression(Protocol):
    """A way to compress floating-point tensors.

    Attributes:
        feedback: whether the error of a message is added to the next one of the same kind.
    """

    feedback: bool

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        """Return the shapes and dtypes of the parts of a tensor."""

    def compress(self, tensor: Tensor) -> Tensors:
        """Return the parts of a tensor."""

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        """Return the tensor that the parts describe."""


class Cast:
    """Values in another dtype.

    >>> Cast(torch.bfloat16).compress(torch.tensor([1.001]))
    (tensor([1.], dtype=torch.bfloat16),)
    """

    feedback = False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        """Return the one part."""
        return (Spec(spec.shape, self._dtype),)

    def compress(self, tensor: Tensor) -> Tensors:
        """Convert."""
        return (tensor.to(self._dtype),)

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        """Convert back."""
        return parts[0].to(spec.dtype)


class Int8:
    """Values in 255 steps of one size per sample, from its largest absolute value.

    >>> codes, size = Int8().compress(torch.tensor([[1.0, -0.5], [0.0, 0.0]]))
    >>> codes.tolist(), size.shape
    ([[127, -64], [0, 0]], torch.Size([2]))
    """

    feedback = False

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        """Return the codes, and a step for each sample."""
        return Spec(spec.shape, torch.int8), Spec(spec.shape[:1], torch.float32)

    def compress(self, tensor: Tensor) -> Tensors:
        """Return the codes and the steps."""
        rows = tensor.detach().unsqueeze(-1).flatten(1)
        step = (rows.abs().amax(-1) if rows.numel() else rows.new_zeros(tensor.shape[:1])).float() / 127
        # A sample of zeros has no step. A value that is not a number makes its sample's step one, so the other end sees it.
        codes = (rows / step.where(step != 0, 1).unsqueeze(-1)).round().nan_to_num(0.0, 0.0, 0.0)
        return codes.to(torch.int8).view(tensor.shape), step

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        """Multiply the codes by the steps."""
        codes, step = parts
        exact = torch.promote_types(spec.dtype, torch.float32)
        return (codes.to(exact) * step.view(-1, *(1,) * (codes.dim() - 1))).to(spec.dtype)


class TopK:
    """The largest values of every tensor, with their places; the rest waits for the next message.

    Args:
        share: which share of the values travels, above 0 and at most 1.

    >>> values, places = TopK(0.5).compress(torch.tensor([1.0, -3.0, 2.0, 0.5]))
    >>> values.tolist(), places.tolist()
    ([-3.0, 2.0], [1, 2])
    """

    feedback = True

    def __init__(self, share: float) -> None:
        self._share = share

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        """Return values and places."""
        count = math.ceil(self._share * math.prod(spec.shape))
        return Spec((count,), spec.dtype), Spec((count,), torch.int32)

    def compress(self, tensor: Tensor) -> Tensors:
        """Return values and places, in the order of the places."""
        flat = tensor.detach().reshape(-1)
        places = flat.abs().topk(math.ceil(self._share * flat.numel()), sorted=False).indices.sort().values
        return flat[places], places.to(torch.int32)

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        """Put the values in their places, and zeros in all others."""
        values, places = parts
        return values.new_zeros(math.prod(spec.shape)).index_copy_(0, places.long(), values).view(spec.shape)


def parse_compression(name: str | Compression | None) -> Compression | None:
    """Return the compression of a name.

    Args:
        name: ``"none"``, ``"bf16"``, ``"int8"``, ``"top-<p>%"`` for the largest p percent, a compression, or None.

    Raises:
        ValueError: no compression has that name.

    >>> parse_compression("top-5%").specs(Spec((10, 10), torch.float32))[0].shape
    (5,)
    """
    if name is None or not isinstance(name, str):
        return name
    if name in _NAMED:
        return _NAMED[name]
    percent = re.fullmatch(r"top-(\d+(?:\.\d+)?)%", name)
    if percent and 0 < float(percent[1]) <= 100:
        return TopK(float(percent[1]) / 100)
    raise ValueError(
        f"`compress` should be none, bf16, int8 or top-<p>%, with p above 0 and at most 100. Found {name!r}."
    )


_NAMED: dict[str, Compression | None] = {"none": None, "bf16": Cast(torch.bfloat16), "int8": Int8()}


class Wire:
    """The form in which messages travel from and to the stages of a process.

    Args:
        compression: the compression; None to send tensors as they are.
    """

    def __init__(self, compression: Compression | None) -> None:
        self.compression = compression
        self._errors: dict[Hashable, Tensor] = {}

    def specs(self, specs: Sequence[Spec]) -> tuple[Spec, ...]:
        """Return the shapes and dtypes that travel instead of tensors."""
        rule = self.compression
        if rule is None:
            return tuple(specs)
        return tuple(part for s in specs for part in (rule.specs(s) if s.dtype.is_floating_point else (s,)))

    def compress(self, sender: Hashable, tensors: Sequence[Tensor]) -> Tensors:
        """Return what travels instead of tensors.

        Args:
            sender: the stage, micro-batch and message, under which an error is kept for the next one.
            tensors: the tensors.
        """
        rule = self.compression
        if rule is None:
            return tuple(tensors)
        travels: list[Tensor] = []
        for i, tensor in enumerate(tensors):
            spec = make_spec(tensor)
            if not spec.dtype.is_floating_point:
                travels.append(tensor)
                continue
            error = self._errors.get((sender, i)) if rule.feedback else None
            if error is not None and make_spec(error) == spec:
                tensor = tensor + error
            parts = rule.compress(tensor)
            if rule.feedback:
                # Without this a single value that is not a number would stay for ever.
                self._errors[sender, i] = (tensor - rule.restore(parts, spec)).nan_to_num(0.0, 0.0, 0.0)
            travels += parts
        return tuple(travels)

    def restore(self, parts: Sequence[Tensor], specs: Sequence[Spec]) -> Tensors:
        """Return the tensors that the parts describe, of the given shapes and dtypes."""
        rule, rest = self.compression, iter(parts)
        if rule is None:
            return tuple(parts)
        return tuple(
            rule.restore(tuple(next(rest) for _ in rule.specs(s)), s) if s.dtype.is_floating_point else next(rest)
            for s in specs
        )

    def through(self, sender: Hashable, tensors: Cotangents) -> Cotangents:
        """Return what arrives at a stage of the same process; None stays None."""
        if self.compression is None:
            return tensors
        given = [t for t in tensors if t is not None]
        arrived = iter(self.restore(self.compress(sender, given), list(map(make_spec, given))))
        return tuple(None if t is None else next(arrived) for t in tensors)

    @property
    def errors(self) -> Mapping[Hashable, Tensor]:
        """What the messages so far have left out, by sender; may be set to an earlier value."""
        return dict(self._errors)

    @errors.setter
    def errors(self, errors: Mapping[Hashable, Tensor]) -> None:
        self._errors = dict(errors)

    def forget(self) -> None:
        """Drop all errors."""
        self._errors.clear()
