"""A stage at work: a part of the main network with its head, and the passes that run on each micro-batch.

    F  forward, keeping the tensors that the passes need
    H  head: forward, loss, backward to the head's parameters and to the stage's own cotangent ``d``
    I  gradient of one message to the stage's input only
    W  gradient of the summed cotangent to the stage's parameters only; on stage 0 also to the model's input, if it asks for one
    B  I and W in one pass, if they share their cotangent

A stage knows nothing of its neighbours. The runtime puts inputs and messages on the tape of a micro-batch, names the next action,
and carries its result to the tape of a neighbour::

              inputs                      outputs of F
    stage k-1 ------>    tape of stage k  ------> stage k+1
              <------                     <------
        message of I or B                messages
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nwise.auxiliary import PRESENT
from nwise.looks import looks_at
from nwise.losses import explain
from nwise.microbatch import Batch, full_like, may_count
from nwise.schedule.actions import PASSES, Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.graph import add_gradients
from nwise.stage.guard import Graph, Guard
from nwise.stage.kept import keep
from nwise.stage.rerun import FirstRun
from nwise.stage.tape import Cotangents, Tape
from nwise.stage.versions import InMemory, Recomputed, Stashed, Versions
from nwise.tensors import (
    Tensors,
    anew,
    as_argument,
    as_leaves,
    asks,
    call,
    each,
    refuse_attributes,
    run_module,
    run_unchanged,
)

__all__ = ["LossFn", "Stage"]

LossFn = Callable[..., Tensor]

# Made once: a step enters and calls them many times.
_NOTHING_ELSE, _UNWATCHED = nullcontext(), nullcontext[tuple[Sequence[Tensor], Sequence[Tensor]]](((), ()))
_gradient = attrgetter("grad")


class Stage:
    """One stage and its head.

    Args:
        index: index of the stage, from 0.
        module: the part of the main network.
        head: the auxiliary network; None for the last stage, whose output goes to the loss.
        loss_fn: ``loss_fn(head_output, target)``, the mean over the micro-batch.
        recompute: whether to keep only the input of F while the stage's rank works on anything else, and run F once more before
            the next pass (activation checkpointing).
        always: whether to check at every call what the user's modules do; default: at calls 1, 2, 4, 8, ...
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        head: nn.Module | None,
        loss_fn: LossFn,
        recompute: bool,
        always: bool = False,
    ) -> None:
        self.index, self._name, self._output = index, f"stage {index}", f"The output of stage {index}"
        self.module = module
        self.head = head
        self.loss_fn = loss_fn
        self.recompute = recompute
        self.learns: list[Tensor] = []
        self.head_learns: list[Tensor] = []
        self._guard = Guard(f"Stage {index}", always)
        self._head_guard = Guard(f"The head or loss of stage {index}", always)
        self._kind: type = type(None)  # of the versions of parameters in the last forward
        self._aliases = False  # whether a message back has shared memory with a cotangent that a later pass reads
        self._compared: set[object] = set()  # shapes with which the forward has been run again and compared
        self._reruns = 0  # forwards that were to run again, of which those of number 1, 2, 4, 8, ... are compared

    def survey(self, module: nn.Module, head: nn.Module | None) -> list[nn.Module]:
        """Take over the modules and look up their trainable parameters, which the caller may change between two steps.

        The result is all modules of the stage and its head, so callers need not walk through them again.
        """
        changed = module is not self.module or head is not self.head
        self.module, self.head = module, head
        self._guard.owners = [module]
        self._head_guard.owners = [one for one in (head, self.loss_fn) if isinstance(one, nn.Module)]
        before, self.learns, self.head_learns = len(self.learns), _trainable(module), _trainable(head)
        if changed or len(self.learns) != before:
            self._guard.graphs = self._head_guard.graphs = 0
        return [*module.modules(), *(() if head is None else head.modules())]

    def tapes(self, schedule: Schedule, minibatch: int, batch: Batch) -> list[Tape]:
        """Return an empty tape for every micro-batch of a mini-batch.

        Args:
            schedule: the schedule.
            minibatch: index of the mini-batch in the schedule's cycle.
            batch: the mini-batch.
        """
        k = self.index
        versions: Versions | None = None
        if k in schedule.late_stages:  # passes come after updates
            late = Stashed if schedule.ages.stashes else Recomputed if self.recompute else InMemory
            versions = late(self.module, self._name)
        passes, flows = schedule.passes[minibatch], schedule.flows[minibatch]
        return [Tape(f.stages[k], batch, m, passes[k, m], versions and copy(versions)) for m, f in enumerate(flows)]

    def run(self, action: Action, tape: Tape, *, continued: bool = True) -> Tensors | Cotangents:
        """Run a computation; return the outputs of F and the message of I or B. What H and W return is not used.

        Args:
            action: the action.
            tape: its micro-batch.
            continued: whether the stage's next pass on this micro-batch follows before any other work of the rank
                (`Schedule.continued`). Default: True.
        """
        made: Tensors | Cotangents = ()
        try:
            if action.kind is Kind.FORWARD:
                made = self._forward(tape, continued)
            elif action.kind is Kind.HEAD:
                self._run_head(tape)
            elif action.kind in PASSES:
                made = self._backward(tape, action.kind, action.message, continued)
            else:
                raise ValueError(f"A stage should run F, H, I, W or B. Found {action}.")
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note(
                    f"nwise: {self._name} may keep a tensor with its graph, such as a hidden state; detach it"
                )
            elif "selective activation checkpoint" in str(error):
                error.add_note(
                    f"nwise: {self._name} is walked several times; use an order and strategy with one pass, such as 'end-to-end' "
                    "with 'gpipe', or `recompute=True` instead"
                )
            raise
        finally:
            PRESENT.microbatch = None
        if not tape.passes_left and not tape.head_left:
            tape.release()
        return made

    def _forward(self, tape: Tape, continued: bool) -> Tensors:
        """Run F; return the outputs, detached."""
        if tape.passes_left and self.recompute:
            tape.first = FirstRun(self.module, self._name)
        if self.index in tape.batch.watched:
            tape.batch.entering[self.index, tape.microbatch] = each(tape.inputs, torch.Tensor.detach)
        # The gradient to the model's input goes back to the user's graph.
        tape.inputs = as_leaves(tape.inputs, tracked=bool(tape.flow.messages)) if self.index else anew(tape.inputs)
        outputs = self._outputs(tape, tracked=tape.passes_left > 0 and (continued or not self.recompute))
        tape.head_left = tape.flow.head
        if tape.graph is not None or tape.head_left:
            tape.outputs = outputs
        detached = each(outputs, torch.Tensor.detach)
        if tape.first is not None:
            self._reruns += 1
            if self._guard.always or looks_at(self._reruns) or _shapes(tape.inputs) not in self._compared:
                tape.first.keep(detached)
        return detached

    def _rerun(self, tape: Tape) -> Graph:
        """Run F once more, for its graph."""
        assert tape.first is not None
        # New leaves, because hooks that the first run put on its inputs are put on again.
        tape.inputs = anew(tape.inputs)
        with tape.first.again():
            tape.outputs = self._outputs(tape, tracked=True)
        tape.first.compare(tape.outputs)
        self._compared.add(_shapes(tape.inputs))
        assert tape.graph is not None
        return tape.graph

    def _outputs(self, tape: Tape, *, tracked: bool) -> Tensors:
        """Run the module, with a graph if `tracked`."""
        guard, versions = self._guard, tape.versions
        if type(versions) is not self._kind:  # what a graph may end at has changed
            self._kind, guard.graphs = type(versions), 0
        learns = self.learns if versions is None else versions.learns
        graph = tape.graph = Graph(guard, learns, tape.inputs, tape.batch.looked) if tracked else None
        checked = graph is not None and graph.checked
        weights = _NOTHING_ELSE if versions is None else versions.computing(checked=checked)
        part, device = ("stage", self.index, tape.microbatch), tape.inputs[0].device
        function = partial(run_module, self.module, what=self._output)
        arguments = part, device, run_unchanged, function, tape.inputs, guard.owner
        if graph is None:
            with weights, torch.no_grad():
                return tape.batch.draws.run(*arguments)
        PRESENT.microbatch = graph  # for `nwise.inject`
        with weights, graph.watching([*learns, *tape.inputs]) if checked else _UNWATCHED as seen:
            outputs = tape.batch.draws.run(*arguments)
        if checked:
            refuse_attributes(outputs, self._output)
        if checked or RemovableHandle.next_id != graph.expected:
            graph.look(outputs, self.module, *seen)
        guard.graphs += 1  # a graph that was refused is looked through again
        return outputs

    def _run_head(self, tape: Tape) -> None:
        """Run H: fill the ``.grad`` of the head's parameters, and report the micro-batch's mean loss."""
        batch, m, flow, guard = tape.batch, tape.microbatch, tape.flow, self._head_guard
        target, weight = batch.targets[m], batch.weights[m][self.index]
        part, device = ("head", self.index, m), tape.outputs[0].device
        leaves = as_leaves(tape.outputs, tracked=flow.own)
        graph = PRESENT.microbatch = Graph(guard, self.head_learns, leaves, batch.looked)
        with graph.watching(leaves) if graph.checked else _UNWATCHED as seen:
            loss = batch.draws.run(part, device, run_unchanged, self._loss, leaves, guard.owner, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            result = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"`loss_fn` of stage {self.index} should return one number, the mean over the micro-batch. Found {result}."
            )
        wrt = [*self.head_learns, *filter(asks, leaves)]
        counts = may_count(weight)
        if counts and flow.own and not loss.requires_grad:
            raise ValueError(
                f"The loss of stage {self.index} should depend on the stage's output, because the strategy trains stages "
                "with it. Found a loss without gradient; make the output floating-point and the head differentiable."
            )
        if wrt and loss.requires_grad and counts:
            seeds, graph.share = [full_like(loss, weight)], batch.samples[m]
            if graph.checked or RemovableHandle.next_id != graph.expected:
                graph.look([loss], self.head, *seen)
            guard.graphs += 1
            if guard.foreign or guard.adds:
                graph.prepare()
            if graph.suspect or graph.hooked:
                graph.walk([loss], seeds, wrt, retain_graph=False, alone=True)
            else:
                add_gradients([loss], seeds, wrt, retain_graph=False)
        elif not counts:  # zeros, so its auxiliary losses count; the gradient of a mean over no terms would be nan
            for leaf in filter(asks, leaves):
                leaf.grad = torch.zeros_like(leaf)
        gradients = tuple(map(_gradient, leaves))
        tape.own = _clones(gradients) if guard.foreign else gradients
        tape.head_left = False
        if tape.graph is None:
            tape.outputs = ()
        value = loss.detach()
        if not counts or isinstance(weight, Tensor):  # the mean over no terms is nan
            value = torch.where(torch.as_tensor(weight, device=loss.device) > 0, value, 0)
        batch.losses[self.index, m] = value.reshape(()) if value.dim() else value

    def _loss(self, leaves: Tensors, target: Tensors | None) -> object:
        """Return what the loss returns for the outputs of a forward."""
        try:
            output = call(self.head, leaves) if self.head is not None else as_argument(leaves)
            return self.loss_fn(output, None if target is None else as_argument(target))
        except (TypeError, AttributeError, ValueError, RuntimeError, IndexError) as error:
            explain(error, f"stage {self.index}", leaves, target)
            raise

    def _backward(self, tape: Tape, kind: Kind, message: int | None, continued: bool) -> Cotangents:
        """Run I, W or B; return the gradient to each input, for a W only on stage 0. The last pass frees the graph."""
        # With `recompute` the graph is also freed when the rank turns to other work, and another forward makes it again.
        graph = tape.graph or self._rerun(tape)
        tape.passes_left -= 1
        again, versions = tape.passes_left > 0, tape.versions
        checks: AbstractContextManager[None] = _NOTHING_ELSE
        if graph.checked:
            checks = graph.without_updates(self.learns, () if tape.first is None else tape.first.lent)
        PRESENT.microbatch = graph
        with _NOTHING_ELSE if versions is None else versions.passing(), checks:
            self._walk_back(tape, graph, kind, message, again)
        gradients = self._take(tape, graph, again) if kind is not Kind.WEIGHT_GRAD or self.index == 0 else ()
        if versions is not None and kind is not Kind.INPUT_GRAD:
            versions.move_gradients()
        if again and tape.first is not None and not continued and tape.kept is None:
            tape.outputs = each(tape.outputs, torch.Tensor.detach) if tape.head_left else ()
            tape.graph = None
        return gradients

    def _walk_back(self, tape: Tape, graph: Graph, kind: Kind, message: int | None, again: bool) -> None:
        """Walk a graph back for I, W or B; `again` says whether another pass will follow."""
        # A pass walks from the outputs to the tensors in `wanted`, and autograd skips everything else:
        #
        #     inputs <----------- layers <----------- outputs <----- own * d + sum of weight * message
        #       I: no weight        W: ends at the first
        #       gradients           layer with parameters
        guard, cotangent = self._guard, tape.flow.cotangent(message)
        graph.share = cotangent.total * tape.batch.samples[tape.microbatch]
        if kind is Kind.WEIGHT_GRAD and tape.kept is not None:
            kept, tape.kept = tape.kept, None
            kept.replay(partial(add_gradients, retain_graph=again or graph.hooked))
            if graph.moved:  # a hook on the way to parameters alone
                roots = list(filter(asks, tape.outputs))
                graph.refuse_hooks(roots, roots)
            return
        outputs, seeds = tape.start(cotangent, apart=guard.writes)
        if not outputs:
            return
        if guard.foreign or guard.adds:
            graph.prepare()
        parameters = self.learns if tape.versions is None else tape.versions.learns  # that the graph ends at
        leaves = list(filter(asks, tape.inputs)) if kind is not Kind.WEIGHT_GRAD or self.index == 0 else []
        # An I and a later W that start from one cotangent share the walk.
        if kind is Kind.INPUT_GRAD and tape.flow.fused == message and not graph.suspect:
            with keep(outputs, seeds, leaves, parameters, apart=guard.writes) as tape.kept:
                if leaves:
                    # Without kept cotangents, W will read these once more.
                    safe = seeds if tape.kept is not None else [g.clone() for g in seeds]
                    add_gradients(outputs, safe, leaves, retain_graph=True)
            if graph.hooked:
                graph.refuse_hooks(outputs, seeds)
        elif wanted := leaves if kind is Kind.INPUT_GRAD else parameters + leaves:
            if graph.suspect or graph.hooked:
                alone = not again and not tape.walked
                graph.walk(outputs, seeds, wanted, retain_graph=again, alone=alone)
            else:
                add_gradients(outputs, seeds, wanted, retain_graph=again)
            tape.walked = True

    def _take(self, tape: Tape, graph: Graph, again: bool) -> Cotangents:
        """Take the gradients to the inputs from the leaves, which outlive the pass and would add the next message to them."""
        gradients = tuple(map(_gradient, tape.inputs))
        for x in tape.inputs:
            x.grad = None
        if self._guard.foreign:
            gradients = _clones(gradients)
        if self.index == 0:
            tape.batch.input_gradients[tape.microbatch] = gradients
        elif again and (graph.checked or self._aliases):
            apart = tape.apart(gradients)
            self._aliases |= any(a is not b for a, b in zip(apart, gradients, strict=True))
            return apart
        return gradients


def learning(stages: Iterable[Stage]) -> list[Tensor]:
    """Return the trainable parameters of stages and their heads."""
    return [p for stage in stages for p in stage.learns + stage.head_learns]


def _trainable(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else list(filter(asks, module.parameters()))


def _clones(gradients: Cotangents) -> Cotangents:
    """Return gradients that no function of the user's writes over, as one does that returns a part of a workspace."""
    return tuple(g if g is None else g.clone() for g in gradients)


def _shapes(tensors: Tensors) -> tuple[torch.Size | None, ...]:
    return tuple(None if x.is_nested else x.shape for x in tensors)
