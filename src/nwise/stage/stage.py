"""A stage at work: a part of the main network with its head, and the passes that run on each micro-batch.

    F  forward, keeping the tensors that the passes need
    R  forward again, for a graph that was let go
    H  head: forward, loss, backward to the head's parameters and to the stage's own cotangent ``d``
    I  gradient of one message to the stage's input only
    W  gradient of the summed cotangent to the stage's parameters only
    B  I and W in one pass, if they share their cotangent

A stage knows nothing of its neighbours. The runtime names the next action on the tape of a micro-batch, brings what it reads, and
carries its result to a neighbour::

              inputs                      outputs of F
    stage k-1 ------>    tape of stage k  ------> stage k+1
              <------                     <------
        message of I or B                messages
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from nwise.auxiliary import PRESENT
from nwise.losses import explain
from nwise.microbatch import Batch, full_like
from nwise.schedule.actions import Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.stage.graph import add_gradients
from nwise.stage.kept import keep
from nwise.stage.rerun import FirstRun
from nwise.stage.tape import Cotangents, Messages, Tape
from nwise.stage.weights import Copies, InMemory, Weights
from nwise.tensors import Tensors, anew, as_argument, as_leaves, asks, each, invoke, run_module, run_unchanged

__all__ = ["LossFn", "Stage"]

LossFn = Callable[..., Tensor]

_gradient = attrgetter("grad")
_detach = Tensor.detach
_ADVICE = {  # by a part of torch's error
    "backward through the graph a second time": "may keep a tensor with its graph, such as a hidden state; detach it",
    "modified by an inplace operation": "may write to a buffer that its graph holds; compute with a clone of it",
    "selective activation checkpoint": "is walked several times; use an order and strategy with one pass, such as "
    "'end-to-end' with 'gpipe', or `recompute=True` instead",
}


class Stage:
    """One stage and its head.

    Args:
        index: index of the stage, from 0.
        module: the part of the main network.
        head: the auxiliary network; None for the last stage, whose output goes to the loss.
        loss_fn: ``loss_fn(head_output, target)``, the mean over the micro-batch.
    """

    def __init__(self, index: int, module: nn.Module, head: nn.Module | None, loss_fn: LossFn) -> None:
        self.index = index
        self._name = f"Stage {index}"
        self._output = f"The output of stage {index}"
        self._head_name = f"The head or loss of stage {index}"
        self.module = module
        self.head = head
        self.loss_fn = loss_fn
        self.learns: list[Tensor] = []
        self.head_learns: list[Tensor] = []
        self._present = Weights(())
        self._home: torch.device | None = None
        self._scripted = False  # whether a part of the module is TorchScript

    def survey(self, module: nn.Module, head: nn.Module | None) -> list[nn.Module]:
        """Take over the modules and look up their trainable parameters, which the caller may change between two steps.

        The result is all modules of the stage and its head, so callers need not walk through them again.
        """
        self.module = module
        self.head = head
        self.learns = _trainable(module)
        self._present = Weights(self.learns)
        self._home = next((x.device for x in (*module.parameters(), *module.buffers())), None)
        self.head_learns = _trainable(head)
        self._scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
        return [*module.modules(), *(() if head is None else head.modules())]

    def tapes(self, schedule: Schedule, minibatch: int, batch: Batch) -> dict[int, Tape]:
        """Return an empty tape for every micro-batch of a mini-batch, by index.

        Args:
            schedule: the schedule.
            minibatch: index of the mini-batch in the schedule's cycle.
            batch: the mini-batch.

        Raises:
            ValueError: the stage is TorchScript, which cannot run again or with other weights.
        """
        k = self.index
        late = self.index in schedule.late_stages
        copies = late and schedule.ages.stashes
        if self._scripted and (copies or schedule.recomputed):
            raise ValueError(
                f"{self._name} should not be TorchScript when it runs with replaced parameters or buffers, as under a delay or "
                "with `recompute`. Found a scripted module; pass the original module."
            )
        weights = self._present
        if late:
            weights = (Copies if copies else InMemory)(self.learns, self.module, self._name)
        passes = schedule.passes[minibatch]
        flows = schedule.flows[minibatch]
        again = schedule.recomputed
        return {
            m: Tape(flow.stages[k], batch, m, passes[k, m], weights, (k, m, minibatch) in again)
            for m, flow in enumerate(flows)
        }

    def run(self, action: Action, tape: Tape, given: Mapping[Any, Any], *, frees: bool = False) -> Tensors | Cotangents:
        """Run a computation; return the outputs of F and the message of I or B. What H and W return is not used.

        The last pass of a micro-batch frees its graph.

        Args:
            action: the action.
            tape: its micro-batch.
            given: the inputs of F, under None; the gradients from the next stage that a pass reads, by message.
            frees: whether the graph goes after it, because an R makes it again (`Schedule.frees`). Default: False.
        """
        try:
            if action.kind is Kind.FORWARD:
                return self._forward(tape, given[None], frees)
            if action.kind in (Kind.HEAD, Kind.RECOMPUTE):
                run = self._run_head if action.kind is Kind.HEAD else self._rerun
                run(tape)
                return ()
            tape.passes_left -= 1
            again = tape.passes_left > 0
            self._walk_back(tape, action.kind, action.message, given, again)
            gradients = tuple(map(_gradient, tape.inputs))
            for x in tape.inputs:  # which outlive the pass, and would add the next message
                x.grad = None
            if tape.weights.copied and action.kind is not Kind.INPUT_GRAD:
                tape.weights.hand_over()
            if again:
                gradients = tape.clone_if_aliased(gradients, given)
                if frees:
                    tape.outputs = each(tape.outputs, _detach) if tape.head_left else ()
                    tape.tracked = False
            return gradients
        except Exception as error:
            if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
                error.add_note(
                    f"nwise: in the forward of stage {self.index}, given {[list(x.shape) for x in tape.inputs]}"
                )
            if known := next((advice for sign, advice in _ADVICE.items() if sign in str(error)), None):
                error.add_note(f"nwise: {self._name} {known}")
            raise
        finally:
            PRESENT.share = 1.0

    def _forward(self, tape: Tape, inputs: Tensors, frees: bool) -> Tensors:
        """Run F; return the outputs, detached."""
        if tape.recomputed:
            tape.first = FirstRun(self.module)
        tape.inputs = as_leaves(inputs, tracked=bool(tape.flow.messages))
        tape.tracked = tape.passes_left > 0 and not frees
        outputs = self._outputs(tape)
        tape.head_left = tape.flow.head
        if tape.tracked or tape.head_left:
            tape.outputs = outputs
        return tuple(map(_detach, outputs)) if type(outputs) is tuple else each(outputs, _detach)

    def _rerun(self, tape: Tape) -> None:
        """Run R: the forward once more, for its graph."""
        assert tape.first is not None
        tape.tracked = True
        # New leaves, because hooks that the first run put on its inputs are put on again.
        tape.inputs = anew(tape.inputs)
        with tape.first.again():
            tape.outputs = self._outputs(tape)

    def _outputs(self, tape: Tape) -> Tensors:
        """Run the module, with a graph if the tape is tracked."""
        device = self._home or tape.inputs[0].device  # an input may be elsewhere, such as lengths on the CPU
        function = partial(run_module, self.module, what=self._output)
        with tape.weights.computing, torch.set_grad_enabled(tape.tracked):
            part = "stage", self.index, tape.microbatch
            return tape.batch.draws.run(part, device, run_unchanged, function, tape.inputs, self._name)

    def _run_head(self, tape: Tape) -> None:
        """Run H: fill the ``.grad`` of the head's parameters, and report the micro-batch's mean loss."""
        batch = tape.batch
        m = tape.microbatch
        flow = tape.flow
        target = batch.targets[m]
        weight = batch.weights[m][self.index]
        part = ("head", self.index, m)
        device = self._home or tape.outputs[0].device
        leaves = as_leaves(tape.outputs, tracked=flow.own)
        loss = batch.draws.run(part, device, run_unchanged, self.loss, leaves, self._head_name, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            result = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"`loss_fn` of stage {self.index} should return one number, the mean over the micro-batch. Found {result}."
            )
        counts = isinstance(weight, Tensor) or weight != 0  # whether a term of the target counts, as far as is known
        if counts and flow.own and not loss.requires_grad:
            raise ValueError(
                f"The loss of stage {self.index} should depend on the stage's output, because the strategy trains stages "
                "with it. Found a loss without gradient; make the output floating-point and the head differentiable."
            )
        wanted = [*self.head_learns, *filter(asks, leaves)]
        if wanted and loss.requires_grad and counts:
            PRESENT.share = batch.samples[m]
            seed = full_like(loss, weight) if isinstance(weight, Tensor) else torch.full_like(loss, weight)
            add_gradients([loss], [seed], wanted, retain_graph=False)
        elif not counts:  # zeros, so its auxiliary losses count; the gradient of a mean over no terms would be nan
            for leaf in filter(asks, leaves):
                leaf.grad = torch.zeros_like(leaf)
        tape.own = tuple(map(_gradient, leaves))
        tape.head_left = False
        if not tape.tracked:
            tape.outputs = ()
        value = loss.detach()
        if not counts or isinstance(weight, Tensor):  # the mean over no terms is nan
            value = torch.where(torch.as_tensor(weight, device=loss.device) > 0, value, 0)
        batch.losses[self.index, m] = value.reshape(()) if value.dim() else value

    def loss(self, leaves: Tensors, target: Tensors | None) -> object:
        """Return what the head's loss returns for the outputs of a forward."""
        try:
            output = invoke(self.head, leaves) if self.head is not None else as_argument(leaves)
            return self.loss_fn(output, None if target is None else as_argument(target))
        except (TypeError, AttributeError, ValueError, RuntimeError, IndexError) as error:
            explain(error, f"stage {self.index}", leaves, target)
            raise

    def _walk_back(self, tape: Tape, kind: Kind, message: int | None, given: Messages, again: bool) -> None:
        """Walk a graph back for I, W or B; `again` says whether another pass will follow."""
        # A pass walks from the outputs to the tensors in `wanted`, and autograd skips everything else:
        #
        #     inputs <----------- layers <----------- outputs <----- own * d + sum of weight * message
        #       I: no weight        W: ends at the first
        #       gradients           layer with parameters
        cotangent = tape.flow.weights if message is None else tape.flow.messages[message]
        assert cotangent is not None, "the flow has this pass"
        PRESENT.share = cotangent.total * tape.batch.samples[tape.microbatch]
        if kind is Kind.WEIGHT_GRAD and tape.kept is not None:
            kept = tape.kept
            tape.kept = None
            kept.replay(partial(add_gradients, retain_graph=again))
            return
        outputs, seeds = tape.start(cotangent, given)
        if not outputs:
            return
        learns = list(filter(asks, tape.weights.learns))  # some may be frozen by now
        leaves = list(filter(asks, tape.inputs)) if kind is not Kind.WEIGHT_GRAD else []
        # An I and a later W that start from one cotangent share the walk.
        if kind is Kind.INPUT_GRAD and tape.flow.fused == message:
            with keep(outputs, seeds, leaves, learns) as tape.kept:
                if leaves:
                    # Without kept cotangents, W will read these once more.
                    safe = seeds if tape.kept is not None else [g.clone() for g in seeds]
                    add_gradients(outputs, safe, leaves, retain_graph=True)
        elif wanted := leaves if kind is Kind.INPUT_GRAD else learns + leaves:
            add_gradients(outputs, seeds, wanted, retain_graph=again)


def learning(stages: Iterable[Stage]) -> list[Tensor]:
    """Return the trainable parameters of stages and their heads."""
    return [p for stage in stages for p in stage.learns + stage.head_learns]


def _trainable(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else list(filter(asks, module.parameters()))
