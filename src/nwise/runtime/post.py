"""The post: the mailbox of a rank of several processes, which receives what a task reads and sends what it has made.

Its messages are arcs of the task graph that lead from it to another rank, or to it. A message is sent right after the task that
makes it, and received right before the first task that reads it::

    rank 0   F0(0) send, F0(1) send, receive W0(0)
    rank 1   receive F1(0) H1(0) B1(0.0) send, ...
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nwise.modes import autocast_dtype
from nwise.runtime.calls import Status
from nwise.runtime.channel import Name
from nwise.runtime.compression import Codec
from nwise.runtime.connections import Channels, connected
from nwise.runtime.mailbox import Flying, Mailbox, Tell
from nwise.runtime.processes import Processes
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import Signature, Spec, check_sendable, make_specs, spec_names
from nwise.runtime.work import RankWork
from nwise.schedule.actions import Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Cotangents
from nwise.tensors import Tensors, each, with_names


class Arc(NamedTuple):
    """One end of a message."""

    action: Action  # the send or the receive, as a recorder sees it
    place: int  # pipeline place of the other end


class Post(Mailbox):
    """The mailbox of one of several processes.

    Args:
        processes: the processes.
        stages: this rank's stages, by index.
        codec: the form in which messages travel.
        device: device of the stages' tensors.
        replicas: what sums the gradients of a stage over its replicas, by index; none without replicas.
    """

    def __init__(
        self,
        processes: Processes,
        stages: Mapping[int, Stage],
        codec: Codec,
        device: torch.device,
        replicas: Mapping[int, Replicas],
    ) -> None:
        super().__init__(stages, codec)
        self._processes = processes
        self._device = device
        self.replicas = replicas
        self._channels: Channels | None = None
        self._schedule: Schedule | None = None
        self._arriving: Mapping[int, Arc] = {}  # by the task that makes them
        self._leaving: Mapping[int, Arc] = {}
        self._wanted: set[int] = set()
        self._updates: Sequence[Action] = ()  # of the present call
        self._call = 0
        self._tell = cast(Tell, None)
        self._epoch = 0
        self._inferred = 0
        self._signature = Signature()  # of the newest mini-batch
        self._label = ""
        self._labels: dict[int, str] = {}  # of the mini-batches in flight

    def signature(self, inputs: Sequence[Tensors]) -> object:
        autocast = autocast_dtype(self._device)
        look = Signature((make_specs(one), "" if autocast is None else str(autocast)) for one in inputs)
        if look != self._signature:
            self._signature = look
            self._label = str(look)
        return self._signature

    def begin(self, schedule: Schedule, work: RankWork, call: int, flying: Flying, tell: Tell) -> None:
        super().begin(schedule, work, call, flying, tell)
        self._call = call
        self._tell = tell
        self.sent = [0, 0]
        self._updates = [self._tasks[n] for n in work.updates[call % len(work.updates)]]
        channels = self._connected()
        if schedule is not self._schedule:
            self._schedule = schedule
            self._arriving, self._leaving = arcs_of(schedule, self._processes.place)
            self._wanted = work.uses.keys() | self._leaving.keys()
            for place, count in Counter(arc.place for arc in self._leaving.values()).items():
                channels[place].allowance = (1 + schedule.oldest) * count
        self.wanted = self._wanted
        if call in flying:
            self._labels[call] = f"{schedule.digest[:16]} {self._processes.settings[0]} | {self._label}"
        self._labels.pop(call - schedule.oldest - 1, None)
        for replicas in self.replicas.values():
            replicas.start()

    def take(self, task: int, number: int) -> Tensors | Cotangents:
        if (task, number) not in self._results:
            arc = self._arriving[task]
            begin = self._now(arc.action)
            specs, parts, label = self._connected()[arc.place].take(Name(self._epoch, number, task))
            _check_label(self._labels[number], label, self._processes.ranks[arc.place])
            made = _named(self._codec.restore(parts, specs), specs)
            self._results[task, number] = [self._uses[task], made]
            if self._tell is not None:
                self._tell(arc.action, begin)
        return super().take(task, number)

    def put(self, task: int, number: int, made: Tensors | Cotangents) -> None:
        arc = self._leaving.get(task)
        if arc is None:
            super().put(task, number, made)
            return
        begin = self._now(arc.action)
        kind, k, *_ = arc.action
        if kind is Kind.SEND_ACTIVATION:
            check_sendable(cast(Tensors, made), k, self._device)
        parts = self._codec.compress(made)
        name = Name(self._epoch, number, task)
        size = self._connected()[arc.place].send(name, made, parts, self._labels[number])
        self.sent[kind is not Kind.SEND_ACTIVATION] += size
        if self._tell is not None:
            self._tell(arc.action, begin)

    def end(self) -> None:
        # The caller's optimizer updates; this rank is done once its gradients are summed.
        for action in self._updates:
            begin = self._now(action)
            if action.stage in self.replicas:
                self.replicas[action.stage].finish()
            if self._tell is not None:
                self._tell(action, begin)
        for replicas in self.replicas.values():
            replicas.sum_statistics()

    def infer(self, inputs: Tensors, step: int, call: Callable[[int, Tensors], Tensors]) -> None:
        placement = self._processes.placement
        hidden = inputs
        self._inferred += 1
        self._call = step
        self._connected()
        for k in self._processes.here:
            if k and k - 1 not in self._stages:
                self._now(Action(Kind.RECEIVE_ACTIVATION, k, 0))
                specs, parts, _ = self._connected()[placement[k - 1]].take(Name(self._epoch, -self._inferred, k))
                hidden = cast(Tensors, _named(parts, specs))
            self._now(Action(Kind.FORWARD, k, 0))
            hidden = call(k, hidden)
            if k + 1 < len(placement) and k + 1 not in self._stages:
                made = each(hidden, Tensor.detach)
                check_sendable(made, k, self._device)
                self._connected()[placement[k + 1]].send(Name(self._epoch, -self._inferred, k + 1), made, made)

    def forget(self) -> None:
        # Messages of these mini-batches may still be on their way. All ranks forget them at the same call.
        super().forget()
        self._epoch += 1
        for channel in (self._channels or {}).values():
            channel.drop(self._epoch)

    def _connected(self) -> Channels:
        if self._channels is None:
            self._channels = connected(self._processes, self._device)
        return self._channels

    def _now(self, action: Action) -> float:
        """Note the present action for the other ranks; return its start."""
        begin = time.perf_counter()
        self._processes.doing = Status(self._call, action, begin)
        return begin


def arcs_of(schedule: Schedule, rank: int) -> tuple[dict[int, Arc], dict[int, Arc]]:
    """Return the messages that a rank receives and those that it sends, by the task that makes them."""
    ranks = schedule.graph.ranks
    arriving = dict[int, Arc]()
    leaving = dict[int, Arc]()
    for (task, user), (send, receive) in zip(schedule.messages, schedule.transfers, strict=True):
        if ranks[task] == rank:
            leaving[task] = Arc(send, ranks[user])
        elif ranks[user] == rank:
            arriving[task] = Arc(receive, ranks[task])
    return arriving, leaving


def _named(made: Tensors | Cotangents, specs: Sequence[Spec | None]) -> Tensors | Cotangents:
    """Return tensors under the names that their specs have."""
    known = spec_names([spec for spec in specs if spec is not None])
    return with_names(cast(Tensors, made), known) if known else made


def _check_label(mine: str, theirs: str, peer: int) -> None:
    """Raise ValueError if rank `peer` has another schedule, or another mini-batch."""
    if mine == theirs:
        return
    here, own = mine.split(" | ", 1)
    there, other = theirs.split(" | ", 1)
    if here != there:
        raise ValueError(
            f"Every rank should have the same schedule. Found {here.partition(' ')[2]} here and {there.partition(' ')[2]} on "
            f"rank {peer}, with lists that differ; make the same calls on all ranks, and the schedule from the same costs."
        )
    raise ValueError(
        f"Every rank should get the whole mini-batch, under the same autocast. Found micro-batches, {own} here and {other} on "
        f"rank {peer}; load the same data on all ranks."
    )
