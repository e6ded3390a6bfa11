"""The post: the mailbox of a rank of several processes, which receives what a task reads and sends what it has made.

Its messages are arcs of the task graph that lead from it to another rank, or to it. A message is sent right after the task that
makes it, and received right before the first task that reads it::

    rank 0   F0(0)   send, F0(1)   send, receive, W0(0)           the plan of the channel 0 -> 1: the two activations,
    rank 1           receive, F1(0) H1(0) B1(0.0)   send          in the order of their senders
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nwise.modes import autocast_dtype
from nwise.runtime.channel import Receiver, Sender, start_all
from nwise.runtime.compression import Wire
from nwise.runtime.ledger import NOTHING, Exchanged, Key, MessagePlan, Window, make_labels
from nwise.runtime.mailbox import Flying, Mailbox, Tell
from nwise.runtime.processes import Doing, Processes
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import Specs, check_sendable, packed, unpacked
from nwise.runtime.work import Work
from nwise.schedule.actions import SENDS, Action, Kind
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Cotangents
from nwise.tensors import Tensors, each, with_names

_Message = tuple[Tensors, Tensors]  # what a message is about, and what travels
Channels = tuple[dict[int, Sender], dict[int, Receiver]]  # to and from other ranks, by place


class Arc(NamedTuple):
    """One end of a message."""

    action: Action  # the send or the receive, as a recorder sees it
    key: Key  # name of the message
    place: int  # pipeline place of the other end
    travel: int  # number of calls from the send to the receive


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a rank in one cycle of calls."""

    received: Mapping[int, Sequence[Arc]] = field(default_factory=dict)  # by the task that reads them first
    arriving: Mapping[int, Arc] = field(default_factory=dict)  # the same by the task that makes them
    sends: Mapping[int, Arc] = field(default_factory=dict)  # by the task that makes them
    outgoing: Mapping[int, MessagePlan] = field(default_factory=dict)  # by the other rank, as `incoming`
    incoming: Mapping[int, MessagePlan] = field(default_factory=dict)


