"""The staleness of gradients when no stage waits: the steady timing grid of Hogwild.

The grid assumes the paper's costs: a forward takes one slot, each loss's pass through a stage takes one slot, and heads are
free. Stage ``k`` starts the forward of micro-batch ``i`` in slot ``p i + k``, where ``p`` is the work of the busiest stage. It
fills the slots between with the passes whose gradients have arrived, oldest first. An update is applied with the last pass of
its mini-batch. The staleness of a gradient is the number of updates between its forward and its own update. For end-to-end
credit and one micro-batch that is ``A - 1 - k`` at stage ``k`` (figure 1 of the paper). With 3 stages, the digit being the
mini-batch::

    slot      0   1   2   3   4   5   6   7   8
    stage 0   F0  .   F1  .   F2  W0  F3  W1  F4      F2 runs before the updates by 0 and 1: staleness 2
    stage 1   .   F0  .   F1  B0  F2  B1  F3  B2      F1 runs before the update by 0: staleness 1
    stage 2   .   .   F0  B0  F1  B1  F2  B2  F3      F1 runs after the update by 0: staleness 0

The parameters behind an update depend on those counts alone, so one process executes the grid exactly by computing each stage
with the parameters of that many updates ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind, passes


def staleness(flow: Flow, num_microbatches: int = 1) -> list[list[int]]:
    """Count the updates between each forward and its own update in the steady grid.

    Args:
        flow: flow of the credit matrix, from `nwise.flow.find_flow`.
        num_microbatches: number of micro-batches in a mini-batch, M; updates come once per mini-batch; default: 1.

    Returns:
        The counts ``[A][M]``, one per stage and micro-batch.

    >>> import nwise
    >>> from nwise.flow import find_flow
    >>> staleness(find_flow(nwise.EndToEnd().credit(4)))
    [[3], [2], [1], [0]]
    """
    return [list(ages) for ages in _steady(flow, num_microbatches)]


@lru_cache(maxsize=256)
def _steady(flow: Flow, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    num_stages = len(flow.stages)
    # After 2A micro-batches every stage has received its first gradient; 3A leave a margin. Then measure two mini-batches:
    # equal counts in both show that the grid is steady.
    settled = -(-3 * num_stages // num_microbatches) + 2
    first = _ages(flow, num_microbatches, settled)
    assert first == _ages(flow, num_microbatches, settled + 1), "the grid is not steady yet"
    return tuple(map(tuple, first))


def _ages(flow: Flow, num_microbatches: int, measured: int) -> list[list[int]]:
    """Return the ages of the parameters in mini-batch ``measured``, by walking through the slots."""
    num_stages = len(flow.stages)
    period = 1 + max(stage.passes for stage in flow.stages)
    waiting: list[list[tuple[int, Action]]] = [[] for _ in range(num_stages)]
    arrived: set[tuple[int, int, int]] = set()  # (stage, micro-batch, message) at its receiver
    updates = [0] * num_stages
    left = [[num_microbatches] * (measured + 1) for _ in range(num_stages)]
    ages = [[0] * num_microbatches for _ in range(num_stages)]
    trained = [stage.weights is not None for stage in flow.stages]
    # In every slot a stage runs the forward of the grid, or else the oldest pass whose messages have arrived.
    for slot in range(period * num_microbatches * (measured + 1) + num_stages):
        done: list[Action] = []
        for k in range(num_stages):
            index, phase = divmod(slot - k, period)
            if phase == 0 and 0 <= index < num_microbatches * (measured + 1):
                batch, m = divmod(index, num_microbatches)
                if batch == measured and trained[k]:
                    ages[k][m] = batch - updates[k]
                waiting[k] += [(slot, action) for action in passes(flow.stages[k], k, index)]
            else:
                ready = next((w for w in waiting[k] if w[0] < slot and _ready(flow, w[1], arrived)), None)
                if ready is not None:
                    waiting[k].remove(ready)
                    done.append(ready[1])
        for action in done:  # results become visible in the next slot
            if action.message is not None:
                arrived.add((action.stage - 1, action.microbatch, action.message))
            if action.kind in (Kind.WEIGHT_GRAD, Kind.BOTH):
                batch = action.microbatch // num_microbatches
                left[action.stage][batch] -= 1
                updates[action.stage] += left[action.stage][batch] == 0
    return ages


def _ready(flow: Flow, action: Action, arrived: set[tuple[int, int, int]]) -> bool:
    cotangent = flow.stages[action.stage].cotangent(action.message)
    return all((action.stage, action.microbatch, p) in arrived for p in cotangent.needed)


@dataclass(frozen=True, slots=True)
class Due:
    """Deadlines of a stage's work for a mini-batch, in mini-batches after its forward.

    Args:
        update: deadline of the update.
        sends: deadlines of its messages to the stage before.
    """

    update: int
    sends: tuple[int, ...]


def timetable(cycle: Sequence[Sequence[Flow]]) -> list[Due]:
    """Set each stage's deadlines, with which the stages can wait for each other without a deadlock.

    Updates are as old as in the grid. No work is due before the messages that it needs have been sent, and no message is due
    later than the stage before needs it. So a stage waits only for messages that the next stage sends in the same mini-batch or
    an earlier one, and the last stage never waits.

    Args:
        cycle: flows of all mini-batches of the strategy's cycle.

    Returns:
        The deadlines of each stage.

    >>> import nwise
    >>> from nwise.flow import find_flow
    >>> frozen = find_flow(nwise.EndToEnd().credit(4), trainable=[True, False, True, True])
    >>> [(due.update, due.sends) for due in timetable([[frozen]])]
    [(3, ()), (0, (1,)), (1, (1,)), (0, (0,))]
    """
    flows, updates = list(dict.fromkeys(flow for batch in cycle for flow in batch)), _oldest(cycle)
    stages = range(len(updates))
    sends = [[0] * max(len(flow.stages[k].messages) for flow in flows) for k in stages]
    works = [[(flow.stages[k], a) for flow in flows for a in passes(flow.stages[k], k, 0)] for k in stages]
    # From the last stage down: the earliest step at which the messages that an action needs can arrive.
    for k in reversed(stages):
        for stage, action in works[k]:
            soonest = max((sends[k + 1][p] for p in stage.cotangent(action.message).needed), default=0)
            if action.kind is not Kind.INPUT_GRAD:
                updates[k] = max(updates[k], soonest)
            if action.message is not None:
                sends[k][action.message] = max(sends[k][action.message], soonest)
        for stage in (flow.stages[k] for flow in flows):
            if stage.fused is not None:
                sends[k][stage.fused] = max(sends[k][stage.fused], updates[k])
    # From the first stage up: a message may wait for the update of its stage, unless the stage before needs it earlier.
    for k in stages[1:]:
        latest = [max(soonest, updates[k]) for soonest in sends[k]]
        for stage, action in works[k - 1]:
            passes_on = action.kind is Kind.INPUT_GRAD and action.message is not None
            when = sends[k - 1][action.message or 0] if passes_on else updates[k - 1]
            for p in stage.cotangent(action.message).needed:
                latest[p] = min(latest[p], when)
        sends[k] = latest
    return [Due(update, tuple(when)) for update, when in zip(updates, sends, strict=True)]


def _oldest(cycle: Sequence[Sequence[Flow]]) -> list[int]:
    """Return the age of each stage's oldest gradients in the steady grid, in updates."""
    known = [staleness(flow, len(cycle[0])) for flow in dict.fromkeys(flow for batch in cycle for flow in batch)]
    return [max(max(ages[k]) for ages in known) for k in range(len(known[0]))]


