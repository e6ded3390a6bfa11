"""Ages: how many mini-batches old the gradients are that update a stage.

An action of age a in call s of `Pipeline.step` works on mini-batch s - a. Synchronous training has age 0 everywhere. A delay
d gives every weight gradient the age d. Under Hogwild, each stage has its own age, because no stage ever waits: in every slot it
makes a pass if a gradient has arrived, and otherwise the forward of the next mini-batch. With the paper's costs (a forward takes
one slot, each loss's pass through a stage takes one slot, heads are free), 3 stages and the digit being the mini-batch::

    slot      0   1   2   3   4   5   6   7   8   9
    stage 0   F0  F1  F2  F3  F4  W0  F5  W1  F6  W2      5 forwards before the first update: age 4
    stage 1   .   F0  F1  F2  B0  F3  B1  F4  B2  F5      3 forwards: age 2
    stage 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3      1 forward: age 0

That is ``2 (A - 1 - k)`` at stage ``k`` for end-to-end training without micro-batches, and figure 1 of the paper: the first of
three stages reads the fourth mini-batch (3) before any update and makes its pass after three. From its first update on a stage
begins one mini-batch for each, or stages with little work would run further and further ahead.

The least ages with which no stage waits in the steady state are smaller, because mini-batches enter at the pace of the busiest
stage from the beginning::

    slot      0   1   2   3   4   5   6   7   8
    stage 0   F0  .   F1  .   F2  W0  F3  W1  F4      F2 runs before the updates by 0 and 1: age 2
    stage 1   .   F0  .   F1  B0  F2  B1  F3  B2      F1 runs before the update by 0: age 1
    stage 2   .   .   F0  B0  F1  B1  F2  B2  F3      F1 runs after the update by 0: age 0

Forwards and heads have age 0, and a message has any age from that of the messages it needs to that of its use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from nwise.flow import Flow, Flows, StageFlow, counted
from nwise.schedule.actions import INPUT_GRADS, WEIGHT_GRADS, Action, Kind
from nwise.strategies import Hogwild, Strategy

__all__ = ["Ages", "greedy_ages", "message_ages", "staleness", "strategy_ages"]

When = Literal["early", "late"]


def staleness(flow: Flow, num_microbatches: int = 1, *, ages: Literal["greedy", "least"] = "greedy") -> list[list[int]]:
    """Count the updates between each forward and its own update under Hogwild.

    Args:
        flow: flow of the credit matrix, from `nwise.flow.find_flow`.
        num_microbatches: number of micro-batches in a mini-batch, M; updates come once per mini-batch; default: 1.
        ages: as for `nwise.Hogwild`.

    Returns:
        The counts ``[A][M]``, one per stage and micro-batch.

    >>> import nwise
    >>> from nwise.flow import find_flow
    >>> staleness(find_flow(nwise.EndToEnd().credit(4))), staleness(find_flow(nwise.EndToEnd().credit(4)), ages="least")
    ([[6], [4], [2], [0]], [[3], [2], [1], [0]])
    """
    flows = ((flow,) * num_microbatches,)
    return [[age] * num_microbatches for age in strategy_ages(Hogwild(ages=ages), flows).weights]


def strategy_ages(strategy: Strategy, flows: Flows) -> Ages:
    """Return the age of every pass under a strategy.

    Args:
        strategy: the strategy in force.
        flows: flow of every micro-batch, ``[cycle][M]``.

    >>> import nwise
    >>> from nwise.flow import flows_for
    >>> strategy_ages(nwise.Delayed(by=1), flows_for(nwise.EndToEnd(), 3, 1))
    Ages(weights=(1, 1, 1), messages=((), (1,), (1,)), stashes=True)
    """
    if not isinstance(strategy, Hogwild):
        return message_ages(flows, (strategy.delay,) * len(flows[0][0].stages))
    if strategy.ages == "greedy":
        ages = greedy_ages(flows)
    else:  # for each stage the largest age of all flows
        paths = [_path_ages(flow, len(flows[0])) for flow in counted(flows)]
        ages = message_ages(flows, tuple(map(max, zip(*paths, strict=True))))
    return message_ages(flows, ages.weights) if strategy.stashes else replace(ages, stashes=False)


def _path_ages(flow: Flow, num_microbatches: int) -> list[int]:
    """Return the age of every stage's gradients if they travel without waiting."""
    # End-to-end, 3 stages, M = 1, as in the last table above: a mini-batch enters every 2 slots.
    #
    #     stage 2    F in slot 2, B in slot 3    age (3 - 2) // 2 = 0
    #     stage 1    F in slot 1, B in slot 4    age (4 - 1) // 2 = 1
    #     stage 0    F in slot 0, W in slot 5    age (5 - 0) // 2 = 2
    period = 1 + max(stage.passes for stage in flow.stages)  # slots of the busiest stage
    ages = [0] * len(flow.stages)
    above: list[int] = []  # slots at which the messages of the next stage arrive
    for k, stage in reversed(list(enumerate(flow.stages))):
        if stage.weights is not None:
            # From the first forward to the last weight gradient; the last micro-batch comes (M - 1) periods later.
            begin = max([k + 1, *(above[p] for p in stage.weights.needed)])
            ages[k] = (begin - k + period * (num_microbatches - 1)) // (period * num_microbatches)
        above = [1 + max([k + 1, *(above[p] for p in message.needed)]) for message in stage.messages]
    return ages


