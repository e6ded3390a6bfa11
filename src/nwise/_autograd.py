"""The one call of autograd's engine, without the checks of `torch.autograd.backward`.

For every call these checks take 15 microseconds, as long as a small layer, and a step of A stages makes about 3 A calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

_NOTHING_ELSE = nullcontext()  # made once: a step calls the engine many times


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
    device = seeds[0].device.type
    # Backward operations have the dtype of their forward and must not be cast again.
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING_ELSE:
        _engine_run_backward(
            tuple(roots), tuple(seeds), retain_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
        )
