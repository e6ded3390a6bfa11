"""The task graph: the computations and updates of one cycle of calls, and what each of them needs.

It follows from the flows, the placement and the ages, and this file alone knows what an F, H, I, W, B or U needs. End-to-end
training of two stages on two ranks, two micro-batches; the tasks have the numbers from 0 on, an arc leads to a task from what it
needs::

    rank 0    F0(0) 0 --------.          .--> W0(0) 4      F0(1) 5 --------.            .--> W0(1) 9    U0 10
                              v          |                                 v            |
    rank 1                  F1(0) 1 -> H1(0) 2 -> B1(0.0) 3              F1(1) 6 -> H1(1) 7 -> B1(1.0) 8    U1 11

The arcs between the ranks are messages: an activation down, a gradient up. No message is a task, and nothing else is sent. Every
order of work (`nwise.schedule.orders`) is a permutation of these numbers; the clock, the bounds, the model of memory and the
engine follow the arcs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from nwise.flow import Flow, Flows, StageFlow
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.schedule.ages import Ages, message_ages
from nwise.schedule.placement import Placement

__all__ = ["Need", "TaskGraph", "task_graph"]


class Need(NamedTuple):
    """An arc: the result of a task for which another one waits.

    Args:
        task: number of the task that makes it.
        calls: number of calls by which that task runs earlier.
        link: whether another rank makes it, so it is a message.
    """

    task: int
    calls: int
    link: bool


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of one cycle of calls.

    The numbers of the tasks are in an order in which each comes after all that it needs.

    Args:
        flows: flow of every micro-batch, ``[cycle][M]``.
        placement: rank of every stage.
        ages: age of every pass under the strategy; with `stashes`, a message may be younger.
        tasks: the computations and updates, by number.
        needs: what every task needs.
    """

    flows: Flows
    placement: Placement
    ages: Ages
    tasks: tuple[Action, ...]
    needs: tuple[tuple[Need, ...], ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of every task."""
        return tuple(self.placement[task.stage] for task in self.tasks)

    # A cycle of two mini-batches, passes of age 1. Those of mini-batch 1 run in call 2, which is call 0 of the next cycle:
    #
    #     mini-batch  minibatch + age   call   late
    #     0           1                 1      0
    #     1           2                 0      1

    @cached_property
    def call(self) -> tuple[int, ...]:
        """The call of the cycle that runs each task."""
        return tuple((task.minibatch + task.age) % len(self.flows) for task in self.tasks)

    @cached_property
    def late(self) -> tuple[int, ...]:
        """The number of cycles by which each task comes after its mini-batch was the newest."""
        return tuple((task.minibatch + task.age) // len(self.flows) for task in self.tasks)

    @cached_property
    def _number(self) -> dict[tuple[object, ...], int]:
        return {action[:5]: task for task, action in enumerate(self.tasks)}

    def numbers(self, actions: Iterable[Action]) -> list[int]:
        """Return the numbers of computations or updates."""
        return [self._number[action[:5]] for action in actions]

    def aged(self, ages: Sequence[int]) -> TaskGraph:
        """Return the same tasks with other ages, one for each."""
        tasks = [a._replace(age=age) for a, age in zip(self.tasks, ages, strict=True)]
        needs = [
            tuple(need._replace(calls=ages[task] - ages[need.task]) for need in needs)
            for task, needs in enumerate(self.needs)
        ]
        return replace(self, tasks=tuple(tasks), needs=tuple(needs))

    def stage(self, task: int) -> StageFlow:
        """Return the stage's work on the micro-batch of a task."""
        action = self.tasks[task]
        return self.flows[action.minibatch][action.microbatch].stages[action.stage]


def task_graph(
    flows: Flows, placement: Placement = (), ages: Ages | None = None, given: Iterable[Action] | None = None
) -> TaskGraph:
    """Return the task graph of a cycle of calls.

    Args:
        flows: flow of every micro-batch, ``[cycle][M]``.
        placement: rank of every stage; default: a rank for each.
        ages: age of every pass under the strategy; default: 0.
        given: all computations, such as those of hand-made lists: they tell where one pass B replaces an I and a W, and how
            old each pass is. Updates do not count. Default: every I and W apart, and of age 0.

    Raises:
        ValueError: a computation is missing in `given`, or unknown.
    """
    size = len(flows[0][0].stages)
    placement = placement or tuple(range(size))
    ages = ages or message_ages(flows)
    known = None if given is None else {a[:5]: a for a in given if a.kind is not Kind.UPDATE}
    tasks: list[Action] = []
    needs: list[tuple[Need, ...]] = []
    blocks: dict[tuple[Flow, tuple[int, ...]], list[_Pattern]] = {}  # micro-batches are alike, but for what they fuse
    for minibatch, batch in enumerate(flows):
        for m, flow in enumerate(batch):
            both = [(Kind.BOTH, k, m, stage.fused, minibatch) for k, stage in enumerate(flow.stages)]
            fused = tuple(key[1] for key in both if key in known) if known else ()
            if (flow, fused) not in blocks:
                blocks[flow, fused] = _block(flow, fused)
            first = len(tasks)
            for kind, k, q, inputs in blocks[flow, fused]:
                key = kind, k, m, q, minibatch
                action = Action(*key) if known is None else known.pop(key, None)
                if action is None:
                    raise _incomplete(placement[k], f"no {Action(*key)}")
                made = [(first + i, tasks[first + i]) for i in inputs]
                needs.append(tuple([Need(n, action.age - a.age, placement[a.stage] != placement[k]) for n, a in made]))
                tasks.append(action)
        tasks += [Action(Kind.UPDATE, k, 0, None, minibatch) for k in range(size)]
        needs += [()] * size
    if known:
        unneeded = next(iter(known.values()))
        raise _incomplete(placement[min(unneeded.stage, size - 1)], f"{unneeded} too often or unneeded")
    return TaskGraph(flows, placement, ages, tuple(tasks), tuple(needs))


# A computation of a micro-batch: kind, stage, message, and the places of those that it needs.
_Pattern = tuple[Kind, int, int | None, list[int]]


def _block(flow: Flow, fused: Container[int]) -> list[_Pattern]:
    """Return the computations of a micro-batch, each after those that it needs, with a B on the stages `fused`."""
    # Forwards go up the stages, passes come down. So each task comes after those that it needs, whatever the credit:
    #
    #     stage 2              F2 H2 B2
    #     stage 1        F1 H1          I1 W1
    #     stage 0     F0                      W0
    block: list[_Pattern] = []
    made: dict[tuple[str | int, int], int] = {}  # place of what is made: "F", "H" or a message, and the stage

    def add(action: Action, inputs: Iterable[tuple[str | int, int]]) -> None:
        kind, k, _, q, *_ = action
        made[kind.value if q is None else q, k] = len(block)
        block.append((kind, k, q, [made[one] for one in inputs]))

    for k, stage in enumerate(flow.stages):
        for action in forwards(stage, k, 0):
            add(action, [("F", k)] if action.kind is Kind.HEAD else [("F", k - 1)] if k else [])
    for k, stage in reversed(list(enumerate(flow.stages))):
        for action in passes(stage, k, 0, fuse=k in fused):
            cotangent = stage.cotangent(action.message)
            inputs: list[tuple[str | int, int]] = [("F", k)]
            if cotangent.own:
                inputs.append(("H", k))
            inputs += [(q, k + 1) for q in cotangent.needed]
            # A separate W comes after the I of the same cotangent, which has kept the cotangent of every layer for it.
            if action.kind is Kind.WEIGHT_GRAD and stage.fused is not None:
                inputs.append((stage.fused, k))
            add(action, inputs)
    return block


def _incomplete(rank: int, problem: str) -> ValueError:
    return ValueError(f"The list of rank {rank} should contain each of its actions once. Found {problem}.")
