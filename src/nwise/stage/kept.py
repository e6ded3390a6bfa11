"""Kept cotangents: an input-gradient pass that leaves the weight gradients for later, without a second walk.

Plain autograd can compute the gradient to the inputs alone and the gradient to the weights alone, but both passes walk the chain
of layers. While I walks, `keep` keeps the cotangent of every layer with weights, and W starts from those::

    I    output --> layer 3 --> layer 2 --> layer 1 --> input
                       |           |           |
                     keep        keep        keep
    W                  +-> w3      +-> w2      +-> w1

So I and W together cost as much as one pass for both gradients (B). The price is memory: a cotangent for every such layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from nwise._torch import has_custom
from nwise.stage.graph import clones, leaves_first

__all__ = ["Kept", "Part", "keep"]

Gradients = tuple[Tensor | None, ...]


class Part(NamedTuple):
    """A backward walk from a node to its parameters that remains to be done.

    Args:
        node: the node at which it begins.
        gradients: cotangents of the node's outputs; a custom function's backward may return none, which stands for zeros.
        learns: the parameters beyond the node.
        arrived: whether the cotangents have passed the tensor hooks of these outputs.
    """

    node: Node
    gradients: Gradients
    learns: list[Tensor]
    arrived: bool


class Kept:
    """The cotangents that a pass has kept.

    Args:
        apart: whether a custom backward may write over them.

    Attributes:
        parts: the walks that remain to be done.
    """

    def __init__(self, apart: bool) -> None:
        self.parts: list[Part] = []
        self._apart = apart

    def replay(self, walk: Callable[[list[GradientEdge], list[Tensor], list[Tensor]], object]) -> None:
        """Call ``walk(edges, cotangents, learns)`` for every part."""
        for part in self.parts:
            present = [(GradientEdge(part.node, i), g) for i, g in enumerate(part.gradients) if g is not None]
            # A tensor's hooks run again, but what they return must not count twice.
            with part.node.register_prehook(partial(_instead, part.gradients)) if part.arrived else nullcontext():
                walk([edge for edge, _ in present], [g.clone() if self._apart else g for _, g in present], part.learns)

    @property
    def num_bytes(self) -> int:
        """Size of the cotangents, in bytes."""
        every = (g for part in self.parts for g in part.gradients if g is not None)
        tensors = {(g.untyped_storage(), g.storage_offset()): g for g in every}
        return sum(g.nbytes for g in tensors.values())


@contextmanager
def keep(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    learns: Sequence[Tensor],
) -> Iterator[Kept | None]:
    """Keep the cotangents that the weight gradients need, while the body computes the input gradients.

    Args:
        outputs: outputs of the graph.
        cotangents: gradient of each output.
        inputs: leaves of the graph to compute the gradients of now.
        learns: leaves of the graph to compute the gradients of later.

    Yields:
        The kept cotangents, complete after the body; None if they cannot be told apart because layers share a parameter. The
        gradients to the weights then need a walk through the whole graph.

    >>> import torch
    >>> first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    >>> x, one = torch.ones(1, 2, requires_grad=True), torch.ones(1, 1)
    >>> y = second(first(x))
    >>> with keep([y], [one], [x], [first.weight, second.weight]) as kept:
    ...     y.backward(one, inputs=[x], retain_graph=True)
    >>> x.grad is None, first.weight.grad is None
    (False, True)
    >>> kept.replay(lambda edges, gradients, learns: torch.autograd.backward(edges, gradients, inputs=learns))
    >>> first.weight.grad.shape
    torch.Size([2, 2])
    """
    edges = [get_gradient_edge(y) for y in outputs]
    nodes = leaves_first([edge.node for edge in edges])
    exits, ends = _exits(nodes, [edge.node for edge in edges], inputs, learns)
    if exits is None:
        yield None
        return
    gradients: dict[Node, Gradients] = {}
    # Custom backwards may write their result over the cotangent that they get, as fused kernels do.
    apart = has_custom(nodes)

    def arrive(node: Node, cotangents: Gradients) -> None:
        gradients[node] = clones(cotangents)

    # A prehook gets the cotangent that arrives at its node, already summed over all ways from the outputs.
    put: Callable[[Node, Gradients], None] = arrive if apart else gradients.__setitem__
    handles = [node.register_prehook(partial(put, node)) for node in exits]
    kept = Kept(apart)
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
    for node, part in exits.items():
        if any(g is not None for g in gradients.get(node, ())):
            kept.parts.append(Part(node, gradients[node], part, arrived=True))
    # An output that no input reaches was not walked at all.
    for edge, cotangent in zip(edges, cotangents, strict=True):
        if edge.node in ends:
            alone = (*(None,) * edge.output_nr, cotangent)
            kept.parts.append(Part(edge.node, alone, ends[edge.node], arrived=False))


def _instead(gradients: Gradients, _: Gradients) -> Gradients:
    return gradients


def _exits(
    nodes: Sequence[Node], roots: Sequence[Node], inputs: Sequence[Tensor], learns: Sequence[Tensor]
) -> tuple[dict[Node, list[Tensor]] | None, dict[Node, list[Tensor]]]:
    """Find the nodes on the way to the inputs, of those given leaves first, at which ways to parameters branch off.

    Returns:
        The parameters beyond each of these nodes, or None if one is beyond several; and the parameters of every root from which
        no input can be reached.
    """
    # Two layers, from the output to the leaves. Both products are exits: one path continues to x, another ends at a parameter.
    #
    #     output --> product 2 --> relu --> product 1 --> x
    #                    `--> w2                `--> w1
    #
    # The gradient of w2 depends only on the cotangent that arrives at product 2. A pass from there to w2 alone is short. But if
    # w1 were w2, that pass would continue to product 1, and W would count product 1 twice. So shared parameters have
    # no exits.
    wanted = set(learns)
    goals = set(inputs)
    reaches: dict[Node, bool] = {}  # whether a path continues to an input
    beyond: dict[Node, dict[Tensor, None]] = {}  # the parameters that a node without such a way leads to
    exits: dict[Node, dict[Tensor, None]] = {}
    for node in nodes:
        children = [child for child, _ in node.next_functions if child is not None]
        leaf = getattr(node, "variable", None)
        reaches[node] = leaf in goals or any(reaches[child] for child in children)
        branches = {p: None for child in children if not reaches[child] for p in beyond[child]}
        if leaf in wanted:
            branches[leaf] = None
        if not reaches[node]:
            beyond[node] = branches
        elif branches:
            exits[node] = branches
    ends = {root: beyond[root] for root in roots if not reaches[root] and beyond[root]}
    counts = Counter(p for part in (*exits.values(), *ends.values()) for p in part)
    alone = max(counts.values(), default=1) == 1 and len(ends) == sum(root in ends for root in roots)
    ways = {node: list(part) for node, part in exits.items()} if alone else None
    return ways, {root: list(part) for root, part in ends.items()}
