"""Prepared calls: the tasks of a rank with the messages that each needs and makes.

A message is an arc of the task graph between two ranks. It is sent right after the task that makes it, and received right before
the first task that needs it::

    rank 0   F0(0)   send, F0(1)   send, receive, W0(0)           the plan of the channel 0 -> 1: the two activations,
    rank 1           receive, F1(0) H1(0) B1(0.0)   send          in the order of their senders
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nwise.flow import Flow, StageFlow
from nwise.runtime.ledger import Key, MessagePlan
from nwise.runtime.shapes import Specs
from nwise.schedule.actions import Action, Kind, transfer
from nwise.schedule.graph import task_graph
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Schedule

_LEARNING = (Kind.HEAD, Kind.WEIGHT_GRAD, Kind.BOTH)


class Arc(NamedTuple):
    """One end of a message.

    Args:
        action: the send or the receive, as a recorder sees it.
        key: name of the message.
        peer: rank at the other end.
        travel: number of calls from the send to the receive.
    """

    action: Action
    key: Key
    peer: int
    travel: int


class Job(NamedTuple):
    """A task of a rank.

    Args:
        action: the computation or update.
        receives: messages to receive before it.
        send: message to send after it, or None.
        last: whether it is the call's last task that adds to the gradients of its stage or head, if replicas sum these.
        continued: whether a pass on the same stage and micro-batch follows at once (`Schedule.continued`).
    """

    action: Action
    receives: list[Arc]
    send: Arc | None
    last: bool
    continued: bool


@dataclass(frozen=True, slots=True)
class Plans:
    """The messages of a schedule from and to a rank, by the other rank."""

    outgoing: Mapping[int, MessagePlan]
    incoming: Mapping[int, MessagePlan]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The work of a rank in one cycle of calls.

    Args:
        calls: for every call its tasks, in order.
        plans: the messages.
    """

    calls: list[list[Job]]
    plans: Plans


def forwards_alone(placement: Placement) -> Schedule:
    """Return the schedule of one micro-batch's forwards, without heads, passes and updates."""
    flow = Flow((StageFlow(head=False, own=False, messages=(), weights=None, fused=None),) * len(placement))
    graph = task_graph([[flow]], placement)
    ranks = range(1 + max(placement))
    return Schedule(
        "forwards", graph, (tuple(tuple(k for k, r in enumerate(placement) if r == rank) for rank in ranks),)
    )


def prepare(schedule: Schedule, rank: int, *, replicated: bool, parts: Callable[[Specs], Specs]) -> Prepared:
    """Return the work of a rank.

    Args:
        schedule: the schedule of all ranks.
        rank: the rank.
        replicated: whether gradients are summed over replicas.
        parts: see `MessagePlan`.
    """
    tasks, ranks = schedule.graph.tasks, schedule.graph.ranks
    receives, sends = defaultdict[int, list[Arc]](list), dict[int, Arc]()
    for task, user in schedule.messages:
        send, receive = transfer(tasks[task], tasks[user])
        key, travel = receive._replace(age=0), receive.age - send.age
        sends[task] = Arc(send, key, ranks[user], travel)
        receives[user].append(Arc(receive, key, ranks[task], travel))

    def plan(sender: int, receiver: int) -> MessagePlan:
        """Return the messages from one rank to another, in the order in which they are sent."""
        calls = [
            tuple((sends[t].key, tasks[t].age) for t in lists[sender] if t in sends and sends[t].peer == receiver)
            for lists in schedule.lists
        ]
        travel = max(tasks[task].age for task in schedule.by_rank[receiver])
        return MessagePlan(tuple(calls), travel, schedule.digest, parts)

    def job(task: int, *, last: bool) -> Job:
        return Job(tasks[task], receives[task], sends.get(task), last, task in schedule.continued)

    calls = []
    for numbers in (lists[rank] for lists in schedule.lists):
        # The last head and the last W or B of every stage: later ones replace earlier ones.
        learning = [t for t in numbers if tasks[t].kind in _LEARNING] if replicated else []
        final = {(tasks[t].stage, tasks[t].kind is Kind.HEAD): t for t in learning}.values()
        # An update only waits for the sums over replicas; alone, there is nothing to do or to record.
        alone = schedule.num_ranks == 1 and not replicated
        calls.append([job(t, last=t in final) for t in numbers if not (alone and tasks[t].kind is Kind.UPDATE)])
    others = [other for other in range(schedule.num_ranks) if other != rank]
    plans = Plans({other: plan(rank, other) for other in others}, {other: plan(other, rank) for other in others})
    return Prepared(calls, plans)
