"""How stale gradients are when nobody waits: the steady timing grid of Hogwild.

Under the paper's costs (a forward is one slot, each loss's pass through a stage is one slot, heads
are free) stage ``k`` starts the forward of micro-batch ``i`` in slot ``p i + k``, where ``p`` is the
work of the busiest stage, and fills the slots between with the passes whose gradients have arrived,
oldest first. An update is applied with the last pass of its mini-batch; the staleness of a gradient
is the number of updates between the forward and the update it belongs to. For end-to-end credit
and one micro-batch that is ``A - 1 - k`` at stage ``k`` (figure 1 of the paper).

What an update sees depends on those counts alone, so one process executes the grid exactly by
computing each stage with the parameters of that many updates ago.
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
    """Updates between forward and update in the steady grid.

    Args:
        flow: from the credit matrix, `nwise.flow.flow_of`.
        num_microbatches: micro-batches in a mini-batch; updates come once a mini-batch.

    Returns:
        ``[A][M]``, one count per stage and micro-batch.

    >>> import nwise
    >>> from nwise.flow import flow_of
    >>> staleness(flow_of(nwise.EndToEnd().credit(4)))
    [[3], [2], [1], [0]]
    """
    return [list(ages) for ages in _steady(flow, num_microbatches)]


@lru_cache(maxsize=256)
def _steady(flow: Flow, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    num_stages = len(flow.stages)
    # After 2A micro-batches every stage has seen its first gradient come back; two more mini-batches
    # are measured so that the second shows that the grid has become steady.
    settled = -(-3 * num_stages // num_microbatches) + 2
    first = _ages(flow, num_microbatches, settled)
    assert first == _ages(flow, num_microbatches, settled + 1), "the grid has not become steady"
    return tuple(map(tuple, first))


def _ages(flow: Flow, num_microbatches: int, measured: int) -> list[list[int]]:
    """Ages of the parameters in mini-batch ``measured``, by walking through the slots."""
    num_stages = len(flow.stages)
    period = 1 + max(stage.passes for stage in flow.stages)
    waiting: list[list[tuple[int, Action]]] = [[] for _ in range(num_stages)]
    arrived: set[tuple[int, int, int]] = set()  # (stage, micro-batch, message) at its receiver
    updates = [0] * num_stages
    left = [[num_microbatches] * (measured + 1) for _ in range(num_stages)]
    ages = [[0] * num_microbatches for _ in range(num_stages)]
    trained = [stage.weights is not None for stage in flow.stages]
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
        for action in done:  # what a slot produces is seen from the next slot on
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
    """When a stage is done with what a mini-batch has it do, in mini-batches after its forward.

    Args:
        update: its update.
        sends: each of its messages to the stage before.
    """

    update: int
    sends: tuple[int, ...]


def timetable(cycle: Sequence[Sequence[Flow]]) -> list[Due]:
    """For every stage, what it may wait for others with, so that nobody waits in a circle.

    Updates are as old as in the grid. Nothing is due before what it needs has been sent, and no message later than the stage
    before needs it: whoever waits within a mini-batch waits for what the next stage sends within the same one or earlier, and
    the last stage waits for nobody.

    Args:
        cycle: the flows of all mini-batches of the strategy's cycle.

    >>> import nwise
    >>> from nwise.flow import flow_of
    >>> frozen = flow_of(nwise.EndToEnd().credit(4), trainable=[True, False, True, True])
    >>> [(due.update, due.sends) for due in timetable([[frozen]])]
    [(3, ()), (0, (1,)), (1, (1,)), (0, (0,))]
    """
    flows, updates = list(dict.fromkeys(flow for batch in cycle for flow in batch)), _oldest(cycle)
    stages = range(len(updates))
    sends = [[0] * max(len(flow.stages[k].messages) for flow in flows) for k in stages]
    works = [[(flow.stages[k], a) for flow in flows for a in passes(flow.stages[k], k, 0)] for k in stages]
    for k in reversed(stages):  # as soon as what they need can be there
        for stage, action in works[k]:
            soonest = max((sends[k + 1][p] for p in stage.cotangent(action.message).needed), default=0)
            if action.kind is not Kind.INPUT_GRAD:
                updates[k] = max(updates[k], soonest)
            if action.message is not None:
                sends[k][action.message] = max(sends[k][action.message], soonest)
        for stage in (flow.stages[k] for flow in flows):
            if stage.fused is not None:
                sends[k][stage.fused] = max(sends[k][stage.fused], updates[k])
    for k in stages[1:]:  # with the update, unless the stage before needs them earlier
        latest = [max(soonest, updates[k]) for soonest in sends[k]]
        for stage, action in works[k - 1]:
            hands_on = action.kind is Kind.INPUT_GRAD and action.message is not None
            when = sends[k - 1][action.message or 0] if hands_on else updates[k - 1]
            for p in stage.cotangent(action.message).needed:
                latest[p] = min(latest[p], when)
        sends[k] = latest
    return [Due(update, tuple(when)) for update, when in zip(updates, sends, strict=True)]


def _oldest(cycle: Sequence[Sequence[Flow]]) -> list[int]:
    """For every stage, the age of its oldest gradients in the steady grid."""
    known = [staleness(flow, len(cycle[0])) for flow in dict.fromkeys(flow for batch in cycle for flow in batch)]
    return [max(max(ages[k]) for ages in known) for k in range(len(known[0]))]


class History:
    """The last versions of a stage's parameters; an update is what changes a parameter in place.

    Args:
        module: the stage.
        depth: how many updates back the oldest version is.

    Attributes:
        module: see above.
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
        # An optimizer that writes to ``parameter.data`` moves no counter.
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
        """The copy that the last call of `remember` has seen."""
        return self._versions[-1]

    def version(self, age: int) -> tuple[Mapping[str, Tensor], int]:
        """The version ``age`` updates ago, or the oldest there is; and its true age."""
        age = max(0, min(age, len(self._versions) - 1))
        return (self._versions[-1 - age] if age else {}), age


class Past:
    """The histories of all stages of one process, for the strategy that is in force."""

    def __init__(self) -> None:
        self._key: object = None
        self._histories: list[History] = []

    def versions(
        self, stages: Iterable[nn.Module], cycle: Sequence[Sequence[Flow]], flows: Sequence[Flow]
    ) -> tuple[dict[tuple[int, int], Mapping[str, Tensor]], list[list[int]]]:
        """What every stage computes with: parameters of as many updates ago as in the steady grid.

        Args:
            stages: whose parameters have all updates behind them.
            cycle: the flows of all mini-batches of the strategy's cycle.
            flows: those of this mini-batch.

        Returns:
            The parameters that are not the current ones, by (stage, micro-batch); and their ages, ``[A][M]``.
        """
        modules, size = list(stages), len(flows)
        # Stages that have been replaced, and parameters that have been frozen, moved or cast, have no past.
        like = tuple((p.device, p.dtype) for module in modules for p in module.parameters())
        key = (tuple(map(tuple, cycle)), like)
        same = [history.module for history in self._histories] == modules
        if self._key != key or not same:
            self._key = key
            self._histories = [History(module, depth) for module, depth in zip(modules, _oldest(cycle), strict=True)]
        found: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        ages = [[0] * size for _ in modules]
        steady = [staleness(flow, size) for flow in flows]
        for k, history in enumerate(self._histories):
            history.remember()
            for m in range(size):
                version, ages[k][m] = history.version(steady[m][k][m])
                if ages[k][m]:
                    found[k, m] = version
        return found, ages
