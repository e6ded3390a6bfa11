"""Hogwild on many processes: no rank waits for an update, and every gradient is used when the steady timing grid uses it.

In a step a rank runs the forwards of the new mini-batch, sends every message that is due or needs no other rank's message, and
updates by the mini-batch that is as old as in the grid (`nwise.hogwild.timetable`). It never uses a gradient that arrives
early: there is one update per step, so the gain would be limited to the filling of the pipeline, and runs would not be
repeatable. A mini-batch computes with a copy of the parameters that its forward saw: its gradient should be one at that point.

The messages of one loss arrive in the order of the mini-batches, but messages of different losses may overtake each other.
Therefore each loss has its own channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from nwise.flow import Flow
from nwise.hogwild import History, timetable
from nwise.microbatch import Batch, Tensors
from nwise.runtime.channel import NOTHING, MessagePlan, Spec, start_all
from nwise.runtime.distributed import Distributed, Script, packed, unpacked
from nwise.runtime.shapes import carrying
from nwise.runtime.worker import Worker, count_passes
from nwise.runtime.world import World
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.stage import Stage


@dataclass(slots=True)
class _Pending:
    """A mini-batch after its forwards and before its last pass.

    Args:
        step: number of the mini-batch.
        turn: index of the mini-batch in the cycle.
        updates: number of updates that the stage had made when the forwards ran.
        worker: worker that ran the forwards and runs the passes.
        left: remaining passes.
    """

    step: int
    turn: int
    updates: int
    worker: Worker
    left: list[Action]

    @property
    def learning(self) -> list[Action]:
        """The remaining passes that the update needs."""
        return [action for action in self.left if action.kind is not Kind.INPUT_GRAD]


class Stale:
    """Runs one rank's stage asynchronously.

    Args:
        world: this process and its neighbours.
        runtime: this rank's runtime, which provides the forward channels.
        stage: the rank's stage.
        cycle: flows of all mini-batches of the strategy's cycle.

    Attributes:
        age: number of updates between the forward and the update of the mini-batch finished last.
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
        # A stage sends before it finishes the passes that other stages wait for, so a send must never block. No stage is ahead of
        # another by more mini-batches than the age of the oldest gradients, so this depth suffices.
        depth = size + 1
        self._out, self._in = world.gradient_channels(many, runtime.device, depth)

    def run(self, turn: int, batch: Batch, step: int) -> Worker:
        """Run one mini-batch's forwards, then compute the gradients of the oldest one that can be finished.

        Args:
            turn: index of the mini-batch in the cycle.
            batch: the data; only the first stage uses the values of `inputs`, the others their shapes.
            step: number of the mini-batch.

        Returns:
            The worker with the stage's loss.
        """
        # End-to-end on stage 0 of 3, where the gradients of the grid are two updates old:
        #
        #     step 0   F(0)
        #     step 1   F(1)
        #     step 2   F(2) W(0)      mini-batch 0 is due, so W waits for its message
        #     step 3   F(3) W(1)
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
        """Finish mini-batches until one leaves gradients for an update; return whether one did."""
        with self._runtime.watched():
            while self._pending:
                if self._finish():
                    return True
        return False

    def close(self) -> None:
        """Wait until the neighbours have every message; a call for all ranks, after the last mini-batch is finished."""
        with self._runtime.watched():
            self._change(None, 0)

    def _start(self, inputs: Sequence[Tensors], turn: int) -> None:
        script = self._runtime.start_forwards(inputs)
        if script is not self._script:
            # The shapes change: use the messages on their way first, all of them in the next update.
            while self._pending:
                self._finish()
            self._change(script, turn)

    def _change(self, script: Script | None, turn: int) -> None:
        k = self._stage.index
        out = [NOTHING if script is None else self._plan(q, k, script.inputs) for q in range(len(self._out))]
        into = [NOTHING if script is None else self._plan(q, k + 1, script.outputs) for q in range(len(self._in))]
        start_all(list(zip(self._out, out, strict=True)), list(zip(self._in, into, strict=True)), turn)
        self._script = script

    def _plan(self, q: int, sender: int, specs: Sequence[tuple[Spec, ...]]) -> MessagePlan:
        """MessagePlan one cycle of the messages that go through channel `q`."""
        keys = [
            (m, q, turn)
            for turn, batch in enumerate(self._cycle)
            for m, flow in enumerate(batch)
            if q < len(flow.stages[sender].messages)
        ]
        return MessagePlan(tuple(keys), tuple(carrying(specs[m]) for m, _, _ in keys))

    def _forwards(self, turn: int, batch: Batch, step: int) -> _Pending:
        k, flows = self._stage.index, self._cycle[turn]
        size = range(len(flows))
        left = [a for m in size for a in passes(flows[m].stages[k], k, m, turn=turn)]
        versions = {}
        if self._oldest:
            if self._history.module is not self._stage.module:  # the module may be replaced between two steps
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
        """Return the messages that an action needs and that are not received yet."""
        m, q = action.microbatch, action.message
        cotangent = self._cycle[entry.turn][m].stages[self._stage.index].cotangent(q)
        taken = entry.worker.messages.get(m, {})
        return [p for p in cotangent.needed if p not in taken]

    def _send(self, step: int) -> None:
        """Send, oldest mini-batch first, the messages that are due or need no waiting.

        A message that is computed together with weight gradients is sent at its update.
        """
        for entry in self._pending:
            for action in [a for a in entry.left if a.kind is Kind.INPUT_GRAD]:
                assert action.message is not None
                due = step - entry.step >= self._due.sends[action.message]
                if due or (self._is_first(entry, action) and not self._missing(entry, action)):
                    self._run(entry, action)

    def _can_learn(self, entry: _Pending) -> bool:
        """Return whether a mini-batch's update needs no waiting for other ranks."""
        return all(self._is_first(entry, a) and not self._missing(entry, a) for a in entry.learning)

    def _is_first(self, entry: _Pending, action: Action) -> bool:
        """Return whether the action's message is the next one in its channel."""
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
        """Compute the gradients of a mini-batch, waiting for missing messages."""
        for action in entry.learning:
            self._run(entry, action)
        self.age = self._updates - entry.updates
        self._updates += 1

    def _finish(self) -> bool:
        """Finish the oldest mini-batch, waiting for missing messages; return whether it left gradients."""
        entry = self._pending.popleft()
        for action in [a for a in entry.left if a.kind is Kind.INPUT_GRAD]:
            self._run(entry, action)
        learns = bool(entry.learning)
        if learns:
            self._learn(entry)
        return learns
