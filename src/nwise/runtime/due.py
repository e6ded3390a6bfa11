"""Gradients that were computed before the call that leaves them, so a checkpoint can hold them.

Under a delay the passes of some mini-batches are still to come at any moment. Their graphs cannot be saved, but their gradients
can: the passes need no further input. A delay of 2, saved after call 2; the digit is the mini-batch::

    call               0    1    2   | saved |   3    4    5
    forward            F0   F1   F2              F3   F4   F5
    passes             .    .    W0     W1 W2    .    .    W3
    left in .grad      .    .    g0              g1   g2   g3      the same with and without the checkpoint
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from nwise.stage.hooks import add_to_grad

Gradients = Mapping[Tensor, Tensor]


class DueGradients:
    """Gradients by the call that leaves them in ``.grad``."""

    def __init__(self) -> None:
        self._calls: dict[int, Gradients] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: int, parameters: Iterable[Tensor]) -> None:
        """Take the gradients of parameters from ``.grad``, and add them to those that the call already leaves."""
        moved = {p: p.grad for p in parameters if p.grad is not None}
        for p, early in self._calls.get(call, {}).items():
            moved[p] = early if p not in moved else early + moved[p]
        self._calls[call] = moved
        for p in moved:
            p.grad = None

    def leave(self, call: int) -> None:
        """Add the gradients of a call to ``.grad``, but for parameters that have been frozen since."""
        for p, gradient in self._calls.pop(call, {}).items():
            if p.requires_grad:
                add_to_grad(p, gradient)

    def replace(self, call: int, calls: Sequence[Gradients]) -> None:
        """Replace all gradients by copies of those of a call and of the calls after it."""
        self._calls = dict(enumerate(_copied(calls), call))

    def by_call(self) -> list[Gradients]:
        """Return copies of the gradients of the next calls, in order."""
        return _copied(self._calls[call] for call in sorted(self._calls))

    def clear(self) -> None:
        """Drop all."""
        self._calls.clear()


def _copied(calls: Iterable[Gradients]) -> list[Gradients]:
    # A gradient becomes a parameter's `.grad`, which clipping and optimizers change in place.
    return [{p: gradient.clone() for p, gradient in call.items()} for call in calls]


def warn_of_loss(lost: int, because: str, stacklevel: int) -> None:
    """Warn that mini-batches were dropped before their gradients; `stacklevel` counts from the caller of this function."""
    warnings.warn(
        f"All gradients should be applied before a change. Found {lost} mini-batch{'es' * (lost > 1)} with gradients still due, "
        f"lost now because {because}; update while `pipe.drain()` returns True, or call `pipe.forget_pending()`.",
        stacklevel=1 + stacklevel,
    )
