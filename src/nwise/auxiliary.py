"""Auxiliary losses inside a stage, such as the balance loss of a mixture of experts.

A stage returns its output, and its loss is computed elsewhere. `inject` adds a second loss on the way: the forward is the
identity, and the backward adds the gradient of the auxiliary loss.

    x --> layer --> y --> inject --> y      gradient of y: as it comes
                    `--> aux ----'          gradient of aux: the share of the micro-batch

It counts as a part of every loss that is computed from the stage's output, once for each, whatever the number of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, aux: Tensor) -> Tensor:
        ctx.like = aux.detach()
        return y.view_as(y)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> tuple[Tensor, Tensor]:
        # The gradient of y passes as it comes. `aux` is a mean over the micro-batch's samples, 3 of 4, so its gradient is 3/4.
        return gradients[0], torch.ones_like(ctx.like) * PRESENT.share  # type: ignore[attr-defined]


@dataclass
class _Present:
    """What a pipeline sets: the weight of auxiliary losses in the walk that is under way."""

    share: float = 1.0  # outside a pipeline a loss counts as in plain PyTorch
    apply: Any = _Inject.apply  # the function behind `inject`


# The backward may run in a thread of autograd, so this is not a variable of the thread.
PRESENT = _Present()


def allow_compiled_blocks() -> None:
    """Let compiled blocks call `inject` instead of tracing it, with the share of the walk that they were traced with."""
    if PRESENT.apply == _Inject.apply:
        PRESENT.apply = torch.compiler.disable(_Inject.apply)


def inject(y: Tensor, aux: Tensor) -> Tensor:
    """Return `y`, and let training minimise an auxiliary loss too.

    Call it in the forward of a stage or head. In a pipeline the loss is added to every loss that is computed from `y`: stage i
    gets its gradient with weight ``sum_j C[j, i]`` over the losses j from this stage on, as the definition
    (`nwise.reference_grads`) has it. Micro-batches weight it by their share of the samples, also if the loss ignores some
    targets, so `aux` is a mean over samples. The losses that `Pipeline.step` returns do not contain it.

    Args:
        y: a tensor on the way to the output, floating-point.
        aux: the auxiliary loss, one number, already multiplied by its coefficient.

    Raises:
        ValueError: `aux` is not one number.

    >>> layer = torch.nn.Linear(2, 2)
    >>> hidden = layer(torch.ones(1, 2))
    >>> y = inject(hidden, 0.1 * hidden.square().mean())
    >>> y.equal(hidden)
    True
    """
    if aux.numel() != 1 or not aux.is_floating_point():
        raise ValueError(
            f"`aux` should be one floating-point number, the mean over the samples. Found {aux.dtype} of shape "
            f"{list(aux.shape)}; take the mean, and multiply it by its coefficient."
        )
    result: Tensor = PRESENT.apply(y, aux)
    return result
