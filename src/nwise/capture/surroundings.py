"""What a recording relies on without reading it again: the attributes of modules and losses, and the memory of their tensors.

    vars(module)      the same objects under the same names?        a rate of dropout, a mode, a replaced forward
    lists, dicts      the same objects inside?                      a counter in a list, a cache
    tensors           the same address, shape and strides?          weights that were replaced, buffers

A change makes a recording stale. A part that changes any of this while it runs cannot be recorded, as its Python runs only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import hooks_of
from nwise.held import OF_TORCH, held
from nwise.runtime.structure import Structure

_CLOSED = (type, ModuleType, FunctionType, MethodType, nn.Module, torch.Generator)
_SCALARS = (bool, int, float, complex, str, type(None))
_DEPTH = 3  # containers inside one another
_LONG = 1000  # items from which a container is compared by its length alone, such as a vocabulary


class Surroundings:
    """Attributes and memory as they were when it was made.

    It has all `modules`, those of losses and unregistered ones included, the dictionaries that hold their `hooks`, and the random
    `generators` in plain attributes.
    """

    def __init__(self, structure: Structure, losses: Iterable[Any]) -> None:
        self.structure = structure
        inside = [held(container) for container in structure.containers]
        owners = [owner for loss in losses for owner in _owners(loss)]
        others = [module for one in inside for module in one.modules]
        others += [owner for owner in owners if isinstance(owner, nn.Module)]
        self.generators = [generator for one in inside for generator in one.generators]
        self.modules = list(dict.fromkeys([*structure.modules, *others]))
        self.hooks = hooks_of(self.modules)
        self._stores: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._others: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # which the structure compares
        self._containers: list[tuple[str, Any, list[Any]]] = []  # by identity, with the items that were in it
        self._tensors: list[tuple[str, Tensor, object]] = []
        known = set(structure.modules)
        for module in self.modules:
            owner = type(module).__name__
            self._add(owner, vars(module))
            self._add(owner, module._buffers)
            # The structure compares which parameters its modules have; here only their memory counts.
            self._add(owner, module._parameters, compared=module not in known)
        for owner in owners:
            if not isinstance(owner, nn.Module):
                self._add(getattr(owner, "__name__", type(owner).__name__), getattr(owner, "__dict__", {}))

    def _add(self, owner: str, store: Any, *, compared: bool = True) -> None:
        if isinstance(store, dict):  # TorchScript has none
            (self._stores if compared else self._others).append((owner, store, dict(store)))
            for name, value in store.items():
                if name not in OF_TORCH:
                    self._inside(f"{owner}.{name}", value, _DEPTH)

    def _inside(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._tensors.append((name, value, _place(value)))
        elif isinstance(value, list | tuple | set | frozenset | dict):
            items = _items(value)
            if not isinstance(value, tuple | frozenset):  # which keep their items
                self._containers.append((name, value, items))
            for item in items if depth and len(items) < _LONG else ():
                self._inside(name, item, depth - 1)
        elif depth == _DEPTH and not isinstance(value, (*_CLOSED, *_SCALARS)):
            self._add(name, getattr(value, "__dict__", None))

    def changed(self) -> str | None:
        """Return the name of something that has changed, None if nothing has."""
        # By identity first, in C: of the thousands of attributes of a network none has changed as a rule.
        for owner, store, before in self._stores:
            if len(store) != len(before) or not all(map(is_, store.values(), before.values())):
                for name in {**before, **store}:
                    missing = name not in store or name not in before
                    if missing or not _equal(store[name], before[name]):
                        return f"{owner}.{name}"
        for name, container, items in self._containers:
            now = _items(container)
            if len(now) != len(items) or not all(map(is_, now, items)):
                return name
        return next((name for name, tensor, place in self._tensors if _place(tensor) != place), None)

    def restore(self) -> None:
        """Put all attributes back, and what lists, sets and dictionaries held."""
        # In place: modules and others hold these dictionaries and lists themselves.
        for _, store, before in (*self._stores, *self._others):
            store.clear()
            store.update(before)
        for _, container, items in self._containers:
            if isinstance(container, list):
                container[:] = items
            elif isinstance(container, set | dict):
                container.clear()
                container.update(items if isinstance(container, set) else zip(items[::2], items[1::2], strict=True))

    def elsewhere(self, device: torch.device) -> str | None:
        """Return the name of a tensor on another device than this one, None if there is none."""
        return next((name for name, tensor, _ in self._tensors if tensor.device != device), None)


def _owners(loss: Any) -> Iterator[Any]:
    """Iterate over the objects whose attributes a loss may use."""
    if isinstance(loss, nn.Module):
        yield from loss.modules()
        return
    yield loss
    for inner in (loss.func, *loss.args, loss.keywords) if isinstance(loss, partial) else ():
        yield from _owners(inner)
    if (owner := getattr(loss, "__self__", None)) is not None and not isinstance(owner, ModuleType):
        yield from _owners(owner)


def _items(container: Any) -> list[Any]:
    """Return the items of a container, of a dictionary keys and values in turn."""
    return [x for pair in container.items() for x in pair] if isinstance(container, dict) else list(container)


def _equal(first: Any, second: Any) -> bool:
    return first is second or (type(first) is type(second) and isinstance(first, _SCALARS) and first == second)


def _place(tensor: Tensor) -> object:
    """Return where and how a tensor lies in memory."""
    if tensor.layout is not torch.strided:
        return tensor.shape, tensor.layout
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
