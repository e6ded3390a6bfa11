"""Losses beside torch's own.

A loss is ``loss_fn(head_output, target)`` and returns the mean over its micro-batch. One that averages
over something other than samples has a method ``count(target)`` that says how many terms there are,
so that uneven micro-batches are weighted rightly.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class TokenCrossEntropy:
    """Mean cross-entropy over the tokens ``[B, T]`` of logits ``[B, T, V]``.

    Args:
        ignore_index: target that does not count.
        label_smoothing: weight of the uniform distribution in the target.

    >>> import torch
    >>> round(TokenCrossEntropy()(torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.long)).exp().item(), 4)
    7.0
    """

    def __init__(self, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def count(self, target: Tensor) -> int:
        """Tokens that count."""
        return int((target != self.ignore_index).sum())
