"""Actions: the work of a runtime as plain data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from nwise.flow import StageFlow

__all__ = ["COMPUTATIONS", "PASSES", "SENDS", "Action", "Kind", "describe", "forwards", "passes"]


class Kind(Enum):
    """Kinds of actions: computations (see `nwise.stage`), messages, and bookkeeping.

    Attributes:
        value: letter of the kind.
        words: name of the kind.
        costs: names of the `nwise.schedule.Costs` whose sum is its time; none for messages, which no rank waits to send.
        urgency: place among the ready tasks of a rank (`nwise.schedule.greedy`); the smallest comes first.
    """

    FORWARD = "F", "forward", ("forward", "overhead"), 2
    RECOMPUTE = "R", "forward again", ("forward", "overhead"), 0  # never chosen: it comes with its pass
    HEAD = "H", "head", ("head",), 0
    INPUT_GRAD = "I", "input gradient", ("input_grad", "overhead"), 1
    WEIGHT_GRAD = "W", "weight gradient", ("weight_grad", "overhead"), 3  # it only fills gaps
    BOTH = "B", "input and weight gradient", ("input_grad", "weight_grad", "overhead"), 1
    SEND_ACTIVATION = "SX", "sending an activation"
    RECEIVE_ACTIVATION = "RX", "waiting for an activation"
    SEND_GRADIENT = "SG", "sending a gradient"
    RECEIVE_GRADIENT = "RG", "waiting for a gradient"
    UPDATE = "U", "update", ("update",), 0

    words: str
    costs: tuple[str, ...]
    urgency: int

    def __new__(cls, letter: str, words: str, costs: tuple[str, ...] = (), urgency: int = 0) -> Kind:
        kind = object.__new__(cls)
        kind._value_ = letter
        kind.words = words
        kind.costs = costs
        kind.urgency = urgency
        return kind

    # Members are singletons, so their identity is a valid hash, and faster for millions of actions.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One action of one stage on one micro-batch.

    Args:
        kind: kind of the action.
        stage: index of the stage.
        microbatch: index of the micro-batch; 0 for an update.
        message: index of the message that an I or B produces, or that a gradient's send or receive carries; that of the pass
            that follows an R; None for other actions (default).
        minibatch: index of the mini-batch in a rotating strategy's cycle; 0 for other strategies (default).
        age: age of the action's mini-batch, in mini-batches: an action of age a in call s of `Pipeline.step` works on
            mini-batch s - a. Default: 0.
    """

    kind: Kind
    stage: int
    microbatch: int
    message: int | None = None
    minibatch: int = 0
    age: int = 0

    def __str__(self) -> str:
        message = "" if self.message is None else f".{self.message}"
        minibatch = f"/{self.minibatch}" if self.minibatch else ""
        place = "" if self.kind is Kind.UPDATE else f"({self.microbatch}{message}{minibatch})"
        return f"{self.kind.value}{self.stage}{place or minibatch}" + (f"-{self.age}" if self.age else "")


# The receive at the other end of every kind of send.
SENDS = {Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT}
# What makes the gradient to a stage's input, and to its weights.
INPUT_GRADS = tuple(kind for kind in Kind if "input_grad" in kind.costs)
WEIGHT_GRADS = tuple(kind for kind in Kind if "weight_grad" in kind.costs)
PASSES = tuple(kind for kind in Kind if kind in (*INPUT_GRADS, *WEIGHT_GRADS))
COMPUTATIONS = tuple(kind for kind in Kind if kind.costs and kind is not Kind.UPDATE)


def passes(stage: StageFlow, index: int, microbatch: int, minibatch: int = 0, *, fuse: bool = True) -> list[Action]:
    """Return the backward actions of a stage, nearest loss first, and for equal losses W last.

    Args:
        stage: work of the stage.
        index: index of the stage.
        microbatch: index of the micro-batch.
        minibatch: see `Action`.
        fuse: whether one pass B replaces an I and a W that share their cotangent (default: True).
    """
    together = stage.fused if fuse else None
    actions = [
        (
            message.farthest_loss,
            Action(Kind.BOTH if together == q else Kind.INPUT_GRAD, index, microbatch, q, minibatch),
        )
        for q, message in enumerate(stage.messages)
    ]
    if stage.weights is not None and together is None:
        actions.append((stage.weights.farthest_loss, Action(Kind.WEIGHT_GRAD, index, microbatch, None, minibatch)))
    return [action for _, action in sorted(actions, key=lambda pair: pair[0])]


def forwards(stage: StageFlow, index: int, microbatch: int, minibatch: int = 0) -> list[Action]:
    """Return the forward of a stage, and the action of its head if that runs."""
    head = [Action(Kind.HEAD, index, microbatch, None, minibatch)] if stage.head else []
    return [Action(Kind.FORWARD, index, microbatch, None, minibatch), *head]


def transfer(made: Action, used: Action) -> tuple[Action, Action]:
    """Return the send and the receive of a message, given the task that makes it and the first that uses it."""
    send = Kind.SEND_ACTIVATION if made.kind is Kind.FORWARD else Kind.SEND_GRADIENT
    return made._replace(kind=send), made._replace(kind=SENDS[send], stage=used.stage, age=used.age)


def describe(action: Action) -> str:
    """Describe an action in words.

    >>> describe(Action(Kind.FORWARD, 2, 1))
    'F2(1) (forward, stage 2, micro-batch 1)'
    """
    return f"{action} ({action.kind.words}, stage {action.stage}, micro-batch {action.microbatch})"
