"""Validation: the conditions that lists must meet before anything runs.

1. complete: every rank's list contains each action of its stages exactly once. The flow and the placement determine what
   crosses each boundary, so every receive then has one send, and every send one receive;
2. of the right age: no result is older than its use, a message is received in the call of its send or later, the weight
   gradients of a stage have one age, and forwards and heads have age 0;
3. in order: nothing is used before it exists or after it is dropped, updates come last, and there is no deadlock;
4. bounded: the number of messages on every link is limited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nwise.schedule.actions import COMPUTATIONS, SENDS, Action, Kind, counterpart, forwards, passes
from nwise.schedule.event_graph import EventGraph, Need, run
from nwise.schedule.schedule import (
    Product,
    Schedule,
    Word,
    check_schedule,
    counted,
    held_back,
    needs,
    product,
)

_RECEIVES = frozenset(SENDS.values())


@dataclass(frozen=True, slots=True)
class Buffer:
    """The largest number of messages that may wait at one boundary.

    Args:
        activations: activations on their way from stage k - 1 to stage k.
        gradients: gradients on their way from stage k to stage k - 1.
        limited: whether stage k - 1 is held back: it starts a forward only after its activation of an earlier mini-batch
            has been taken. It is where a micro-batch has no gradient that flows back over the boundary, and under a delay.
    """

    activations: int
    gradients: int
    limited: bool


def validate(schedule: Schedule, *, lists: Sequence[Word] | None = None) -> list[Buffer]:
    """Check that a schedule can run.

    Args:
        schedule: the schedule.
        lists: lists to check instead of the schedule's own, such as hand-written ones; default: the schedule's.

    Returns:
        The buffers that boundaries 1 .. A-1 need.

    Raises:
        ValueError: the schedule cannot run; the message names the first error and its actions.
        TypeError: `schedule` is not a `Schedule`.
    """
    check_schedule(schedule)
    lists = schedule.lists if lists is None else lists
    if len(lists) != schedule.num_ranks:
        raise ValueError(
            f"`lists` should have one list for each of the {schedule.num_ranks} ranks. Found {len(lists)}."
        )
    for rank, word in enumerate(lists):
        _check_complete(rank, word, schedule)
    _check_ages(lists, schedule)
    _check_deadlock(lists)
    for rank, word in enumerate(lists):
        _check_list(rank, word, schedule)
    return buffers(schedule)


def buffers(schedule: Schedule) -> list[Buffer]:
    """Return limits on the messages that may wait at the boundaries 1 .. A-1, for any times of the actions."""
    # One cycle's messages at most, and more under a delay: a sender waits for the same message of an earlier cycle
    # (`nwise.runtime.channel`). Stages of one rank send each other nothing.
    cycles = 1 + schedule.oldest
    size = cycles * len(schedule.flows) * schedule.num_microbatches
    limited = held_back(schedule.flows, schedule.placement, oldest=schedule.oldest)
    limits = []
    for k, (before, here) in enumerate(pairwise(schedule.placement), start=1):
        if before == here:
            limits.append(Buffer(activations=0, gradients=0, limited=False))
            continue
        gradients = sum(count * len(flow.stages[k].messages) for flow, count in counted(schedule.flows).items())
        limits.append(Buffer(activations=size, gradients=cycles * gradients, limited=k - 1 in limited))
    return limits


def _expected(rank: int, schedule: Schedule, fused: set[tuple[int, int, int]]) -> Counter[Action]:
    """Return all actions of a rank without their ages, given the (stage, micro-batch, turn) whose list fuses I and W."""
    expected: Counter[Action] = Counter()
    placement = schedule.placement
    for k in (k for k, r in enumerate(placement) if r == rank):
        below = k > 0 and placement[k - 1] != rank
        above = k < len(placement) - 1 and placement[k + 1] != rank
        for turn, batch in enumerate(schedule.flows):
            expected[Action(Kind.UPDATE, k, 0, None, turn)] += 1
            for m, flow in enumerate(batch):
                stage = flow.stages[k]
                computed = [*forwards(stage, k, m, turn), *passes(stage, k, m, fuse=(k, m, turn) in fused, turn=turn)]
                expected.update(computed)
                sent = [a.message for a in computed if a.message is not None and below]
                received = range(len(flow.stages[k + 1].messages)) if above else ()
                expected.update(Action(Kind.SEND_GRADIENT, k, m, q, turn) for q in sent)
                expected.update(Action(Kind.RECEIVE_GRADIENT, k, m, p, turn) for p in received)
                expected[Action(Kind.DROP, k, m, None, turn)] += 1
                expected[Action(Kind.RECEIVE_ACTIVATION, k, m, None, turn)] += below
                expected[Action(Kind.SEND_ACTIVATION, k, m, None, turn)] += above
    return +expected


def _check_complete(rank: int, word: Word, schedule: Schedule) -> None:
    """Raise ValueError unless a list has each action of its rank once."""
    counts = Counter(a._replace(age=0) for a in word)
    expected = _expected(rank, schedule, {(a.stage, a.microbatch, a.turn) for a in word if a.kind is Kind.BOTH})
    if counts == expected:
        return
    missing, extra = expected - counts, counts - expected
    problem = f"no {next(iter(missing))}" if missing else f"{next(iter(extra))} too often or unneeded"
    raise ValueError(
        f"The list of rank {rank} should contain each of its {expected.total()} actions once. Found {problem} "
        f"({missing.total()} missing, {extra.total()} too many)."
    )


def _check_ages(lists: Sequence[Word], schedule: Schedule) -> None:
    """Raise ValueError for an action that is younger than a result that it needs, or of another age than its stage's."""
    ages = {made: a.age for word in lists for a in word if (made := product(a)) is not None and a.kind in COMPUTATIONS}
    for action in (a for word in lists for a in word if a.kind in COMPUTATIONS):
        if action.kind in (Kind.WEIGHT_GRAD, Kind.BOTH):
            right = action.age == schedule.ages[action.stage]
        else:
            right = action.age >= 0 if action.kind is Kind.INPUT_GRAD else action.age == 0
        if not right or any(ages[key] > action.age for key in needs(action, schedule.flows)):
            raise ValueError(
                "Weight gradients should have their stage's age, forwards and heads age 0, and no result should be older than "
                f"its use. Found {action} on a stage of age {schedule.ages[action.stage]}."
            )


