"""The runtime of many processes: each executes its own list, and messages cross boundaries through channels.

A rank waits only for messages: it begins its next mini-batch as soon as its own list is done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from nwise._dtensor import is_dtensor
from nwise.microbatch import Batch, Tensors
from nwise.runtime.channel import NOTHING, Key, MessagePlan, Receiver, Sender, Spec, make_spec, start_all
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import carrying, from_json, to_json
from nwise.runtime.watch import Doing, RankError, Watch
from nwise.runtime.worker import Workable, Worker, count_passes
from nwise.runtime.world import World
from nwise.schedule.actions import Action, Kind
from nwise.schedule.lists import Schedule
from nwise.stage import Cotangents

Specs = tuple[Spec, ...]
# A function from the shapes of a stage's inputs to the shapes of its outputs.
Shapes = Callable[[Specs], Specs]
# Called after each action of this rank with the step, the action, and its begin and end in seconds of `time.perf_counter`.
Recorder = Callable[[int, Action, float, float], None]
EndT = TypeVar("EndT", Sender, Receiver)

_MOST_SCRIPTS = 256  # every shape of a batch needs a script
_LEARNING = (Kind.HEAD, Kind.WEIGHT_GRAD, Kind.BOTH)


@dataclass(frozen=True, slots=True)
class Script:
    """The work of a rank in one mini-batch.

    Args:
        word: the rank's actions, in order.
        passes: number of backward passes by (stage, micro-batch).
        plans: plans of the rank's channels.
        inputs, outputs: shapes of the stage's inputs and outputs, per micro-batch.
        num_bytes: bytes that the rank sends as activations and as gradients.
        final: places of the last actions that add to gradients, one of the main part and one of the head.
    """

    word: tuple[Action, ...]
    passes: Counter[tuple[int, int]]
    plans: Plans
    inputs: tuple[Specs, ...]
    outputs: tuple[Specs, ...]
    num_bytes: tuple[int, int] = (0, 0)
    final: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of a rank's four channels."""

    activations_in: MessagePlan = NOTHING
    activations_out: MessagePlan = NOTHING
    gradients_in: MessagePlan = NOTHING
    gradients_out: MessagePlan = NOTHING


