"""Scripts: the actions of a rank in one call, with the messages and shapes that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwise.runtime.channel import Key, MessagePlan, Spec
from nwise.runtime.processes import Processes
from nwise.runtime.shapes import carrying, from_json, output_specs, to_json
from nwise.schedule.actions import SENDS, Action, Kind, counterpart
from nwise.schedule.schedule import Schedule, Word
from nwise.stage import Stage

Specs = tuple[Spec, ...]
# Shapes of the inputs or outputs of a rank's stages by (stage, age), for every micro-batch.
StageShapes = Mapping[tuple[int, int], Sequence[Specs]]

_MOST_SCRIPTS = 256  # every shape of a batch needs a script
_LEARNING = (Kind.HEAD, Kind.WEIGHT_GRAD, Kind.BOTH)


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
        inputs, outputs: shapes of the inputs and outputs of this rank's stages, by (stage, age), per micro-batch.
        num_bytes: bytes that the rank sends, as activations and as gradients.
    """

    steps: tuple[Step, ...]
    outgoing: Mapping[int, MessagePlan]
    incoming: Mapping[int, MessagePlan]
    inputs: StageShapes
    outputs: StageShapes
    num_bytes: Sequence[int]


class ScriptWriter:
    """Writes the scripts of one rank, and keeps them.

    Args:
        processes: the processes.
        stages: this rank's stages, by index.
        wire: function from the shapes of a training step's message to those of the tensors that travel instead.
        device: device of the stages' tensors.
        replicated: whether gradients are summed over replicas.
    """

    def __init__(
        self,
        processes: Processes,
        stages: Mapping[int, Stage],
        wire: Callable[[Specs], Specs],
        device: torch.device,
        *,
        replicated: bool,
    ) -> None:
        self._processes, self._stages, self._wire = processes, stages, wire
        self._device, self._replicated = device, replicated
        self._known: dict[Hashable, Script] = {}

    def script(self, schedule: Schedule | None, turn: int, window: Sequence[tuple[Specs, ...]]) -> Script:
        """Return the script of a call, made once per schedule, turn, shapes and autocast, on all ranks at the same step.

        Args:
            schedule: None for forwards alone.
            turn: index of the call in the cycle.
            window: shapes of the model's inputs per micro-batch, for every age.
        """
        device = self._device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (None if schedule is None else schedule.digest, turn, tuple(window), autocast)
        if key not in self._known:
            if len(self._known) == _MOST_SCRIPTS:  # on all ranks at the same step
                self._known.clear()
            self._known[key] = self._new_script(schedule, turn, window)
        return self._known[key]

    def _new_script(self, schedule: Schedule | None, turn: int, window: Sequence[tuple[Specs, ...]]) -> Script:
        rank, placement = self._processes.place, self._processes.placement
        lists = _forwards(placement) if schedule is None else schedule.lists
        turns = 1 if schedule is None else len(schedule.flows)
        inputs, outputs = self._all_shapes("" if schedule is None else schedule.digest, window)

        def plan(sender: int, receiver: int) -> MessagePlan:
            sends = [a for a in lists[sender] if a.kind in SENDS and placement[counterpart(a).stage] == receiver]
            specs = []
            for a in sends:
                # This rank knows the shapes of its own stage, at one of the ends:
                #
                #     stage k    outputs -- activation --> inputs     stage k + 1
                #                outputs <-- gradient ---- inputs
                forward = a.kind is Kind.SEND_ACTIVATION
                stage = a.stage if sender == rank else counterpart(a).stage
                shapes = outputs if forward == (sender == rank) else inputs
                one = shapes[stage, a.age][a.microbatch]
                specs.append(one if forward else carrying(one))
            return MessagePlan(
                tuple(counterpart(a)._replace(age=0) for a in sends),
                tuple((a.turn + a.age) % turns for a in sends),
                tuple(specs if schedule is None else map(self._wire, specs)),
                travel=max((a.age for a in lists[receiver]), default=0),
            )

        peers = [r for r in range(self._processes.num_ranks) if r != rank] if window else []
        outgoing = {r: p for r in peers if (p := plan(rank, r)).keys}
        incoming = {r: p for r in peers if (p := plan(r, rank)).keys}
        word = lists[rank] if schedule is None else schedule.calls[rank][turn]
        # The last head action and the last W or B of every stage: later places replace earlier ones.
        final = {(a.stage, a.kind is Kind.HEAD): i for i, a in enumerate(word) if a.kind in _LEARNING}
        last = set(final.values()) if self._replicated else ()
        alone = self._processes.num_ranks == 1 and not self._replicated
        steps = [
            self._step(a, schedule, last=i in last) for i, a in enumerate(word) if not (alone and a.kind is Kind.UPDATE)
        ]
        num_bytes = [sum(p.num_bytes(turn, kind) for p in outgoing.values()) for kind in SENDS.values()]
        return Script(tuple(steps), outgoing, incoming, inputs, outputs, num_bytes)

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

    def _all_shapes(self, digest: str, window: Sequence[tuple[Specs, ...]]) -> tuple[StageShapes, StageShapes]:
        """Return the shapes of all inputs and outputs of this rank's stages; every stage gets its own from the one before."""
        inputs: dict[tuple[int, int], Sequence[Specs]] = {}
        outputs: dict[tuple[int, int], Sequence[Specs]] = {}

        def known(k: int, before: Any) -> Any:
            if before is not None and before["lists"] != digest:
                raise ValueError(
                    "Every rank should have the same schedule. Found lists that differ from those of the rank before; make the "
                    "schedule from the same costs on all ranks, not from costs that each rank measures."
                )
            given = window if before is None else [list(map(from_json, shapes)) for shapes in before["shapes"]]
            for age, shapes in enumerate(given):
                inputs[k, age] = shapes
                module = self._stages[k].module
                made = {specs: output_specs(module, specs, self._device, k) for specs in dict.fromkeys(shapes)}
                outputs[k, age] = [made[specs] for specs in shapes]
            return {"lists": digest, "shapes": [[to_json(s) for s in outputs[k, age]] for age in range(len(given))]}

        if window:
            self._processes.hand_on("shapes", sorted(self._stages), known)
        return inputs, outputs


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