def _check_deadlock(lists: Sequence[Word]) -> None:
    """Run the lists without times, and raise `Deadlock` if they are in one."""
    # Sends never wait, and a receive waits for its send only, in the same call or an earlier one.
    actions = [a for word in lists for a in word]
    numbers = iter(range(len(actions)))
    words = [[next(numbers) for _ in word] for word in lists]
    sends = {counterpart(a)._replace(age=0): node for node, a in enumerate(actions) if a.kind in SENDS}
    needs: list[list[Need]] = [[] for _ in actions]
    for node, a in enumerate(actions):
        if a.kind in _RECEIVES:
            send = sends[a._replace(age=0)]
            calls = a.age - actions[send].age
            if calls < 0:
                raise ValueError(
                    f"A message should be received in the call in which it is sent, or later. Found {a}, sent with age "
                    f"{actions[send].age}."
                )
            needs[node].append((send, 0.0, calls))
    run(EventGraph(len(words), words, [0.0] * len(actions), needs, actions), [])


def _takes(action: Action, schedule: Schedule) -> list[Product]:
    """Return the results that a rank must hold for an action."""
    kind, k, m, q, turn, _ = action
    if kind in _RECEIVES:
        return []
    if kind in SENDS or kind is Kind.DROP:
        return [("F" if q is None else q, k, m, turn)]
    return needs(action, schedule.flows)


def _brings(action: Action) -> Product | None:
    """Return the result that a rank holds after an action, if there is one: its own, or a received one."""
    kind, k, m, q, turn, _ = action
    if kind is Kind.RECEIVE_ACTIVATION:
        return ("F", k - 1, m, turn)
    if kind is Kind.RECEIVE_GRADIENT and q is not None:
        return (q, k + 1, m, turn)
    return product(action) if kind in COMPUTATIONS else None


def _name(made: Product) -> str:
    what, stage, *_ = made
    return {"F": "the activation", "H": "the head"}.get(str(what), f"message {what}") + f" of stage {stage}"


def _check_list(rank: int, word: Word, schedule: Schedule) -> None:
    """Raise ValueError unless each action finds its inputs, no action uses a dropped micro-batch, and updates end each call."""
    stages = [k for k, r in enumerate(schedule.placement) if r == rank]
    ages = {made: a.age for a in word if (made := _brings(a)) is not None}
    left = Counter(schedule.call(a) for a in word if a.kind is Kind.DROP)
    uses: dict[tuple[int, int, int], int] = {}
    for a in word:
        if a.kind not in (Kind.UPDATE, Kind.DROP):
            uses[a.stage, a.microbatch, a.turn] = max(a.age, uses.get((a.stage, a.microbatch, a.turn), 0))
    held: set[Product] = set()
    dropped: set[tuple[int, int, int, int]] = set()
    updates = 0
    for action in word:
        kind, k, m, _, turn, age = action
        if kind is Kind.UPDATE:
            if left[turn] or turn != updates // len(stages):
                raise ValueError(
                    f"The list of rank {rank} should update after all other actions of a call, call by call. Found "
                    f"{action} before {left[turn]} of its micro-batches were dropped, after {updates} updates."
                )
            updates += 1
            continue
        if (k, m, turn, age) in dropped:
            raise ValueError(
                f"The list of rank {rank} should drop a micro-batch after its last use. Found {action} after its drop."
            )
        for key in _takes(action, schedule):
            made_at = ages.get(key, age)
            if made_at > age:
                raise ValueError(
                    f"The list of rank {rank} should have no result that is older than its use. Found {action} and "
                    f"{_name(key)}, of ages {age} and {made_at}."
                )
            # A result of a smaller age was made in an earlier call.
            if made_at == age and key not in held:
                raise ValueError(
                    f"The list of rank {rank} should compute or receive the inputs of an action before the action, and drop "
                    f"them only afterwards. Found {action} without {_name(key)}."
                )
        if (made := _brings(action)) is not None:
            held.add(made)
        if kind is Kind.DROP:
            if age != (last := uses[k, m, turn]):
                raise ValueError(
                    f"The list of rank {rank} should drop a micro-batch in the call of its last use. Found {action}, of age "
                    f"{age}, and a last use of age {last}."
                )
            dropped.add((k, m, turn, age))
            left[schedule.call(action)] -= 1
