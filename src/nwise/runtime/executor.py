"""The executor: runs the list of one rank in one call, segments of computations with messages between them.

A call runs in one of three ways. To the other ranks the first and the last are the same, so each rank chooses alone::

    execute    receive, compute,                        send
    record              compute, from memory to memory            computes and sends nothing (`nwise.capture`)
    replay     receive, copy to memory, launch, copy,   send
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch

from nwise.microbatch import Batch
from nwise.modes import autocast_dtype
from nwise.randomness import Draws
from nwise.runtime.compression import Wire
from nwise.runtime.ledger import Exchanged, make_labels
from nwise.runtime.mail import Mail
from nwise.runtime.messages import Arc, Messages, Segment, messages_of
from nwise.runtime.processes import Doing, Processes
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import Form, packed, unpacked
from nwise.schedule.actions import Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Tape
from nwise.tensors import Tensors, each, with_names

Tell = Callable[[Action, float], None] | None  # called after each action with its start in seconds
_Message = tuple[Tensors, Tensors] | None  # what a message is about, and what travels; None for a header alone
_NOTHING_ELSE = nullcontext()  # made once: a step enters it for every task


class Memory(NamedTuple):
    """Where the messages of a recorded call are, by segment.

    Args:
        arriving: what it reads, by message.
        leaving: what it writes; empty before the call is recorded.
    """

    arriving: list[list[Tensors]]
    leaving: list[Tensors]


class Executor:
    """Runs the lists of one rank.

    Args:
        processes: the processes.
        stages: this rank's stages, by index.
        replicas: what sums the gradients of a stage over its replicas, by index; none without replicas.
        wire: the form in which messages travel.
        device: device of the stages' tensors.

    Attributes:
        mail: the messages.
        tapes: tapes of the mini-batches with passes to come, by number and stage.
        exchanged: what the other ranks know of them, by number.
        newest: the same of the last one.
        first: number of the first mini-batch of the present schedule.
    """

    def __init__(
        self,
        processes: Processes,
        stages: Mapping[int, Stage],
        replicas: Mapping[int, Replicas],
        wire: Wire,
        device: torch.device,
    ) -> None:
        self._processes, self._stages, self._replicas = processes, stages, replicas
        self._wire, self._device, self.mail = wire, device, Mail(processes, device)
        self._observed, self._alone = processes.size > 1, processes.num_ranks == 1
        self._messages: dict[str, Messages] = {}  # by digest
        self.tapes: dict[int, Mapping[int, Sequence[Tape]]] = {}
        self.exchanged: dict[int, Exchanged] = {}
        self.newest = Exchanged()
        self.first = 0

    def add(self, schedule: Schedule, step: int, batch: Batch) -> None:
        """Add a mini-batch."""
        minibatch = step % len(schedule.flows)
        tapes = self.tapes[step] = {k: stage.tapes(schedule, minibatch, batch) for k, stage in self._stages.items()}
        if 0 in tapes:
            for tape, inputs in zip(tapes[0], batch.inputs, strict=True):
                tape.inputs = inputs
        self._describe(schedule, step, batch.inputs)

    def add_recorded(self, schedule: Schedule, step: int, inputs: Sequence[Tensors]) -> None:
        """Add a mini-batch of which all passes are recorded, so it needs no tapes."""
        self.tapes[step] = {}
        self._describe(schedule, step, inputs)

    def _describe(self, schedule: Schedule, step: int, inputs: Sequence[Tensors]) -> None:
        """Note what the other ranks know of a mini-batch."""
        if not self._alone:
            labels = make_labels(inputs, autocast_dtype(self._device), self.newest.labels)
            self.newest = self.exchanged[step] = Exchanged(schedule.flows[step % len(schedule.flows)], labels)

    def drop(self, step: int) -> None:
        """Drop a mini-batch."""
        self.tapes.pop(step), self.exchanged.pop(step, None)

    def _messages_of(self, schedule: Schedule) -> Messages:
        """Return the messages of this rank."""
        if schedule.digest not in self._messages:
            self._messages[schedule.digest] = messages_of(schedule, self._processes.place, self._wire.specs)
        return self._messages[schedule.digest]

    def start(self, schedule: Schedule, step: int) -> None:
        """Begin a call on all channels."""
        if not self._alone:
            batches = [self.exchanged.get(step - age) for age in range(schedule.oldest + 1)]
            window = tuple(None if one is None else one.labels for one in batches)
            self.mail.start(self._messages_of(schedule), step % len(schedule.flows), window)

    def execute(self, schedule: Schedule, step: int, draws: Draws, tell: Tell) -> None:
        """Run the list of a call.

        Args:
            schedule: the schedule of all ranks.
            step: number of the call.
            draws: what seeds the random numbers of its mini-batch.
            tell: function called after each action, or None.
        """
        # The list alone decides the order. A receive blocks until its message is there; a result goes to another rank, or to the
        # tape of a neighbour on this rank, as its inputs (of F) or a message (of I and B). A task of age a works on mini-batch
        # `step - a`. If there is none yet, or none any more, nothing is computed, and its messages are headers alone.
        messages, call, tapes = self._messages_of(schedule), step % len(schedule.flows), self.tapes.get(step, {})
        self.mail.spare([tape.inputs for tape in tapes.get(0, ())], self._stages.values())
        for i, segment in enumerate(messages.segments[call]):
            if i:
                draws.next_segment()
            for arc in segment.receives:
                self._receive(arc, step, tell)
            message = self._compute(schedule, segment, step, tell, self.mail.post)
            if segment.send is not None:
                self._send(segment.send, message, step, tell)
        # The caller's optimizer updates; a rank of several is done once its gradients are summed.
        for action in () if self._alone and not self._replicas else messages.updates[call]:
            begin = time.perf_counter()
            self._processes.doing = Doing(step, action, begin)
            if action.stage in self._replicas:
                self._replicas[action.stage].finish()
            if tell is not None:
                tell(action, begin)

    def memory(self, schedule: Schedule, step: int, inputs: Sequence[Tensors]) -> Memory:
        """Return memory for a call to be recorded, of a kind of which one has run; `inputs` are the model's, per micro-batch."""
        labels = make_labels(inputs, autocast_dtype(self._device), self.newest.labels)
        arriving = [
            [self.mail.form(arc, labels[arc.key.microbatch]).zeros(self._device) for arc in segment.receives]
            for segment in self._segments(schedule, step)
        ]
        return Memory(arriving, [])

    def record(self, schedule: Schedule, step: int, batch: Batch, memory: Memory) -> None:
        """Run the computations of a call from memory to memory, without messages and updates."""
        self.add(schedule, step, batch)
        try:
            for i, segment in enumerate(self._segments(schedule, step)):
                if i:
                    batch.draws.next_segment()
                for arc, tensors in zip(segment.receives, memory.arriving[i], strict=True):
                    self.exchanged[step].note(arc.key, Form.of(tensors))
                    self._deliver(arc, tensors, step)
                made, _ = self._compute(schedule, segment, step, None, lambda: None) or ((), ())
                if segment.send is not None:
                    self.exchanged[step].note(segment.send.key, Form.of(made))
                memory.leaving.append(made)
        finally:
            self.drop(step)

    def replay(self, schedule: Schedule, step: int, memory: Memory, launch: Callable[[int], None]) -> None:
        """Run a recorded call, whose segments `launch` computes by their index."""
        for i, segment in enumerate(self._segments(schedule, step)):
            for arc, own in zip(segment.receives, memory.arriving[i], strict=True):
                for target, tensor in zip(own, self._take(arc, step), strict=True):
                    target.copy_(tensor)
            if self._observed:
                self._processes.doing = Doing(step, schedule.graph.tasks[segment.tasks[0]], time.perf_counter())
            launch(i)
            if segment.send is not None:
                # A copy, because another replay may write to the memory before the message has left.
                copied = each(memory.leaving[i], torch.clone)
                self._send(segment.send, (copied, copied), step, None)
            else:
                self.mail.post()

    def _segments(self, schedule: Schedule, step: int) -> Sequence[Segment]:
        return self._messages_of(schedule).segments[step % len(schedule.flows)]

    def _compute(
        self, schedule: Schedule, segment: Segment, step: int, tell: Tell, on_last: Callable[[], None]
    ) -> _Message:
        """Run the computations of a segment; return the message that it sends.

        Args:
            schedule: the schedule of all ranks.
            segment: the segment.
            step: number of the call.
            tell: function called after each action, or None.
            on_last: function called after a forward of the last stage, which sends nothing.
        """
        wire, message = self._wire, None
        compressed, completing = wire.compression is not None, schedule.completing if self._replicas else ()
        leaves = None if segment.send is None else segment.tasks[-1]
        for task in segment.tasks:
            action = schedule.graph.tasks[task]
            kind, k, m, q, _, age = action
            begin = time.perf_counter()
            if self._observed:
                self._processes.doing = Doing(step, action, begin)
            tapes = self.tapes.get(step - age)
            if tapes is None:
                continue
            # After the last task that adds to gradients they are complete, so their sums over replicas begin during it.
            with self._replicas[k].summing(head=kind is Kind.HEAD) if task in completing else _NOTHING_ELSE:
                made = self._stages[k].run(action, tapes[k][m], continued=task in schedule.continued)
            if kind is Kind.FORWARD:
                if task == leaves:
                    activation = cast(Tensors, made)
                    message = activation, wire.compress(None, self.mail.apart(activation, k))
                elif k + 1 in tapes:
                    tapes[k + 1][m].inputs = cast(Tensors, wire.through(None, made) if compressed else made)
                else:
                    on_last()
            elif task == leaves:
                specs = self.exchanged[step - age].forms[k, m].specs
                gradients, absent = packed(made, specs, self._device)
                message = gradients, wire.compress(action, gradients, absent)
            elif q is not None:
                # Without a name, which would keep the message beyond its last pass.
                tapes[k - 1][m].messages[q] = wire.through(action, made) if compressed else made
            if tell is not None:
                tell(action, begin)
        return message

    def _send(self, arc: Arc, message: _Message, step: int, tell: Tell) -> None:
        """Send a message."""
        begin, number = time.perf_counter(), step - arc.action.age
        self._processes.doing = Doing(step, arc.action, begin)
        if message is None:
            self.mail.send_nothing(arc)
        else:
            self.exchanged[number].note(arc.key, self.mail.send(arc, *message))
        self.mail.post()  # now that the other rank has its message
        if tell is not None and number in self.tapes:
            tell(arc.action, begin)

    def _receive(self, arc: Arc, step: int, tell: Tell) -> None:
        """Receive a message and put it on its tape."""
        begin, known = time.perf_counter(), step - arc.action.age in self.tapes
        if step - arc.travel >= self.first:  # otherwise it would have been sent before the first call
            tensors = self._take(arc, step)
            if known:
                self._deliver(arc, tensors, step)
        if tell is not None and known:
            tell(arc.action, begin)

    def _take(self, arc: Arc, step: int) -> Tensors:
        """Wait for a message and return its tensors."""
        self._processes.doing = Doing(step, arc.action, time.perf_counter())
        parts, form = self.mail.take(arc)
        if (exchanged := self.exchanged.get(step - arc.action.age)) is not None:
            exchanged.note(arc.key, form)
        return with_names(self._wire.restore(parts, form.specs), form.names)

    def _deliver(self, arc: Arc, tensors: Tensors, step: int) -> None:
        """Put what has arrived on its tape."""
        kind, k, m, q, _, age = arc.action
        tape = self.tapes[step - age][k][m]
        if kind is Kind.RECEIVE_ACTIVATION:
            tape.inputs = tensors
        else:
            tape.messages[cast(int, q)] = unpacked(tensors, self.exchanged[step - age].forms[k + 1, m].specs)
