"""The post: the mail of a rank of several processes, which receives what a segment needs and sends what it has made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from nwise.dtensor import is_dtensor
from nwise.modes import autocast_dtype
from nwise.runtime.channel import Receiver, Sender, start_all
from nwise.runtime.compression import Wire
from nwise.runtime.ledger import NOTHING, Exchanged, Window, make_labels
from nwise.runtime.mail import Mail, Memory, Tapes, Tell
from nwise.runtime.messages import Arc, Messages, Segment, activation, forwards_alone, messages_of
from nwise.runtime.processes import Doing, Processes
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import Form, check_sendable, packed, unpacked
from nwise.schedule.actions import SENDS, Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Cotangents
from nwise.tensors import Tensors, each, with_names

_Message = tuple[Tensors, Tensors] | None  # what a message is about, and what travels; None for a header alone
Channels = tuple[dict[int, Sender], dict[int, Receiver]]  # to and from other ranks, by place


class Post(Mail):
    """The mail of one of several processes.

    Args:
        processes: the processes.
        stages: this rank's stages, by index.
        wire: the form in which messages travel.
        device: device of the stages' tensors.
        replicas: what sums the gradients of a stage over its replicas, by index; none without replicas.
        connect: function that returns the channels; all ranks make the first call together.
    """

    def __init__(
        self,
        processes: Processes,
        stages: Mapping[int, Stage],
        wire: Wire,
        device: torch.device,
        replicas: Mapping[int, Replicas],
        connect: Callable[[torch.device], Channels],
    ) -> None:
        super().__init__(stages)
        self._processes, self._wire, self._device = processes, wire, device
        self.replicas, self._connect = replicas, connect
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._messages: dict[str, Messages] = {}  # by digest of the schedule
        self._forwards = forwards_alone(processes.placement, processes.place)
        self._exchanged: dict[int, Exchanged] = {}  # by mini-batch
        self._newest = Exchanged()
        self._made: Tensors | Cotangents | None = None  # what the present segment sends
        self._recording = False
        self._spared: set[int] = set()

    @property
    def sent(self) -> list[int]:
        return [sum(sender.num_bytes[kind] for sender in self._senders.values()) for kind in SENDS.values()]

    @property
    def predicted(self) -> list[int]:
        return self._newest.num_bytes(self._stages, self._wire.specs)

    def add(self, schedule: Schedule, step: int, inputs: Sequence[Tensors]) -> object:
        labels = make_labels(inputs, autocast_dtype(self._device), self._newest.labels)
        self._newest = self._exchanged[step] = Exchanged(schedule.flows[step % len(schedule.flows)], labels)
        return labels

    def drop(self, step: int) -> None:
        self._exchanged.pop(step, None)

    def start(self, schedule: Schedule, step: int) -> None:
        batches = [self._exchanged.get(step - age) for age in range(schedule.oldest + 1)]
        window = tuple(None if one is None else one.labels for one in batches)
        self._start(self._messages_of(schedule), step % len(schedule.flows), window)
        for replicas in self.replicas.values():
            replicas.start()

    def segments(self, schedule: Schedule, step: int, tapes: Tapes, tell: Tell) -> Iterator[Sequence[int]]:
        # The list alone decides the order. A receive blocks until its message is there. A task of age a works on mini-batch
        # `step - a`. If there is none yet, or none any more, nothing is computed, and its messages are headers alone.
        self._spare(tape.inputs for tape in tapes.get(step, {}).get(0, ()))
        for receives, tasks, send in self._segments(schedule, step):
            for arc in receives:
                begin, known = time.perf_counter(), step - arc.action.age in tapes
                if step - arc.travel >= self.first:  # otherwise it would have been sent before the first call
                    self._deliver(arc, self._take(arc, step), step, tapes)
                if tell is not None and known:
                    tell(arc.action, begin)
            yield tasks
            if send is not None:
                begin = self._now(step, send.action)
                self._send(send, self._leaving(send, step), step)
                if tell is not None and step - send.action.age in tapes:
                    tell(send.action, begin)
        # The caller's optimizer updates; this rank is done once its gradients are summed.
        for action in self._messages_of(schedule).updates[step % len(schedule.flows)]:
            begin = self._now(step, action)
            if action.stage in self.replicas:
                self.replicas[action.stage].finish()
            if tell is not None:
                tell(action, begin)
        for replicas in self.replicas.values():
            replicas.sum_statistics()

    def recorded(self, schedule: Schedule, step: int, tapes: Tapes, memory: Memory) -> Iterator[Sequence[int]]:
        self._recording, exchanged = True, self._exchanged[step]
        for (receives, tasks, send), arriving in zip(self._segments(schedule, step), memory.arriving, strict=True):
            for arc, tensors in zip(receives, arriving, strict=True):
                exchanged.note(arc.key, Form.of(tensors))
                self._deliver(arc, tensors, step, tapes)
            yield tasks
            made = None if send is None else self._leaving(send, step)
            if send is not None and made is not None:
                exchanged.note(send.key, Form.of(made[0]))
            memory.leaving.append(() if made is None else made[0])

    def replayed(self, schedule: Schedule, step: int, memory: Memory) -> Iterator[Sequence[int]]:
        for i, (receives, tasks, send) in enumerate(self._segments(schedule, step)):
            for arc, own in zip(receives, memory.arriving[i], strict=True):
                for target, tensor in zip(own, self._take(arc, step), strict=True):
                    target.copy_(tensor)
            self._now(step, schedule.graph.tasks[tasks[0]])
            yield tasks
            if send is not None:
                # A copy, because another replay may write to the memory before the message has left.
                copied = each(memory.leaving[i], torch.clone)
                self._now(step, send.action)
                self._send(send, (copied, copied), step)
            else:
                self._post()

    def memory(self, schedule: Schedule, step: int, inputs: Sequence[Tensors]) -> Memory:
        labels = make_labels(inputs, autocast_dtype(self._device), self._newest.labels)

        def zeros(arc: Arc) -> Tensors:
            return self._receivers[arc.peer].form(arc.key, labels[arc.key.microbatch]).zeros(self._device)

        return Memory([[*map(zeros, segment.receives)] for segment in self._segments(schedule, step)], [])

    def leave(self, action: Action, made: Tensors | Cotangents) -> None:
        if action.kind is not Kind.FORWARD or action.stage + 1 < len(self._processes.placement):
            self._made = made
        elif not self._recording:
            self._post()

    def infer(self, inputs: Tensors, step: int, call: Callable[[int, Tensors], Tensors]) -> None:
        # Every message has a header, because a stage may return other shapes, in evaluation mode, say.
        self._start(self._forwards, 0, (None,))
        self._spare([inputs])
        placement, hidden = self._processes.placement, inputs
        for k in self._processes.here:
            if k and k - 1 not in self._stages:
                self._now(step, activation(k))
                tensors, form = self._receivers[placement[k - 1]].take(activation(k))
                hidden = with_names(tensors, form.names)
            self._now(step, Action(Kind.FORWARD, k, 0))
            hidden = call(k, hidden)
            if k + 1 < len(placement) and k + 1 not in self._stages:
                parts = self._apart(each(hidden, Tensor.detach), k)
                self._senders[placement[k + 1]].send(activation(k + 1), hidden, parts)
                self._post()

    def forget(self) -> None:
        self._exchanged.clear()
        for receiver in self._receivers.values():
            receiver.forget()

    def close(self) -> None:
        self._start(Messages(), 0, ())

    def _messages_of(self, schedule: Schedule) -> Messages:
        if schedule.digest not in self._messages:
            self._messages[schedule.digest] = messages_of(schedule, self._processes.place, self._wire.specs)
        return self._messages[schedule.digest]

    def _segments(self, schedule: Schedule, step: int) -> Sequence[Segment]:
        return self._messages_of(schedule).segments[step % len(schedule.flows)]

    def _now(self, step: int, action: Action) -> float:
        """Note the present action for the other ranks; return its start."""
        begin = time.perf_counter()
        self._processes.doing = Doing(step, action, begin)
        return begin

    def _start(self, messages: Messages, call: int, window: Window) -> None:
        """Begin a call, given by its index in the cycle, on all channels."""
        self._made, self._recording = None, False
        if not self._senders:
            self._senders, self._receivers = self._connect(self._device)
        incoming = [(receiver, messages.incoming.get(peer, NOTHING)) for peer, receiver in self._receivers.items()]
        outgoing = [(sender, messages.outgoing.get(peer, NOTHING)) for peer, sender in self._senders.items()]
        start_all(outgoing, incoming, window, call)

    def _take(self, arc: Arc, step: int) -> Tensors:
        """Wait for a message and return its tensors."""
        self._now(step, arc.action)
        parts, form = self._receivers[arc.peer].take(arc.key)
        if (exchanged := self._exchanged.get(step - arc.action.age)) is not None:
            exchanged.note(arc.key, form)
        return with_names(self._wire.restore(parts, form.specs), form.names)

    def _deliver(self, arc: Arc, tensors: Tensors, step: int, tapes: Tapes) -> None:
        """Put what has arrived on its tape, if it is of a mini-batch."""
        kind, k, m, q, _, age = arc.action
        if step - age not in tapes:
            return
        if kind is Kind.RECEIVE_ACTIVATION:
            tapes[step - age][k][m].inputs = tensors
        else:
            tapes[step - age][k][m].messages[cast(int, q)] = unpacked(
                tensors, self._exchanged[step - age].forms[k + 1, m].specs
            )

    def _leaving(self, arc: Arc, step: int) -> _Message:
        """Return what the present segment sends."""
        _, k, m, _, _, age = arc.action
        made, self._made = self._made, None
        if made is None:
            return None
        if arc.action.kind is Kind.SEND_ACTIVATION:
            activation = cast(Tensors, made)
            return activation, self._wire.compress(None, self._apart(activation, k))
        gradients, absent = packed(made, self._exchanged[step - age].forms[k, m].specs, self._device)
        return gradients, self._wire.compress(arc.action, gradients, absent)

    def _send(self, arc: Arc, message: _Message, step: int) -> None:
        """Send a message, then post the next receives: now the other rank has what it may be waiting for."""
        if message is None:
            self._senders[arc.peer].send_nothing()
        else:
            form = self._senders[arc.peer].send(arc.key, *message)
            self._exchanged[step - arc.action.age].note(arc.key, form)
        self._post()

    def _post(self) -> None:
        for receiver in self._receivers.values():
            receiver.post()

    def _spare(self, inputs: Iterable[Tensors]) -> None:
        """Let messages share no memory with the model's inputs and with parameters and buffers (`_apart`)."""
        # An optimizer changes parameters, and the caller may reuse a batch. A send returns before its message has left.
        if self._senders:
            tensors = [x for microbatch in inputs for x in microbatch]
            for stage in self._stages.values():
                tensors += [*stage.module.parameters(), *stage.module.buffers()]
            self._spared = {t.untyped_storage().data_ptr() for t in tensors if not is_dtensor(t)}

    def _apart(self, tensors: Tensors, stage: int) -> Tensors:
        """Copy outputs of a stage whose memory may change before they have left, and tensors of other types."""
        check_sendable(tensors, stage, self._device)
        # Tensor parallelism returns tensors of a subclass, whose values may still be on their way.
        plain = [type(t) is Tensor and t.untyped_storage().data_ptr() not in self._spared for t in tensors]
        return tensors if all(plain) else tuple(t if p else t.clone() for t, p in zip(tensors, plain, strict=True))
