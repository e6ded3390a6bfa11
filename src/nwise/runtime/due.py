"""Gradients that are due in later calls, computed early for a checkpoint.

Under a delay the passes of some mini-batches are still to come at any moment. Their graphs cannot be saved, but their gradients
can: the passes need no further input. A delay of 2, saved after call 2; the digit is the mini-batch::

    call               0    1    2   | saved |   3    4    5
    forward            F0   F1   F2              F3   F4   F5
    passes             .    .    W0     W1 W2    .    .    W3
    left in .grad      .    .    g0              g1   g2   g3      the same with and without the checkpoint

They belong to the weights of their forwards, so code that loads other weights should call `Pipeline.forget_pending`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from nwise.stage.graph import add_to_grad

Gradients = Mapping[Tensor, Tensor]


class DueGradients(dict[int, Gradients]):
    """Gradients by the call that leaves them in ``.grad``."""

    def put(self, call: int, parameters: Iterable[Tensor]) -> None:
        """Take the gradients of parameters from ``.grad``, and add them to those that the call already leaves."""
        self.leave(call)
        self[call] = {p: p.grad for p in parameters if p.grad is not None}
        for p in self[call]:
            p.grad = None

    def leave(self, call: int) -> None:
        """Add the gradients of a call to ``.grad``, but for parameters that have been frozen since."""
        for p, gradient in self.pop(call, {}).items():
            if p.requires_grad:
                add_to_grad(p, gradient)

    def by_call(self) -> list[Gradients]:
        """Return copies of the gradients of the next calls, in order."""
        return copied(self[call] for call in sorted(self))


def copied(calls: Iterable[Gradients]) -> list[Gradients]:
    """Return copies of gradients."""
    # A gradient becomes a parameter's `.grad`, which clipping and optimizers change in place.
    return [{p: gradient.clone() for p, gradient in call.items()} for call in calls]
