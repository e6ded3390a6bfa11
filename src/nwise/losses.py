"""Loss functions beyond torch's own.

A loss function ``loss_fn(head_output, target)`` returns the mean over its micro-batch. If it averages over anything but
samples, it needs a method ``count(target)`` that returns the number of terms, by which uneven micro-batches are weighted: a
number, or a tensor of one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nwise.tensors import Tensors, names

__all__ = ["AT_ONCE", "TokenCrossEntropy", "explain", "logits_of"]

AT_ONCE = 2**28  # logits: half a GiB in bf16, one in float32


class TokenCrossEntropy(nn.CrossEntropyLoss):
    """Mean cross-entropy over the tokens ``[B, T]`` of logits ``[B, T, V]``, or of their factors ``[B, T, D]`` and ``[V, D]``.

    Of factors, as `nwise.network.layers.Vocabulary` returns them, it multiplies a slice of tokens at a time: the logits never
    exist as a whole.

    With a `fraction` below 1 it is the mean over that part of the micro-batch's tokens, drawn at random, in training mode. Its
    gradient is on average that of the mean over all tokens. Of factors it multiplies the drawn tokens only, so a head that
    returns them (``Vocabulary(..., at_once=0)``) gets cheaper by the fraction. A step draws the same tokens however many
    processes run it, and again after a resume.

    Args:
        ignore_index: target that does not count; default: -100.
        label_smoothing: weight of the uniform distribution in the target; default: 0.
        at_once: most logits of a slice; default: 2^28, half a GiB in bf16.
        fraction: part of the tokens to draw, above 0; fewer tokens than that may count, and then all of them do. Default: 1.

    Raises:
        ValueError: `fraction` is not above 0 and at most 1.

    >>> import torch
    >>> round(TokenCrossEntropy()(torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.long)).exp().item(), 4)
    7.0
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, at_once: int = AT_ONCE, fraction: float = 1.0
    ) -> None:
        super().__init__(ignore_index=ignore_index, label_smoothing=label_smoothing)
        if not 0 < fraction <= 1:
            raise ValueError(
                f"`fraction` should be above 0 and at most 1. Found {fraction}; 0.25 stands for a quarter of the tokens."
            )
        self.at_once = at_once
        self.fraction = fraction

    def forward(self, logits: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        hidden, weight = (logits, None) if isinstance(logits, Tensor) else logits
        if hidden.shape[:2] != target.shape:
            raise ValueError(
                f"The target of `TokenCrossEntropy` should be tokens of shape {list(hidden.shape[:2])}, as the logits have. "
                f"Found shape {list(target.shape)}."
            )
        if self.weight is not None or self.reduction != "mean":
            raise ValueError(
                "`TokenCrossEntropy` should be the mean over tokens of equal weight. Found an assigned `weight` or `reduction`; "
                "use `nn.CrossEntropyLoss` on logits of shape [B, V, T]."
            )
        rows = hidden.flatten(0, 1)
        labels = target.flatten()
        if self.fraction < 1 and self.training:
            drawn = self._draw(labels)
            rows = rows[drawn]
            labels = labels[drawn]
        if weight is None:
            return super().forward(rows, labels)
        options = (self.ignore_index, self.label_smoothing, self.at_once)
        loss: Tensor = _Sliced.apply(rows, weight, labels, *options)  # type: ignore[no-untyped-call]
        return loss

    def _draw(self, labels: Tensor) -> Tensor:
        """Return the places of random tokens, as many as the fraction says; ignored ones only if too few count."""
        # With the global generators, which a step seeds for every head and micro-batch. Of 8 tokens, two of them ignored, and a
        # fraction of 0.25: the two with the lowest of  0.3  2  0.8  0.1  0.5  2  0.9  0.2,  so the mean is over two that count.
        keys = torch.rand(len(labels), device=labels.device).masked_fill_(labels == self.ignore_index, 2.0)
        return keys.topk(math.ceil(self.fraction * len(labels)), largest=False).indices

    def count(self, target: Tensor) -> Tensor:
        """Return the number of tokens that count."""
        return (target != self.ignore_index).sum()


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
    """The mean cross-entropy of ``hidden @ weight.T``, whose gradients are computed with it, while the logits are there.

    A vocabulary of 50,257 makes 26 GB of logits for 131,072 tokens in bf16, and as much again several times over in a loss::

        for some rows:   logits = hidden @ weight.T  ->  loss, and its gradients to hidden and weight  ->  forget the logits
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, ignored: int, smoothing: float, at_once: int
    ) -> Tensor:
        # 131,072 tokens and a vocabulary of 50,257 at 2^28 logits: 25 slices of 5,341 tokens.
        counted = target != ignored
        rows = max(1, at_once // len(weight))
        losses = []
        to_hidden = []
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for x, y, counts in zip(*(part.split(rows) for part in (hidden, target, counted)), strict=True):
            logits = functional.linear(x, weight)  # in bf16 under autocast
            wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
            log_p = wide.log_softmax(-1)
            y = torch.where(counts, y, 0)[:, None]
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


def explain(error: Exception, where: str, inputs: Tensors, target: Tensors | None) -> None:
    """Add to an error of a head or loss the place that it comes from; raise TypeError if a target is missing."""
    if target is None and isinstance(error, TypeError | AttributeError):
        raise TypeError(
            f"The loss of {where} should receive a target by name, `pipe.step(x, target=y)`. Found none: {error}"
        ) from error
    if names(inputs) and isinstance(error, TypeError):
        known = ", ".join(names(inputs))
        text = "by name; `nwise.heads.OnFirstOutput` takes the hidden state alone"
        error.add_note(f"nwise: the head gets {known} {text}")
    if (
        target is not None
        and inputs[0].dim() == 3
        and target[0].dim() == 2
        and isinstance(error, RuntimeError | ValueError)
    ):
        error.add_note("nwise: `nwise.losses.TokenCrossEntropy()` is the loss of logits for every token")
    if "not have been used in the graph" in str(error):
        error.add_note(
            "nwise: the graph of a loss begins at its stage's output, so it cannot differentiate by the network's input or by "
            "hidden values; compute such a term in the stage, and add it by `nwise.inject`"
        )
    given, wanted = ([list(x.shape) for x in part or ()] for part in (inputs, target))
    error.add_note(f"nwise: in the head or loss of {where}, given {given}, with a target of {wanted}")
