"""Actions: what a runtime executes, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from nwise.flow import Flow


class Kind(Enum):
    """What an action does (see `nwise.stage`)."""

    FORWARD = "F"
    HEAD = "H"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    BOTH = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one stage on one micro-batch.

    Args:
        kind: what is done.
        stage: the stage that does it.
        microbatch: the micro-batch it is done to.
        message: index of the message that I and B produce; None for the others.
    """

    kind: Kind
    stage: int
    microbatch: int
    message: int | None = None

    def __str__(self) -> str:
        message = "" if self.message is None else f".{self.message}"
        return f"{self.kind.value}{self.stage}({self.microbatch}{message})"


def passes(flow: Flow, stage: int, microbatch: int) -> list[Action]:
    """The backward actions of a stage, nearest loss first and W last among equals."""
    here = flow.stages[stage]
    actions = [
        (message.far, Action(Kind.BOTH if here.fused == q else Kind.INPUT_GRAD, stage, microbatch, q))
        for q, message in enumerate(here.messages)
    ]
    if here.weights is not None and here.fused is None:
        actions.append((here.weights.far, Action(Kind.WEIGHT_GRAD, stage, microbatch)))
    return [action for _, action in sorted(actions, key=lambda pair: pair[0])]


def farthest_loss(flow: Flow, action: Action) -> int:
    """The last loss that an I, W or B has to wait for."""
    return flow.stages[action.stage].cotangent(action.message).far


def depth_first(flows: Sequence[Flow]) -> list[Action]:
    """An order for one process: every pass as soon as its losses exist, one micro-batch at a time.

    Stage ``k``'s activations are freed when the farthest loss it learns from has come back, so N-wise
    keeps at most N stages' activations, end-to-end all of them.

    Args:
        flows: the flow of every micro-batch.

    >>> import nwise
    >>> from nwise.flow import flow_of
    >>> print(*depth_first([flow_of(nwise.NWise(2).credit(3))]))
    F0(0) F1(0) H1(0) I1(0.0) W0(0) F2(0) H2(0) B2(0.0) W1(0)
    """
    order: list[Action] = []
    for m, flow in enumerate(flows):
        num_stages = len(flow.stages)
        waiting = [passes(flow, k, m) for k in range(num_stages)]
        for loss in range(num_stages):
            order.append(Action(Kind.FORWARD, loss, m))
            if not flow.stages[loss].head:
                continue
            order.append(Action(Kind.HEAD, loss, m))
            for k in reversed(range(loss + 1)):
                while waiting[k] and farthest_loss(flow, waiting[k][0]) <= loss:
                    order.append(waiting[k].pop(0))
    return order
