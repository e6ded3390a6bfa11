"""Gradients that are due in later calls: those computed early for a checkpoint, and writes that make all of them meaningless.

Under a delay the passes of some mini-batches are still to come at any moment. Their graphs cannot be saved, but their gradients
can: the passes need no further input. A delay of 2, saved after call 2; the digit is the mini-batch::

    call               0    1    2   | saved |   3    4    5
    forward            F0   F1   F2              F3   F4   F5
    passes             .    .    W0     W1 W2    .    .    W3
    left in .grad      .    .    g0              g1   g2   g3      the same with and without the checkpoint

An optimizer's updates in between are meant. Weights that are loaded or copied from elsewhere make the gradients that are due
meaningless. Every write raises a tensor's version counter, so the counters are read after each step and around each update, and
the writes between are counted::

    step ------ optimizer.step() ------ step
        | same? |               | same? |        if not, something else has written

Two kinds of write mean no harm. A swap writes other weights for an evaluation, and then the present ones again. A clamp or a
projection belongs to the update: the loop writes as often after every `optimizer.step()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nwise._torch import version
from nwise.stage.hooks import add_to_grad, around_updates
from nwise.stage.stage import Stage
from nwise.tensors import sample

Gradients = Mapping[Tensor, Tensor]

_BECAUSE = (
    "the weights were written outside `optimizer.step()`, as by loading (what every update writes, write in a hook, "
    "`optimizer.register_step_post_hook`; from the second update on nwise takes it for a part of the update anyway)"
)


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


class Written:
    """Notices writes to the parameters of stages, without their heads, between two steps that belong to no update."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._seen: dict[Tensor, tuple[int, int, Tensor]] = {}  # version, memory and some values
        self._writes: Counter[Tensor] = Counter()  # since the last step, outside of optimizers
        self._changed = False  # whether they have changed values
        # How often each update writes to a parameter. Without an optimizer, the writes after the first gradients are the update.
        self._usual: int | None = None
        self._graded = False  # whether there were gradients after the last step
        self._updated = False  # whether an optimizer has run since
        self._depth = 0  # of calls of an optimizer's `step` inside one another
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Begin to watch, after a step."""
        self._note(self._parameters())
        self._graded = any(p.grad is not None for p in self._seen)
        self._updated = self._changed = False
        self._writes.clear()
        self._depth = 0
        if not self._hooks:
            self._hooks = around_updates(self._before_update, self._after_update)

    def stop(self) -> None:
        """End the watch."""
        self._seen = {}
        while self._hooks:
            self._hooks.pop().remove()

    def found(self, *, several: bool) -> str:
        """Return what has happened if something has written to the parameters, or has put others into their place.

        Raises:
            ValueError: it has, and there are `several` processes, of which the others cannot know of it.
        """
        if not self._seen:
            return ""
        parameters = self._parameters()
        # Replaced one by one, as by loading with assign=True.
        replaced = len(parameters) == len(self._seen) and any(p not in self._seen for p in parameters)
        self._count()
        # A clamp after every `optimizer.step()`; at the second step weights are loaded, too:
        #
        #     steps so far       1      2      3
        #     writes             1      2      1
        #     usual              None   1      2  ->  1
        #     due gradients      lost   lost   stay
        most = max(self._writes.values(), default=0)
        if self._usual is None and self._graded and not self._updated:
            self._usual = most
        more = self._changed and most > (self._usual or 0)
        if self._updated:
            self._usual = most if self._changed or self._usual is None else min(most, self._usual)
        if not replaced and not more:
            return ""
        if several:
            raise ValueError(
                f"All gradients should be applied before a change. Found that {_BECAUSE}; load on all ranks, and call "
                "`pipe.forget_pending()` on all of them."
            )
        return _BECAUSE

    def _parameters(self) -> list[Tensor]:
        return [p for stage in self._stages for p in stage.learns]

    def _before_update(self, *_: object) -> None:
        # An optimizer may call others inside its step, and write between their steps.
        if not self._depth:
            self._count()
        self._depth += 1

    def _after_update(self, *_: object) -> None:
        self._updated = True
        self._depth -= 1
        self._note(self._seen)

    def _note(self, parameters: Iterable[Tensor]) -> None:
        """Note the state of parameters; take a sample only of those that have changed."""
        seen = self._seen
        self._seen = {p: seen[p] if p in seen and _same(p, seen[p]) else _state(p) for p in parameters}

    def _count(self) -> None:
        """Count the writes since the last note."""
        for p, state in self._seen.items():
            if not _same(p, state):
                self._writes[p] += version(p) - state[0] or 1
                self._changed |= not torch.equal(sample(p), state[2])


def _state(parameter: Tensor) -> tuple[int, int, Tensor]:
    """Return what a write changes: the version, or with ``p.data = other`` the memory; and values to tell a swap by."""
    return version(parameter), parameter.data_ptr(), sample(parameter)


def _same(parameter: Tensor, state: tuple[int, int, Tensor]) -> bool:
    """Return whether nothing has written to a parameter."""
    return version(parameter) == state[0] and parameter.data_ptr() == state[1]
