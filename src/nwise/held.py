"""What a module holds beside its parameters, buffers and children: random generators and other modules in plain attributes.

`nn.Module.modules` does not list them, but the forward uses them::

    self.generator = torch.Generator()          an attribute
    self.norms = [nn.BatchNorm1d(4)]            in a list, tuple, set or dictionary: neither registered nor switched by `eval`
    self.noise.generator                        one level down, in an attribute that is a plain object
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_SOUGHT = (nn.Module, torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CLOSED = (Tensor, type, ModuleType, FunctionType, MethodType)  # their attributes are no state of the module
_SEQUENCES = (list, tuple, set, frozenset)
_DEPTH = 3  # containers inside one another
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device))
_OF_TORCH = frozenset(vars(nn.Module()))


class Held(NamedTuple):
    """What plain attributes hold.

    Args:
        modules: modules that are not registered, and all modules inside them.
        generators: random generators, without those that have no state.
    """

    modules: list[nn.Module]
    generators: list[Any]


def held(module: nn.Module) -> Held:
    """Return what the plain attributes of a module and of all modules inside it hold, each object once.

    >>> layer = nn.Linear(2, 2)
    >>> layer.norms = [nn.BatchNorm1d(2)]
    >>> [type(module).__name__ for module in held(layer).modules]
    ['BatchNorm1d']
    """
    modules = list(module.modules())
    registered, known = len(modules), set(modules)
    generators: dict[Any, None] = {}
    for part in modules:  # grows
        for name, value in vars(part).items():
            if name in _OF_TORCH or type(value) in _LEAVES:
                continue
            for found in _inside(value, _DEPTH):
                if not isinstance(found, nn.Module):
                    generators[found] = None
                elif found not in known:
                    new = [inner for inner in found.modules() if inner not in known]
                    known.update(new)
                    modules += new
    return Held(modules[registered:], list(generators))


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """Iterate over the modules and generators in a value: containers in containers, and the attributes of an object."""
    if isinstance(value, _SOUGHT):
        if not isinstance(value, random.SystemRandom):
            yield value
    elif depth and not isinstance(value, _CLOSED):
        items: Any = value
        if isinstance(value, dict):
            items = value.values()
        elif not isinstance(value, _SEQUENCES):
            items, depth = getattr(value, "__dict__", {}).values(), 1
        if not _LEAVES.issuperset(map(type, items)):  # a large vocabulary costs little
            for item in items:
                yield from _inside(item, depth - 1)
