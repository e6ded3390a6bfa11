"""The engine: runs the lists of one rank, with its stages, its messages and the mini-batches that wait for their delay.

One process is one rank with all stages. A rank waits only for messages: it begins its next call as soon as its own list is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from nwise._dtensor import is_dtensor
from nwise._snapshot import restored_on_error
from nwise.microbatch import Batch
from nwise.modes import autocast_dtype
from nwise.runtime.channel import Receiver, Sender, start_all
from nwise.runtime.compression import Compression, Wire
from nwise.runtime.due import DueGradients, Gradients, warn_of_loss
from nwise.runtime.ledger import NOTHING, Exchanged, Window, make_labels, same
from nwise.runtime.messages import Arc, Messages, forwards_alone, messages_of
from nwise.runtime.processes import Processes
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import check_sendable, packed, unpacked
from nwise.runtime.watch import Doing
from nwise.runtime.written import Written
from nwise.schedule.actions import SENDS, Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage import Stage, learning
from nwise.tape import Tape
from nwise.tensors import Tensors, each, with_names

__all__ = ["Engine"]

# Called after each action of this rank with the step, the action, and its start and end in seconds of `time.perf_counter`.
Recorder = Callable[[int, Action, float, float], None]
OnAction = Callable[[Action], None] | None
_Tapes = Mapping[int, Sequence[Tape]] | None  # by stage; None if there is no such mini-batch
_Message = tuple[Tensors, Tensors] | None  # what a message is about, and what travels; None for a header alone
_NOTHING_ELSE = nullcontext()  # made once: a step enters it for every task


class Engine:
    """Runs the stages of one rank. All processes make their engines together.

    Args:
        processes: the processes.
        stages: this rank's stages.
        device: device of the stages' tensors.
        compression: compression of all messages between two stages; default: none.

    Attributes:
        recorder: None, or a function called with the start and end of every action.
        sent: bytes that the last step sent as activations and as gradients.
    """

    def __init__(
        self,
        processes: Processes,
        stages: Sequence[Stage],
        device: torch.device,
        compression: Compression | None = None,
    ) -> None:
        self.recorder: Recorder | None = None
        self.sent, self.device = [0, 0], device
        self._processes, self._stages = processes, {stage.index: stage for stage in stages}
        self._alone = processes.num_ranks == 1
        group = processes.replicas_group()
        self._replicas = {} if group is None else {stage.index: Replicas(group, stage) for stage in stages}
        self._owned: set[int] = set()
        self._wire = Wire(compression)
        self._forwards = forwards_alone(processes.placement)
        self._messages = {"": messages_of(self._forwards, processes.place, same)}  # by digest; "" for forwards alone
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._schedule: Schedule | None = None
        # Mini-batches with passes to come, by number; `_first` is the first of this schedule.
        self._tapes: dict[int, Mapping[int, Sequence[Tape]]] = {}
        self._exchanged: dict[int, Exchanged] = {}
        self._newest = Exchanged()
        self._due, self._written = DueGradients(), Written()
        self._first = self._next = 0
        self._autocast: torch.dtype | None = None  # of the last step
        processes.before_close(self.close)

    @property
    def bytes_of_last_step(self) -> dict[str, list[int]]:
        """The bytes of activations and of gradients that the last step sent, and those that its mini-batch should send."""
        return {"measured": self.sent, "predicted": self._newest.num_bytes(self._stages, self._wire.specs)}

    def run(self, schedule: Schedule, step: int, batch: Batch, on_action: OnAction = None) -> None:
        """Run one call: the forwards of a mini-batch, and the passes that are due; fill every ``.grad`` of this rank.

        Args:
            schedule: the schedule of all ranks.
            step: number of the mini-batch.
            batch: the data; only the first stage uses the values of `inputs`, other ranks their shapes.
            on_action: function called after each action, or None.

        Raises:
            RankError: this or another rank failed.
        """
        if step != self._next or (self._schedule is not None and schedule != self._schedule):
            self.forget("the strategy, M, the order, the trained parameters, or the number of the step changed")
        self._look_for_writes()
        if self._schedule is None:
            self._schedule, self._first = schedule, step
        self._autocast = autocast_dtype(self.device)
        if schedule.oldest:
            # The last passes come in a later call, when the caller may have reused the memory of the batch.
            batch = replace(batch, inputs=[each(inputs, torch.clone) for inputs in batch.inputs])
        turn = step % len(schedule.flows)
        tapes = self._tapes[step] = {k: stage.tapes(schedule, turn, batch) for k, stage in self._stages.items()}
        if 0 in tapes:
            for tape, inputs in zip(tapes[0], batch.inputs, strict=True):
                tape.inputs = inputs
        if not self._alone:
            labels = make_labels(batch.inputs, self._autocast, self._newest.labels)
            self._newest = self._exchanged[step] = Exchanged(schedule.flows[turn], labels)
        self._call(schedule, step, batch.inputs, on_action)
        self._due.leave(step)
        if self._tapes or self._due:
            self._written.watch(self._mains())
        self.count(step)

    def count(self, step: int) -> None:
        """Count a call that has run, or was replayed (`nwise.capture`)."""
        self._next = step + 1
        self._processes.progress.steps += 1

    def drain(self) -> bool:
        """Run a call without a new mini-batch; return False, and run nothing, if no gradient is due.

        A call that raises restores every ``.grad``.
        """
        if not self._tapes and not self._due:
            return False
        self._look_for_writes()
        call = self._next
        self._processes.begin("`drain`")
        with restored_on_error((), learning(self._stages.values())):
            if self._tapes:
                self._call_without_batch()
            self._due.leave(call)
        self._next = call + 1
        return True

    def complete(self) -> list[Gradients]:
        """Run all passes that are left; return for each of the next calls the gradients that it leaves in ``.grad``."""
        if not self._tapes:
            return self._due.by_call()
        call, learns, sent = self._next, learning(self._stages.values()), self.sent
        before, recorder = [p.grad for p in learns], self.recorder
        self.recorder = None  # these passes belong to no step
        self._processes.begin("`pending_gradients`")
        try:
            while self._tapes:
                for p in learns:
                    p.grad = None
                number = self._next
                self._call_without_batch()
                self._due.put(number, learns)
        finally:
            for p, gradient in zip(learns, before, strict=True):
                p.grad = gradient
            self.recorder = recorder
        # As at the start of a schedule, except for the gradients: no message of an earlier mini-batch is on its way.
        self._first = self._next = call
        self.sent = sent
        self._drop_messages()
        return self._due.by_call()

    def restore(self, schedule: Schedule, step: int, calls: Sequence[Gradients]) -> bool:
        """Let calls from `step` on leave the gradients that `complete` returned; return False if the delay is too short."""
        if len(calls) > schedule.oldest:
            return False
        self._schedule = schedule
        self._first = self._next = step
        self._due.replace(step, calls)
        return True

    def forget(self, because: str = "") -> int:
        """Drop the mini-batches that wait for their delay, and the errors of compressed messages; return how many there were.

        Args:
            because: cause, for a warning if there are any; default: no warning.
        """
        lost = len(self._tapes) + len(self._due)
        if lost:  # the others would wait for messages of the lost mini-batches
            self._processes.begin("`forget_pending`")
        if lost and because:
            warn_of_loss(lost, because, stacklevel=5)
        self._written.stop()
        self._tapes.clear()
        self._due.clear()
        self._schedule = None
        self._wire.errors.clear()
        self._drop_messages()
        return lost

    def infer(self, inputs: Tensors, step: int, call: Callable[[int, Tensors], Tensors]) -> None:
        """Run only the forwards of all stages.

        Args:
            inputs: inputs of the first stage.
            step: number of the previous mini-batch.
            call: function from a stage's index and inputs to its outputs.
        """
        with self._processes.watched("a forward"):
            # Every message has a header, because a stage may return other shapes, in evaluation mode, say.
            messages, hidden = self._messages[""], inputs
            self._start(messages, 0, [inputs], (None,))
            for task in self._forwards.lists[0][self._processes.place]:
                for arc in messages.receives.get(task, ()):
                    self._processes.doing = Doing(step, arc.action, time.perf_counter())
                    tensors, form = self._receivers[arc.peer].take(arc.key)
                    hidden = with_names(tensors, form.names)
                action = self._forwards.graph.tasks[task]
                self._processes.doing = Doing(step, action, time.perf_counter())
                hidden = call(action.stage, hidden)
                if task in messages.sends:
                    _, key, peer, _ = messages.sends[task]
                    self._senders[peer].send(key, hidden, self._apart(each(hidden, Tensor.detach), action.stage))
                    self._post()

    def close(self) -> None:
        """Wait until the other ranks have all messages; all ranks call it after the last step."""
        with self._processes.watched(None):
            self.forget()
            self._start(Messages({}, {}, {}, {}), 0, (), ())

    def _look_for_writes(self) -> None:
        """Drop mini-batches that wait for their delay if something but an optimizer has written to the weights."""
        if because := self._written.found(self._mains(), several=self._processes.size > 1):
            self.forget(because)

    def _mains(self) -> list[Tensor]:
        return [p for stage in self._stages.values() for p in stage.learns]

    def _drop_messages(self) -> None:
        """Drop the messages that are on their way."""
        self._exchanged.clear()
        for receiver in self._receivers.values():
            receiver.forget()

    def _call_without_batch(self) -> None:
        """Run a call that has only passes of earlier mini-batches."""
        assert self._schedule is not None, "mini-batches wait for their passes"
        # The shapes of messages, and forwards that run again, depend on the modes of the last step.
        dtype = self._autocast
        with torch.inference_mode(False), torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            self._call(self._schedule, self._next, (), None)

    def _call(self, schedule: Schedule, step: int, inputs: Sequence[Tensors], on_action: OnAction) -> None:
        """Run the list of one call."""
        self._next, errors, batch = step + 1, dict(self._wire.errors), self._newest.labels if inputs else ""
        try:
            with self._processes.watched(f"step {step}", batch), torch.enable_grad():
                turn = step % len(schedule.flows)
                if schedule.digest not in self._messages:
                    self._messages[schedule.digest] = messages_of(schedule, self._processes.place, self._wire.specs)
                messages = self._messages[schedule.digest]
                batches = (self._exchanged.get(step - age) for age in range(schedule.oldest + 1))
                self._start(messages, turn, inputs, tuple(None if one is None else one.labels for one in batches))
                for replicas in self._replicas.values():
                    replicas.start()
                self._execute(schedule, messages, step, on_action)
                for replicas in self._replicas.values():
                    replicas.sum_statistics()
        except BaseException:
            self._tapes.clear()
            self._due.clear()
            self._next, self._wire.errors = step, errors
            raise
        for number in [n for n in self._tapes if n <= step - schedule.oldest]:
            self._tapes.pop(number), self._exchanged.pop(number, None)
        self.sent = [sum(sender.num_bytes[kind] for sender in self._senders.values()) for kind in SENDS.values()]

    def _start(self, messages: Messages, turn: int, inputs: Sequence[Tensors], window: Window) -> None:
        """Begin a call on all channels."""
        if self._alone:
            return
        if not self._senders:
            self._senders, self._receivers = self._processes.channels(self.device)
        incoming = [(receiver, messages.incoming.get(peer, NOTHING)) for peer, receiver in self._receivers.items()]
        outgoing = [(sender, messages.outgoing.get(peer, NOTHING)) for peer, sender in self._senders.items()]
        start_all(outgoing, incoming, window, turn)
        # Memory that a message must not share: an optimizer changes parameters, and the caller may reuse a batch. A send returns
        # before its message has left.
        tensors = [x for microbatch in inputs for x in microbatch]
        for stage in self._stages.values():
            tensors += [*stage.module.parameters(), *stage.module.buffers()]
        self._owned = {t.untyped_storage().data_ptr() for t in tensors if not is_dtensor(t)}

    def _post(self) -> None:
        """Post the next receives; this rank's own sends have been issued, so no other rank is blocked on it."""
        for receiver in self._receivers.values():
            receiver.post()

    def _apart(self, tensors: Tensors, stage: int) -> Tensors:
        """Copy outputs of a stage whose memory may change before they have left, and tensors of other types."""
        check_sendable(tensors, stage, self.device)
        # Tensor parallelism returns tensors of a subclass, whose values may still be on their way.
        plain = [type(t) is Tensor and t.untyped_storage().data_ptr() not in self._owned for t in tensors]
        return tensors if all(plain) else tuple(t if p else t.clone() for t, p in zip(tensors, plain, strict=True))

    def _execute(self, schedule: Schedule, messages: Messages, step: int, on_action: OnAction) -> None:
        """Execute this rank's list, task by task."""
        # The list alone decides the order. A receive blocks until its message is there; a result goes to another rank, or to the
        # tape of a neighbour on this rank, as its inputs (of F) or a message (of I and B). A task of age a works on mini-batch
        # `step - a`. If there is none yet, or none any more, nothing is computed, and its messages are headers alone.
        processes, wire = self._processes, self._wire
        compressed, watched = wire.compression is not None, self.recorder is not None or on_action is not None
        completing, observed = schedule.completing if self._replicas else (), processes.size > 1
        for task in schedule.lists[step % len(schedule.flows)][processes.place]:
            action = schedule.graph.tasks[task]
            kind, k, m, q, _, age = action
            if kind is Kind.UPDATE and self._alone and not self._replicas:
                break  # the caller's optimizer updates
            tapes, send = self._tapes.get(step - age), messages.sends.get(task)
            for arc in messages.receives.get(task, ()):
                self._receive(arc, step, tapes, on_action)
            begin, message = time.perf_counter(), None
            if observed:
                processes.doing = Doing(step, action, begin)
            if kind is Kind.UPDATE:
                if k in self._replicas:
                    self._replicas[k].finish()
            elif tapes is not None:
                # After the last task that adds to gradients they are complete, so their sums over replicas begin during it.
                with self._replicas[k].summing(head=kind is Kind.HEAD) if task in completing else _NOTHING_ELSE:
                    made = self._stages[k].run(action, tapes[k][m], continued=task in schedule.continued)
                if kind is Kind.FORWARD:
                    if send is not None:
                        activation = cast(Tensors, made)
                        message = activation, wire.compress(None, self._apart(activation, k))
                    elif k + 1 in tapes:
                        tapes[k + 1][m].inputs = cast(Tensors, wire.through(None, made) if compressed else made)
                    else:
                        self._post()  # the last stage sends nothing after a forward
                elif send is not None:
                    specs = self._exchanged[step - age].forms[k, m].specs
                    gradients, absent = packed(made, specs, self.device)
                    message = gradients, wire.compress(action, gradients, absent)
                elif q is not None:
                    # Without a name, which would keep the message beyond its last pass.
                    tapes[k - 1][m].messages[q] = wire.through(action, made) if compressed else made
            if watched and (tapes is not None or kind is Kind.UPDATE):
                self._tell(step, action, begin, on_action)
            if send is not None:
                self._send(send, message, step, tapes, on_action)

    def _tell(self, step: int, action: Action, begin: float, on_action: OnAction) -> None:
        """Tell the recorder and the user's function what this rank has done."""
        if self.recorder is not None:
            self.recorder(step, action, begin, time.perf_counter())
        if on_action is not None:
            self._processes.doing = Doing(step, action, time.perf_counter(), over=True)
            on_action(action)

    def _send(self, arc: Arc, message: _Message, step: int, tapes: _Tapes, on_action: OnAction) -> None:
        """Send a message."""
        action, key, peer, _ = arc
        begin = time.perf_counter()
        self._processes.doing = Doing(step, action, begin)
        if message is None:
            self._senders[peer].send_nothing()
        else:
            form = self._senders[peer].send(key, *message)
            if action.kind is Kind.SEND_ACTIVATION:
                self._exchanged[step - action.age].forms[key.stage, key.microbatch] = form
        self._post()  # now that the other rank has its message
        if tapes is not None:
            self._tell(step, action, begin, on_action)

    def _receive(self, arc: Arc, step: int, tapes: _Tapes, on_action: OnAction) -> None:
        """Receive a message and put it on its tape."""
        action, key, peer, travel = arc
        begin = time.perf_counter()
        self._processes.doing = Doing(step, action, begin)
        if step - travel >= self._first:  # otherwise it would have been sent before the first call
            kind, k, m, q, _, age = action
            tensors, form = self._receivers[peer].take(key)
            if tapes is not None and kind is Kind.RECEIVE_ACTIVATION:
                self._exchanged[step - age].forms[k, m] = form
                tapes[k][m].inputs = with_names(self._wire.restore(tensors, form.specs), form.names)
            elif tapes is not None:
                outputs = self._exchanged[step - age].forms[k + 1, m].specs
                tapes[k][m].messages[cast(int, q)] = unpacked(self._wire.restore(tensors, form.specs), outputs)
        if tapes is not None:
            self._tell(step, action, begin, on_action)
