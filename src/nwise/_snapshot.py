"""Copies of the values that a step changes in place; a step that raises restores them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from nwise.batchnorm import DeferredBatchNorm

_STATEFUL = (_NormBase, torch.jit.ScriptModule)


class Snapshot:
    """Keeps the gradients and the statistics of batch norms from before a step.

    A gradient that is None costs nothing to keep, so a loop that sets gradients to None between steps pays only for the
    statistics. Other buffers that a forward changes are not kept.

    Args:
        modules: all modules that the step runs.
        parameters: parameters to whose gradients the step adds.
    """

    def __init__(self, modules: Sequence[nn.Module], parameters: Iterable[Tensor]) -> None:
        # Autograd adds to a gradient in place, so the tensor and its values are both kept.
        self._gradients = [(p, g, None if g is None else g.clone()) for p in parameters for g in (p.grad,)]
        self._deferred = [module for module in modules if isinstance(module, DeferredBatchNorm)]
        for norm in self._deferred:
            norm.discard()  # drops statistics of inference in training mode
        norms = [module for module in modules if isinstance(module, _STATEFUL) and _moves_statistics(module)]
        self._buffers = [(b, b.clone()) for norm in norms for b in norm._buffers.values() if b is not None]

    def commit(self) -> None:
        """Move the deferred statistics, after the whole mini-batch of a step."""
        for norm in self._deferred:
            norm.commit()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore gradients and statistics after an error."""
        for parameter, gradient, values in self._gradients:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                gradient.copy_(values)
        for buffer, values in self._buffers:
            buffer.copy_(values)
        for norm in self._deferred:
            norm.discard()


@contextmanager
def restored_on_error(modules: Sequence[nn.Module], parameters: Iterable[Tensor]) -> Iterator[None]:
    """Run the body as a whole or not at all: move deferred statistics after it, restore everything if it raises.

    Args:
        modules, parameters: as for `Snapshot`.
    """
    before = Snapshot(modules, parameters)
    try:
        yield
        before.commit()
    except BaseException:
        before.restore()
        raise


def _moves_statistics(module: nn.Module) -> bool:
    # The layers of a ScriptModule cannot be inspected, so all its buffers are copied.
    return module.training and (not isinstance(module, _NormBase) or module.track_running_stats)
