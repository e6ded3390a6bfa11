"""Cutting a mini-batch into micro-batches (GPipe) and weighting them so that nothing changes.

A loss is the mean over the whole mini-batch, so micro-batch ``m`` with ``c_m`` of the ``c`` counted
terms enters with weight ``c_m / c``; uneven micro-batches are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Tensors = tuple[Tensor, ...]


def as_tuple(value: Tensor | Sequence[Tensor], what: str) -> Tensors:
    """A tensor, or a tuple of tensors, as a tuple; anything else is refused by name."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    found = type(value).__name__
    if isinstance(value, tuple | list):
        found += " of " + (", ".join(type(item).__name__ for item in value) or "nothing")
    raise TypeError(f"{what} should be a tensor or a tuple of tensors. Found {found}; unpack or convert it.")


def batch_size(tensors: Tensors, what: str) -> int:
    """The common length of dimension 0."""
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ValueError(f"{what} should have samples along dimension 0. Found a tensor without dimensions.")
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1:
        raise ValueError(f"{what} should have the same number of samples in every tensor. Found {sorted(sizes)}.")
    return sizes.pop()


def scatter(tensors: Tensors, num_microbatches: int) -> list[Tensors]:
    """Micro-batches of dimension 0, whose sizes differ by at most one (larger ones first)."""
    size = batch_size(tensors, "The mini-batch")
    if not size:
        raise ValueError("The mini-batch should have at least one sample. Found none.")
    if num_microbatches > size:
        raise ValueError(
            f"`num_microbatches` should be at most the {size} samples of the mini-batch. Found {num_microbatches}; "
            f"use {size} or fewer, or a larger batch."
        )
    if num_microbatches == 1:
        return [tensors]
    return list(zip(*(torch.tensor_split(tensor, num_microbatches) for tensor in tensors), strict=True))


class Terms:
    """How many terms of a micro-batch's target a loss averages over.

    That is the number of samples, unless the loss says otherwise: cross-entropy and ``nll_loss``
    average over the targets that are not ``ignore_index``, each with the ``weight`` of its class, and
    a loss of one's own may have a method ``count(target)``.

    Args:
        loss_fn: the loss.

    Raises:
        ValueError: the loss is declared to be no mean.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self._count = getattr(loss_fn, "count", None)
        self._options = {} if callable(self._count) else _options(loss_fn)
        reduction = self._options.get("reduction", "mean")
        if reduction not in ("mean", "batchmean"):
            raise ValueError(
                f"`loss_fn` should be the mean over a micro-batch. Found reduction = {reduction!r}; use reduction='mean'."
            )

    def __call__(self, target: Tensors) -> float:
        if callable(self._count):
            return float(self._count(target[0] if len(target) == 1 else target))
        labels = target[0]
        if "ignore_index" not in self._options:
            return float(len(labels))
        if labels.is_floating_point():  # class probabilities: every sample counts
            return float(labels.numel() // labels.shape[1])
        kept = labels[labels != self._options["ignore_index"]]
        weight = self._options.get("weight")
        return float(kept.numel() if weight is None else weight[kept].sum())


def _options(loss_fn: Callable[..., Tensor]) -> dict[str, Any]:
    """The keyword arguments that matter for the mean, with their defaults; empty for an unknown loss."""
    function = getattr(loss_fn, "func", loss_fn)  # functools.partial
    given = dict(getattr(loss_fn, "keywords", {}))
    if isinstance(loss_fn, nn.Module):
        return {
            name: getattr(loss_fn, name) for name in ("reduction", "ignore_index", "weight") if hasattr(loss_fn, name)
        }
    if function in (functional.cross_entropy, functional.nll_loss):
        return {"ignore_index": -100, **given}
    return given
