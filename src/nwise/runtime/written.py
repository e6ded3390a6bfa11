"""Weights written by something other than an optimizer, while gradients of earlier weights are still due.

Under a delay the gradients of the last mini-batches are still to come. An optimizer's updates are meant. Weights that are loaded
or copied from elsewhere make those gradients meaningless. Every write raises a tensor's version counter, so the counters are
read after each step and around each update, and the writes between are counted:

    step ------ optimizer.step() ------ step
        | same? |               | same? |        if not, something else has written

Two kinds of write mean no harm. A swap writes other weights for an evaluation, and then the present ones again. A clamp or a
projection belongs to the update: the loop writes as often after every `optimizer.step()`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nwise._torch import version
from nwise.tensors import sample

_BECAUSE = (
    "the weights were written outside `optimizer.step()`, as by loading (what every update writes, write in a hook, "
    "`optimizer.register_step_post_hook`; from the second update on nwise takes it for a part of the update anyway)"
)


class Written:
    """Notices writes to parameters between two steps that belong to no update."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, int, Tensor]] = {}  # version, memory and some values
        self._writes: Counter[Tensor] = Counter()  # since the last step, outside of optimizers
        self._changed = False  # whether they have changed values
        # How often each update writes to a parameter. Without an optimizer, the writes after the first gradients are the update.
        self._usual: int | None = None
        self._updated = self._graded = False
        self._hooks: list[Any] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Begin to watch these parameters, after a step."""
        self._note(parameters)
        self._graded = any(p.grad is not None for p in self._seen)
        self._updated = self._changed = False
        self._writes.clear()
        self._depth = 0  # of calls of `step` inside one another
        if not self._hooks:
            # The hooks must not keep this object, with its parameters, alive.
            before, after = weakref.WeakMethod(self._before_update), weakref.WeakMethod(self._after_update)
            self._hooks = [
                register_optimizer_step_pre_hook(lambda *_: _call(before)),
                register_optimizer_step_post_hook(lambda *_: _call(after)),
            ]
            for hook in self._hooks:
                weakref.finalize(self, hook.remove)

    def stop(self) -> None:
        """End the watch."""
        self._seen = {}
        while self._hooks:
            self._hooks.pop().remove()

    def found(self, parameters: Sequence[Tensor], *, several: bool) -> str:
        """Return what has happened if something has written to the parameters, or has put others into their place.

        Args:
            parameters: the parameters that were watched.
            several: whether there are other processes, which cannot know of it.

        Raises:
            ValueError: it has, and there are other processes.
        """
        if not self._seen:
            return ""
        # Replaced one by one, as by loading with assign=True.
        replaced = len(parameters) == len(self._seen) and any(p not in self._seen for p in parameters)
        self._count()
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

    def _before_update(self) -> None:
        # An optimizer may call others inside its step, and write between their steps.
        if not self._depth:
            self._count()
        self._depth += 1

    def _after_update(self) -> None:
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


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
