"""The mail of a rank: what a call computes, segment after segment, and the messages that travel between two segments.

One process has no messages, so a call is one segment. Several have a `nwise.runtime.post.Post`. A call runs in one of three
ways. To the other ranks the first and the last are the same, so each rank chooses alone::

    execute    receive, compute,                        send
    record              compute, from memory to memory            computes and sends nothing (`nwise.capture`)
    replay     receive, copy to memory, launch, copy,   send
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from nwise.schedule.actions import Action
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Cotangents, Tape
from nwise.tensors import Tensors

if TYPE_CHECKING:
    from nwise.runtime.replicas import Replicas

Tell = Callable[[Action, float], None] | None  # called after each action with its start in seconds
Tapes = Mapping[int, Mapping[int, Sequence[Tape]]]  # of each mini-batch and stage


class Memory(NamedTuple):
    """Where the messages of a recorded call are, by segment.

    Args:
        arriving: what it reads, by message.
        leaving: what it writes; empty before the call is recorded.
    """

    arriving: list[list[Tensors]]
    leaving: list[Tensors]


class Mail:
    """The mail of one process: no messages.

    Args:
        stages: this rank's stages, by index.

    Attributes:
        replicas: what sums the gradients of a stage over its replicas, by index; none without replicas.
        first: number of the first mini-batch of the present schedule.
    """

    replicas: Mapping[int, Replicas] = MappingProxyType({})
    first = 0

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages

    @property
    def sent(self) -> list[int]:
        """The bytes that the present call has sent as activations and as gradients."""
        return [0, 0]

    @property
    def predicted(self) -> list[int]:
        """The bytes that the newest mini-batch should send."""
        return [0, 0]

    def add(self, schedule: Schedule, step: int, inputs: Sequence[Tensors]) -> object:
        """Add a mini-batch; return what it looks like, with a ``str`` that is the same on all ranks."""
        return ""

    def drop(self, step: int) -> None:
        """Drop a mini-batch."""

    def start(self, schedule: Schedule, step: int) -> None:
        """Begin a call."""

    def segments(self, schedule: Schedule, step: int, tapes: Tapes, tell: Tell) -> Iterable[Sequence[int]]:
        """Yield the numbers of the tasks in each segment of a call; receive before it, and send after it."""
        # The list ends with an update of each stage, which the caller's optimizer makes.
        return (schedule.lists[step % len(schedule.lists)][0][: -schedule.num_stages],)

    def recorded(self, schedule: Schedule, step: int, tapes: Tapes, memory: Memory) -> Iterable[Sequence[int]]:
        """Yield them without messages: take from memory what a segment would receive, and note what it would send."""
        return self.segments(schedule, step, tapes, None)

    def replayed(self, schedule: Schedule, step: int, memory: Memory) -> Iterable[Sequence[int]]:
        """Yield those of a recorded call; receive into memory before each segment, and send from memory after it."""
        return self.segments(schedule, step, {}, None)

    def memory(self, schedule: Schedule, step: int, inputs: Sequence[Tensors]) -> Memory:
        """Return memory for a call to be recorded, of a kind of which one has run; `inputs` are the model's, per micro-batch."""
        return Memory([], [])

    def leave(self, action: Action, made: Tensors | Cotangents) -> None:
        """Take a result that no stage of this process needs."""

    def infer(self, inputs: Tensors, step: int, call: Callable[[int, Tensors], Tensors]) -> None:
        """Run only the forwards of all stages (`Engine.infer`)."""
        for k in self._stages:
            inputs = call(k, inputs)

    def forget(self) -> None:
        """Drop the messages that are on their way."""

    def close(self) -> None:
        """Wait until the other ranks have all messages."""
