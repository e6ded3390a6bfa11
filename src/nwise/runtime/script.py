"""Scripts: the actions of a rank in one call, and the messages that belong to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nwise.runtime.compression import Wire
from nwise.runtime.ledger import Key, MessagePlan
from nwise.runtime.processes import Processes
from nwise.schedule.actions import SENDS, Action, Kind, counterpart
from nwise.schedule.schedule import Schedule, Word

_LEARNING = (Kind.HEAD, Kind.WEIGHT_GRAD, Kind.BOTH)

Plans = Mapping[int, MessagePlan]


@dataclass(frozen=True, slots=True)
class Step:
    """An action of a script.

    Args:
        action: the action.
        key: name of its message, for sends and receives; None for others.
        peer: rank at the other end of its message; -1 for other actions.
        travel: for receives the number of calls since the send.
        last: whether it is the call's last action that adds to the gradients of its stage or head.
        continued: whether a pass on the same stage and micro-batch follows at once (`Schedule.continued`).
    """

    action: Action
    key: Key | None = None
    peer: int = -1
    travel: int = 0
    last: bool = False
    continued: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """The work of a rank in one call.

    Args:
        steps: the rank's actions, in order.
        outgoing, incoming: plans of the channels to and from other ranks.
    """

    steps: tuple[Step, ...]
    outgoing: Plans
    incoming: Plans


class ScriptWriter:
    """Writes the scripts of one rank, and keeps them.

    Args:
        processes: the processes.
        wire: the form in which the messages of training steps travel.
        replicated: whether gradients are summed over replicas.
    """

    def __init__(self, processes: Processes, wire: Wire, *, replicated: bool) -> None:
        self._processes, self._wire, self._replicated = processes, wire, replicated
        self._known: dict[str, list[Script]] = {}

    def script(self, schedule: Schedule | None, turn: int) -> Script:
        """Return the script of a call; those of a schedule are made once.

        Args:
            schedule: None for forwards alone.
            turn: index of the call in the cycle.
        """
        digest = "" if schedule is None else schedule.digest
        if digest not in self._known:
            self._known[digest] = self._new_scripts(schedule)
        return self._known[digest][turn]

    def _new_scripts(self, schedule: Schedule | None) -> list[Script]:
        processes = self._processes
        lists = _forwards(processes.placement) if schedule is None else schedule.lists
        others = [r for r in range(processes.num_ranks) if r != processes.place]
        outgoing = {other: self._plan(schedule, lists, processes.place, other) for other in others}
        incoming = {other: self._plan(schedule, lists, other, processes.place) for other in others}
        words = lists[processes.place : processes.place + 1] if schedule is None else schedule.calls[processes.place]
        return [Script(self._steps(schedule, word), outgoing, incoming) for word in words]

    def _steps(self, schedule: Schedule | None, word: Word) -> tuple[Step, ...]:
        # The last head action and the last W or B of every stage: later places replace earlier ones.
        final = {(a.stage, a.kind is Kind.HEAD): i for i, a in enumerate(word) if a.kind in _LEARNING}
        last = set(final.values()) if self._replicated else ()
        alone = self._processes.num_ranks == 1 and not self._replicated
        return tuple(
            self._step(a, schedule, last=i in last) for i, a in enumerate(word) if not (alone and a.kind is Kind.UPDATE)
        )

    def _plan(self, schedule: Schedule | None, lists: Sequence[Word], sender: int, receiver: int) -> MessagePlan:
        """Return the messages from one rank to another."""
        placement, turns = self._processes.placement, 1 if schedule is None else len(schedule.flows)
        calls: list[list[tuple[Key, int]]] = [[] for _ in range(turns)]
        for a in lists[sender]:
            if a.kind in SENDS and placement[counterpart(a).stage] == receiver:
                calls[(a.turn + a.age) % turns].append((counterpart(a)._replace(age=0), a.age))
        travel = max((a.age for a in lists[receiver]), default=0)
        plan = MessagePlan(tuple(map(tuple, calls)), travel)
        return plan if schedule is None else replace(plan, digest=schedule.digest, parts=self._wire.specs)

    def _step(self, action: Action, schedule: Schedule | None, *, last: bool) -> Step:
        placement = self._processes.placement
        if action.kind in SENDS:
            receive = counterpart(action)
            return Step(action, receive._replace(age=0), placement[receive.stage])
        if action.kind in SENDS.values():
            other = action.stage + (-1 if action.kind is Kind.RECEIVE_ACTIVATION else 1)
            travel = 0 if schedule is None else schedule.travel[action]
            return Step(action, action._replace(age=0), placement[other], travel)
        return Step(action, last=last, continued=schedule is None or action in schedule.continued)


def _forwards(placement: Sequence[int]) -> list[Word]:
    """Return the list of every rank for forwards alone."""
    lists: list[list[Action]] = [[] for _ in range(1 + max(placement))]
    for k, rank in enumerate(placement):
        if k and placement[k - 1] != rank:
            lists[rank].append(Action(Kind.RECEIVE_ACTIVATION, k, 0))
        lists[rank].append(Action(Kind.FORWARD, k, 0))
        if k + 1 < len(placement) and placement[k + 1] != rank:
            lists[rank].append(Action(Kind.SEND_ACTIVATION, k, 0))
    return [tuple(word) for word in lists]
