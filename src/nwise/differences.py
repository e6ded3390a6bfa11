"""How two sets of tensors differ, beyond rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names at which two sets of tensors differ, the largest difference first, with its share of the values.

    >>> differences({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2), "b": torch.zeros(1)})
    ['b by 1e+02 %']
    """
    apart = [name for name in {**first, **second} if not _equal(first.get(name), second.get(name))]
    if not apart:
        return []
    floor = 0.01 * max((_largest(x) for x in second.values()), default=0.0)
    found = [(gap(first.get(name), second.get(name), floor), name) for name in apart]
    return [f"{name} by {100 * by:.2g} %" for by, name in sorted(found, reverse=True) if by]


def gap(a: Tensor | None, b: Tensor | None, floor: float = 0.0) -> float:
    """Return the largest difference of two tensors as a share of their largest value, or of `floor`; 0 within rounding.

    >>> gap(torch.ones(2), torch.tensor([1.0, 0.5])), gap(torch.ones(2), torch.ones(2) + 1e-7)
    (0.5, 0.0)
    """
    if _equal(a, b):
        return 0.0
    if a is None or b is None:
        return float(any(x is not None and x.any() for x in (a, b)))
    if a.shape != b.shape:
        return math.inf
    kind = a.device.type
    dtype = a.dtype if a.is_floating_point() or a.is_complex() else torch.float64
    lowest = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    # A network of float64 may have parts in float32; sums on a GPU have another order each time.
    bound = max(1e-5 if kind == "cpu" else 1e-2, *(torch.finfo(one).eps ** 0.5 for one in (dtype, lowest)))
    by = _largest(_values(a) - _values(b)) / (max(_largest(a), _largest(b), floor) or 1.0)
    return by if by > bound else 0.0


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether both are the same bits, which most are and which takes one look; tensors with nan are not."""
    if a is None or b is None or a.layout != torch.strided or b.layout != torch.strided:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def _values(x: Tensor) -> Tensor:
    """Return the values in float32 or float64."""
    dense = x.detach().to_dense()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real if real.dtype in (torch.float32, torch.float64) else real.double()


def _largest(x: Tensor) -> float:
    """Return the largest value. One that is not finite counts as 0, as does its difference from any other."""
    return float(_values(x).nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0
