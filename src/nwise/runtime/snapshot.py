"""Copies of the values that a step changes in place; a step that raises restores them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nwise._torch import Norm
from nwise.batchnorm import DeferredBatchNorm

# Modules whose values a forward may change.
STATEFUL = (DeferredBatchNorm, Norm, torch.jit.ScriptModule)


def deferred_norms(modules: Iterable[nn.Module]) -> list[DeferredBatchNorm]:
    """Return the batch norms whose statistics move at the end of a step."""
    return [module for module in modules if isinstance(module, DeferredBatchNorm)]


@contextmanager
def restored_on_error(modules: Sequence[nn.Module], parameters: Iterable[Tensor]) -> Iterator[None]:
    """Run the body as a whole or not at all: move deferred statistics after it; restore gradients and statistics if it raises.

    A gradient that is None costs nothing to keep, so a loop that sets gradients to None between steps pays only for the
    statistics. Other buffers that a forward changes are not kept.

    Args:
        modules: those of the modules that the body runs whose kinds are in `STATEFUL`.
        parameters: parameters to whose gradients it adds.
    """
    # Autograd adds to a gradient in place, so the tensor and its values are both kept.
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    deferred, moving = list[DeferredBatchNorm](), list[nn.Module]()
    for module in modules:
        if isinstance(module, DeferredBatchNorm):
            module.discard()  # drops statistics of inference in training mode
            deferred.append(module)
        # The layers of a ScriptModule cannot be inspected, so all its buffers are copied.
        if module.training and (not isinstance(module, Norm) or module.track_running_stats):
            moving.append(module)
    buffers = [(b, b.clone()) for module in moving for b in module._buffers.values() if b is not None]
    try:
        yield
        for norm in deferred:
            norm.commit()
    except BaseException:
        with torch.no_grad():
            for parameter, gradient, values in gradients:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)
            for buffer, values in buffers:
                buffer.copy_(values)
        for norm in deferred:
            norm.discard()
        raise
