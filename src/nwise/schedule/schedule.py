"""Schedules: one ordered list of actions per rank, which the runtime executes and simulators time."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import groupby

from nwise.flow import Flow
from nwise.schedule.actions import PASSES, SENDS, Action, Kind, counterpart
from nwise.schedule.placement import Placement

Word = tuple[Action, ...]
Link = tuple[int, int]  # ranks of the sender and of the receiver
# The result of an action, for which others wait: (what, stage, micro-batch, turn), with "F", "H" or the index of a message.
Product = tuple[str | int, int, int, int]


@dataclass(frozen=True)
class Schedule:
    """The work of every rank in one call of `Pipeline.step`, or in one cycle of calls for a rotating strategy.

    Args:
        order: name of the rule that made it.
        flows: flow of every micro-batch, ``[turns][M]``.
        words: computations of every rank in order, with the updates of its stages at the end of each call.
        placement: rank of every stage; default: a rank for each.
        ages: age of every stage's weight gradients (`nwise.schedule.ages`); default: 0.
    """

    order: str
    flows: tuple[tuple[Flow, ...], ...]
    words: tuple[Word, ...]
    placement: Placement = ()
    ages: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        size = len(self.flows[0][0].stages)
        object.__setattr__(self, "placement", self.placement or tuple(range(size)))
        object.__setattr__(self, "ages", self.ages or (0,) * size)

    @property
    def num_stages(self) -> int:
        """Number of stages, A."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.words)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per mini-batch, M."""
        return len(self.flows[0])

    @cached_property
    def oldest(self) -> int:
        """Age of the oldest gradients."""
        return max(self.ages)

    @cached_property
    def late_stages(self) -> frozenset[int]:
        """Stages with passes of earlier mini-batches than the newest, which need old versions of their parameters."""
        return frozenset(a.stage for word in self.words for a in word if a.age)

    @cached_property
    def lists(self) -> tuple[Word, ...]:
        """All actions of every rank, in order.

        A receive comes right before the first use, a send right after its computation, a drop after the last use, and the updates
        at the end of their call. Stages of one rank exchange their results without messages.
        """
        return tuple(tuple(_with_messages(word, self)) for word in self.words)

    @cached_property
    def calls(self) -> tuple[tuple[Word, ...], ...]:
        """The lists cut into calls, ``[ranks][turns]``, without drops."""
        turns = range(len(self.flows))
        work = [[a for a in word if a.kind is not Kind.DROP] for word in self.lists]
        return tuple(tuple(tuple(a for a in word if self.call(a) == turn) for turn in turns) for word in work)

    @cached_property
    def passes(self) -> tuple[Counter[tuple[int, int]], ...]:
        """Number of backward passes by (stage, micro-batch), for every turn."""
        counts = [Counter[tuple[int, int]]() for _ in self.flows]
        for action in (a for word in self.words for a in word if a.kind in PASSES):
            counts[action.turn][action.stage, action.microbatch] += 1
        return tuple(counts)

    @cached_property
    def continued(self) -> frozenset[Action]:
        """The computations that are followed by a pass of the same stage and micro-batch, with no other work in between."""
        result: set[Action] = set()
        for word in self.words:
            for _, run in groupby(word, key=_work):
                actions = list(run)
                last = max((i for i, a in enumerate(actions) if a.kind in PASSES), default=0)
                result.update(actions[:last])
        return frozenset(result)

    def call(self, action: Action) -> int:
        """Return the call of the cycle that runs an action."""
        return (action.turn + action.age) % len(self.flows)

    def cycles_late(self, action: Action) -> int:
        """Return the number of cycles by which an action comes after its mini-batch was the newest."""
        return (action.turn + action.age) // len(self.flows)

    @cached_property
    def travel(self) -> dict[Action, int]:
        """Number of calls between a send and its receive, for every receive."""
        sent = {counterpart(a)._replace(age=0): a.age for word in self.lists for a in word if a.kind in SENDS}
        received = set(SENDS.values())
        return {a: a.age - sent[a._replace(age=0)] for word in self.lists for a in word if a.kind in received}

    @cached_property
    def digest(self) -> str:
        """Hash of the lists, the same in every process."""
        return sha256(repr((self.placement, self.lists)).encode()).hexdigest()

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Largest number of micro-batches in flight on every stage: forward done, last use still to come."""
        now, most = [0] * self.num_stages, [0] * self.num_stages
        for word in self.words:
            work = [a for a in word if a.kind is not Kind.UPDATE]
            # The last in time: a pass of an earlier mini-batch may stand before the forward in the list.
            last = {(a.stage, a.microbatch, a.turn): a for a in sorted(work, key=self.cycles_late)}
            # A cycle begins with the micro-batches of earlier ones whose last action comes late.
            for a in last.values():
                now[a.stage] += self.cycles_late(a)
            for a in work:
                now[a.stage] += a.kind is Kind.FORWARD
                most[a.stage] = max(most[a.stage], now[a.stage])
                now[a.stage] -= last[a.stage, a.microbatch, a.turn] == a
        return tuple(most)

    @cached_property
    def first_in_first_out(self) -> bool:
        """Whether gradients are used in the order in which they are sent, on every link."""
        sent, used = defaultdict[Link, list[object]](list), defaultdict[Link, list[object]](list)
        for a in (a for word in self.lists for a in word if a.kind in (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)):
            sends = a.kind is Kind.SEND_GRADIENT
            to = a.stage - sends
            link = self.placement[to + 1], self.placement[to]
            (sent if sends else used)[link].append((to, a.microbatch, a.message))
        return sent == used


def held_back(flows: Sequence[Sequence[Flow]], placement: Placement, *, oldest: int) -> list[int]:
    """Return the stages that start a forward only after the next stage, of another rank, has taken an earlier activation.

    The activation is that of the same micro-batch, `oldest` + 1 cycles before. Without a delay only stages wait that do not
    receive a gradient for every micro-batch, because nothing else would keep them from running ahead.

    Args:
        flows: flow of every micro-batch, ``[turns][M]``.
        placement: rank of every stage.
        oldest: age of the oldest gradients.
    """
    different = list(counted(flows))
    last = len(flows[0][0].stages) - 1
    apart = [k for k in range(last) if placement[k] != placement[k + 1]]
    return [k for k in apart if oldest or not all(flow.stages[k + 1].messages for flow in different)]


def counted(flows: Sequence[Sequence[Flow]]) -> dict[Flow, int]:
    """Return the different flows, each with its number of micro-batches."""
    counts: dict[Flow, int] = {}
    # Hashing a flow takes long, and micro-batches in a row usually share one.
    for flow, group in groupby(flow for batch in flows for flow in batch):
        counts[flow] = counts.get(flow, 0) + sum(1 for _ in group)
    return counts


def check_schedule(schedule: object) -> None:
    """Raise TypeError unless `schedule` is a `Schedule`."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"`schedule` should be a Schedule, such as `best(...).schedule`. Found {type(schedule).__name__}."
        )


