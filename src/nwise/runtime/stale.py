"""Hogwild on many processes: nobody waits for an update, and every gradient is used when the steady timing grid has it.

In a step a rank runs the forwards of the new mini-batch, sends on every message that needs none of others or that is due, and
updates by the mini-batch that is as old as in the grid (`nwise.hogwild.timetable`). It does not look whether a gradient is
there before: a loop has one update a step, so that a lead could only be had while the pipeline fills, and a run could not be
repeated. A mini-batch computes with a copy of the parameters that its forward saw, as its gradient should be a gradient at
that point.

Messages of one loss come in the order of the mini-batches, but those of different losses do not, so that each has a channel
of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from nwise.flow import Flow
from nwise.hogwild import History, timetable
from nwise.microbatch import Batch, Tensors
from nwise.runtime.channel import NOTHING, Plan, Spec, start_all
from nwise.runtime.distributed import Distributed, Script, packed, unpacked
from nwise.runtime.shapes import carrying
from nwise.runtime.worker import Worker, count_passes
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

    @property
    def learning(self) -> list[Action]:
        """Of those that are left the ones for its update."""
        return [action for action in self.left if action.kind is not Kind.INPUT_GRAD]


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
        self._due = timetable(cycle)[k]
        self._oldest = max((self._due.update, *self._due.sends)) if stage.learns else 0
        self._history = History(stage.module, self._oldest)
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
            self._send(step)
            oldest = next((e for e in self._pending if e.learning), None)
            if oldest is not None and (step - oldest.step >= self._due.update or self._can_learn(oldest)):
                self._learn(oldest)
            while self._pending and not self._pending[0].left:
                self._pending.popleft()
        return entry.worker

    def drain(self) -> bool:
        """Finish mini-batches until there is an update by one; whether there was."""
        with self._runtime.watched():
            while self._pending:
                if self._finish():
                    return True
        return False

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
        start_all(list(zip(self._out, out, strict=True)), list(zip(self._in, into, strict=True)), turn)
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
        if self._oldest:
            if self._history.module is not self._stage.module:  # which may be replaced between two steps
                self._history = History(self._stage.module, self._oldest)
            self._history.remember()
            versions = {(k, m): self._history.newest for m in size}
        worker = Worker(self._stage.fresh(), flows, replace(batch, versions=versions), count_passes(left))
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
        cotangent = self._cycle[entry.turn][m].stages[self._stage.index].cotangent(q)
        taken = entry.worker.messages.get(m, {})
        return [p for p in cotangent.needed if p not in taken]

    def _send(self, step: int) -> None:
        """Messages for others, of all mini-batches, the oldest first, that can be sent without waiting or are due; those that
        come with weight gradients wait for their update."""
        for entry in self._pending:
            for action in [a for a in entry.left if a.kind is Kind.INPUT_GRAD]:
                assert action.message is not None
                due = step - entry.step >= self._due.sends[action.message]
                if due or (self._is_first(entry, action) and not self._missing(entry, action)):
                    self._run(entry, action)

    def _can_learn(self, entry: _Pending) -> bool:
        """Whether it needs to wait for nobody."""
        return all(self._is_first(entry, a) and not self._missing(entry, a) for a in entry.learning)

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
            for receiver in self._in:
                receiver.post()

    def _learn(self, entry: _Pending) -> None:
        """The gradients of a mini-batch, waiting for what is missing."""
        for action in entry.learning:
            self._run(entry, action)
        self.age = self._updates - entry.updates
        self._updates += 1

    def _finish(self) -> bool:
        """The oldest mini-batch to its end, waiting for what is missing; whether there are gradients of it."""
        entry = self._pending.popleft()
        for action in [a for a in entry.left if a.kind is Kind.INPUT_GRAD]:
            self._run(entry, action)
        learns = bool(entry.learning)
        if learns:
            self._learn(entry)
        return learns
