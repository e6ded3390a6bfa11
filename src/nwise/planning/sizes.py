"""Bytes of a network's piece: the memory that it keeps for its passes, and the peak of each of its actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from nwise.planning.allocation import allocated
from nwise.stage.graph import add_gradients
from nwise.stage.kept import keep
from nwise.tensors import Tensors, as_leaves, each, run_module


class PieceSizes:
    """Measures a piece of a network on inputs, of which those that carry a gradient require it; leaves no gradients."""

    def __init__(self, piece: nn.Module, inputs: Tensors, device: torch.device) -> None:
        self._piece = piece
        self._inputs = inputs
        self._device = device
        self._learns: list[Tensor] = [p for p in piece.parameters() if p.requires_grad]
        self._tracked = [x for x in inputs if x.requires_grad]
        self.outputs = self._forward()

    def measure(self) -> dict[str, float]:
        """Return the bytes of forward and passes, as `nwise.planning.partitions.Piece` names them."""
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
            "scratch_bytes": max(0, first.peak - first.kept),
            "cotangent_bytes": self._cotangents(),
            "gradient_bytes": sum(p.nbytes for p in self._learns),
            "peak_bytes": self._peak(),
        }
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

    def _peak(self) -> int:
        """Return the peak of the pass to the parameters, or of that to the input if there are none."""

        def ends() -> tuple[list[Tensor], list[Tensor]]:
            roots = [y for y in self._forward() if y.requires_grad]
            return roots, [torch.zeros_like(y) for y in roots]

        wrt = self._learns or self._tracked
        _clear(wrt)
        if not wrt or not any(y.requires_grad for y in self.outputs):
            return 0
        backward = partial(add_gradients, leaves=wrt, retain_graph=False)
        return allocated(lambda given: backward(*given), self._device, ends).peak


def head_sizes(
    head: nn.Module, outputs: Tensors, loss_fn: Callable[[Tensors], Tensor], device: torch.device
) -> dict[str, float]:
    """Return the bytes of a head behind a piece with these outputs, as `nwise.planning.partitions.Piece` names them."""
    learns: list[Tensor] = [p for p in head.parameters() if p.requires_grad]
    leaves = as_leaves(outputs, tracked=True)
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