def needs(action: Action, flows: Sequence[Sequence[Flow]]) -> list[Product]:
    """Return the results that a computation needs before it can start."""
    kind, k, m, q, turn, _ = action
    if kind is Kind.UPDATE:
        return []
    if kind is Kind.FORWARD:
        return [("F", k - 1, m, turn)] if k else []
    if kind is Kind.HEAD:
        return [("F", k, m, turn)]
    stage = flows[turn][m].stages[k]
    cotangent = stage.cotangent(q)
    results: list[Product] = [("F", k, m, turn)]
    if cotangent.own:
        results.append(("H", k, m, turn))
    results += [(p, k + 1, m, turn) for p in cotangent.needed]
    # A separate W comes after the I of the same cotangent, which has kept the cotangent of every layer for it.
    if kind is Kind.WEIGHT_GRAD and stage.fused is not None:
        results.append((stage.fused, k, m, turn))
    return results


def product(action: Action) -> Product | None:
    """Return the result of a computation for which others may wait; None for weight gradients and updates."""
    kind, k, m, q, turn, _ = action
    if kind is Kind.FORWARD or kind is Kind.HEAD:
        return (kind.value, k, m, turn)
    return None if q is None else (q, k, m, turn)


def merge(words: Sequence[Sequence[Action]], flows: Sequence[Sequence[Flow]]) -> list[Action]:
    """Merge words into one order of a call that respects each of them, for one process.

    Args:
        words: computations in order, such as one word per stage; results of other words that an older action needs come from
            earlier calls.
        flows: flow of every micro-batch, ``[turns][M]``.

    Raises:
        Deadlock: the words are in a deadlock; the message names the actions that are stuck.
    """
    # Every word offers its next action. Those that can run are in a heap, the others wait for a result. After F0(0):
    #
    #     stage 0   F0(1)   in the heap with key (0, 1, True, 0)
    #     stage 1   F1(0)   in the heap with key (0, 0, True, 1), so it runs next
    #     stage 2   F2(0)   waits for the result of F1(0)
    #
    # The key prefers the oldest mini-batch, then its oldest micro-batch, then passes to forwards (False < True). So few
    # micro-batches are in flight. Each action enters the heap once.
    ages = {made: a.age for word in words for a in word if (made := product(a)) is not None}
    done: set[Product] = set()
    waiting: dict[Product, int] = {}
    left = [[a for a in reversed(word) if a.kind is not Kind.UPDATE] for word in words]
    order: list[Action] = []
    ready: list[tuple[int, int, bool, int]] = []

    def queue(k: int) -> None:
        if left[k]:
            action = left[k][-1]
            missing = next((n for n in needs(action, flows) if n not in done and ages.get(n) == action.age), None)
            if missing is None:
                call = (action.turn + action.age) % len(flows)
                heapq.heappush(ready, (call, action.microbatch, action.kind is Kind.FORWARD, k))
            else:
                waiting[missing] = k

    for k in range(len(words)):
        queue(k)
    while ready:
        k = heapq.heappop(ready)[-1]
        action = left[k].pop()
        order.append(action)
        made = product(action)
        if made is not None:
            done.add(made)
        queue(k)
        if made in waiting:
            queue(waiting.pop(made))
    stuck = [word[-1] for word in left if word]
    if stuck:
        raise Deadlock(stuck)
    return order


