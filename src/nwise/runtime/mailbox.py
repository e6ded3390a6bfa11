"""The mailbox of a rank: results on their way from the task that makes them to the tasks that read them.

A result has a name, its task and its mini-batch, and a number of reads. After the last one it is gone. In one process every
result stays in memory; several processes have a `nwise.runtime.post.Post`, which sends some results and receives others::

    put    F0 of mini-batch 3, read once       {(F0, 3): 1}
    take   by F1 of mini-batch 3               {}
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

from nwise.microbatch import Batch
from nwise.runtime.work import RankWork
from nwise.schedule.actions import Action
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import Stage
from nwise.stage.tape import Cotangents, Tape
from nwise.tensors import Tensors

if TYPE_CHECKING:
    from nwise.runtime.compression import Codec
    from nwise.runtime.replicas import Replicas

__all__ = ["Flying", "Mailbox", "Minibatch", "Tell"]

Tell = Callable[[Action, float], None] | None  # called after each action with its start in seconds


class Minibatch(NamedTuple):
    """A mini-batch in flight on one rank.

    Args:
        batch: its data.
        tapes: its micro-batches with work to come, by stage and index.
    """

    batch: Batch
    tapes: Mapping[int, dict[int, Tape]]


Flying = Mapping[int, Minibatch]  # by number


class Mailbox:
    """The mailbox of one process.

    Args:
        stages: this rank's stages, by index.
        codec: the form in which results travel between two stages.

    Attributes:
        replicas: what sums the gradients of a stage over its replicas, by index; none without replicas.
        wanted: the tasks whose results other tasks read.
        sent: bytes that the present call has sent as activations and as gradients.
    """

    replicas: Mapping[int, Replicas] = MappingProxyType({})

    def __init__(self, stages: Mapping[int, Stage], codec: Codec) -> None:
        self._stages = stages
        self._codec = codec
        self._tasks: Sequence[Action] = ()
        self._uses: Mapping[int, int] = {}
        self.wanted: Container[int] = ()
        self._results: dict[tuple[int, int], list[object]] = {}  # what was made, and its reads that are left
        self.sent = [0, 0]

    def signature(self, inputs: Sequence[Tensors]) -> object:
        """Return what a mini-batch looks like, with a ``str`` that is the same on all ranks."""
        return ""

    def begin(self, schedule: Schedule, work: RankWork, call: int, flying: Flying, tell: Tell) -> None:
        """Begin a call."""
        self._tasks = schedule.graph.tasks
        self._uses = work.uses
        self.wanted = work.uses

    def take(self, task: int, number: int) -> Tensors | Cotangents:
        """Return the result of a task for a mini-batch, to one of its readers."""
        entry = self._results[task, number]
        entry[0] -= 1  # type: ignore[operator]
        if not entry[0]:
            del self._results[task, number]
        return cast(Tensors, entry[1])

    def put(self, task: int, number: int, made: Tensors | Cotangents) -> None:
        """Take the result of a task for its readers."""
        if self._codec.compression is not None:
            made = self._codec.through(made)
        self._results[task, number] = [self._uses[task], made]

    def end(self) -> None:
        """End a call: wait for the gradients that other ranks add."""

    def infer(self, inputs: Tensors, step: int, call: Callable[[int, Tensors], Tensors]) -> None:
        """Run only the forwards of all stages (`Engine.infer`)."""
        for k in self._stages:
            inputs = call(k, inputs)

    def clear(self) -> None:
        """Drop the results that are in memory, after an error."""
        self._results.clear()

    def forget(self) -> None:
        """Drop all results, with those that are on their way."""
        self.clear()