@lru_cache(maxsize=64)
def greedy_ages(flows: Flows) -> Ages:
    """Return the age of every pass if no stage ever waits: the mini-batches that its stage has begun since.

    Of several flows each is simulated alone, and the largest ages count.

    Args:
        flows: flow of every micro-batch, ``[cycle][M]``.

    >>> import nwise
    >>> from nwise.flow import flows_for
    >>> greedy_ages(flows_for(nwise.NWise(2), 4, 1)).weights
    (2, 1, 1, 0)
    """
    different = list(counted(flows))
    runs = [_simulated(flow, len(flows[0])) for flow in different]
    weights: list[int] = []
    messages: list[list[int]] = []
    above: list[int] = []
    for k in reversed(range(len(different[0].stages))):
        stages = [flow.stages[k] for flow in different]
        here = [max(run.get((k, q), 0) for run in runs) for q in range(max(len(stage.messages) for stage in stages))]
        # No result is older than its use, and one pass for a message and the weights has one age.
        for q, message in ((q, message) for stage in stages for q, message in enumerate(stage.messages)):
            here[q] = max([here[q], *(above[p] for p in message.needed)])
        fused = [stage.fused for stage in stages if stage.fused is not None]
        needed = [above[p] for stage in stages if stage.weights is not None for p in stage.weights.needed]
        weight = max([0, *(run.get((k, None), 0) for run in runs), *needed, *(here[q] for q in fused)])
        for q in fused:
            here[q] = weight
        weights.insert(0, weight)
        messages.insert(0, here)
        above = here
    return Ages(tuple(weights), tuple(map(tuple, messages)))


