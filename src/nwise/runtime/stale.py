"""Hogwild on many processes: nobody waits for an update, and every gradient is used when the steady timing grid has it.

In a step a rank runs the forwards of the new mini-batch, sends on every message that needs none of others, and finishes the
mini-batch that is as old as in the grid (`nwise.hogwild.staleness`). It does not look whether a gradient is there before: a
loop has one update a step, so that a lead could only be had while the pipeline fills, and a run could not be repeated. A
mini-batch computes with a copy of the parameters that its forward saw, as its gradient should be a gradient at that point.

Messages of one loss come in the order of the mini-batches, but those of different losses do not, so that each has a channel
of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from nwise.flow import Flow
from nwise.hogwild import History, staleness
from nwise.microbatch import Tensors
from nwise.runtime.channel import NOTHING, Plan, Spec
from nwise.runtime.distributed import Distributed, Script, packed, unpacked
from nwise.runtime.shapes import carrying
from nwise.runtime.worker import Batch, Worker, passes_of
from nwise.runtime.world import World
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.stage import Stage


@dataclass(slots=True)
class _Pending:
    """A mini-batch whose forwards have run.

    Args:
        step: its number.
        turn: which mini-batch of the cycle.
        updates: that its stage had made when its forwards ran.
        worker: its stage.
        left: passes that are still to be run.
    """

    step: int
    turn: int
    updates: int
    worker: Worker
    left: list[Action]


class Stale:
    """Runs one rank's stage asynchronously.

    Args:
        world: this process and its neighbours.
        runtime: of this rank, whose forward channels are used.
        stage: its stage.
        cycle: flows of all mini-batches of the strategy's cycle.

    Attributes:
        age: updates between forward and update of the mini-batch that was finished last.
    """

    def __init__(self, world: World, runtime: Distributed, stage: Stage, cycle: Sequence[Sequence[Flow]]) -> None:
        self._runtime, self._stage, self._cycle = runtime, stage, cycle
        k, size = stage.index, len(cycle[0])
        self.age = 0
        self._limit = max(max(staleness(flow, size)[k]) for batch in cycle for flow in batch)
        self._history = History(stage.module, self._limit)
        self._pending: deque[_Pending] = deque()
        self._updates = 0
        self._script: Script | None = None
        many = max(len(s.messages) for batch in cycle for flow in batch for s in flow.stages)
        # A stage sends what it can before it finishes what others wait for, so that it must never have to wait for them; none is
        # ahead of another by more mini-batches than gradients may be old.
        depth = size + 1
        self._out, self._in = world.gradient_channels(many, runtime.device, depth)

    def run(self, turn: int, batch: Batch, step: int) -> Worker:
        """One mini-batch's forwards, and the gradients of the oldest one that can be finished, if there is one.

        Args:
            turn: which mini-batch of the cycle.
            batch: the data; of `inputs` only the first stage uses more than the shapes.
            step: number of the mini-batch.

        Returns:
            The stage with its loss.
        """
        with self._runtime.watched():
            self._start(batch.inputs, turn)
            entry = self._forwards(turn, batch, step)
            self._pending.append(entry)
            self._send_what_can_be()
            oldest = self._pending[0]
            if step - oldest.step >= self._limit or not any(self._missing(oldest, action) for action in oldest.left):
                self._finish()
        return entry.worker

    def drain(self) -> bool:
        """Finish the oldest mini-batch; whether there was one."""
        if not self._pending:
            return False
        with self._runtime.watched():
            self._finish()
        return True

    def close(self) -> None:
        """Wait until the neighbours have everything; after the last mini-batch has been finished, on all ranks."""
        with self._runtime.watched():
            self._change(None, 0)

    def _start(self, inputs: Sequence[Tensors], turn: int) -> None:
        script = self._runtime.start_forwards(inputs)
        if script is not self._script:
            # Messages of other shapes: those on the way are used first, all in the next update.
            while self._pending:
                self._finish()
            self._change(script, turn)

    def _change(self, script: Script | None, turn: int) -> None:
        k = self._stage.index
        out = [NOTHING if script is None else self._plan(q, k, script.inputs) for q in range(len(self._out))]
        into = [NOTHING if script is None else self._plan(q, k + 1, script.outputs) for q in range(len(self._in))]
        for sender, plan in zip(self._out, out, strict=True):
            sender.start(plan, turn)
        for receiver, plan in zip(self._in, into, strict=True):
            receiver.start(plan, turn)
        self._script = script

    def _plan(self, q: int, sender: int, specs: Sequence[tuple[Spec, ...]]) -> Plan:
        """What goes through the channel of a message, in one cycle."""
        keys = [
            (m, q, turn)
            for turn, batch in enumerate(self._cycle)
            for m, flow in enumerate(batch)
            if q < len(flow.stages[sender].messages)
        ]
        return Plan(tuple(keys), tuple(carrying(specs[m]) for m, _, _ in keys))

    def _forwards(self, turn: int, batch: Batch, step: int) -> _Pending:
        k, flows = self._stage.index, self._cycle[turn]
        size = range(len(flows))
        left = [a for m in size for a in passes(flows[m].stages[k], k, m, turn=turn)]
        versions = {}
        if self._limit:
            self._history.remember()
            versions = {(k, m): self._history.newest for m in size}
        worker = Worker(self._stage.fresh(), flows, replace(batch, versions=versions), passes_of(left))
        for m in size:
            worker.inputs[m] = self._runtime.receive(m, batch.inputs[m], step)
            for action in forwards(flows[m].stages[k], k, m, turn):
                self._runtime.at(step, action.kind, m)
                made = worker.run(action)
                if action.kind is Kind.FORWARD:
                    self._runtime.send(m, cast(Tensors, made))
        return _Pending(step, turn, self._updates, worker, left)

    def _missing(self, entry: _Pending, action: Action) -> list[int]:
        """Messages that an action needs and that have not been taken."""
        m, q = action.microbatch, action.message
        received = self._cycle[entry.turn][m].stages[self._stage.index].cotangent(q).received
        taken = entry.worker.messages.get(m, {})
        return [p for p, weight in enumerate(received) if weight and p not in taken]

    def _send_what_can_be(self) -> None:
        """Messages for others, of all mini-batches, the oldest first; those that come with weight gradients wait for their
        update."""
        for entry in self._pending:
            for action in [a for a in entry.left if a.kind is Kind.INPUT_GRAD]:
                if self._is_first(entry, action) and not self._missing(entry, action):
                    self._run(entry, action)

    def _is_first(self, entry: _Pending, action: Action) -> bool:
        """Whether nothing is left that its channel should carry before it."""
        for other in self._pending:
            for left in other.left:
                if left is action and other is entry:
                    return True
                if left.message == action.message:
                    return False
        return True

    def _run(self, entry: _Pending, action: Action) -> None:
        assert self._script is not None
        m, q = action.microbatch, action.message
        for p in self._missing(entry, action):
            self._runtime.at(entry.step, Kind.RECEIVE_GRADIENT, m, p)
            message = self._in[p].take((m, p, entry.turn))
            entry.worker.messages.setdefault(m, {})[p] = unpacked(message, self._script.outputs[m])
        self._runtime.at(entry.step, action.kind, m, q)
        made = entry.worker.run(action)
        entry.left.remove(action)
        if q is not None:
            self._runtime.at(entry.step, Kind.SEND_GRADIENT, m, q)
            self._out[q].send((m, q, entry.turn), packed(made, self._script.inputs[m], self._runtime.device))

    def _finish(self) -> None:
        """The oldest mini-batch to its end, waiting for what is missing."""
        entry = self._pending[0]
        for action in list(entry.left):
            self._run(entry, action)
        self._pending.popleft()
        self.age = self._updates - entry.updates
        self._updates += 1
