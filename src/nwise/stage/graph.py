"""What a graph of autograd holds: its nodes, the tensors at its ends, and gradients that it adds of its own.

A stage walks its graph several times, in parts, and keeps cotangents between the walks. That gives the gradients of one
`backward` if the graph ends at the stage's own parameters and inputs, if no operation overwrites a cotangent that a later walk
reads, and if the gradient of a zero cotangent is zero. Torch's own operations obey; a user's `torch.autograd.Function` may not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from nwise._torch import run_backward, versions
from nwise.dtensor import is_dtensor
from nwise.randomness import seeded


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
def _leaving(leaves: Sequence[Tensor], others: Sequence[Tensor], error: str) -> Iterator[None]:
    """Raise ValueError with this message if the body adds to the gradients of leaves, or changes other tensors."""
    before = [x.grad for x in leaves]
    held = [*before, *others]
    counters = versions(held)
    yield
    if any(x.grad is not old for x, old in zip(leaves, before, strict=True)) or versions(held) != counters:
        raise ValueError(error)


def without_backward(leaves: Sequence[Tensor], what: str) -> AbstractContextManager[None]:
    """Raise ValueError if the body calls `backward`, whose gradients would count with another weight than the step's.

    Args:
        leaves: the tensors whose gradients the step computes.
        what: owner of the body, for the message.

    >>> x = torch.ones(1, requires_grad=True)
    >>> with without_backward([x], "Stage 0"):
    ...     (2 * x).backward()
    Traceback (most recent call last):
    ...
    ValueError: Stage 0 should leave gradients to `step`. Found a call of `backward` in its forward; ...
    """
    return _leaving(
        leaves,
        (),
        f"{what} should leave gradients to `step`. Found a call of `backward` in its forward; add the loss by `nwise.inject`, or "
        "to the loss that `loss_fn` returns.",
    )


@contextmanager
def without_updates(parameters: Sequence[Tensor], copies: Sequence[Tensor], what: str) -> Iterator[None]:
    """Raise ValueError if the body, a walk through a graph, changes what it should leave.

    Args:
        parameters: parameters; the next micro-batch would find other ones.
        copies: buffers and tensors that a second forward had instead of the module's own, which would not change.
        what: owner of the graph.
    """
    before, lent = versions(parameters), versions(copies)
    yield
    if lent != versions(copies):
        raise ValueError(
            f"{what.capitalize()} should keep no state in its backward with `recompute`, whose second forward has copies of the "
            "buffers and tensors. Found a buffer or tensor that its backward changes, as the scaling of float8 does; set "
            "`recompute=False`."
        )
    if before != versions(parameters):
        raise ValueError(
            f"{what.capitalize()} should leave updates to the time after `step`. Found parameters that its backward changes; "
            "update by an optimizer, or in `register_post_accumulate_grad_hook`, which runs once a step."
        )


def without_side_gradients(leaves: Sequence[Tensor], what: str) -> AbstractContextManager[None]:
    """Raise ValueError if the body, one of several walks through a graph, adds to gradients that it should leave.

    Args:
        leaves: parameters whose ``.grad``, and whose attributes such as ``main_grad``, the walk should leave.
        what: owner of the graph.
    """
    return _leaving(
        leaves,
        [value for x in leaves for value in vars(x).values() if isinstance(value, Tensor)],
        f"{what} should return its gradients to autograd, because this strategy walks its graph more than once. Found a backward "
        "that adds them itself, to `.grad` or to an attribute such as `main_grad`, as reversible blocks and fused accumulation "
        "do; pass the parameters to the `torch.autograd.Function` and return their gradients, or use an order and strategy with "
        "one pass, such as 'end-to-end' with 'gpipe'.",
    )


def surplus(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], wanted: Sequence[Tensor], what: str, *, again: bool
) -> list[Tensor | None]:
    """Return the gradients that a graph adds even if the cotangent of every root is zero, None where it adds nothing.

    A `torch.autograd.Function` that injects the gradient of an auxiliary loss adds one, and so may the hook of a hidden tensor.
    The graph stays.

    Args:
        roots: outputs of the graph.
        seeds: gradient of each root in a walk that has been made.
        wanted: leaves of the graph.
        what: owner of the graph.
        again: whether it will be walked again.

    Raises:
        ValueError: another walk fails, or would give other gradients.

    >>> x = torch.ones(1, requires_grad=True)
    >>> surplus([2 * x], [torch.ones(1)], [x], "Stage 0", again=False)
    [None]
    """

    # A function may return a part of a workspace, which its next call writes over.
    before = [x.grad if x.grad is None or isinstance(x, nn.Parameter) else x.grad.clone() for x in wanted]

    def walk(seeds: Sequence[Tensor]) -> list[Tensor | None]:
        # Not `torch.autograd.grad`, in which hooks on several leaves, as of `FlopCounterMode`, fail.
        for x in wanted:
            x.grad = None
        try:
            # A user's function may divide by the norm of a cotangent, and may draw random numbers, such as for rounding.
            with torch.autograd.set_detect_anomaly(False), seeded(0, seeds[0].device):
                add_gradients(roots, [seed.clone() for seed in seeds], wanted, retain_graph=True)
            return [x.grad for x in wanted]
        except Exception as error:
            raise ValueError(
                f"{what} should have a backward that can run more than once, because nwise runs it with zeros to see whether it "
                f"adds a gradient. Found that it cannot ({type(error).__name__}: {error}); let the backward of its "
                "`torch.autograd.Function` leave what its forward kept as it is, or use one micro-batch and the strategy "
                "'end-to-end'."
            ) from error
        finally:
            for x, gradient in zip(wanted, before, strict=True):
                x.grad = gradient

    if again:
        for first, second in zip(walk(seeds), walk(seeds), strict=True):
            if first is not None and second is not None and not _close(first, second):
                raise ValueError(
                    f"{what} should give the same gradients each time its graph is walked, because this strategy walks it "
                    "more than once. Found other ones the second time; let the backward of its `torch.autograd.Function` leave "
                    "the tensors that it saved as they are and keep no state, or use an order and strategy with one pass, such "
                    "as 'end-to-end'."
                )
    added = walk([torch.zeros_like(seed) for seed in seeds])
    return [g if g is not None and _counts(g) else None for g in added]


def _close(first: Tensor, second: Tensor) -> bool:
    """Return whether two gradients are equal within rounding; of distributed ones, the parts of this process."""
    if is_dtensor(first) and is_dtensor(second):
        first, second = first.to_local(), second.to_local()
    return torch.allclose(first, second, equal_nan=True)


def _counts(gradient: Tensor) -> bool:
    """Return whether a gradient is finite and not zero."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all() and values.any())
