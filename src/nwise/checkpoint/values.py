"""Nested values as JSON and tensors, without pickles.

Numbers, texts, None and lists are JSON as they are. Everything else is an object of one entry, the name of its type::

    (0.9, None)  ->  {"tuple": [0.9, null]}        {1: "a"}  ->  {"dict": [[1, "a"]]}

A tensor becomes its name, and the caller stores it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

Put = Callable[[Tensor, str], str]

_SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (tuple, set, frozenset, torch.Size)}


class UnknownTypeError(TypeError):
    """A value is of no type that can be packed; the message has its place and its type."""


def pack(value: Any, put: Put, place: str = "", like: Tensor | None = None) -> Any:
    """Return a value as JSON: numbers, texts, None, tensors, dtypes, devices, and lists, tuples, sets and dictionaries of them.

    Args:
        put: gets each tensor, detached, and its place, keys joined by ``/``; returns the tensor's name.
        like: a tensor whose order in memory `unpack` gives to tensors of the same shape; default: contiguous.

    Raises:
        UnknownTypeError: a part is of another type.
    """
    kind = type(value).__name__

    def inner(part: Any, key: Any) -> Any:
        return pack(part, put, f"{place}/{key}" if place else str(key), like)

    if isinstance(value, Tensor):
        return {"tensor": _pack_tensor(value, put, place, like)}
    # An enum may be a number, too, and would come back as one.
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"dict": [[inner(key, "key"), inner(part, key)] for key, part in value.items()]}
    if type(value) is list:
        return [inner(part, i) for i, part in enumerate(value)]
    if _SEQUENCES.get(kind) is type(value):
        return {kind: [inner(part, i) for i, part in enumerate(value)]}
    raise UnknownTypeError(f"{place!r}, a {kind}")


def unpack(packed: Any, get: Callable[[Mapping[str, Any], str], Tensor], place: str = "") -> Any:
    """Return the value that `pack` has packed.

    Args:
        get: gets the JSON of each tensor (its ``name``, ``strides`` if they matter, and whether it shows ``complex`` numbers as
            pairs) and its place, as `put` did; returns the tensor, whose memory the value shares, so it may be filled later.
    """

    def inner(part: Any, key: Any) -> Any:
        return unpack(part, get, f"{place}/{key}" if place else str(key))

    if isinstance(packed, list):
        return [inner(part, i) for i, part in enumerate(packed)]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        tensor = get(content, place)
        return torch.view_as_complex(tensor) if content.get("complex") else tensor
    if kind in ("complex", "device"):
        return complex(*content) if kind == "complex" else torch.device(content)
    if kind == "dtype":
        return next(d for d in vars(torch).values() if isinstance(d, torch.dtype) and str(d) == f"torch.{content}")
    if kind == "dict":
        keys = [(inner(key, "key"), part) for key, part in content]
        return {key: inner(part, key) for key, part in keys}
    return _SEQUENCES[kind]([inner(part, i) for i, part in enumerate(content)])


def _pack_tensor(tensor: Tensor, put: Put, place: str, like: Tensor | None) -> dict[str, Any]:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        layout = "" if tensor.layout == torch.strided else f" of layout {tensor.layout}"
        raise UnknownTypeError(f"{place!r}, a {type(tensor).__name__}{layout}")
    facts: dict[str, Any] = {"complex": True} if tensor.dtype == torch.complex128 else {}  # which safetensors lacks
    expected = torch.empty(tensor.shape, device="meta")
    if like is not None and like.shape == tensor.shape and not facts:
        expected = torch.empty_like(like, device="meta")
    # Fused updates walk through memory, so a momentum must lie as its parameter does, e.g. channels last. Strides are noted only
    # if `unpack` would choose others. A tensor whose elements do not lie side by side in memory, such as an expanded one, is
    # loaded as a contiguous one.
    if tensor.stride() == torch.empty_like(tensor, device="meta").stride() != expected.stride():
        facts["strides"] = list(tensor.stride())
    whole = tensor.detach()
    return {"name": put(torch.view_as_real(whole.contiguous()) if "complex" in facts else whole, place), **facts}


def as_name(place: str) -> str:
    """Return a place as the last part of a tensor's name, which has no dots.

    >>> as_name("factors/0.5")
    'factors/0_5'
    """
    return re.sub(r"[^\w/-]", "_", place)
