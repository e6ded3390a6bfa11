"""A stage at work: a part of the main network with its head, and the passes that run on each micro-batch.

    F  forward, keeping the tensors that the passes need
    H  head: forward, loss, backward to the head's parameters and to the stage's own cotangent ``d``
    I  gradient of one message to the stage's input only
    W  gradient of the summed cotangent to the stage's parameters only
    B  I and W in one pass, if they share their cotangent

A stage knows nothing of its neighbours. The runtime puts inputs and messages on the tape of a micro-batch, names the next action,
and carries its result to the tape of a neighbour::

              inputs                      outputs of F
    stage k-1 ------>    tape of stage k  ------> stage k+1
              <------                     <------
        message of I or B                messages
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward

from nwise._modes import Modes, in_modes, modes_in
from nwise.flow import StageFlow
from nwise.kept import Kept, keep
from nwise.losses import explain
from nwise.microbatch import Batch
from nwise.randomness import derive, seed_all
from nwise.schedule.actions import Action, Kind
from nwise.schedule.schedule import Schedule
from nwise.tensors import Tensors, as_argument, as_leaves, call, each, run_unchanged, unchanged
from nwise.versions import check_names_used, copy_parameters, holding, move_gradients

LossFn = Callable[..., Tensor]
# One gradient per output of a stage; None stands for zero.
Cotangents = tuple[Tensor | None, ...]


_NOTHING_ELSE = nullcontext()  # made once: a step enters it many times


@dataclass(slots=True)
class Tape:
    """One micro-batch at one stage, from the arrival of its inputs to its last pass.

    Args:
        flow: the stage's work for the micro-batch.
        batch: the mini-batch.
        microbatch: index of the micro-batch.
        passes_left: number of backward passes that will follow; the last one frees the graph.
        versions: copies of the parameters to use instead of the current ones, by name, if those may change before the last pass.
        inputs: outputs of the previous stage, or the model's input; from the forward on, leaves of the graph.
        messages: gradients from the next stage, by index. They stay until the last pass, because several passes may use one.
        outputs: outputs of the forward.
        buffers: buffers as the forward saw them, with `recompute`; otherwise None.
        modes: training or evaluation mode of every module in the forward, if a pass may run parts of it in a later call.
        has_graph: whether `outputs` have their graph.
        head_left: whether the head is still to run.
        own: gradient of the stage's own loss to its outputs.
        kept: cotangents that an I has kept for a later W.
    """

    flow: StageFlow
    batch: Batch
    microbatch: int
    passes_left: int
    versions: Mapping[str, Tensor] | None = None
    inputs: Tensors = ()
    messages: dict[int, Cotangents] = field(default_factory=dict)
    outputs: Tensors = ()
    buffers: Mapping[str, Tensor] | None = None
    modes: Modes | None = None
    has_graph: bool = False
    head_left: bool = False
    own: Cotangents = ()
    kept: Kept | None = None

    def release(self) -> None:
        """Drop the tensors of the micro-batch once no action needs them."""
        if not self.passes_left and not self.head_left:
            self.inputs = self.outputs = self.own = ()
            self.messages, self.buffers, self.modes, self.kept, self.versions = {}, None, None, None, None


class Stage:
    """One stage and its head.

    Args:
        index: index of the stage, from 0.
        module: the part of the main network.
        head: the auxiliary network; None for the last stage, whose output goes to the loss.
        loss_fn: ``loss_fn(head_output, target)``, the mean over the micro-batch.
        recompute: whether to keep only the input of F while the stage's rank works on anything else, and run F once more before
            the next pass (activation checkpointing).
    """

    def __init__(self, index: int, module: nn.Module, head: nn.Module | None, loss_fn: LossFn, recompute: bool) -> None:
        self.index, self._name = index, f"stage {index}"
        self.module = module
        self.head = head
        self.loss_fn = loss_fn
        self.recompute = recompute
        self.learns: list[Tensor] = []
        self.head_learns: list[Tensor] = []
        self._checked: set[Tensor] = set()  # parameters that the module is known to use only by name

    def survey(self, module: nn.Module, head: nn.Module | None) -> list[nn.Module]:
        """Take over the modules and look up their trainable parameters, which the caller may change between two steps.

        The result is all modules of the stage and its head, so callers need not walk through them again.
        """
        self.module, self.head = module, head
        main, self.learns = _walk(module)
        side, self.head_learns = _walk(head)
        return main + side

    def tapes(self, schedule: Schedule, turn: int, batch: Batch) -> list[Tape]:
        """Return an empty tape for every micro-batch of a mini-batch.

        Args:
            schedule: the schedule.
            turn: index of the mini-batch in the schedule's cycle.
            batch: the mini-batch.
        """
        k, flows = self.index, [flow.stages[self.index] for flow in schedule.flows[turn]]
        # Passes that come after an update need the parameters of the forward.
        versions = copy_parameters(self.module) if k in schedule.late_stages else None
        return [Tape(flow, batch, m, schedule.passes[turn][k, m], versions) for m, flow in enumerate(flows)]

    def run(self, action: Action, tape: Tape, *, continued: bool = True) -> Tensors | Cotangents:
        """Run a computation; return the outputs of F, the message of I or B, and nothing for H and W.

        Args:
            action: the action.
            tape: its micro-batch.
            continued: whether the stage's next pass on this micro-batch follows before any other work of the rank
                (`Schedule.continued`). Default: True.
        """
        made: Tensors | Cotangents = ()
        if action.kind is Kind.FORWARD:
            made = self._forward(tape, continued)
        elif action.kind is Kind.HEAD:
            self._run_head(tape)
        else:
            with _NOTHING_ELSE if tape.modes is None else in_modes(tape.modes):
                made = self._backward(tape, action.kind, action.message, continued)
        tape.release()
        return made

    def _forward(self, tape: Tape, continued: bool) -> Tensors:
        """Run F; return the outputs, detached."""
        tape.has_graph = tape.passes_left > 0 and (continued or not self.recompute)
        if tape.passes_left and self.recompute:
            tape.buffers = _copies(self.module.named_buffers())
        if tape.versions is not None:
            tape.modes = modes_in(self.module)
        tape.inputs = as_leaves(tape.inputs, tracked=bool(tape.flow.messages))
        outputs = self._outputs(tape, tape.versions)
        tape.head_left = tape.flow.head
        if tape.has_graph or tape.head_left:
            tape.outputs = outputs
        return each(outputs, torch.Tensor.detach)

    def _rerun(self, tape: Tape) -> None:
        """Run F once more, for its graph."""
        # It must see the same buffers as the first time, and must not update the real ones again. Copies stay for a third time.
        assert tape.buffers is not None
        tape.has_graph = True
        tape.outputs = self._outputs(tape, {**(tape.versions or {}), **_copies(tape.buffers.items())})

    def _outputs(self, tape: Tape, replaced: Mapping[str, Tensor] | None) -> Tensors:
        """Run the module, with these parameters and buffers instead of its own, and with a graph if the tape has one."""
        self._draw("stage", tape, tape.inputs)
        held = holding(self.module, replaced, self._name) if replaced else _NOTHING_ELSE
        with held, _NOTHING_ELSE if tape.has_graph else torch.no_grad():
            outputs = run_unchanged(self.module, tape.inputs, self._name)
        # A graph must not use a present parameter instead of its old version; look once for each set of them.
        if tape.versions is not None and tape.has_graph and self._checked != set(self.learns):
            check_names_used(outputs, self.learns, self.module, self._name)
            self._checked = set(self.learns)
        return outputs

    def _draw(self, what: str, tape: Tape, inputs: Tensors) -> None:
        """Seed the random numbers of the stage or its head; `Pipeline.step` restores them once for all stages."""
        # Micro-batches are numbered over all replicas, so each draws the same numbers however the mini-batch is shared out.
        seed_all(derive(tape.batch.seed, what, self.index, tape.batch.first + tape.microbatch), inputs[0].device)

    def _run_head(self, tape: Tape) -> None:
        """Run H: fill the ``.grad`` of the head's parameters, and report the micro-batch's mean loss."""
        batch, m, flow = tape.batch, tape.microbatch, tape.flow
        target, weight = batch.targets[m], batch.weights[m][self.index]
        self._draw("head", tape, tape.outputs)
        leaves = as_leaves(tape.outputs, tracked=flow.own)
        with unchanged(leaves, f"The head or loss of stage {self.index}"):
            try:
                output = call(self.head, leaves) if self.head is not None else as_argument(leaves)
                loss = self.loss_fn(output, None if target is None else as_argument(target))
            except (TypeError, AttributeError, ValueError, RuntimeError, IndexError) as error:
                explain(error, f"stage {self.index}", leaves, target)
                raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            result = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"`loss_fn` of stage {self.index} should return one number, the mean over the micro-batch. Found {result}."
            )
        wrt = self.head_learns + [leaf for leaf in leaves if leaf.requires_grad]
        if weight and flow.own and not loss.requires_grad:
            raise ValueError(
                f"The loss of stage {self.index} should depend on the stage's output, because the strategy trains stages "
                "with it. Found a loss without gradient; make the output floating-point and the head differentiable."
            )
        if wrt and loss.requires_grad and weight:
            add_gradients([loss], [torch.full_like(loss, weight)], wrt, retain_graph=False)
        tape.own = tuple(leaf.grad for leaf in leaves)
        tape.head_left = False
        if not tape.has_graph:
            tape.outputs = ()
        value = (loss if weight else torch.zeros_like(loss)).detach()
        batch.losses[self.index, m] = value.reshape(()) if value.dim() else value

    def _backward(self, tape: Tape, kind: Kind, message: int | None, continued: bool) -> Cotangents:
        """Run I, W or B; return the gradient to each input, nothing for W. The last pass frees the graph."""
        # A pass walks the kept graph back from the outputs to the tensors in `wrt`, and autograd skips everything else:
        #
        #     inputs <----------- layers <----------- outputs <----- own * d + sum of weight * message
        #       I: no weight        W: ends at the first
        #       gradients           layer with parameters
        #
        # The graph can be walked again until the last pass, which frees it. With `recompute` it is also freed when the rank turns
        # to other work, and another forward makes it again.
        if not tape.has_graph:
            self._rerun(tape)
        tape.passes_left -= 1
        again = tape.passes_left > 0
        inputs, weights = kind is not Kind.WEIGHT_GRAD, kind is not Kind.INPUT_GRAD
        # A pass may run parts of the module again, as `torch.utils.checkpoint` does, and they must find the old versions.
        with _NOTHING_ELSE if tape.versions is None else holding(self.module, tape.versions, self._name):
            if kind is Kind.WEIGHT_GRAD and tape.kept is not None:
                tape.kept.replay(partial(add_gradients, retain_graph=again))
                tape.kept = None
            else:
                # An I and a later W that start from one cotangent share the walk.
                keeps = kind is Kind.INPUT_GRAD and tape.flow.fused == message
                learns = self._leaves(tape) if weights or keeps else []
                leaves = [x for x in tape.inputs if inputs and x.requires_grad]
                seeds = _mix(tape, message)
                pairs = [(y, g) for y, g in zip(tape.outputs, seeds, strict=True) if g is not None and y.requires_grad]
                outputs, cotangents = [y for y, _ in pairs], [g for _, g in pairs]
                if pairs and keeps:
                    with keep(outputs, cotangents, leaves, learns) as tape.kept:
                        if leaves:
                            add_gradients(outputs, cotangents, leaves, retain_graph=True)
                elif pairs and (learns or leaves):
                    add_gradients(outputs, cotangents, learns + leaves, retain_graph=again)
        gradients = tuple(x.grad for x in tape.inputs) if inputs else ()
        # The leaves outlive this pass: without a reset, the next message would be added to this one.
        if inputs:
            for x in tape.inputs:
                x.grad = None
        if weights and tape.versions is not None:
            move_gradients(tape.versions, self.module, self._name)
        if again and tape.buffers is not None and not continued and tape.kept is None:
            tape.outputs = each(tape.outputs, torch.Tensor.detach) if tape.head_left else ()
            tape.has_graph = False
        return gradients

    def _leaves(self, tape: Tape) -> list[Tensor]:
        """Return the parameters that the micro-batch was computed with."""
        if tape.versions is None:
            return self.learns
        return [version for version in tape.versions.values() if version.requires_grad]


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}


def add_gradients(
    roots: Sequence[Tensor] | Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    retain_graph: bool,
) -> None:
    """Add the gradient to every leaf's ``.grad``.

    Args:
        roots: outputs or edges of the graph.
        seeds: gradient of each root.
        leaves: leaves of the graph, at least one.
        retain_graph: whether another pass through the graph will follow.

    >>> x = torch.ones(2, requires_grad=True)
    >>> add_gradients([3 * x], [torch.ones(2)], [x], retain_graph=False)
    >>> x.grad
    tensor([3., 3.])
    """
    # `torch.autograd.backward` checks its arguments for 15 microseconds, as long as a small layer takes, and a step of A stages
    # makes about 3 A calls. Backward operations have the dtype of their forward and must not be cast again.
    device = seeds[0].device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING_ELSE:
        _engine_run_backward(
            tuple(roots), tuple(seeds), retain_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
        )


def _walk(root: nn.Module | None) -> tuple[list[nn.Module], list[Tensor]]:
    """Return a module and all modules inside it, in the order of `nn.Module.modules`, and their trainable parameters."""
    # One plain loop: torch's two generators take four times as long, and every step walks through all modules.
    modules: dict[nn.Module, None] = {}
    trainable: dict[Tensor, None] = {}
    stack = [] if root is None else [root]
    while stack:
        module = stack.pop()
        if module in modules:
            continue
        modules[module] = None
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                trainable[parameter] = None
        if module._modules:
            stack += [child for child in reversed(module._modules.values()) if child is not None]
    return list(modules), list(trainable)


def _mix(tape: Tape, message: int | None) -> Cotangents:
    """Return ``own * d + sum_p received[p] * u_p`` for every output: the start of a message's pass, or of W."""
    cotangent = tape.flow.cotangent(message)
    sources = [(cotangent.own, tape.own)] if cotangent.own else []
    sources += [(weight, tape.messages[p]) for p, weight in enumerate(cotangent.received) if weight]
    return tuple(
        _sum([(weight, part) for weight, source in sources if (part := source[i]) is not None])
        for i in range(len(sources[0][1]))
    )


def _sum(parts: list[tuple[float, Tensor]]) -> Tensor | None:
    if not parts:
        return None
    (weight, total), *rest = parts
    if weight != 1:
        total = total * weight
    for weight, part in rest:
        total = torch.add(total, part, alpha=weight)
    return total