class Deadlock(ValueError):
    """Lists in which actions wait for each other.

    Args:
        stuck: the next action of every list that cannot proceed.
    """

    def __init__(self, stuck: Sequence[Action]) -> None:
        names = ", ".join(map(str, stuck[:6])) + (", ..." if len(stuck) > 6 else "")
        super().__init__(
            "The lists should let every action run. Found a deadlock: each of these waits for one that comes later in another "
            f"list or its own: {names}. Put each action after those that it waits for."
        )


def _work(action: Action) -> tuple[int, int, int, int, bool]:
    """Return a key that identifies a stage's work on a micro-batch."""
    return action.stage, action.microbatch, action.turn, action.age, action.kind is Kind.UPDATE


def _with_messages(word: Word, schedule: Schedule) -> Iterator[Action]:
    """Insert the receives, sends and drops around a rank's computations."""
    placement, flows = schedule.placement, schedule.flows
    # The first use of every message and the last of every micro-batch: what is older comes in a later call.
    first: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    last: dict[tuple[int, int, int], tuple[int, int]] = {}
    for i, action in enumerate(word):
        kind, k, m, q, turn, age = action
        if kind is not Kind.UPDATE:
            last[k, m, turn] = max(last.get((k, m, turn), (age, i)), (age, i))
        for p in flows[turn][m].stages[k].cotangent(q).needed if kind in PASSES else ():
            first[k, m, p, turn] = min(first.get((k, m, p, turn), (age, i)), (age, i))
    for i, action in enumerate(word):
        kind, k, m, q, turn, age = action
        below = k > 0 and placement[k - 1] != placement[k]
        above = k < len(placement) - 1 and placement[k + 1] != placement[k]
        if kind is Kind.FORWARD and below:
            yield Action(Kind.RECEIVE_ACTIVATION, k, m, None, turn, age)
        for p in flows[turn][m].stages[k].cotangent(q).needed if kind in PASSES and above else ():
            if first[k, m, p, turn] == (age, i):
                yield Action(Kind.RECEIVE_GRADIENT, k, m, p, turn, age)
        yield action
        if kind is Kind.FORWARD and above:
            yield Action(Kind.SEND_ACTIVATION, k, m, None, turn, age)
        if q is not None and below:
            yield Action(Kind.SEND_GRADIENT, k, m, q, turn, age)
        if last.get((k, m, turn)) == (age, i):
            yield Action(Kind.DROP, k, m, None, turn, age)
