"""What is pending on one rank: the mini-batches that wait for their delay, and the gradients that are due in later calls.

The engine runs one call. Under a delay a call leaves passes of its mini-batch to later ones. `Pending` connects the calls::

    step      forwards, and the passes that are due     a step that does not follow the one before drops what waits
    drain     passes only, with their gradients         after the last step
    complete  all passes, gradients kept for later      for a checkpoint; `restore` brings them back
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nwise.checks import warn
from nwise.modes import autocast_dtype
from nwise.runtime.due import DueGradients, Gradients, copied
from nwise.runtime.engine import Engine, Recorder
from nwise.runtime.processes import Processes
from nwise.runtime.structure import restored_on_error
from nwise.schedule.schedule import Schedule
from nwise.stage.graph import gradients_aside
from nwise.stage.stage import Stage, learning

__all__ = ["Pending"]


class Pending:
    """What waits for its delay on one rank.

    Args:
        engine: the engine of the rank, also an attribute.
        processes: the processes.
        stages: this rank's stages, also an attribute.
    """

    def __init__(self, engine: Engine, processes: Processes, stages: Sequence[Stage]) -> None:
        self.engine, self._processes, self.stages = engine, processes, stages
        self._schedule: Schedule | None = None
        self._due = DueGradients()
        self._autocast: torch.dtype | None = None  # of the last step
        processes.before_close(self._close)

    @property
    def has_some(self) -> bool:
        """Whether gradients are due."""
        return bool(self.engine.tapes or self._due)

    @contextmanager
    def around(self, schedule: Schedule, step: int) -> Iterator[None]:
        """Let the body run a step.

        Before it, drop what waits if the step does not follow the last one. After it, add the gradients that are due.
        """
        engine = self.engine
        if step != engine.next or (self._schedule is not None and schedule != self._schedule):
            self.forget("the strategy, M, the order, the trained parameters, or the number of the step changed")
        if self._schedule is None:
            self._begin(schedule, step)
        if schedule.oldest:
            self._autocast = autocast_dtype(engine.device)
        with self._lost_on_error():
            yield
        self._due.leave(step)

    def drain(self) -> bool:
        """Run a call without a new mini-batch; return False, and run nothing, if no gradient is due.

        A call that raises restores every ``.grad``.
        """
        engine = self.engine
        if not self.has_some:
            return False
        call = engine.next
        self._processes.begin("`drain`")
        with restored_on_error((), learning(self.stages)):
            if engine.tapes:
                self._call(engine.recorder)
            self._due.leave(call)
        engine.next = call + 1
        return True

    def complete(self) -> list[Gradients]:
        """Run all passes that are left; return for each of the next calls the gradients that it leaves in ``.grad``."""
        engine = self.engine
        if not engine.tapes:
            return self._due.by_call()
        call, learns, sent = engine.next, learning(self.stages), engine.sent
        self._processes.begin("`pending_gradients`")
        with gradients_aside(learns):
            while engine.tapes:
                number = engine.next
                self._call()  # its passes belong to no step, so they are not recorded
                self._due.put(number, learns)
        self._begin(self._schedule, call)
        engine.sent = sent
        engine.mail.forget()
        return self._due.by_call()

    def restore(self, schedule: Schedule, step: int, calls: Sequence[Gradients]) -> bool:
        """Let calls from `step` on leave the gradients that `complete` returned; return False if the delay is too short."""
        if len(calls) > schedule.oldest:
            return False
        self._begin(schedule, step)
        self._due.clear()
        self._due.update(enumerate(copied(calls), step))
        return True

    def forget(self, because: str = "") -> int:
        """Drop all that waits, and the errors of compressed messages; return the number of mini-batches.

        Args:
            because: cause, for a warning if there are any; default: no warning.
        """
        lost = len(self.engine.tapes) + len(self._due)
        if lost:  # the others would wait for messages of the lost mini-batches
            self._processes.begin("`forget_pending`")
        if lost and because:
            warn(
                f"All gradients should be applied before a change. Found {lost} mini-batch{'es' * (lost > 1)} with gradients "
                f"still due, lost now because {because}; update while `pipe.drain()` returns True, or call "
                "`pipe.forget_pending()`."
            )
        self._due.clear()
        self._schedule = None
        self.engine.forget()
        return lost

    def _call(self, recorder: Recorder | None = None) -> None:
        """Run a call that has only passes of earlier mini-batches."""
        assert self._schedule is not None, "mini-batches wait for their passes"
        # The shapes of messages, and forwards that run again, depend on the modes of the last step.
        dtype = self._autocast
        casting = torch.autocast(self.engine.device.type, dtype, enabled=dtype is not None)
        with torch.inference_mode(False), casting, self._lost_on_error():
            self.engine.run_without_batch(self._schedule, recorder)

    def _begin(self, schedule: Schedule | None, call: int) -> None:
        """Begin a schedule at a call: no message of an earlier one is on its way."""
        self._schedule = schedule
        self.engine.mail.first = self.engine.next = call

    @contextmanager
    def _lost_on_error(self) -> Iterator[None]:
        """Drop all that waits if the body raises."""
        try:
            yield
        except BaseException:
            self.engine.drop()
            self._due.clear()
            raise

    def _close(self) -> None:
        with self._processes.watched(None):
            self.forget()
            self.engine.mail.close()
