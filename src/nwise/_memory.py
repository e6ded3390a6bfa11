"""Live bytes of tensors: what a piece of work allocates, keeps and frees, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make inside the `with`, until each is freed.

    Memory that an operation uses inside itself is not seen, such as the scratch space of a convolution.

    Attributes:
        now: live bytes.
        peak: the largest number of live bytes since `measure` began.

    >>> import torch
    >>> with LiveBytes() as memory:
    ...     x = torch.zeros(256)
    ...     y = (x + 1) * 2
    >>> memory.now, memory.peak
    (2048, 3072)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def measure(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Run a function; return its result and the most bytes that were live beyond those before it."""
        before = self.peak = self.now
        result = run()
        return result, self.peak - before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count the storages of its results."""
        del types
        results = func(*args, **(kwargs or {}))
        # A view, or the result of an operation in place, has the storage of an argument.
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(results):
            if storage.nbytes() and storage.data_ptr() not in given and storage.data_ptr() not in self._live:
                self._add(storage)
        return results

    def _add(self, storage: UntypedStorage) -> None:
        place = storage.data_ptr()
        self._live[place] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, place)

    def _free(self, place: int) -> None:
        self.now -= self._live.pop(place)


def _storages(values: Any) -> list[UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
