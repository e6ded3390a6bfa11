"""What tensors depend on: names that follow the values through every function of torch, with a gradient or without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nwise._torch import pytree

# Functions that return what Python code may branch on, those that look at sizes, and those that look at nothing else.
_VALUES = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "__contains__",
    "__format__",
    "item",
    "tolist",
    "numpy",
}
_VALUES |= {"equal", "allclose", "is_nonzero"}
_SIZES = {"size", "__len__", "numel", "nelement"}
_SHAPE = getattr(Tensor.shape, "__get__")  # noqa: B009 - the function that reads ``x.shape``
_LIKE = {f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
_LIKE |= {"new_zeros", "new_ones", "new_empty", "new_full"}


class Dependence(TorchFunctionMode):
    """Follows named values while it is entered.

    Attributes:
        counts: whether what Python reads counts, as it does in the network's own code and not inside a module.
        read: names of values that Python has read, on which all that follows may depend.
        sized: names of values whose sizes Python has read.
    """

    def __init__(self) -> None:
        super().__init__()
        # By storage: a view has the names of its base, also after a change in place.
        self._names: WeakKeyDictionary[torch.UntypedStorage, set[str]] = WeakKeyDictionary()
        self.counts = True
        self.read: set[str] = set()
        self.sized: set[str] = set()

    def name(self, x: Tensor, name: str) -> None:
        """Let a tensor depend on this name alone."""
        for storage in _storages([x]):
            self._names[storage] = {name}

    def of(self, values: Any) -> set[str]:
        """Return the names on which values depend."""
        found = [self._names.get(storage, set()) for storage in _storages(pytree.tree_leaves(values))]
        return set().union(*found)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        function = getattr(func, "__name__", "")
        if function in _LIKE:
            return result
        # In ``x.view_as(y)`` only the sizes of y count.
        names = self.of(args[:1] if function.endswith("_as") else (args, dict(kwargs or {})))
        if not names:
            return result
        if self.counts and function in _VALUES:
            self.read |= names
        if self.counts and (function in _SIZES or func == _SHAPE):
            self.sized |= names
        changed = args[:1] if result is None else result  # such as ``x[0] = y``
        for storage in _storages(pytree.tree_leaves(changed)):
            self._names[storage] = self._names.get(storage, set()) | names
        return result


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors; some kinds have none, such as sparse and nested ones."""
    found = []
    for x in values:
        with suppress(NotImplementedError, RuntimeError):
            found += [x.untyped_storage()] if isinstance(x, Tensor) else []
    return found
