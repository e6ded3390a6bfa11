"""Schedules: one ordered list of actions per stage, which runtimes execute and simulators time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind

Word = tuple[Action, ...]
# The result of an action, for which others wait: (what, stage, micro-batch, turn), with "F", "H" or the index of a message.
Product = tuple[str | int, int, int, int]


@dataclass(frozen=True)
class Schedule:
    """The work of every stage in one mini-batch, or in one cycle of mini-batches of a rotating strategy.

    Args:
        order: name of the rule that made it.
        flows: flow of every micro-batch, ``[turns][M]``.
        words: computations of every stage in order, with an update at the end of each turn.
    """

    order: str
    flows: tuple[tuple[Flow, ...], ...]
    words: tuple[Word, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, A."""
        return len(self.words)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per mini-batch, M."""
        return len(self.flows[0])

    @cached_property
    def lists(self) -> tuple[Word, ...]:
        """All actions of every stage, in order.

        A receive comes right before the first use, a send right after its computation, a drop after the last use, and
        an update at the end of its turn.
        """
        return tuple(tuple(_with_messages(word, self.flows, len(self.words))) for word in self.words)

    @cached_property
    def digest(self) -> str:
        """Hash of the lists, the same in every process."""
        return sha256(repr(self.lists).encode()).hexdigest()

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For every stage the largest number of micro-batches in flight: forward done, last use still to come."""
        return tuple(_most_in_flight(word) for word in self.words)

    @cached_property
    def first_in_first_out(self) -> bool:
        """Whether gradients are used in the order in which they are sent, at every boundary."""
        sent = [[(a.microbatch, a.message) for a in word if a.kind is Kind.SEND_GRADIENT] for word in self.lists]
        used = [[(a.microbatch, a.message) for a in word if a.kind is Kind.RECEIVE_GRADIENT] for word in self.lists]
        return all(here == above for here, above in zip(used, sent[1:], strict=False))

    @cached_property
    def one_process_turns(self) -> tuple[Word, ...]:
        """For each mini-batch of the cycle, all its computations in an order for one process."""
        order = self.one_process()
        return tuple(tuple(action for action in order if action.turn == turn) for turn in range(len(self.flows)))

    def one_process(self) -> list[Action]:
        """Return all computations in one order that respects every list, for one process.

        Raises:
            ValueError: the lists are in a deadlock; the message names the actions that are stuck.
        """
        return merge(self.words, self.flows)


def counted(flows: Sequence[Sequence[Flow]]) -> list[tuple[Flow, int]]:
    """Return the different flows, each with its number of micro-batches."""
    # By identity, because flows are large and equal ones usually come from one cached object.
    counts: dict[int, tuple[Flow, int]] = {}
    for flow in (flow for batch in flows for flow in batch):
        counts[id(flow)] = flow, counts.get(id(flow), (flow, 0))[1] + 1
    return list(counts.values())


def held_back(flows: Sequence[Sequence[Flow]]) -> list[int]:
    """Return the stages that do not receive a gradient from the next stage for every micro-batch.

    Nothing else would keep such a stage from running ahead. It therefore starts a forward only after the next stage has
    taken its activation of the previous mini-batch.
    """
    different = [flow for flow, _ in counted(flows)]
    return [k for k in range(len(flows[0][0].stages) - 1) if not all(flow.stages[k + 1].messages for flow in different)]


