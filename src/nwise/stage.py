"""A stage: a part of the main network with its head, and the passes that run on them.

    F  forward, keeping what the passes need
    H  head: forward, loss, backward to the head's parameters and to the stage's own cotangent ``d``
    I  gradient of one message to the stage's input only
    W  gradient of the summed cotangent to the stage's parameters only
    B  I and W in one pass, if they share their cotangent

A stage knows nothing of other stages or mini-batches: it takes and returns tensors, and leaves a tape of each micro-batch to its
caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nwise._autograd import add_gradients
from nwise.flow import Cotangent, StageFlow
from nwise.kept import Kept, gradient_to_inputs
from nwise.tensors import Tensors, as_argument, as_leaves, call, each, names, run_unchanged, unchanged

LossFn = Callable[..., Tensor]
# One gradient per output of a stage; None stands for zero.
Cotangents = tuple[Tensor | None, ...]


@dataclass(slots=True)
class Tape:
    """The tensors of one micro-batch that are kept until its last pass.

    Args:
        inputs: leaves of the graph.
        outputs: outputs of the forward.
        passes_left: number of calls of `Stage.backward` that will follow.
        versions: parameters that the forward used instead of the current ones, by name.
        seed: seed of the forward, for running it once more.
        buffers: buffers as the forward saw them, with `recompute`; otherwise None.
        has_graph: whether `outputs` have their graph.
        head_left: whether the head is still to run.
        own: gradient of the stage's own loss to its outputs.
        kept: cotangents that an I has kept for a later W.
    """

    inputs: Tensors
    outputs: Tensors
    passes_left: int
    versions: Mapping[str, Tensor] | None
    seed: int
    buffers: Mapping[str, Tensor] | None
    has_graph: bool
    head_left: bool
    own: Cotangents = ()
    kept: Kept | None = None


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

    def survey(self, module: nn.Module, head: nn.Module | None) -> list[nn.Module]:
        """Take over the modules and look up their trainable parameters, which the caller may change between two steps.

        The result is all modules of the stage and its head, so callers need not walk through them again.
        """
        self.module, self.head = module, head
        main = _modules(self.module)
        side = [] if self.head is None else _modules(self.head)
        self.learns, self.head_learns = _trainable(main), _trainable(side)
        return main + side

    def copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters by name, for passes that come after the next update."""
        return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in self.module.named_parameters()}

    def forward(
        self,
        inputs: Tensors,
        flow: StageFlow,
        passes: int,
        seed: int,
        versions: Mapping[str, Tensor] | None = None,
        continued: bool = True,
    ) -> tuple[Tape, Tensors]:
        """Run F and return a tape, and the outputs, detached.

        Args:
            inputs: the outputs of the previous stage, or the model's input.
            flow: this stage's work for the micro-batch.
            passes: number of calls of `backward` that will follow; the last one frees the graph.
            seed: seed of every random number drawn here.
            versions: copies of the parameters to use instead of the current ones, by name, if those may change before the last
                pass.
            continued: whether a pass follows before any other work of this rank (`Schedule.continued`). Default: True.
        """
        has_graph = passes > 0 and (continued or not self.recompute)
        buffers = _copies(self.module.named_buffers()) if passes and self.recompute else None
        function = self._function(versions)
        _draw_from(seed, inputs[0].device)
        leaves = as_leaves(inputs, tracked=bool(flow.messages))
        with nullcontext() if has_graph else torch.no_grad():
            outputs = run_unchanged(function, leaves, self._name)
        kept = outputs if has_graph or flow.head else ()
        tape = Tape(leaves, kept, passes, versions, seed, buffers, has_graph, flow.head)
        return tape, each(outputs, torch.Tensor.detach)

    def _rerun(self, tape: Tape) -> None:
        """Run F once more, for its graph."""
        # It must see the same buffers as the first time, and must not update the real ones again. Copies stay for a third time.
        assert tape.buffers is not None
        function = self._function({**(tape.versions or {}), **_copies(tape.buffers.items())})
        _draw_from(tape.seed, tape.inputs[0].device)
        tape.outputs, tape.has_graph = run_unchanged(function, tape.inputs, self._name), True

    def _function(self, replaced: Mapping[str, Tensor] | None) -> Callable[..., Any]:
        """Return the module, or a function that uses these parameters and buffers instead of its own."""
        if not replaced:
            return self.module
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.module.modules()):
            raise ValueError(
                f"Stage {self.index} should not be TorchScript when it runs with replaced parameters or buffers, as under "
                "a delay or with `recompute`. Found a scripted module; pass the original module."
            )
        tensors = dict(replaced)
        return lambda *inputs, **named: functional_call(self.module, tensors, inputs, named)

    def run_head(self, tape: Tape, target: Tensors | None, flow: StageFlow, weight: float, seed: int) -> Tensor:
        """Run H: fill the ``.grad`` of the head's parameters, and return the micro-batch's mean loss, detached.

        `weight` is the share of this micro-batch in the mini-batch.
        """
        _draw_from(seed, tape.outputs[0].device)
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
        if flow.own and not loss.requires_grad:
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
        return loss.detach().reshape(()) if weight else torch.zeros_like(loss.detach()).reshape(())

    def backward(
        self,
        tape: Tape,
        cotangent: Cotangent,
        received: Sequence[Cotangents],
        *,
        inputs: bool,
        weights: bool,
        shared: bool = False,
        continued: bool = True,
    ) -> Cotangents:
        """Run I (``inputs``), W (``weights``) or B (both).

        Args:
            tape: the micro-batch's tensors.
            cotangent: weights of the own cotangent and of the messages.
            received: the messages from the next stage; a message of weight 0 may be anything.
            inputs: whether to return the gradient to the inputs.
            weights: whether to add the gradient to the parameters to their ``.grad``.
            shared: whether an I and a later W have this cotangent in common. The I then keeps the cotangent of every layer
                (`nwise.kept`), and the W starts from those. Default: False.
            continued: whether the next pass follows before any other work of this rank. Default: True.

        Returns:
            The gradient to each input with ``inputs``, else an empty tuple. The last pass frees the graph.
        """
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
        keeps = shared and inputs and not weights
        if weights and tape.kept is not None:
            tape.kept.finish(retain_graph=again)
            tape.kept = None
        else:
            seeds = _mix(cotangent, tape.own, received)
            pairs = [(y, g) for y, g in zip(tape.outputs, seeds, strict=True) if g is not None and y.requires_grad]
            learns = self._leaves(tape) if weights or keeps else []
            leaves = [x for x in tape.inputs if inputs and x.requires_grad]
            if pairs and keeps:
                tape.kept = gradient_to_inputs(pairs, leaves, learns)
            elif pairs and (leaves or learns):
                outputs, gradients = zip(*pairs, strict=True)
                add_gradients(outputs, gradients, learns + leaves, retain_graph=again)
        gradients = tuple(x.grad for x in tape.inputs) if inputs else ()
        # The leaves outlive this pass: without a reset, the next message would be added to this one.
        if inputs:
            for x in tape.inputs:
                x.grad = None
        if weights and tape.versions is not None:
            self._move_gradients(tape.versions)
        if again and tape.buffers is not None and not continued and tape.kept is None:
            tape.outputs = each(tape.outputs, torch.Tensor.detach) if tape.head_left else ()
            tape.has_graph = False
        return gradients

    def _leaves(self, tape: Tape) -> list[Tensor]:
        """Return the parameters that the micro-batch was computed with."""
        if tape.versions is None:
            return self.learns
        return [version for version in tape.versions.values() if version.requires_grad]

    def _move_gradients(self, versions: Mapping[str, Tensor]) -> None:
        """Move gradients from the old versions to the current parameters, where they are stale."""
        for name, parameter in self.module.named_parameters():
            old = versions[name]
            if old.grad is not None and parameter.requires_grad:
                parameter.grad = old.grad if parameter.grad is None else parameter.grad + old.grad
                old.grad = None


