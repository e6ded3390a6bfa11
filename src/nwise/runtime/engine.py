"""The engine: runs the calls of one rank.

One process is one rank with all stages. A rank waits only for messages: it begins its next call as soon as its own list is done.
The engine computes; its mail (`nwise.runtime.mail`) brings what a segment of its list needs from other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import cast

import torch

from nwise.microbatch import Batch
from nwise.randomness import Draws
from nwise.runtime.compression import Compression, Wire
from nwise.runtime.mail import Memory, Tell
from nwise.runtime.processes import Doing, Processes
from nwise.runtime.received import Received
from nwise.schedule.actions import Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Tape
from nwise.tensors import Tensors, each

__all__ = ["Engine"]

# Called after each action of this rank with the step, the action, and its start and end in seconds of `time.perf_counter`.
Recorder = Callable[[int, Action, float, float], None]
OnAction = Callable[[Action], None] | None
_NOTHING_ELSE = nullcontext()  # made once: a step enters it for every task


class Engine:
    """Runs the stages of one rank. All processes make their engines together.

    Args:
        processes: the processes.
        stages: this rank's stages.
        device: device of the stages' tensors.
        compression: compression of all messages between two stages; default: none.

    Attributes:
        recorder: None, or a function called with the start and end of every action.
        received: None, or what keeps what the stages receive in a step that is compared (`nwise.checking`).
        sent: bytes that the last step sent as activations and as gradients.
        mail: the messages from and to other ranks.
        tapes: those of the mini-batches with passes to come, by number, stage and micro-batch.
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
        self.sent, self.device = [0, 0], device
        self._processes, self._stages = processes, {stage.index: stage for stage in stages}
        self._wire = Wire(compression)
        self.mail = processes.mail(self._stages, self._wire, device)
        self.tapes: dict[int, Mapping[int, Sequence[Tape]]] = {}
        self.next = 0

    @property
    def bytes_of_last_step(self) -> dict[str, list[int]]:
        """The bytes of activations and of gradients that the last step sent, and those that its mini-batch should send."""
        return {"measured": self.sent, "predicted": self.mail.predicted}

    def run(self, schedule: Schedule, step: int, batch: Batch, on_action: OnAction = None) -> None:
        """Run one call: the forwards of a mini-batch, and the passes that are due; fill every ``.grad`` of this rank.

        Args:
            schedule: the schedule of all ranks.
            step: number of the mini-batch.
            batch: the data; only the first stage uses the values of `inputs`, other ranks their shapes.
            on_action: function called after each action, or None.

        Raises:
            RankError: this or another rank failed.
        """
        if schedule.oldest:
            # The last passes come in a later call, when the caller may have reused the memory of the batch.
            batch = replace(batch, inputs=[each(inputs, torch.clone) for inputs in batch.inputs])
        with self._call(schedule, step, self._add(schedule, step, batch)):
            self._compute(schedule, step, batch.draws, _teller(self._processes, step, self.recorder, on_action))

    def record(self, schedule: Schedule, step: int, batch: Batch, memory: Memory) -> None:
        """Run the computations of a call from memory to memory, without messages and updates."""
        self._add(schedule, step, batch)
        try:
            with torch.enable_grad():
                self._compute(schedule, step, batch.draws, None, memory)
        finally:
            del self.tapes[step]
            self.mail.drop(step)

    def replay(
        self, schedule: Schedule, step: int, inputs: Sequence[Tensors], memory: Memory, launch: Callable[[int], None]
    ) -> None:
        """Run a recorded call, whose segments `launch` computes by index; only the shapes of the model's `inputs` count."""
        self.tapes[step] = {}  # all passes are recorded
        with self._call(schedule, step, self.mail.add(schedule, step, inputs)):
            for i, _ in enumerate(self.mail.replayed(schedule, step, memory)):
                launch(i)

    def run_without_batch(self, schedule: Schedule, recorder: Recorder | None = None) -> None:
        """Run a call that has only passes of earlier mini-batches; tell `recorder` of its actions."""
        call = self.next
        with self._call(schedule, call, ""):
            self._compute(schedule, call, Draws(), _teller(self._processes, call, recorder, None))

    def forget(self) -> None:
        """Drop all mini-batches, and the errors of compressed messages."""
        self.drop()
        self._wire.errors.clear()
        self.mail.forget()

    def drop(self) -> None:
        """Drop all mini-batches."""
        self.tapes.clear()
        self.received = None

    def infer(self, inputs: Tensors, step: int, call: Callable[[int, Tensors], Tensors]) -> None:
        """Run only the forwards of all stages.

        Args:
            inputs: inputs of the first stage.
            step: number of the previous mini-batch.
            call: function from a stage's index and inputs to its outputs.
        """
        with self._processes.watched("a forward"):
            self.mail.infer(inputs, step, call)

    def _add(self, schedule: Schedule, step: int, batch: Batch) -> object:
        """Add a mini-batch; return what it looks like to the other ranks (`Mail.add`)."""
        minibatch = step % len(schedule.flows)
        tapes = self.tapes[step] = {k: stage.tapes(schedule, minibatch, batch) for k, stage in self._stages.items()}
        if 0 in tapes:
            for tape, inputs in zip(tapes[0], batch.inputs, strict=True):
                tape.inputs = inputs
        return self.mail.add(schedule, step, batch.inputs)

    def _compute(self, schedule: Schedule, step: int, draws: Draws, tell: Tell, memory: Memory | None = None) -> None:
        """Run the computations of a call, with its messages or from memory to memory."""
        call = schedule, step, self.tapes
        segments = self.mail.segments(*call, tell) if memory is None else self.mail.recorded(*call, memory)
        # A result goes to the tape of a neighbour on this rank, as its inputs (of F) or a message (of I and B), or to the mail.
        wire, mail, tasks, observed = self._wire, self.mail, schedule.graph.tasks, self._processes.size > 1
        received = self.received
        watched = observed or tell is not None
        compressed, completing = wire.compression is not None, schedule.completing if mail.replicas else ()
        for i, segment in enumerate(segments):
            if i:
                draws.next_segment()
            for task in segment:
                action = tasks[task]
                kind, k, m, q, _, age = action
                begin = time.perf_counter() if watched else 0.0
                if observed:
                    self._processes.doing = Doing(step, action, begin)
                tapes = self.tapes.get(step - age)
                if tapes is None:
                    continue
                if received is not None:
                    received.note(task, step - age, tapes[k][m])
                # After the last task that adds to gradients they are complete, so their sums over replicas begin during it.
                with mail.replicas[k].summing(head=kind is Kind.HEAD) if task in completing else _NOTHING_ELSE:
                    made = self._stages[k].run(action, tapes[k][m], continued=task in schedule.continued)
                # Without a name for what is compressed, which would keep the message beyond its last pass.
                if kind is Kind.FORWARD and k + 1 in tapes:
                    tapes[k + 1][m].inputs = cast(Tensors, wire.through(None, made) if compressed else made)
                elif q is not None and k - 1 in tapes:
                    tapes[k - 1][m].messages[q] = wire.through(action, made) if compressed else made
                elif kind is Kind.FORWARD or q is not None:
                    mail.leave(action, made)
                if tell is not None:
                    tell(action, begin)

    @contextmanager
    def _call(self, schedule: Schedule, step: int, batch: object) -> Iterator[None]:
        """Let the body run the list of one call. `batch` is what the new mini-batch looks like."""
        self.next, errors = step + 1, dict(self._wire.errors)
        try:
            with self._processes.watched(f"step {step}", batch), torch.enable_grad():
                self.mail.start(schedule, step)
                yield
        except BaseException:
            self.next, self._wire.errors = step, errors
            raise
        for number in [n for n in self.tapes if n <= step - schedule.oldest]:
            del self.tapes[number]
            self.mail.drop(number)
        self.sent = self.mail.sent


def _teller(processes: Processes, step: int, recorder: Recorder | None, on_action: OnAction) -> Tell:
    """Return what tells a recorder and the user's function what this rank has done; None if there are none."""
    if recorder is None and on_action is None:
        return None

    def tell(action: Action, begin: float) -> None:
        if recorder is not None:
            recorder(step, action, begin, time.perf_counter())
        if on_action is not None:
            processes.doing = Doing(step, action, time.perf_counter(), over=True)
            on_action(action)

    return tell
