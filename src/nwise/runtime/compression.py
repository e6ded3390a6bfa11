"""Compressed messages, which travel between two stages instead of activations and gradients.

    stage k     y --> compress ---- parts ----> restore --> y'     stage k + 1
                g' <-- restore <--- parts ---- compress <-- g

The next stage computes with y', and the stage before it with g'. Gradients pass as if y' = y (straight through). This holds
between all stages, also those of one process, so the number of processes does not change the results. `nwise.compression` has
more ways.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from nwise.runtime.shapes import Spec, describe, make_spec, make_specs
from nwise.stage.tape import Cotangents
from nwise.tensors import Tensors, names, with_names

__all__ = ["Cast", "Compression", "Codec", "fingerprint", "parse_compression"]


class Compression(Protocol):
    """A way to compress floating-point tensors."""

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        """Return the shapes and dtypes of the parts of a tensor."""

    def compress(self, tensor: Tensor) -> Tensors:
        """Return the parts of a tensor."""

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        """Return the tensor that the parts describe."""


class Cast:
    """Sends values in another dtype, if that takes fewer bytes.

    >>> Cast(torch.bfloat16).compress(torch.tensor([1.001]))
    (tensor([1.], dtype=torch.bfloat16),)
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise ValueError(
                f"`dtype` should be floating-point. Found {dtype}; `nwise.compression.Int8` sends integers."
            )
        self._dtype = dtype

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        return (Spec(spec.shape, self._dtype if self._dtype.itemsize < spec.dtype.itemsize else spec.dtype),)

    def compress(self, tensor: Tensor) -> Tensors:
        return (tensor.to(self.specs(make_spec(tensor))[0].dtype),)

    def restore(self, parts: Tensors, spec: Spec) -> Tensor:
        return parts[0].to(spec.dtype)


def parse_compression(given: str | Compression) -> Compression | None:
    """Return the compression that is given, None for ``"none"``, and that of ``"bf16"``.

    Raises:
        ValueError: it is another name, or asks for feedback.
        TypeError: it is neither a name nor a compression.
    """
    if not isinstance(given, str):
        wanted = ("specs", "compress", "restore")
        if isinstance(given, type) or not all(hasattr(given, attribute) for attribute in wanted):
            raise TypeError(f"`compress` should be a name, or an object with {', '.join(wanted)}. Found {given!r}.")
        if getattr(given, "feedback", False):
            raise ValueError("`compress` should keep nothing between messages. Found `feedback`; leave it out.")
        return given
    if given not in _NAMED:
        raise ValueError(
            f"`compress` should be none, bf16, or an object such as `nwise.compression.Int8()`. Found {given!r}; "
            "`nwise.compression.named` makes one of a name."
        )
    return _NAMED[given]


def fingerprint(compression: Compression | None) -> str:
    """Return a text that identifies a compression: its class, its settings, the parts of a sample; "none" without one."""
    if compression is None:
        return "none"
    # Settings too, because 5 % and 5.4 % of a small sample are equally many values; without addresses, which differ by process.
    settings = re.sub(r" at 0x\w+", "", repr(compression.__getstate__()))
    return f"{type(compression).__name__}{compression.specs(Spec((7, 13), torch.float32))}{settings}"


_NAMED: dict[str, Compression | None] = {"none": None, "bf16": Cast(torch.bfloat16)}


class Codec:
    """The form in which messages travel from and to the stages of a process; None sends tensors as they are."""

    def __init__(self, compression: Compression | None) -> None:
        self.compression = compression

    def compress(self, tensors: Sequence[Tensor | None]) -> Tensors:
        """Return the parts that travel instead of tensors; None has none.

        Raises:
            ValueError: the compression makes other parts than it says.
        """
        rule = self.compression
        if rule is None:
            return tuple([t for t in tensors if t is not None])
        made = list[Tensor]()
        for tensor in tensors:
            if tensor is not None and not tensor.is_floating_point():
                made.append(tensor)
            elif tensor is not None:
                parts = rule.compress(tensor)
                wanted = tuple(rule.specs(make_spec(tensor)))
                found = make_specs(parts)
                if wanted != found:
                    raise ValueError(
                        f"`compress` should return tensors like those that its `specs` names. Found {describe(found)} instead "
                        f"of {describe(wanted)}."
                    )
                made += parts
        return tuple(made)

    def restore(self, parts: Sequence[Tensor], specs: Sequence[Spec | None]) -> Cotangents:
        """Return the tensors that the parts describe, of the given shapes and dtypes; None where there is none."""
        rule = self.compression
        rest = iter(parts)
        made = list[Tensor | None]()
        for spec in specs:
            if spec is None:
                made.append(None)
            elif rule is None or not spec.dtype.is_floating_point:
                made.append(next(rest))
            else:
                made.append(rule.restore(tuple(next(rest) for _ in rule.specs(spec)), spec))
        return tuple(made)

    def through(self, tensors: Cotangents) -> Cotangents:
        """Compress and restore tensors on their way to a stage of the same process; names and None stay."""
        specs = [None if t is None else make_spec(t) for t in tensors]
        arrived = self.restore(self.compress(tensors), specs)
        return with_names(cast(Tensors, arrived), names(cast(Tensors, tensors)))
