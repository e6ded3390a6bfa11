"""Weights written by something other than an optimizer, while gradients of earlier weights are still due.

Under a delay the gradients of the last mini-batches are still to come. An optimizer's updates are meant. Weights that are loaded
or copied from elsewhere make those gradients meaningless. Every write raises a tensor's version counter, so the counters are
read after each step and around each update:

    step ------ optimizer.step() ------ step
        | same? |               | same? |        if not, something else has written
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nwise._torch import version

_BECAUSE = "the weights were written outside `optimizer.step()`, as by loading (hooks of an optimizer may write)"


class Written:
    """Notices writes to parameters between two steps that no optimizer of torch has made."""

    def __init__(self) -> None:
        self._counters: dict[Tensor, tuple[int, int]] = {}
        self._updated = self._written = self._graded = False
        self._by_hand: bool | None = (
            None  # whether the loop updates without an optimizer; unknown before its first gradients
        )
        self._hooks: list[Any] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Begin to watch these parameters, after a step."""
        self._counters = {p: _state(p) for p in parameters}
        self._graded = any(p.grad is not None for p in self._counters)
        self._updated = self._written = False
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
        self._counters = {}
        while self._hooks:
            self._hooks.pop().remove()

    def found(self, parameters: Sequence[Tensor], *, several: bool) -> str:
        """Return what has happened if something has written to the parameters, or has put others into their place.

        A loop that writes between its first steps with gradients, without an optimizer of torch, is taken to update by hand. Its
        updates cannot be told from other writes, so they are trusted.

        Args:
            parameters: the parameters that were watched.
            several: whether there are other processes, which cannot know of it.

        Raises:
            ValueError: it has, and there are other processes.
        """
        if not self._counters:
            return ""
        # Replaced one by one, as by loading with assign=True.
        replaced = len(parameters) == len(self._counters) and any(p not in self._counters for p in parameters)
        written = self._written or self._differ()
        if self._by_hand is None and self._graded:
            self._by_hand = written and not self._updated
        if not replaced and (self._by_hand or not written):
            return ""
        if several:
            raise ValueError(
                f"All gradients should be applied before a change. Found that {_BECAUSE}; load on all ranks, and call "
                "`pipe.forget_pending()` on all of them."
            )
        return _BECAUSE

    def _before_update(self) -> None:
        # An optimizer may call others inside its step, and write between their steps.
        self._written |= not self._depth and self._differ()
        self._depth += 1

    def _after_update(self) -> None:
        self._updated = True
        self._depth -= 1
        self._counters = {p: _state(p) for p in self._counters}

    def _differ(self) -> bool:
        return any(_state(p) != counter for p, counter in self._counters.items())


def _state(parameter: Tensor) -> tuple[int, int]:
    """Return what a write changes: the version, or with ``p.data = other`` the memory."""
    return version(parameter), parameter.data_ptr()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
