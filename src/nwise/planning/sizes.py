"""Bytes of a network's piece: the memory that it keeps for its passes, and the peak of each of its actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nwise.graph import add_gradients
from nwise.kept import keep
from nwise.planning.allocation import allocated
from nwise.tensors import Tensors, as_leaves, each, run_module


class PieceSizes:
    """Measures a piece of a network for a micro-batch; leaves no gradients.

    Args:
        piece: the piece.
        inputs: its inputs; those that carry a gradient require it.
        device: device of both.
    """

    def __init__(self, piece: nn.Module, inputs: Tensors, device: torch.device) -> None:
        self._piece, self._inputs, self._device = piece, inputs, device
        self._learns: list[Tensor] = [p for p in piece.parameters() if p.requires_grad]
        self._tracked = [x for x in inputs if x.requires_grad]
        self.outputs = self._forward()

    def measure(self) -> dict[str, float]:
        """Return the bytes of forward and passes, as `nwise.schedule.partitions.Piece` names them."""
        first = allocated(lambda _: self._forward(), self._device)
        graph = allocated(lambda _: [y.grad_fn for y in self._forward()], self._device)
        passing = allocated(lambda _: [y.grad_fn for y in self._forward(passing=True)], self._device)
        # A piece may pass on an input, such as a mask, or a parameter.
        given = {x.untyped_storage() for x in (*self._inputs, *self._piece.parameters())}
        made = sum(y.nbytes for y in first.result if y.untyped_storage() not in given)
        sizes = {
            "activation_bytes": max(0, first.kept - made),
            "held_bytes": max(0, graph.kept - first.kept + made),
            "released_bytes": max(0, sum(x.nbytes for x in self._tracked) - passing.kept + graph.kept),
            "cotangent_bytes": self._cotangents(),
            "forward_peak_bytes": first.peak,
            "input_grad_peak_bytes": self._pass(self._tracked, again=True),  # another pass follows an I
            "gradient_bytes": sum(p.nbytes for p in self._learns),
        }
        for name, wrt in (("weight_grad", self._learns), ("both", self._learns + self._tracked)):
            for where, inside in (("", False), ("inner_", True)):
                sizes[f"{where}{name}_peak_bytes"] = self._pass(wrt, inside=inside)
        later = self._pass(self._learns + self._tracked, later=True)
        sizes["fresh_gradient_bytes"] = max(0, sizes["both_peak_bytes"] - later)
        _clear([*self._tracked, *self._learns])
        return {name: float(size) for name, size in sizes.items()}

    def _forward(self, *, passing: bool = False) -> Tensors:
        """Run the piece; `passing`: on inputs that nothing else holds, as inside a stage."""
        inputs = each(self._inputs, lambda x: x.clone() if passing and x.requires_grad else x)
        return run_module(self._piece, inputs, "The output of a piece")

    def _cotangents(self) -> int:
        """Return the bytes of the cotangents that an I keeps for a later W."""
        outputs = [y for y in self._forward() if y.requires_grad]
        cotangents = [torch.zeros_like(y) for y in outputs]
        if not self._tracked or not outputs:
            return 0
        with keep(outputs, cotangents, self._tracked, self._learns) as kept:
            add_gradients(outputs, cotangents, self._tracked, retain_graph=True)
        return 0 if kept is None else kept.num_bytes

    def _pass(self, wrt: list[Tensor], *, inside: bool = False, again: bool = False, later: bool = False) -> int:
        """Return the peak of a pass.

        Args:
            wrt: tensors whose gradients it makes.
            inside: whether the piece is inside a stage. Then nothing else holds its output, and the peak includes the gradient to
                the output, which the piece frees as soon as it can.
            again: whether another pass follows, so the graph stays.
            later: whether the parameters have gradients of an earlier micro-batch, to which the new ones are added.
        """

        def ends() -> tuple[list[Tensor] | list[GradientEdge], list[Tensor]]:
            roots = [y * 1.0 if inside else y for y in self._forward() if y.requires_grad]
            return list(map(get_gradient_edge, roots)) if inside else roots, [torch.zeros_like(y) for y in roots]

        _clear([*self._tracked, *self._learns])
        for p in self._learns if later else ():
            p.grad = torch.zeros_like(p)
        if not wrt or not any(y.requires_grad for y in self.outputs):
            return 0
        backward = partial(add_gradients, leaves=wrt, retain_graph=again)
        return allocated(lambda given: backward(*given), self._device, ends).peak


def head_sizes(
    head: nn.Module, inputs: Tensors, loss_fn: Callable[[Tensors], Tensor], device: torch.device
) -> dict[str, float]:
    """Return the bytes of a head, as `nwise.schedule.partitions.Piece` names them.

    Args:
        head: the head.
        inputs: output of the piece before it.
        loss_fn: function from the head's output to its loss.
        device: device of all.
    """
    learns: list[Tensor] = [p for p in head.parameters() if p.requires_grad]
    leaves = as_leaves(inputs, tracked=True)
    wrt = [*learns, *(y for y in leaves if y.requires_grad)]

    def whole(_: None) -> None:
        loss = loss_fn(run_module(head, leaves, "The output of a head"))
        add_gradients([loss], [torch.ones_like(loss)], wrt, retain_graph=False)

    peak = allocated(whole, device).peak
    _clear(wrt)
    return {"head_peak_bytes": float(peak), "head_gradient_bytes": float(sum(p.nbytes for p in learns))}


def _clear(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None