def _copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors}


def _draw_from(seed: int, device: torch.device) -> None:
    """Seed the global generators; `Pipeline.step` puts them back at its end, once for all stages."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def explain(error: Exception, where: str, inputs: Tensors, target: Tensors | None) -> None:
    """Add to an error of a head or loss the place that it comes from; raise TypeError if a target is missing."""
    if target is None and isinstance(error, TypeError | AttributeError):
        raise TypeError(
            f"The loss of {where} should receive a target by name, `pipe.step(x, target=y)`. Found none: {error}"
        ) from error
    if names(inputs) and isinstance(error, TypeError):
        known = ", ".join(names(inputs))
        error.add_note(f"nwise: it gets {known} by name; `nwise.heads.OnFirstOutput` takes the hidden state alone")
    if (
        target is not None
        and inputs[0].dim() == 3
        and target[0].dim() == 2
        and isinstance(error, RuntimeError | ValueError)
    ):
        error.add_note("nwise: `nwise.losses.TokenCrossEntropy()` is the loss of logits for every token")
    given, wanted = ([list(x.shape) for x in part or ()] for part in (inputs, target))
    error.add_note(f"nwise: in the head or loss of {where}, given {given}, with a target of {wanted}")


def _modules(root: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside it, in the order of `nn.Module.modules`, which takes three times as long."""
    seen: dict[nn.Module, None] = {}
    stack = [root]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen[module] = None
            if module._modules:
                stack += [child for child in reversed(module._modules.values()) if child is not None]
    return list(seen)


def _trainable(modules: Sequence[nn.Module]) -> list[Tensor]:
    parameters = (p for module in modules for p in module._parameters.values() if p is not None and p.requires_grad)
    return list(dict.fromkeys(parameters))


def _mix(cotangent: Cotangent, own: Cotangents, received: Sequence[Cotangents]) -> Cotangents:
    """Return ``own * d + sum_p received[p] * u_p`` for every output."""
    sources = [(cotangent.own, own)] if cotangent.own else []
    sources += [(weight, received[p]) for p, weight in enumerate(cotangent.received) if weight]
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
