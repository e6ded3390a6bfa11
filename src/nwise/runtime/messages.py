"""The messages of a rank: arcs of the task graph that lead from it to another rank, or to it.

A message is sent right after the task that makes it, and received right before the first task that needs it. What a rank computes
between two messages is a segment::

    rank 0   F0(0)   send, F0(1)   send, receive, W0(0)           the plan of the channel 0 -> 1: the two activations,
    rank 1           receive, F1(0) H1(0) B1(0.0)   send          in the order of their senders
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from nwise.runtime.ledger import Key, MessagePlan
from nwise.runtime.shapes import Specs
from nwise.schedule.actions import Action, Kind
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Schedule


class Arc(NamedTuple):
    """One end of a message."""

    action: Action  # the send or the receive, as a recorder sees it
    key: Key  # name of the message
    peer: int  # rank at the other end
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
            tuple((sends[t].key, tasks[t].age) for t in lists[sender] if t in sends and sends[t].peer == receiver)
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