class Distributed:
    """Runs one rank's stage.

    Args:
        world: this process and its neighbours.
        watch: the watch, which the runtime tells its present action.
        stage: the rank's stage.
        shapes: function that returns the shapes of the stage's outputs.
        device: device of the stage's tensors.
        kept: function that returns the tensors that may change before a message has left: parameters and buffers.
        replicas: sums of gradients over the replicas of the stage; None without replicas.

    Attributes:
        device: device of the stage's tensors.
        recorder: None, or a function called with the begin and end of every action.
        bytes_of_last_step: bytes sent as activations and as gradients, measured and predicted.
    """

    def __init__(
        self,
        world: World,
        watch: Watch,
        stage: Workable,
        shapes: Shapes,
        device: torch.device,
        kept: Callable[[], Iterable[Tensor]] = tuple,
        replicas: Replicas | None = None,
    ) -> None:
        self.recorder: Recorder | None = None
        self.bytes_of_last_step: dict[str, list[int]] = {}
        self._world, self._watch, self._stage, self._shapes = world, watch, stage, shapes
        self.device = device
        self._replicas, self._kept = replicas, kept
        self._owned: set[int] = set()
        self._scripts: dict[Hashable, Script] = {}
        self._ends = world.ends(device)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes sent so far, as activations and as gradients."""
        forward, back = self._ends.activations_out, self._ends.gradients_out
        return forward.num_bytes if forward else 0, back.num_bytes if back else 0

    def run(
        self,
        schedule: Schedule,
        turn: int,
        batch: Batch,
        step: int,
        on_action: Callable[[Action], None] | None = None,
    ) -> Worker:
        """Run one mini-batch and fill every ``.grad`` of this rank.

        Args:
            schedule: the schedule of all stages.
            turn: index of the mini-batch in the cycle.
            batch: the data; only the first stage uses the values of `inputs`, the others their shapes.
            step: number of the mini-batch.
            on_action: function called after each action, or None.

        Returns:
            The worker with the stage's loss.

        Raises:
            RankError: this or another rank failed.
        """
        with self.watched():
            script = self._script(schedule, turn, batch.inputs)
            self._start(script.plans, turn, batch.inputs)
            before = self.num_bytes
            worker = Worker(self._stage, schedule.flows[turn], batch, script.passes)
            if self._ends.activations_in is None:
                worker.inputs.update(enumerate(batch.inputs))
            try:
                self._execute(script, worker, step, on_action)
            finally:
                self._stage.clear()
        sent = [now - then for now, then in zip(self.num_bytes, before, strict=True)]
        self.bytes_of_last_step = {"measured": sent, "predicted": list(script.num_bytes)}
        return worker

    def infer(self, inputs: Tensors, step: int, call: Callable[[Tensors], Tensors]) -> None:
        """Run a forward alone: receive, forward, send.

        Args:
            inputs: inputs of the first stage; the other stages use their shapes.
            step: number of the previous mini-batch.
            call: function from the inputs of this stage to its outputs.
        """
        with self.watched():
            self.start_forwards([inputs])
            hidden = self.receive(0, inputs, step)
            self.at(step, Kind.FORWARD, 0)
            self.send(0, tuple(y.detach() for y in call(hidden)))

    def start_forwards(self, inputs: Sequence[Tensors]) -> Script:
        """Begin a mini-batch of forwards alone, and return its script."""
        script = self._script(None, 0, inputs)
        self._start(script.plans, 0, inputs)
        return script

    def receive(self, microbatch: int, inputs: Tensors, step: int) -> Tensors:
        """Receive the input of this stage in a mini-batch of forwards; the first stage returns `inputs`."""
        self.at(step, Kind.RECEIVE_ACTIVATION, microbatch)
        source = self._ends.activations_in
        return inputs if source is None else source.take((microbatch, None, 0))

    def send(self, microbatch: int, outputs: Tensors) -> None:
        """Send the output of this stage in a mini-batch of forwards to the next stage, if there is one."""
        if self._ends.activations_out is not None:
            self._ends.activations_out.send((microbatch, None, 0), self._apart(outputs))
        self._post()

    def at(self, step: int, kind: Kind, microbatch: int, message: int | None = None) -> None:
        """Tell the watch the action that this rank begins."""
        self._watch.doing = Doing(step, Action(kind, self._world.stage, microbatch, message), time.perf_counter())

    def close(self) -> None:
        """Wait until the neighbours have all messages; all ranks call it after the last step."""
        with self.watched():
            self._start(Plans(), 0, ())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End all ranks if the body raises."""
        self._watch.check()
        try:
            yield
        except RankError:
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            self._watch.failed(error)
            raise
        except Exception as error:
            raise self._watch.failed(error) from error
        finally:
            self._watch.doing = None

    def _start(self, plans: Plans, turn: int, inputs: Sequence[Tensors]) -> None:
        """Begin a mini-batch on all channels."""
        ends = self._ends
        incoming = [(ends.activations_in, plans.activations_in), (ends.gradients_in, plans.gradients_in)]
        outgoing = [(ends.activations_out, plans.activations_out), (ends.gradients_out, plans.gradients_out)]
        start_all(outgoing, incoming, turn)
        if ends.activations_out is not None:
            # Memory that a message must not share: an optimizer changes parameters, and the caller may reuse a batch.
            tensors = [*self._kept(), *(x for microbatch in inputs for x in microbatch)]
            self._owned = {t.untyped_storage().data_ptr() for t in tensors if not is_dtensor(t)}

    def _post(self) -> None:
        """Post the next receives; this rank's own sends have been issued, so no neighbour is blocked on it."""
        for receiver in (self._ends.activations_in, self._ends.gradients_in):
            if receiver is not None:
                receiver.post()

    def _apart(self, tensors: Tensors) -> Tensors:
        """Copy tensors whose memory may change before they have left, and tensors of other types."""
        # Tensor parallelism returns tensors of a subclass, whose values may still be on their way.
        owned = self._owned
        plain = [type(t) is Tensor and t.untyped_storage().data_ptr() not in owned for t in tensors]
        return tensors if all(plain) else tuple(t if p else t.clone() for t, p in zip(tensors, plain, strict=True))

    def _execute(
        self,
        script: Script,
        worker: Worker,
        step: int,
        on_action: Callable[[Action], None] | None,
    ) -> None:
        """Execute this rank's list, action by action."""
        # The list alone decides the order. A receive blocks until its message is there, a computation puts its result into
        # `outbox`, and the send that follows in the list takes it from there:
        #
        #     RX(m)  previous stage -> worker.inputs[m]             F(m)    -> outbox -> SX(m)    next stage
        #     RG(m.q)    next stage -> worker.messages[m][q]        I(m.q)  -> outbox -> SG(m.q)  previous stage
        #
        # `watch.doing` is set before every action, so the other ranks learn where this one stalls.
        ends, watch, replicas = self._ends, self._watch, self._replicas
        outbox: dict[Key, Tensors] = {}
        if replicas is not None:
            replicas.start()
        for i, action in enumerate(script.word):
            kind, _, m, q, turn = action
            begin = time.perf_counter()
            watch.doing = Doing(step, action, begin)
            if kind is Kind.RECEIVE_ACTIVATION:
                worker.inputs[m] = _existing(ends.activations_in).take((m, None, turn))
            elif kind is Kind.RECEIVE_GRADIENT:
                assert q is not None
                message = _existing(ends.gradients_in).take((m, q, turn))
                worker.messages.setdefault(m, {})[q] = unpacked(message, script.outputs[m])
            elif kind is Kind.SEND_ACTIVATION:
                _existing(ends.activations_out).send((m, None, turn), outbox.pop((m, None, turn)))
                self._post()  # now that the neighbour has its message
            elif kind is Kind.SEND_GRADIENT:
                _existing(ends.gradients_out).send((m, q, turn), outbox.pop((m, q, turn)))
                self._post()
            elif kind is Kind.UPDATE:
                if replicas is not None:
                    replicas.finish()
            elif kind is not Kind.DROP:
                # The gradients are complete after the last action that adds to them, so their sums over replicas begin
                # during it, and overlap with what follows until the update.
                if replicas is not None and i in script.final:
                    with replicas.summing(head=kind is Kind.HEAD):
                        made = worker.run(action)
                else:
                    made = worker.run(action)
                if q is not None:
                    outbox[m, q, turn] = packed(made, script.inputs[m], self.device)
                elif kind is Kind.FORWARD and ends.activations_out is not None:
                    outbox[m, None, turn] = self._apart(cast(Tensors, made))
                elif kind is Kind.FORWARD:
                    self._post()  # the last stage sends nothing after a forward
            if self.recorder is not None:
                self.recorder(step, action, begin, time.perf_counter())
            if on_action is not None:
                watch.doing = Doing(step, action, time.perf_counter(), over=True)
                on_action(action)

    def _script(self, schedule: Schedule | None, turn: int, inputs: Sequence[Tensors]) -> Script:
        """Return the script of a mini-batch, made once per schedule, turn and shapes, on all ranks at the same step."""
        shapes = tuple(tuple(map(make_spec, microbatch)) for microbatch in inputs)
        device = inputs[0][0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = ("" if schedule is None else schedule.digest, turn, shapes, autocast)
        if key not in self._scripts:
            if len(self._scripts) == _MOST_SCRIPTS:  # on all ranks at the same step
                self._scripts.clear()
            self._scripts[key] = self._new_script(schedule, turn, shapes)
        return self._scripts[key]

    def _new_script(self, schedule: Schedule | None, turn: int, shapes: Sequence[Specs]) -> Script:
        """Make a script; every stage receives the shapes of its inputs from the stage before."""
        here: list[tuple[Specs, ...]] = []  # the stage's input shapes, then its output shapes
        lists_here = "" if schedule is None else schedule.digest

        def outputs(before: Any) -> Any:
            if before is not None and before["lists"] != lists_here:
                raise ValueError(
                    "Every rank should have the same schedule. Found other lists than on the rank before; were they made from "
                    "costs that each rank has measured separately?"
                )
            here.append(tuple(shapes) if before is None else tuple(map(from_json, before["shapes"])))
            made = {specs: self._shapes(specs) for specs in dict.fromkeys(here[0])}
            here.append(tuple(made[specs] for specs in here[0]))
            return {"lists": lists_here, "shapes": [to_json(specs) for specs in here[1]]}

        self._world.hand_on("shapes", outputs)
        k, size = self._world.stage, self._world.num_stages
        if schedule is None:
            keys = tuple((m, None, 0) for m in range(len(shapes)))
            plans = Plans(
                MessagePlan(keys, here[0]) if k else NOTHING, MessagePlan(keys, here[1]) if k < size - 1 else NOTHING
            )
            return Script((), Counter(), plans, here[0], here[1])
        lists = schedule.lists
        plans = Plans(
            _plan(lists[k - 1], Kind.SEND_ACTIVATION, here[0]) if k else NOTHING,
            _plan(lists[k], Kind.SEND_ACTIVATION, here[1]),
            _plan(lists[k + 1], Kind.SEND_GRADIENT, [carrying(s) for s in here[1]]) if k < size - 1 else NOTHING,
            _plan(lists[k], Kind.SEND_GRADIENT, [carrying(s) for s in here[0]]),
        )
        word = tuple(a for a in lists[k] if a.turn == turn)
        num_bytes = plans.activations_out.num_bytes(turn), plans.gradients_out.num_bytes(turn)
        # The last head action (key True) and the last W or B (key False): later places replace earlier ones.
        final = {a.kind is Kind.HEAD: i for i, a in enumerate(word) if a.kind in _LEARNING}
        return Script(word, count_passes(word), plans, here[0], here[1], num_bytes, frozenset(final.values()))


def _plan(sender: Sequence[Action], kind: Kind, specs: Sequence[Specs]) -> MessagePlan:
    """Return the plan of a channel, given the sender's list, the kind of its sends, and their shapes per micro-batch."""
    sent = [a for a in sender if a.kind is kind]
    return MessagePlan(tuple((a.microbatch, a.message, a.turn) for a in sent), tuple(specs[a.microbatch] for a in sent))


def _existing(end: EndT | None) -> EndT:
    """Return an end of a channel that must exist."""
    assert end is not None, "validated lists send and receive only over existing boundaries"
    return end


def packed(message: Cotangents, inputs: Specs, device: torch.device) -> Tensors:
    """Return the tensors to send back: a gradient for every input that can carry one, zeros where there is none."""
    carried = [(g, s) for g, s in zip(message, inputs, strict=True) if carrying((s,))]
    return tuple(g if g is not None else torch.zeros(s.shape, dtype=s.dtype, device=device) for g, s in carried)


def unpacked(tensors: Tensors, outputs: Specs) -> Cotangents:
    """Return the received gradient of each output, None for outputs that carry none."""
    parts = iter(tensors)
    return tuple(next(parts) if carrying((spec,)) else None for spec in outputs)
