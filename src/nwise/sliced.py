"""Cross-entropy of logits that never exist as a whole.

A vocabulary of 50,257 makes 26 GB of logits for 131,072 tokens in bf16, and as much again several times over in a loss. Here the
output of a head is the two factors of its logits, and the loss multiplies some rows at a time:

    for some rows:   logits = hidden @ weight.T  ->  loss, and its gradients to hidden and weight  ->  forget the logits

N  tokens    D  width    V  vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["AT_ONCE", "logits_of", "sliced_cross_entropy"]

AT_ONCE = 2**28  # logits: half a GiB in bf16, one in float32


def sliced_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, ignore_index: int, label_smoothing: float, at_once: int
) -> Tensor:
    """Return the mean cross-entropy of ``hidden_ND @ weight_VD.T``.

    Args:
        hidden_ND: one factor of the logits.
        weight_VD: the other.
        target_N: classes of the tokens.
        ignore_index: target that does not count.
        label_smoothing: weight of the uniform distribution in the target.
        at_once: most logits at once; at least one token's.

    >>> x, w, y = torch.eye(3), torch.eye(3), torch.arange(3)
    >>> bool(sliced_cross_entropy(x, w, y, -100, 0.0, 1).isclose(functional.cross_entropy(x, y)))
    True
    """
    arguments = hidden_ND, weight_VD, target_N, ignore_index, label_smoothing, at_once
    loss: Tensor = _Sliced.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's own lacks types
    return loss


def logits_of(output: Tensor | tuple[Tensor, Tensor], tokens: slice) -> Tensor:
    """Return the logits of some tokens, ``[N, V]``, from logits of any shape or from their factors.

    >>> x, w = torch.ones(2, 3, 4), torch.ones(7, 4)
    >>> logits_of((x, w), slice(0, 2)).equal(logits_of(x @ w.T, slice(0, 2)))
    True
    """
    if isinstance(output, Tensor):
        return output.flatten(0, -2)[tokens]
    hidden, weight = output
    return functional.linear(hidden.flatten(0, -2)[tokens], weight)


class _Sliced(torch.autograd.Function):
    """The gradients are computed with the loss, while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, ignored: int, smoothing: float, at_once: int
    ) -> Tensor:
        # 131,072 tokens and a vocabulary of 50,257 at 2^28 logits: 25 slices of 5,341 tokens.
        counted = target != ignored
        rows = max(1, at_once // len(weight))
        losses, to_hidden, to_weight = [], [], torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for x, y, counts in zip(*(part.split(rows) for part in (hidden, target, counted)), strict=True):
            logits = functional.linear(x, weight)  # in bf16 under autocast
            wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
            log_p, y = wide.log_softmax(-1), torch.where(counts, y, 0)[:, None]
            del wide
            # -(1 - s) log p[y] - s mean(log p), of every row; its gradient to the logits is p - (1 - s) onehot(y) - s / V.
            each = (smoothing - 1) * log_p.gather(1, y)[:, 0] - smoothing * log_p.mean(-1)
            losses.append(torch.where(counts, each, 0).sum())
            if not any(ctx.needs_input_grad):
                continue
            to_logits = log_p.exp_().sub_(smoothing / len(weight))  # the probabilities minus the target
            to_logits.scatter_add_(1, y, to_logits.new_full(y.shape, smoothing - 1)).masked_fill_(~counts[:, None], 0)
            to_logits = to_logits.to(logits.dtype)
            to_hidden.append((to_logits @ weight).to(hidden.dtype))
            if to_weight is not None:
                to_weight += to_logits.T @ x
        # All targets ignored: the loss is 0 / 0, nan as in torch, and the gradients are zeros divided by 1.
        count = counted.sum()
        ctx.save_for_backward(torch.cat(to_hidden) if to_hidden else None, to_weight, count.clamp(min=1))
        return torch.stack(losses).sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *totals, count = ctx.saved_tensors
        return (*(None if total is None else total * (gradient / count) for total in totals), None, None, None, None)
