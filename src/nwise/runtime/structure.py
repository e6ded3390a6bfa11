"""The structure of a pipeline: its modules and trainable parameters, looked up once, and compared before every step.

A walk through all modules takes as long as a small network's step. So a step asks only whether what the last walk has found is
still there, in flat loops over what it keeps::

    module 0   its children, its parameters   the same objects in the same places?
    module 1   its children, its parameters
    ...
    parameters                                require a gradient as before?
    modules                                   compiled as before?

What changes otherwise, such as the attributes of a user's strategy, takes effect by `Pipeline.refresh`.

A step changes gradients and statistics in place. If it raises, `restored_on_error` puts them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import Norm, compiled_calls
from nwise.batchnorm import DeferredBatchNorm
from nwise.tensors import asks

_values = methodcaller("values")


class Structure:
    """Modules and parameters as they were when it was made.

    Args:
        containers: modules that hold the stages and the heads.
        modules: all modules of the stages and heads.
        learns: the trainable parameters of this process.

    Attributes:
        containers, modules: as given.
        learns: as given, each parameter once.
        stateful: those modules whose values a forward may change.
    """

    def __init__(self, containers: Iterable[nn.Module], modules: Sequence[nn.Module], learns: Sequence[Tensor]) -> None:
        self.containers = list(containers)
        self.modules = modules
        self.learns = list(dict.fromkeys(learns))  # a head may serve several stages
        self.stateful = [module for module in modules if isinstance(module, Norm | torch.jit.ScriptModule)]
        self._places: list[Any] = [one._modules for one in (*self.containers, *modules)]
        self._places += [module._parameters for module in modules]
        self._lengths = list(map(len, self._places))
        self._held = list(chain.from_iterable(map(_values, self._places)))
        self._parameters = [p for p in self._held if isinstance(p, Tensor)]
        self._trainable = list(map(asks, self._parameters))
        self._compiled = compiled_calls(modules)

    @property
    def is_current(self) -> bool:
        """Whether all modules and parameters are where they were, trainable and compiled as they were."""
        return (
            list(map(len, self._places)) == self._lengths
            and all(map(is_, chain.from_iterable(map(_values, self._places)), self._held))
            and list(map(asks, self._parameters)) == self._trainable
            and all(map(is_, compiled_calls(self.modules), self._compiled))
        )


def deferred_norms(modules: Iterable[nn.Module]) -> list[DeferredBatchNorm]:
    """Return the batch norms whose statistics move at the end of a step."""
    return [module for module in modules if isinstance(module, DeferredBatchNorm)]


@contextmanager
def restored_on_error(modules: Sequence[nn.Module], parameters: Iterable[Tensor]) -> Iterator[None]:
    """Run the body as a whole or not at all: move deferred statistics after it; restore gradients and statistics if it raises.

    A gradient that is None costs nothing to keep, so a loop that sets gradients to None between steps pays only for the
    statistics. Other buffers that a forward changes are not kept.

    Args:
        modules: the modules that the body runs whose values a forward may change (`Structure.stateful`).
        parameters: parameters to whose gradients it adds.
    """
    # Autograd adds to a gradient in place, so the tensor and its values are both kept.
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    deferred = deferred_norms(modules)
    # The layers of a ScriptModule cannot be inspected, so all its buffers are copied.
    moving = [m for m in modules if m.training and (not isinstance(m, Norm) or m.track_running_stats)]
    buffers = [(b, b.clone()) for module in moving for b in module._buffers.values() if b is not None]
    try:
        for norm in deferred:
            norm.begin()
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