class Post(Mailbox):
    """The mailbox of one of several processes.

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
        super().__init__(stages, wire)
        self._processes, self._device = processes, device
        self.replicas, self._connect = replicas, connect
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._known: dict[str, Messages] = {}  # by digest of the schedule
        self._messages = Messages()  # of the present schedule
        self._updates: Sequence[Action] = ()  # of the present call
        self._call, self._tell = 0, cast(Tell, None)
        self._forwards = forwards_alone(processes.placement, processes.place)
        self._exchanged: dict[int, Exchanged] = {}  # by mini-batch
        self._newest = Exchanged()
        self._spared: set[int] = set()

    @property
    def sent(self) -> list[int]:
        return [sum(sender.num_bytes[kind] for sender in self._senders.values()) for kind in SENDS.values()]

    @property
    def predicted(self) -> list[int]:
        return self._newest.num_bytes(self._stages, self._wire.specs)

    def add(self, schedule: Schedule, number: int, inputs: Sequence[Tensors]) -> object:
        labels = make_labels(inputs, autocast_dtype(self._device), self._newest.labels)
        self._newest = self._exchanged[number] = Exchanged(schedule.flows[number % len(schedule.flows)], labels)
        return labels

    def drop(self, number: int) -> None:
        self._exchanged.pop(number, None)

    def begin(self, schedule: Schedule, work: Work, call: int, flying: Flying, tell: Tell) -> None:
        super().begin(schedule, work, call, flying, tell)
        self._call, self._tell, index = call, tell, call % len(schedule.flows)
        self._updates = [self._tasks[n] for n in work.updates[index]]
        self._messages = self._messages_of(schedule)
        batches = [self._exchanged.get(call - age) for age in range(schedule.oldest + 1)]
        self._start(self._messages, index, tuple(None if one is None else one.labels for one in batches))
        for replicas in self.replicas.values():
            replicas.start()
        self._spare(flying[call].batch.inputs if call in flying and 0 in self._stages else ())

    def take(self, task: int, number: int) -> Tensors | Cotangents:
        if (task, number) not in self._results:
            arc = self._messages.arriving[task]
            begin, tensors = time.perf_counter(), self._receive(arc)
            kind, k, m, *_ = arc.action
            if kind is Kind.RECEIVE_GRADIENT:
                tensors = cast(Tensors, unpacked(tensors, self._exchanged[number].forms[k + 1, m].specs))
            self._results[task, number] = [self._uses[task], tensors]
            if self._tell is not None:
                self._tell(arc.action, begin)
        return super().take(task, number)

    def put(self, task: int, number: int, made: Tensors | Cotangents) -> None:
        arc = self._messages.sends.get(task)
        if arc is not None:
            begin = self._now(self._call, arc.action)
            self._send(arc, self._leaving(arc, made, number), number)
            if self._tell is not None:
                self._tell(arc.action, begin)
        elif self._uses[task]:
            super().put(task, number, made)
        elif self._tasks[task].kind is Kind.FORWARD:  # of the last stage
            self._post()

    def skip(self, task: int) -> None:
        # A mini-batch that does not exist, or no longer, has headers alone.
        for arc in self._messages.received.get(task, ()):
            if self._call - arc.travel >= self.first:  # otherwise it would have been sent before the first call
                self._receive(arc)
        if task in self._messages.sends:
            self._senders[self._messages.sends[task].place].send_nothing()
            self._post()

    def end(self) -> None:
        # The caller's optimizer updates; this rank is done once its gradients are summed.
        for action in self._updates:
            begin = self._now(self._call, action)
            if action.stage in self.replicas:
                self.replicas[action.stage].finish()
            if self._tell is not None:
                self._tell(action, begin)
        for replicas in self.replicas.values():
            replicas.sum_statistics()

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
        super().forget()
        self._exchanged.clear()
        for receiver in self._receivers.values():
            receiver.forget()

    def close(self) -> None:
        self._start(Messages(), 0, ())

    def _messages_of(self, schedule: Schedule) -> Messages:
        if schedule.digest not in self._known:
            self._known[schedule.digest] = messages_of(schedule, self._processes.place, self._wire.specs)
        return self._known[schedule.digest]

    def _now(self, step: int, action: Action) -> float:
        """Note the present action for the other ranks; return its start."""
        begin = time.perf_counter()
        self._processes.doing = Doing(step, action, begin)
        return begin

    def _start(self, messages: Messages, call: int, window: Window) -> None:
        """Begin a call, given by its index in the cycle, on all channels."""
        if not self._senders:
            self._senders, self._receivers = self._connect(self._device)
        incoming = [(receiver, messages.incoming.get(peer, NOTHING)) for peer, receiver in self._receivers.items()]
        outgoing = [(sender, messages.outgoing.get(peer, NOTHING)) for peer, sender in self._senders.items()]
        start_all(outgoing, incoming, window, call)

    def _receive(self, arc: Arc) -> Tensors:
        """Wait for a message and return its tensors."""
        self._now(self._call, arc.action)
        parts, form = self._receivers[arc.place].take(arc.key)
        if (exchanged := self._exchanged.get(self._call - arc.action.age)) is not None:
            exchanged.note(arc.key, form)
        return with_names(self._wire.restore(parts, form.specs), form.names)

    def _leaving(self, arc: Arc, made: Tensors | Cotangents, number: int) -> _Message:
        """Return what a message is about, and what travels."""
        _, k, m, *_ = arc.action
        if arc.action.kind is Kind.SEND_ACTIVATION:
            activation = cast(Tensors, made)
            return activation, self._wire.compress(None, self._apart(activation, k))
        gradients, absent = packed(made, self._exchanged[number].forms[k, m].specs, self._device)
        return gradients, self._wire.compress(arc.action, gradients, absent)

    def _send(self, arc: Arc, message: _Message, number: int) -> None:
        """Send a message, then post the next receives: now the other rank has what it may be waiting for."""
        form = self._senders[arc.place].send(arc.key, *message)
        self._exchanged[number].note(arc.key, form)
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
    receivers: dict[tuple[int, int], Arc] = {}
    for (task, user), (send, receive) in zip(schedule.messages, schedule.transfers, strict=True):
        key, travel = receive._replace(age=0), receive.age - send.age
        sends[task] = Arc(send, key, ranks[user], travel)
        receivers[task, user] = Arc(receive, key, ranks[task], travel)
        receives[user].append(receivers[task, user])

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
    here = [n for calls in schedule.lists for n in calls[rank]]
    received = {n: receives[n] for n in here if n in receives}
    arriving = {n: arc for (n, user), arc in receivers.items() if user in received}
    return Messages(received, arriving, {n: sends[n] for n in here if n in sends}, outgoing, incoming)
