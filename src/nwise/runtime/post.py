"""The post: the mail of a rank of several processes, which receives what a segment needs and sends what it has made.

Its messages are arcs of the task graph that lead from it to another rank, or to it. A message is sent right after the task that
makes it, and received right before the first task that needs it. What a rank computes between two messages is a segment::

    rank 0   F0(0)   send, F0(1)   send, receive, W0(0)           the plan of the channel 0 -> 1: the two activations,
    rank 1           receive, F1(0) H1(0) B1(0.0)   send          in the order of their senders
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nwise.modes import autocast_dtype
from nwise.runtime.channel import Receiver, Sender, start_all
from nwise.runtime.compression import Wire
from nwise.runtime.ledger import NOTHING, Exchanged, Key, MessagePlan, Window, make_labels
from nwise.runtime.mail import Mail, Memory, Tapes, Tell
from nwise.runtime.processes import Doing, Processes
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import Form, Specs, check_sendable, packed, unpacked
from nwise.schedule.actions import SENDS, Action, Kind
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Cotangents
from nwise.tensors import Tensors, each, with_names

_Message = tuple[Tensors, Tensors] | None  # what a message is about, and what travels; None for a header alone
Channels = tuple[dict[int, Sender], dict[int, Receiver]]  # to and from other ranks, by place


class Arc(NamedTuple):
    """One end of a message."""

    action: Action  # the send or the receive, as a recorder sees it
    key: Key  # name of the message
    place: int  # pipeline place of the other end
    travel: int  # number of calls from the send to the receive


class Segment(NamedTuple):
    """Computations of a rank between two messages."""

    receives: Sequence[Arc]  # before them
    tasks: Sequence[int]  # their numbers
    send: Arc | None  # after them; None if the next segment begins with a receive, or the call ends


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a rank in one cycle of calls, and the work between them."""

    segments: Sequence[Sequence[Segment]] = ()  # of each call, in order
    updates: Sequence[Sequence[Action]] = ()  # of each call, which follow the segments
    outgoing: Mapping[int, MessagePlan] = field(default_factory=dict)  # by the other rank, as `incoming`
    incoming: Mapping[int, MessagePlan] = field(default_factory=dict)


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
            return self._receivers[arc.place].form(arc.key, labels[arc.key.microbatch]).zeros(self._device)

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
        parts, form = self._receivers[arc.place].take(arc.key)
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
            self._senders[arc.place].send_nothing()
        else:
            form = self._senders[arc.place].send(arc.key, *message)
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
            self._spared = {t.untyped_storage().data_ptr() for t in tensors}

    def _apart(self, tensors: Tensors, stage: int) -> Tensors:
        """Copy outputs of a stage whose memory may change before they have left, and tensors of other types."""
        check_sendable(tensors, stage, self._device)
        plain = [type(t) is Tensor and t.untyped_storage().data_ptr() not in self._spared for t in tensors]
        return tensors if all(plain) else tuple(t if p else t.clone() for t, p in zip(tensors, plain, strict=True))


def forwards_alone(placement: Placement, rank: int) -> Messages:
    """Return the messages of a rank in a call that runs only the forwards of one micro-batch."""

    def plan(sender: int, receiver: int) -> MessagePlan:
        pairs = enumerate(pairwise(placement), 1)
        return MessagePlan((tuple((activation(k), 0) for k, pair in pairs if pair == (sender, receiver)),))

    others = {*placement} - {rank}
    return Messages(outgoing={r: plan(rank, r) for r in others}, incoming={r: plan(r, rank) for r in others})


def activation(stage: int) -> Key:
    """Return the name of the activation that a stage receives in such a call."""
    return Action(Kind.RECEIVE_ACTIVATION, stage, 0)


def messages_of(schedule: Schedule, rank: int, parts: Callable[[Specs], Specs]) -> Messages:
    """Return the messages of a rank; `parts` is that of `MessagePlan`."""
    tasks, ranks = schedule.graph.tasks, schedule.graph.ranks
    receives, sends = defaultdict[int, list[Arc]](list), dict[int, Arc]()
    for (task, user), (send, receive) in zip(schedule.messages, schedule.transfers, strict=True):
        key, travel = receive._replace(age=0), receive.age - send.age
        sends[task] = Arc(send, key, ranks[user], travel)
        receives[user].append(Arc(receive, key, ranks[task], travel))

    def plan(sender: int, receiver: int) -> MessagePlan:
        """Return the messages from one rank to another, in the order in which they are sent."""
        calls = [
            tuple((sends[t].key, tasks[t].age) for t in lists[sender] if t in sends and sends[t].place == receiver)
            for lists in schedule.lists
        ]
        # A bound: a receiver that works on a mini-batch of age 2 may take its message two calls after the send.
        travel = max(tasks[task].age for task in schedule.by_rank[receiver])
        return MessagePlan(tuple(calls), travel, schedule.digest, parts)

    others = [other for other in range(schedule.num_ranks) if other != rank]
    outgoing, incoming = {other: plan(rank, other) for other in others}, {other: plan(other, rank) for other in others}
    lists = [calls[rank] for calls in schedule.lists]
    segments = [_segments([t for t in one if tasks[t].kind is not Kind.UPDATE], receives, sends) for one in lists]
    updates = [[tasks[t] for t in one if tasks[t].kind is Kind.UPDATE] for one in lists]
    return Messages(segments, updates, outgoing, incoming)


def _segments(tasks: Sequence[int], receives: Mapping[int, list[Arc]], sends: Mapping[int, Arc]) -> list[Segment]:
    """Split a rank's computations at its messages."""
    # A segment begins at a task that receives, and behind one that sends:
    #
    #     tasks       F0(0) sends   F0(1) sends   B0(0) receives   W0(0)
    #     segments    [F0(0)]       [F0(1)]       [B0(0)            W0(0)]
    first = [i for i, task in enumerate(tasks) if not i or task in receives or tasks[i - 1] in sends]
    parts = [tasks[begin:end] for begin, end in pairwise([*first, len(tasks)])]
    return [Segment(receives.get(part[0], []), part, sends.get(part[-1])) for part in parts]
