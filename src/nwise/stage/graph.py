"""What a graph of autograd holds: its nodes, and the tensors at its ends.

A stage walks its graph several times, in parts, and keeps cotangents between the walks. That gives the gradients of one
`backward` if the graph ends at the stage's own parameters and inputs, if no operation overwrites a cotangent that a later walk
reads, and if the gradient of a zero cotangent is zero. Torch's own operations obey; a user's `torch.autograd.Function` may not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from nwise._torch import run_backward, versions


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


def check_leaves(nodes: Sequence[Node], known: Sequence[Tensor], named: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError if a graph ends at a tensor whose gradient a step would not compute.

    Args:
        nodes: nodes of the graph.
        known: the tensors whose gradients the step computes.
        named: parameters by name, for the message.
        what: owner of the graph, for the message.
    """
    wanted = set(known)
    for node in nodes:
        if hasattr(node, "variable") and node.variable not in wanted and _references(node) > _IN_GRAPH_ALONE:
            leaf = node.variable
            name = next((repr(name) for name, p in named.items() if p is leaf), f"a tensor of shape {list(leaf.shape)}")
            raise ValueError(
                f"{what} should depend only on parameters that it holds and uses by their names, and on its input. Found a use "
                f"of {name} in another way, such as by a closure or a list of parameters; register it (`nn.Parameter`, "
                "`nn.ParameterList`, a child module) and use the attribute, or detach it."
            )


def _references(node: Node) -> int:
    """Return how many references there are to the tensor at an end of the graph."""
    return sys.getrefcount(node.variable)  # type: ignore[attr-defined]


# Of a tensor that only its graph holds: it was made inside, to differentiate by it, and its gradient interests no one.
with torch.inference_mode(False), torch.enable_grad():  # nwise may be imported inside another context
    _IN_GRAPH_ALONE = max(
        _references(node) for node in nodes_of([torch.zeros(1, requires_grad=True) * 1]) if hasattr(node, "variable")
    )


@contextmanager
def leaving(gradients: Sequence[Tensor], tensors: Sequence[Tensor], error: str) -> Iterator[None]:
    """Raise ValueError with this message if the body changes what it should leave.

    Args:
        gradients: tensors whose ``.grad`` it should leave.
        tensors: tensors whose values it should leave.
        error: the message.

    >>> x = torch.ones(1, requires_grad=True)
    >>> with leaving([x], [], "The body should leave gradients to `step`."):
    ...     (2 * x).backward()
    Traceback (most recent call last):
    ...
    ValueError: The body should leave gradients to `step`.
    """
    before = [x.grad for x in gradients]
    held = [*before, *tensors]
    counters = versions(held)
    yield
    if any(x.grad is not old for x, old in zip(gradients, before, strict=True)) or versions(held) != counters:
        raise ValueError(error)