def _simulated(flow: Flow, num_microbatches: int) -> dict[tuple[int, int | None], int]:
    """Simulate the greedy rule; return the ages of the first mini-batch's passes, by stage and message (None for W)."""
    # What a stage makes of a micro-batch: its forward, -1, and passes, by message or None, each with the messages that it needs.
    passes: list[dict[int | None, list[int]]] = [{q: c.needed for q, c in enumerate(s.messages)} for s in flow.stages]
    for kinds, stage in zip(passes, flow.stages, strict=True):
        if stage.weights is not None and stage.fused is None:
            kinds[None] = stage.weights.needed
    made: list[dict[int | None, int]] = [dict.fromkeys([-1, *kinds], 0) for kinds in passes]  # micro-batches so far

    def choose(k: int) -> list[int | None]:
        mine = made[k]
        ready = [
            (mine[q], place, q)
            for place, (q, needed) in enumerate(passes[k].items())
            if mine[q] < mine[-1] and all(made[k + 1][p] > mine[q] for p in needed)
        ]
        if ready:  # the oldest micro-batch first
            return [min(ready)[-1]]
        return [-1] if k == 0 or made[k - 1][-1] > mine[-1] else []

    ages: dict[tuple[int, int | None], int] = {}
    while len(ages) < sum(map(len, passes)):
        for k, work in enumerate([choose(k) for k in range(len(passes))]):  # all choose before any has done its work
            for kind in work:
                made[k][kind] += 1
                if kind != -1 and made[k][kind] == num_microbatches:
                    ages[k, kind] = -(-made[k][-1] // num_microbatches) - 1
    return ages


@dataclass(frozen=True)
class Ages:
    """The age of every pass.

    Args:
        weights: age of W, for every stage.
        messages: age of every message, for every stage.
        stashes: whether late passes use copies of the weights of their forward (`Strategy.stashes`); default: True. Then
            gradients do not depend on the ages of messages, and a schedule may choose smaller ones. With the weights in memory
            they do.
    """

    weights: tuple[int, ...]
    messages: tuple[tuple[int, ...], ...]
    stashes: bool = True

    @property
    def oldest(self) -> int:
        """Age of the oldest gradients."""
        return max(self.weights)

    def fuses(self, stage: int, flow: StageFlow) -> bool:
        """Tell whether W and the message of its cotangent have one age, so one pass (B) can do both."""
        return flow.fused is not None and self.messages[stage][flow.fused] == self.weights[stage]

    def of(self, action: Action) -> int:
        """Return the age of a computation or an update."""
        if action.kind in WEIGHT_GRADS:
            return self.weights[action.stage]
        if action.kind in INPUT_GRADS:
            return self.messages[action.stage][action.message or 0]
        if not action.kind.costs:
            raise ValueError(f"Only computations and updates should have an age. Found {action}.")
        return 0

    def hold_in(self, tasks: Iterable[Action]) -> bool:
        """Tell whether all computations have these ages; a second forward has that of the pass that it precedes."""
        return all(self.of(task) == task.age for task in tasks if task.kind is not Kind.RECOMPUTE)


def message_ages(flows: Flows, weights: tuple[int, ...] = (), when: When = "late") -> Ages:
    """Choose the age of every message.

    Args:
        flows: flow of every micro-batch, ``[cycle][M]``.
        weights: age of each stage's weight gradients; default: 0.
        when: ``"late"`` (default), so one pass serves message and weights where that is possible; or ``"early"``, so the last hop
            has the most time to travel.

    Raises:
        ValueError: a weight gradient is younger than the messages that it needs can be.

    >>> import nwise
    >>> from nwise.flow import flows_for
    >>> message_ages(flows_for(nwise.EndToEnd(), 3, 1), (1, 1, 1)).messages
    ((), (1,), (1,))
    """
    # A message may run in any call from that of its newest inputs to that of its first use. End-to-end, 3 stages, a delay of 2:
    #
    #     age of           message of stage 2   message of stage 1   W of stage 0
    #     early                    0                    0                 2          the last hop may take two calls
    #     late                     2                    2                 2          W and message are one pass, B
    #
    # List scheduling may choose any age between the two (`nwise.schedule.greedy`).
    weights = weights or (0,) * len(flows[0][0].stages)
    different = list(counted(flows))
    stages = range(len(weights))
    counts = [max(len(flow.stages[k].messages) for flow in different) for k in stages]
    # From the last stage down: a message is as old as the oldest message that it is made of.
    early = [[0] * count for count in counts]
    for k in reversed(stages):
        for stage in (flow.stages[k] for flow in different):
            for q, message in enumerate(stage.messages):
                early[k][q] = max([early[k][q], *(early[k + 1][p] for p in message.needed)])
            oldest = max((early[k + 1][p] for p in stage.weights.needed), default=0) if stage.weights else 0
            if oldest > weights[k]:
                raise ValueError(f"The age of stage {k} should be at least {oldest}. Found {weights[k]}.")
    if when == "early":
        return Ages(weights, tuple(map(tuple, early)))
    # From the first stage up: a message is as young as the youngest of its uses.
    late: list[list[int]] = []
    for k in stages:
        limits = [max(weights)] * counts[k]
        for stage in [flow.stages[k - 1] for flow in different] if k else ():
            uses = [*zip(stage.messages, late[k - 1], strict=False)]
            for cotangent, age in [*uses, (stage.weights, weights[k - 1])] if stage.weights else uses:
                for p in cotangent.needed:
                    limits[p] = min(limits[p], age)
        # W starts from the cotangents that its message has kept, so the message must not be older.
        for q in [fused for flow in different if (fused := flow.stages[k].fused) is not None]:
            limits[q] = max(early[k][q], min(limits[q], weights[k]))
        late.append(limits)
    return Ages(weights, tuple(map(tuple, late)))
