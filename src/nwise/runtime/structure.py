"""The structure of a pipeline: its modules and trainable parameters, looked up once, and compared before every step.

A walk through all modules takes as long as a small network's step. So a step asks only whether what the last walk has found is
still there, in flat loops over what it keeps::

    module 0   its children, its parameters   the same objects in the same places?
    module 1   its children, its parameters
    ...
    parameters                                require a gradient as before?
    modules                                   compiled as before?

What changes otherwise, such as the attributes of a user's strategy, takes effect by `Pipeline.refresh`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import Tensor, nn

from nwise._torch import compiled_calls
from nwise.runtime.snapshot import STATEFUL
from nwise.tensors import asks


class Structure:
    """Modules and parameters as they were when it was made.

    Args:
        containers: modules that hold the stages and the heads.
        modules: all modules of the stages and heads.
        learns: the trainable parameters of this process.

    Attributes:
        containers, modules: as given.
        learns: as given, each parameter once.
        stateful: those that may have statistics of batches, which a failed step restores.
    """

    def __init__(self, containers: Iterable[nn.Module], modules: Sequence[nn.Module], learns: Sequence[Tensor]) -> None:
        self.containers, self.modules = list(containers), modules
        self.learns = list(dict.fromkeys(learns))  # a head may serve several stages
        self.stateful = [module for module in modules if isinstance(module, STATEFUL)]
        self._places: list[Any] = [one._modules for one in (*self.containers, *modules)]
        self._places += [module._parameters for module in modules]
        self._lengths, self._held = list(map(len, self._places)), list(_held(self._places))
        self._parameters = [p for p in self._held if isinstance(p, Tensor)]
        self._trainable = list(map(asks, self._parameters))
        self._compiled = compiled_calls(modules)

    @property
    def is_current(self) -> bool:
        """Whether all modules and parameters are where they were, trainable and compiled as they were."""
        return (
            list(map(len, self._places)) == self._lengths
            and all(map(is_, _held(self._places), self._held))
            and list(map(asks, self._parameters)) == self._trainable
            and all(map(is_, compiled_calls(self.modules), self._compiled))
        )


def _held(places: Iterable[Any]) -> Iterator[object]:
    """Iterate over the values of dictionaries."""
    return chain.from_iterable(map(methodcaller("values"), places))
