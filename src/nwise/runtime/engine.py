"""The engine: runs the calls of one rank.

A task has an age, and a store keeps the mini-batches in flight. A task of age a works in call c on mini-batch c - a, and is
skipped if there is none. So the first calls, the last ones and a resume are one rule. A delay of one::

    call            0     1     2     3, by `drain`
    forwards        F 0   F 1   F 2   .
    passes          .     W 0   W 1   W 2
    in flight       0     0 1   1 2   2

One process is one rank with all stages. A rank waits only for messages: it begins its next call as soon as its own list is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from nwise.checks import warn
from nwise.microbatch import Batch
from nwise.modes import autocast_dtype
from nwise.runtime.calls import Status
from nwise.runtime.compression import Codec, Compression
from nwise.runtime.due import DueGradients, Gradients, copied
from nwise.runtime.mailbox import Minibatch, Tell
from nwise.runtime.processes import Processes
from nwise.runtime.structure import restored_on_error
from nwise.runtime.work import RankWork, work_of
from nwise.schedule.actions import Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.graph import gradients_aside
from nwise.stage.stage import Stage, learning
from nwise.tensors import Tensors, each

if TYPE_CHECKING:
    from nwise.runtime.received import Received

__all__ = ["Engine"]

# Called after each action of this rank with the step, the action, and its start and end in seconds of `time.perf_counter`.
Recorder = Callable[[int, Action, float, float], None]
OnAction = Callable[[Action], None] | None


class Engine:
    """Runs the stages of one rank. All processes make their engines together.

    Args:
        processes: the processes.
        stages: this rank's stages, also an attribute.
        device: device of the stages' tensors.
        compression: compression of all messages between two stages; default: none.

    Attributes:
        recorder: None, or a function called with the start and end of every action.
        received: None, or what keeps what the stages receive in a step that is compared (`nwise.checking`).
        sent: bytes that the last step sent as activations and as gradients.
        mailbox: results on their way, from and to other ranks too.
        flying: the mini-batches with passes to come, by number.
        next: number of the call that follows the last one.
    """

    def __init__(
        self,
        processes: Processes,
        stages: Sequence[Stage],
        device: torch.device,
        compression: Compression | None = None,
    ) -> None:
        self.recorder: Recorder | None = None
        self.received: Received | None = None
        self.sent = [0, 0]
        self.device = device
        self.stages = stages
        self._processes = processes
        self._by_index = {stage.index: stage for stage in stages}
        self.mailbox = processes.mailbox(self._by_index, Codec(compression), device)
        self.flying: dict[int, Minibatch] = {}
        self.next = 0
        self._due = DueGradients()
        self._schedule: Schedule | None = None  # that of the mini-batches in flight
        self._work = RankWork((), (), {})
        self._autocast: torch.dtype | None = None  # of the last step

    @property
    def has_pending(self) -> bool:
        """Whether gradients are due."""
        return bool(self.flying or self._due)

    # Calls ------------------------------------------------------------------------------------------

    def run(self, schedule: Schedule, number: int, batch: Batch, on_action: OnAction = None) -> None:
        """Run one call: the forwards of a mini-batch, and the passes that are due; fill every ``.grad`` of this rank.

        An error drops all mini-batches in flight.

        Args:
            schedule: the schedule of all ranks, which `follow` has begun.
            number: number of the mini-batch.
            batch: the data; only the first stage uses the values of `inputs`, other ranks their shapes.
            on_action: function called after each action, or None.

        Raises:
            RankError: this or another rank failed.
        """
        with self._lost_on_error():
            if schedule.oldest:
                self._autocast = autocast_dtype(self.device)
                # The last passes come in a later call, when the caller may have reused the memory of the batch.
                batch = replace(batch, inputs=[each(inputs, torch.clone) for inputs in batch.inputs])
            look = self._add(number, batch)
            with self._call(number, look):
                self._compute(number, _teller(self._processes, number, self.recorder, on_action))
        self._due.leave(number)

    def follow(self, schedule: Schedule, number: int) -> None:
        """Turn to a schedule; drop what waits if the mini-batch does not follow the last one."""
        if number != self.next or (self._schedule is not None and schedule != self._schedule):
            self.forget("the strategy, M, the order, the trained parameters, or the number of the step changed")
        if self._schedule is None:
            self._begin(schedule, number)

    def drain(self) -> bool:
        """Run a call without a new mini-batch; return False, and run nothing, if no gradient is due.

        A call that raises restores every ``.grad``.
        """
        if not self.has_pending:
            return False
        call = self.next
        self._processes.announce("`drain`")
        with restored_on_error((), learning(self.stages)):
            if self.flying:
                self._run_passes(self.recorder)
            self._due.leave(call)
        self.next = call + 1
        return True

    def complete(self) -> list[Gradients]:
        """Run all passes that are left; return for each of the next calls the gradients that it leaves in ``.grad``."""
        if not self.flying:
            return self._due.by_call()
        call = self.next
        learns = learning(self.stages)
        sent = self.sent
        self._processes.announce("`pending_gradients`")
        with gradients_aside(learns):
            while self.flying:
                number = self.next
                self._run_passes()  # its passes belong to no step, so they are not recorded
                self._due.put(number, learns)
        self._begin(self._schedule, call)
        self.sent = sent
        return self._due.by_call()

    def restore(self, schedule: Schedule, number: int, calls: Sequence[Gradients]) -> bool:
        """Let calls from a number on leave the gradients that `complete` returned; return False if the delay is too short."""
        if len(calls) > schedule.oldest:
            return False
        self._begin(schedule, number)
        self._due.clear()
        self._due.update(enumerate(copied(calls), number))
        return True

    def forget(self, because: str = "") -> int:
        """Drop all that waits; return the number of mini-batches.

        Args:
            because: cause, for a warning if there are any; default: no warning.
        """
        lost = len(self.flying) + len(self._due)
        if lost:  # the others would wait for messages of the lost mini-batches
            self._processes.announce("`forget_pending`")
        if lost and because:
            warn(
                f"All gradients should be applied before a change. Found {lost} mini-batch{'es' * (lost > 1)} with gradients "
                f"still due, lost now because {because}; update while `pipe.drain()` returns True, or call "
                "`pipe.forget_pending()`."
            )
        self._drop()
        self._schedule = None
        if lost:
            self.mailbox.forget()
        return lost

    def record(self, schedule: Schedule, number: int, batch: Batch) -> None:
        """Run the computations of a call of one process for a recording (`nwise.capture`)."""
        self.follow(schedule, number)
        self._add(number, batch)
        try:
            with torch.enable_grad():
                self._compute(number, None)
        finally:
            del self.flying[number]
            self.mailbox.clear()

    def infer(self, inputs: Tensors, number: int, call: Callable[[int, Tensors], Tensors]) -> None:
        """Run only the forwards of all stages.

        Args:
            inputs: inputs of the first stage.
            number: number of the previous mini-batch.
            call: function from a stage's index and inputs to its outputs.
        """
        with self._processes.watched("a forward"):
            self.mailbox.infer(inputs, number, call)

    # Their parts ------------------------------------------------------------------------------------

    def _add(self, number: int, batch: Batch) -> object:
        """Put a mini-batch into the store; return what it looks like to the other ranks (`Mailbox.signature`)."""
        assert self._schedule is not None, "`follow` has set it"
        minibatch = number % len(self._schedule.flows)
        tapes = {stage.index: stage.tapes(self._schedule, minibatch, batch) for stage in self.stages}
        self.flying[number] = Minibatch(batch, tapes)
        return self.mailbox.signature(batch.inputs)

    def _compute(self, call: int, tell: Tell) -> None:
        """Run the computations of a call, with its messages."""
        schedule = self._schedule
        work = self._work
        mailbox = self.mailbox
        flying = self.flying
        assert schedule is not None, "`follow` has set it"
        tasks = schedule.graph.tasks
        stages = self._by_index
        processes = self._processes
        received = self.received
        several = processes.size > 1
        replicas = mailbox.replicas
        watched = several or tell is not None
        completes = work.completes if replicas else ()
        mailbox.begin(schedule, work, call, flying, tell)
        for task in work.calls[call % len(work.calls)]:
            kind, k, m, _, _, age = action = tasks[task]
            number = call - age
            minibatch = flying.get(number)
            if minibatch is None:
                continue
            given: dict[int | None, Any] = {}
            for made, q in work.reads[task]:
                given[q] = mailbox.take(made, number)
            if not k and kind is Kind.FORWARD:
                given[None] = minibatch.batch.inputs[m]
            begin = time.perf_counter() if watched else 0.0
            if several:
                processes.doing = Status(call, action, begin)
            tape = minibatch.tapes[k][m]
            if received is not None:
                received.note(task, number, tape, given)
            result = stages[k].run(action, tape, given, frees=task in schedule.frees)
            if not tape.passes_left and not tape.head_left:
                del minibatch.tapes[k][m]  # its tensors can go
            if task in completes:
                replicas[k].begin()
            if tell is not None:
                tell(action, begin)
            if task in mailbox.wanted:
                mailbox.put(task, number, result)
        mailbox.end()

    @contextmanager
    def _call(self, call: int, batch: object) -> Iterator[None]:
        """Let the body run the list of one call. `batch` is what the new mini-batch looks like."""
        assert self._schedule is not None, "`follow` has set it"
        self.next = call + 1
        try:
            with self._processes.watched(f"step {call}", batch), torch.enable_grad():
                yield
        except BaseException:
            self.next = call
            raise
        over = call - self._schedule.oldest
        self.flying.pop(over, None)
        self.sent = self.mailbox.sent

    def _run_passes(self, recorder: Recorder | None = None) -> None:
        """Run a call that has only passes of earlier mini-batches."""
        # The shapes of messages, and forwards that run again, depend on the modes of the last step.
        dtype = self._autocast
        call = self.next
        casting = torch.autocast(self.device.type, dtype, enabled=dtype is not None)
        with torch.inference_mode(False), casting, self._lost_on_error(), self._call(call, ""):
            self._compute(call, _teller(self._processes, call, recorder, None))

    def _begin(self, schedule: Schedule | None, call: int) -> None:
        """Begin a schedule at a call: no message of an earlier one is on its way."""
        if schedule is not None and schedule is not self._schedule:
            self._work = work_of(schedule, self._processes.place)
        self._schedule = schedule
        self.next = call

    @contextmanager
    def _lost_on_error(self) -> Iterator[None]:
        """Drop all that waits if the body raises."""
        try:
            yield
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        self.flying.clear()
        self.mailbox.clear()
        self._due.clear()
        self.received = None


def _teller(processes: Processes, step: int, recorder: Recorder | None, on_action: OnAction) -> Tell:
    """Return what tells a recorder and the user's function what this rank has done; None if there are none."""
    if recorder is None and on_action is None:
        return None

    def tell(action: Action, begin: float) -> None:
        if recorder is not None:
            recorder(step, action, begin, time.perf_counter())
        if on_action is not None:
            processes.doing = Status(step, action, time.perf_counter(), over=True)
            on_action(action)

    return tell