class History:
    """Keeps the last versions of a stage's parameters; every change of a parameter in place counts as an update.

    Args:
        module: the stage.
        depth: age of the oldest version in updates.

    Attributes:
        module: the stage.
    """

    def __init__(self, module: nn.Module, depth: int) -> None:
        self.module = module
        self._depth = depth
        self._versions: deque[Mapping[str, Tensor]] = deque(maxlen=depth + 1)
        self._counters: list[int] = []

    def remember(self) -> None:
        """Keep a copy of the parameters if they have been updated since the last call."""
        if not self._depth:
            return
        now = dict(self.module.named_parameters())
        counters = [parameter._version for parameter in now.values()]
        # Compare the values too: an optimizer that writes to ``parameter.data`` leaves the counters unchanged.
        if counters == self._counters and all(torch.equal(p, self._versions[-1][name]) for name, p in now.items()):
            return
        self._counters = counters
        self._versions.append(
            {
                name: p.detach().clone().requires_grad_(p.is_floating_point() or p.is_complex())
                for name, p in now.items()
            }
        )

    @property
    def newest(self) -> Mapping[str, Tensor]:
        """The parameters at the last call of `remember`."""
        return self._versions[-1]

    def version(self, age: int) -> tuple[Mapping[str, Tensor], int]:
        """Return the parameters of ``age`` updates ago, or the oldest version kept, and the version's age.

        The mapping is empty for age 0: the stage then computes with its current parameters.
        """
        age = max(0, min(age, len(self._versions) - 1))
        return (self._versions[-1 - age] if age else {}), age


class Past:
    """Keeps the histories of all stages of one process, for the strategy in force."""

    def __init__(self) -> None:
        self._key: object = None
        self._histories: list[History] = []

    def versions(
        self, stages: Iterable[nn.Module], cycle: Sequence[Sequence[Flow]], flows: Sequence[Flow]
    ) -> tuple[dict[tuple[int, int], Mapping[str, Tensor]], list[list[int]]]:
        """Return the parameters that every stage computes with, as many updates old as in the steady grid.

        Args:
            stages: the stages, with all updates so far applied.
            cycle: flows of all mini-batches of the strategy's cycle.
            flows: flows of this mini-batch, one for each micro-batch.

        Returns:
            The old parameters by (stage, micro-batch), without the current ones, and all ages, ``[A][M]``.
        """
        modules, size = list(stages), len(flows)
        # A replaced stage has no past, nor have parameters that were frozen, moved or cast.
        like = tuple((p.device, p.dtype) for module in modules for p in module.parameters())
        key = (tuple(map(tuple, cycle)), like)
        same = [history.module for history in self._histories] == modules
        if self._key != key or not same:
            self._key = key
            self._histories = [History(module, depth) for module, depth in zip(modules, _oldest(cycle), strict=True)]
        old: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        ages = [[0] * size for _ in modules]
        steady = [staleness(flow, size) for flow in flows]
        for k, history in enumerate(self._histories):
            history.remember()
            for m in range(size):
                version, ages[k][m] = history.version(steady[m][k][m])
                if ages[k][m]:
                    old[k, m] = version
        return old, ages
