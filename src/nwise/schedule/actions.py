"""Actions: what a runtime executes, as plain data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from nwise.flow import StageFlow


class Kind(Enum):
    """What an action does: computations (see `nwise.stage`), messages, and bookkeeping."""

    FORWARD = "F"
    HEAD = "H"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    BOTH = "B"
    SEND_ACTIVATION = "SX"
    RECEIVE_ACTIVATION = "RX"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"
    DROP = "D"
    UPDATE = "U"

    # Members are the only ones of their kind, and a schedule may hash millions of them.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One action of one stage on one micro-batch.

    Args:
        kind: what is done.
        stage: the stage that does it.
        microbatch: the micro-batch it is done to; 0 for an update.
        message: index of the message that I and B produce and that a gradient's send or receive carries; None
            for the others.
        turn: which mini-batch of a rotating strategy's cycle; 0 for all others.
    """

    kind: Kind
    stage: int
    microbatch: int
    message: int | None = None
    turn: int = 0

    def __str__(self) -> str:
        message = "" if self.message is None else f".{self.message}"
        turn = f"/{self.turn}" if self.turn else ""
        place = "" if self.kind is Kind.UPDATE else f"({self.microbatch}{message}{turn})"
        return f"{self.kind.value}{self.stage}{place or turn}"


# Sends, each with the receive at its other end.
SENDS = {Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT}


def counterpart(send: Action) -> Action:
    """The receive that takes what a send sends."""
    step = 1 if send.kind is Kind.SEND_ACTIVATION else -1
    return send._replace(kind=SENDS[send.kind], stage=send.stage + step)


def passes(stage: StageFlow, index: int, microbatch: int, *, fuse: bool = True, turn: int = 0) -> list[Action]:
    """The backward actions of a stage, nearest loss first and W last among equals.

    Args:
        stage: what the stage does.
        index: which stage it is.
        microbatch: the micro-batch.
        fuse: where W shares its cotangent with a message, let one pass B do both; else first I, then W.
        turn: see `Action`.
    """
    together = stage.fused if fuse else None
    actions = [
        (message.far, Action(Kind.BOTH if together == q else Kind.INPUT_GRAD, index, microbatch, q, turn))
        for q, message in enumerate(stage.messages)
    ]
    if stage.weights is not None and together is None:
        actions.append((stage.weights.far, Action(Kind.WEIGHT_GRAD, index, microbatch, None, turn)))
    return [action for _, action in sorted(actions, key=lambda pair: pair[0])]


def forwards(stage: StageFlow, index: int, microbatch: int, turn: int = 0) -> list[Action]:
    """The forward of a stage, and its head's action if it has one to run."""
    head = [Action(Kind.HEAD, index, microbatch, None, turn)] if stage.head else []
    return [Action(Kind.FORWARD, index, microbatch, None, turn), *head]
