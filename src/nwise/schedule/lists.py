"""Schedules: one ordered list of actions per stage, the value that runtimes execute and simulators time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind

Word = tuple[Action, ...]
# What an action makes and others wait for: (what, stage, micro-batch, turn); what is a letter or a message's index.
Product = tuple[str | int, int, int, int]


@dataclass(frozen=True)
class Schedule:
    """What every stage does in one mini-batch, or in one cycle of mini-batches of a rotating strategy.

    Args:
        order: name of the rule that made it.
        flows: the flow of every micro-batch, ``[turns][M]``.
        words: per stage its computations in order, each turn closed by its update.
    """

    order: str
    flows: tuple[tuple[Flow, ...], ...]
    words: tuple[Word, ...]

    @property
    def num_stages(self) -> int:
        """A."""
        return len(self.words)

    @property
    def num_microbatches(self) -> int:
        """M."""
        return len(self.flows[0])

    @cached_property
    def lists(self) -> tuple[Word, ...]:
        """Per stage everything that it does: receives right before first use, sends as soon as there is something
        to send, one message per loss, drops after last use, the update last."""
        return tuple(tuple(_with_messages(word, self.flows, len(self.words))) for word in self.words)

    @cached_property
    def digest(self) -> str:
        """A text that is the same for equal lists, in other processes too."""
        return sha256(repr(self.lists).encode()).hexdigest()

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage the most micro-batches whose forward has run and that are still needed."""
        return tuple(_most_in_flight(word) for word in self.words)

    @cached_property
    def first_in_first_out(self) -> bool:
        """Whether every boundary's gradients are used in the order they are sent, so that no message needs a tag."""
        sent = [[(a.microbatch, a.message) for a in word if a.kind is Kind.SEND_GRADIENT] for word in self.lists]
        used = [[(a.microbatch, a.message) for a in word if a.kind is Kind.RECEIVE_GRADIENT] for word in self.lists]
        return all(here == above for here, above in zip(used, sent[1:], strict=False))

    @cached_property
    def one_process_turns(self) -> tuple[Word, ...]:
        """For each mini-batch of the cycle, all its computations in an order that one process can run."""
        order = self.one_process()
        return tuple(tuple(action for action in order if action.turn == turn) for turn in range(len(self.flows)))

    def one_process(self) -> list[Action]:
        """All computations in one order that respects every list, as one process runs them.

        Raises:
            ValueError: the lists wait for each other; it names the actions that are stuck.
        """
        return merge(self.words, self.flows)


def counted(flows: Sequence[Sequence[Flow]]) -> list[tuple[Flow, int]]:
    """The different flows and how many micro-batches have each; told apart by identity, since they are large."""
    found: dict[int, tuple[Flow, int]] = {}
    for flow in (flow for batch in flows for flow in batch):
        found[id(flow)] = flow, found.get(id(flow), (flow, 0))[1] + 1
    return list(found.values())


def held_back(flows: Sequence[Sequence[Flow]]) -> list[int]:
    """Stages whose next one does not send a gradient back for every micro-batch.

    Nothing else would keep such a stage from running away, so it starts a forward only after its activation of the
    mini-batch before has been taken.
    """
    different = [flow for flow, _ in counted(flows)]
    return [k for k in range(len(flows[0][0].stages) - 1) if not all(flow.stages[k + 1].messages for flow in different)]


def check_schedule(schedule: object) -> None:
    """Refuse what is no schedule."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"`schedule` should be a Schedule, such as `best(...).schedule`. Found {type(schedule).__name__}."
        )


def needs(action: Action, flows: Sequence[Sequence[Flow]]) -> list[Product]:
    """What has to exist before a computation can start."""
    kind, k, m, q, turn = action
    if kind is Kind.UPDATE:
        return []
    if kind is Kind.FORWARD:
        return [("F", k - 1, m, turn)] if k else []
    if kind is Kind.HEAD:
        return [("F", k, m, turn)]
    stage = flows[turn][m].stages[k]
    cotangent = stage.cotangent(q)
    found: list[Product] = [("F", k, m, turn)]
    if cotangent.own:
        found.append(("H", k, m, turn))
    found += [(p, k + 1, m, turn) for p in cotangent.needed]
    if kind is Kind.WEIGHT_GRAD and stage.fused is not None:
        found.append((stage.fused, k, m, turn))
    return found


def product(action: Action) -> Product | None:
    """What others can wait for once a computation is done; None for weight gradients and updates."""
    kind, k, m, q, turn = action
    if kind is Kind.FORWARD or kind is Kind.HEAD:
        return (kind.value, k, m, turn)
    return None if q is None else (q, k, m, turn)


def merge(words: Sequence[Sequence[Action]], flows: Sequence[Sequence[Flow]]) -> list[Action]:
    """One order of all computations: of what can run the earliest micro-batch first, and passes before forwards, so
    that little is held; see `Schedule.one_process`."""
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
    """What to say of lists that wait for each other."""
    names = ", ".join(map(str, stuck[:6])) + (", ..." if len(stuck) > 6 else "")
    return (
        "The lists should let every action run. Found a deadlock: each of these waits for one that comes later in another "
        f"list or its own: {names}. Move what they wait for before them."
    )


def _with_messages(word: Word, flows: Sequence[Sequence[Flow]], num_stages: int) -> Iterator[Action]:
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
    last = {(a.microbatch, a.turn): i for i, a in enumerate(word) if a.kind is not Kind.UPDATE}
    now = most = 0
    for i, action in enumerate(word):
        if action.kind is Kind.FORWARD:
            now += 1
            most = max(most, now)
        if action.kind is not Kind.UPDATE and last[action.microbatch, action.turn] == i:
            now -= 1
    return most