def check_schedule(schedule: object) -> None:
    """Raise TypeError unless `schedule` is a `Schedule`."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"`schedule` should be a Schedule, such as `best(...).schedule`. Found {type(schedule).__name__}."
        )


def needs(action: Action, flows: Sequence[Sequence[Flow]]) -> list[Product]:
    """Return the results that a computation needs before it can start."""
    kind, k, m, q, turn = action
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
    # A separate W comes after the I of the same cotangent, which may have kept the cotangent of every layer for it.
    if kind is Kind.WEIGHT_GRAD and stage.fused is not None:
        results.append((stage.fused, k, m, turn))
    return results


def product(action: Action) -> Product | None:
    """Return the result of a computation for which others may wait; None for weight gradients and updates."""
    kind, k, m, q, turn = action
    if kind is Kind.FORWARD or kind is Kind.HEAD:
        return (kind.value, k, m, turn)
    return None if q is None else (q, k, m, turn)


def merge(words: Sequence[Sequence[Action]], flows: Sequence[Sequence[Flow]]) -> list[Action]:
    """Merge the words of all stages into one order that respects each of them; see `Schedule.one_process`."""
    # Every stage offers its next action. Those that can run are in a heap, the others wait for a result. After F0(0):
    #
    #     stage 0   F0(1)   in the heap with key (0, 1, True, 0)
    #     stage 1   F1(0)   in the heap with key (0, 0, True, 1), so it runs next
    #     stage 2   F2(0)   waits for the result of F1(0)
    #
    # The key prefers the oldest mini-batch, then its oldest micro-batch, then passes to forwards (False < True). So few
    # micro-batches are in flight. Each action enters the heap once.
    done: set[Product] = set()
    waiting: dict[Product, int] = {}
    left = [[a for a in reversed(word) if a.kind is not Kind.UPDATE] for word in words]
    order: list[Action] = []
    ready: list[tuple[int, int, bool, int]] = []

    def queue(k: int) -> None:
        if left[k]:
            action = left[k][-1]
            missing = next((need for need in needs(action, flows) if need not in done), None)
            if missing is None:
                heapq.heappush(ready, (action.turn, action.microbatch, action.kind is Kind.FORWARD, k))
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
        raise ValueError(stuck_message(stuck))
    return order


def stuck_message(stuck: Sequence[Action]) -> str:
    """Return the error message for lists in a deadlock."""
    names = ", ".join(map(str, stuck[:6])) + (", ..." if len(stuck) > 6 else "")
    return (
        "The lists should let every action run. Found a deadlock: each of these waits for one that comes later in another "
        f"list or its own: {names}. Move what they wait for before them."
    )


def _with_messages(word: Word, flows: Sequence[Sequence[Flow]], num_stages: int) -> Iterator[Action]:
    """Insert the receives, sends and drops around a stage's computations."""
    last = {(a.microbatch, a.turn): i for i, a in enumerate(word) if a.kind is not Kind.UPDATE}
    received: set[tuple[int, int, int]] = set()
    for i, action in enumerate(word):
        kind, k, m, q, turn = action
        if kind is Kind.UPDATE:
            yield action
            continue
        if kind is Kind.FORWARD:
            if k:
                yield Action(Kind.RECEIVE_ACTIVATION, k, m, None, turn)
            yield action
            if k < num_stages - 1:
                yield Action(Kind.SEND_ACTIVATION, k, m, None, turn)
        elif kind is Kind.HEAD:
            yield action
        else:
            for p in flows[turn][m].stages[k].cotangent(q).needed:
                if (m, p, turn) not in received:
                    received.add((m, p, turn))
                    yield Action(Kind.RECEIVE_GRADIENT, k, m, p, turn)
            yield action
            if q is not None:
                yield Action(Kind.SEND_GRADIENT, k, m, q, turn)
        if last[m, turn] == i:
            yield Action(Kind.DROP, k, m, None, turn)


def _most_in_flight(word: Word) -> int:
    """Return the largest number of micro-batches between their forward and their last action."""
    last = {(a.microbatch, a.turn): i for i, a in enumerate(word) if a.kind is not Kind.UPDATE}
    now = most = 0
    for i, action in enumerate(word):
        if action.kind is Kind.FORWARD:
            now += 1
            most = max(most, now)
        if action.kind is not Kind.UPDATE and last[action.microbatch, action.turn] == i:
            now -= 1
    return most
