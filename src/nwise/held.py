"""What a module holds beside its parameters, buffers and children: plain values, random generators, unregistered modules.

`nn.Module.modules` does not list generators and modules in plain attributes, but the forward uses them::

    self.generator = torch.Generator()          an attribute
    self.norms = [nn.BatchNorm1d(4)]            in a list, tuple, set or dictionary: neither registered nor switched by `eval`
    self.noise.generator                        one level down, in an attribute that is a plain object
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
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
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module that no user has set


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
            if name in OF_TORCH or type(value) in _LEAVES:
                continue
            for found in _inside(value, _DEPTH):
                if not isinstance(found, nn.Module):
                    generators[found] = None
                elif found not in known:
                    new = [inner for inner in found.modules() if inner not in known]
                    known.update(new)
                    modules += new
    return Held(modules[registered:], list(generators))


Values = Sequence[tuple[dict[str, Any], Mapping[str, object]]]


def values_in(*modules: nn.Module) -> Values:
    """Return the plain values that modules, and all modules inside them, hold in attributes: modes, temperatures, drop rates.

    Those in dictionaries and in plain objects, one level down, belong to them. Each holder comes with its values.

    >>> values_in(nn.Dropout(0.5))[0][1]
    {'training': True, 'p': 0.5, 'inplace': False}
    """
    found: list[tuple[dict[str, Any], Mapping[str, object]]] = []
    for part in (inner for module in modules for inner in module.modules()):
        for name, value in (("", vars(part)), *vars(part).items()):
            if type(value) in _LEAVES or name in OF_TORCH or isinstance(value, (*_SOUGHT, *_CLOSED, *_SEQUENCES)):
                continue
            own = type(value).__module__.partition(".")[0] in ("nwise", "torch")
            inside = value if isinstance(value, dict) else {} if own else getattr(value, "__dict__", {})
            if plain := {key: x for key, x in inside.items() if type(x) in _LEAVES and key not in OF_TORCH}:
                found.append((inside, plain))
    return found


@contextmanager
def with_values(values: Values) -> Iterator[None]:
    """Run the body with these values in their holders, then restore the present ones."""
    present = [(inside, _put(inside, then)) for inside, then in values]
    try:
        yield
    finally:
        for inside, now in reversed(present):  # modules may share a holder
            _put(inside, now)


def _put(inside: dict[str, Any], values: Mapping[str, object]) -> Mapping[str, object]:
    """Put values into a holder; return those that it had."""
    if all(map(is_, map(inside.get, values), values.values())):
        return values
    before = {name: inside.get(name) for name in values}
    inside.update(values)
    return before


def tensors_in(*modules: nn.Module) -> list[Tensor]:
    """Return the buffers and the tensors in plain attributes of modules, and of all modules inside them."""
    parts = [part for module in modules for part in module.modules()]
    values = [value for part in parts for value in (*part._buffers.values(), *vars(part).values())]
    return [value for value in values if isinstance(value, Tensor)]


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
