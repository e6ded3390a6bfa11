"""Graphs of autograd: walks back through them, and their nodes.

A stage walks its graph several times, in parts, and keeps cotangents between the walks. That gives the gradients of one
`backward` if the graph ends at the stage's own parameters and inputs, and its backward is linear (docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from nwise._torch import run_backward


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
    # Backward operations have the dtype of their forward and must not be cast again. On "meta" nothing is ever cast.
    device = seeds[0].device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            add_gradients(roots, seeds, leaves, retain_graph=retain_graph)
    else:
        run_backward(
            tuple(roots), tuple(seeds), retain_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
        )


def leaves_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of a graph, each after the nodes that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    return order


def nodes_of(outputs: Sequence[Tensor]) -> list[Node]:
    """Return all nodes of the graph that ends in these outputs."""
    return leaves_first([y.grad_fn for y in outputs if y.grad_fn is not None])


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to ``.grad``, which stays the same tensor where autograd would keep it."""
    old = parameter.grad
    if old is None:
        parameter.grad = gradient
    elif old.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + old  # torch adds a sparse tensor to a dense one only
    else:
        with torch.no_grad():
            old += gradient


def clones(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return copies of gradients, of which None stands for zero."""
    return tuple(None if g is None else g.clone() for g in gradients)


@contextmanager
def gradients_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let the body find no gradients, and put those from before it back.

    >>> x = torch.ones(1, requires_grad=True)
    >>> with gradients_aside([x]):
    ...     (2 * x).backward()
    >>> x.grad is None
    True
    """
    before = [(p, p.grad) for p in parameters]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in before:
            p.grad = gradient
