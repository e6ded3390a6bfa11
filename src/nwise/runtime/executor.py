"""The executor: runs the computations of one rank in one call; its mail brings what they need from other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import cast

import torch

from nwise.microbatch import Batch
from nwise.randomness import Draws
from nwise.runtime.compression import Wire
from nwise.runtime.mail import Memory, Tell
from nwise.runtime.processes import Doing, Processes
from nwise.schedule.actions import Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Tape
from nwise.tensors import Tensors

_NOTHING_ELSE = nullcontext()  # made once: a step enters it for every task


class Executor:
    """Runs the lists of one rank.

    Args:
        processes: the processes.
        stages: this rank's stages, by index.
        wire: the form in which messages travel.
        device: device of the stages' tensors.

    Attributes:
        mail: the messages from and to other ranks.
        tapes: tapes of the mini-batches with passes to come, by number and stage.
    """

    def __init__(self, processes: Processes, stages: Mapping[int, Stage], wire: Wire, device: torch.device) -> None:
        self._processes, self._stages, self._wire = processes, stages, wire
        self._observed = processes.size > 1
        self.mail = processes.mail(stages, wire, device)
        self.tapes: dict[int, Mapping[int, Sequence[Tape]]] = {}

    def add(self, schedule: Schedule, step: int, batch: Batch) -> object:
        """Add a mini-batch; return what it looks like to the other ranks (`Mail.add`)."""
        minibatch = step % len(schedule.flows)
        tapes = self.tapes[step] = {k: stage.tapes(schedule, minibatch, batch) for k, stage in self._stages.items()}
        if 0 in tapes:
            for tape, inputs in zip(tapes[0], batch.inputs, strict=True):
                tape.inputs = inputs
        return self.mail.add(schedule, step, batch.inputs)

    def drop(self, step: int) -> None:
        """Drop a mini-batch."""
        self.tapes.pop(step)
        self.mail.drop(step)

    def execute(self, schedule: Schedule, step: int, draws: Draws, tell: Tell) -> None:
        """Run the list of a call.

        Args:
            schedule: the schedule of all ranks.
            step: number of the call.
            draws: what seeds the random numbers of its mini-batch.
            tell: function called after each action, or None.
        """
        self._compute(schedule, step, draws, tell, self.mail.segments(schedule, step, self.tapes, tell))

    def record(self, schedule: Schedule, step: int, batch: Batch, memory: Memory) -> None:
        """Run the computations of a call from memory to memory, without messages and updates."""
        self.add(schedule, step, batch)
        try:
            with torch.enable_grad():
                self._compute(schedule, step, batch.draws, None, self.mail.recorded(schedule, step, self.tapes, memory))
        finally:
            self.drop(step)

    def _compute(
        self, schedule: Schedule, step: int, draws: Draws, tell: Tell, segments: Iterable[Sequence[int]]
    ) -> None:
        # A result goes to the tape of a neighbour on this rank, as its inputs (of F) or a message (of I and B), or to the mail.
        wire, mail, tasks = self._wire, self.mail, schedule.graph.tasks
        compressed, completing = wire.compression is not None, schedule.completing if mail.replicas else ()
        for i, segment in enumerate(segments):
            if i:
                draws.next_segment()
            for task in segment:
                action = tasks[task]
                kind, k, m, q, _, age = action
                begin = time.perf_counter()
                if self._observed:
                    self._processes.doing = Doing(step, action, begin)
                tapes = self.tapes.get(step - age)
                if tapes is None:
                    continue
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
