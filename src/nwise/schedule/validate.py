"""Validation: the conditions that lists must meet before anything runs.

1. complete: every stage's list contains each of its actions exactly once. The flow determines what crosses each boundary,
   so every receive then has one send, and every send one receive;
2. in order: nothing is used before it exists or after it is dropped, updates come last, and there is no deadlock;
3. bounded: the number of messages on every link is limited;
4. within memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nwise.flow import Flow
from nwise.schedule.actions import SENDS, Action, Kind, counterpart, forwards, passes
from nwise.schedule.costs import Costs
from nwise.schedule.lists import (
    Product,
    Schedule,
    Word,
    check_schedule,
    counted,
    held_back,
    needs,
    product,
    stuck_message,
)
from nwise.schedule.timed import check_memory, peak_bytes

_RECEIVES = frozenset(SENDS.values())


@dataclass(frozen=True, slots=True)
class Buffer:
    """The largest number of messages that may wait at one boundary.

    Args:
        activations: activations on their way from stage k - 1 to stage k.
        gradients: gradients on their way from stage k to stage k - 1.
        limited: whether some micro-batch has no gradient that flows back over the boundary. Such a sender is held back:
            it starts a forward only after its activation of the previous mini-batch has been taken.
    """

    activations: int
    gradients: int
    limited: bool


def validate(
    schedule: Schedule, *, lists: Sequence[Word] | None = None, costs: Costs | None = None, memory: float | None = None
) -> list[Buffer]:
    """Check that a schedule can run.

    Args:
        schedule: the schedule.
        lists: lists to check instead of the schedule's own, such as hand-written ones; default: the schedule's.
        costs: costs whose bytes determine the memory; required with `memory`.
        memory: limit per stage in bytes; default: none.

    Returns:
        The buffers that boundaries 1 .. A-1 need.

    Raises:
        ValueError: the schedule cannot run; the message names the first error and its actions.
        TypeError: `schedule` is not a `Schedule`.
    """
    check_schedule(schedule)
    lists = schedule.lists if lists is None else lists
    if len(lists) != schedule.num_stages:
        raise ValueError(
            f"`lists` should have one list for each of the {schedule.num_stages} stages. Found {len(lists)}."
        )
    for k, word in enumerate(lists):
        _check_complete(k, word, schedule.flows)
    _check_order(lists, schedule.flows)
    if memory is not None:
        if costs is None:
            raise ValueError(
                "`costs` should be given with `memory`, because they determine the size of a micro-batch. Found none."
            )
        check_memory(memory)
        in_flight = [_most_in_flight(word) for word in lists]
        for k, needed in enumerate(peak_bytes(in_flight, costs)):
            if needed > memory:
                raise ValueError(
                    f"Stage {k} should need at most {memory:,.0f} bytes. Found {needed:,.0f} with {in_flight[k]} "
                    "micro-batches in flight; choose an order with fewer in flight, or smaller micro-batches."
                )
    return buffers(schedule)


def buffers(schedule: Schedule) -> list[Buffer]:
    """Return limits of what may wait at the boundaries 1 .. A-1, for any times of the actions."""
    # One cycle's messages at most: a sender waits for the same message of the cycle before (`nwise.runtime.channel`).
    size = len(schedule.flows) * schedule.num_microbatches
    limited = set(held_back(schedule.flows))
    limits = []
    for k in range(1, schedule.num_stages):
        gradients = sum(count * len(flow.stages[k].messages) for flow, count in counted(schedule.flows))
        limits.append(Buffer(activations=size, gradients=gradients, limited=k - 1 in limited))
    return limits


def _most_in_flight(word: Word) -> int:
    """Return the largest number of micro-batches between their forward and their drop."""
    changes = ((action.kind is Kind.FORWARD) - (action.kind is Kind.DROP) for action in word)
    return max(accumulate(changes), default=0)


def _expected(k: int, flows: Sequence[Sequence[Flow]], fused: set[tuple[int, int]]) -> Counter[Action]:
    """Return all actions of a stage, given the (micro-batch, turn) pairs whose list fuses I and W."""
    expected: Counter[Action] = Counter()
    for turn, batch in enumerate(flows):
        expected[Action(Kind.UPDATE, k, 0, None, turn)] += 1
        for m, flow in enumerate(batch):
            stage = flow.stages[k]
            computed = [*forwards(stage, k, m, turn), *passes(stage, k, m, fuse=(m, turn) in fused, turn=turn)]
            last = k == len(flow.stages) - 1
            above = [] if last else range(len(flow.stages[k + 1].messages))
            expected.update(computed)
            expected.update(
                Action(Kind.SEND_GRADIENT, k, m, a.message, turn) for a in computed if a.message is not None
            )
            expected.update(Action(Kind.RECEIVE_GRADIENT, k, m, p, turn) for p in above)
            expected[Action(Kind.DROP, k, m, None, turn)] += 1
            if k:
                expected[Action(Kind.RECEIVE_ACTIVATION, k, m, None, turn)] += 1
            if not last:
                expected[Action(Kind.SEND_ACTIVATION, k, m, None, turn)] += 1
    return expected


def _check_complete(k: int, word: Word, flows: Sequence[Sequence[Flow]]) -> None:
    """Raise ValueError unless a list has each action of its stage once."""
    counts = Counter(word)
    expected = _expected(k, flows, {(a.microbatch, a.turn) for a in word if a.kind is Kind.BOTH})
    if counts == expected:
        return
    missing, extra = expected - counts, counts - expected
    problem = f"no {next(iter(missing))}" if missing else f"{next(iter(extra))} too often or unneeded"
    raise ValueError(
        f"The list of stage {k} should contain each of its {expected.total()} actions once. Found {problem} "
        f"({missing.total()} missing, {extra.total()} too many)."
    )


def _check_order(lists: Sequence[Word], flows: Sequence[Sequence[Flow]]) -> None:
    """Run the lists without times, and raise ValueError for a wrong order or a deadlock."""
    # Sends never wait, and a receive waits for its send only. So the sequence of stages does not matter: if one sequence
    # reaches the end of all lists, every sequence does.
    sent: set[Action] = set()
    waiting: dict[Action, int] = {}
    place = [0] * len(lists)
    stages = [_Holdings(k, flows) for k in range(len(lists))]
    ready = list(range(len(lists)))
    while ready:
        k = ready.pop()
        word = lists[k]
        while place[k] < len(word):
            action = word[place[k]]
            if action.kind in _RECEIVES and action not in sent:
                waiting[action] = k
                break
            stages[k].run(action)
            if action.kind in SENDS:
                receive = counterpart(action)
                sent.add(receive)
                if receive in waiting:
                    ready.append(waiting.pop(receive))
            place[k] += 1
    stuck = [word[i] for word, i in zip(lists, place, strict=True) if i < len(word)]
    if stuck:
        raise ValueError(stuck_message(stuck))


class _Holdings:
    """The results that a stage holds of each micro-batch while it runs its list."""

    def __init__(self, stage: int, flows: Sequence[Sequence[Flow]]) -> None:
        self._stage = stage
        self._flows = flows
        self._held: dict[tuple[int, int], set[Product] | None] = {}  # by (micro-batch, turn); None after the drop
        self._to_drop = [len(batch) for batch in flows]
        self._updates = 0

    def run(self, action: Action) -> None:
        """Record an action; raise ValueError if it needs a result that the stage does not hold, or comes too late."""
        kind, k, m, q, turn = action
        if kind is Kind.UPDATE:
            self._update(action)
            return
        held = self._held.setdefault((m, turn), set())
        if held is None:
            raise ValueError(
                f"The list of stage {self._stage} should drop a micro-batch after its last use. Found {action} after its drop."
            )
        if kind is Kind.RECEIVE_ACTIVATION:
            held.add(("F", k - 1, m, turn))
        elif kind is Kind.RECEIVE_GRADIENT:
            assert q is not None
            held.add((q, k + 1, m, turn))
        elif kind is Kind.DROP:
            self._check(("F", k, m, turn), held, action)
            self._held[m, turn] = None
            self._to_drop[turn] -= 1
        elif kind in SENDS:
            self._check(("F" if q is None else q, k, m, turn), held, action)
        else:
            for key in needs(action, self._flows):
                self._check(key, held, action)
            made = product(action)
            if made is not None:
                held.add(made)

    def _update(self, action: Action) -> None:
        left = self._to_drop[action.turn]
        if left or action.turn != self._updates:
            raise ValueError(
                f"The list of stage {self._stage} should update after all other actions of a mini-batch, turn by turn. Found "
                f"{action} before {left} of its micro-batches were dropped, after {self._updates} updates."
            )
        self._updates += 1

    def _check(self, key: Product, held: set[Product], action: Action) -> None:
        if key not in held:
            what, stage = key[0], key[1]
            thing = {"F": "the activation", "H": "the head"}.get(str(what), f"message {what}")
            raise ValueError(
                f"The list of stage {self._stage} should compute or receive the inputs of an action before the action, and drop "
                f"them only afterwards. Found {action} without {thing} of stage {stage}."
            )
