"""Memory that a piece of work takes from torch's allocator: what it keeps, and what it needs at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from nwise._torch import TorchDispatchMode, memory_changes
from nwise.process import silence_profiler

__all__ = ["Allocated", "allocated"]

T = TypeVar("T")

_MARK = "nwise: what is measured"


@dataclass(frozen=True, slots=True)
class Allocated(Generic[T]):
    """Memory of a function's work.

    Args:
        result: the function's return value.
        kept: bytes that are in use after it, beyond those before it.
        peak: most bytes that were in use at once, beyond those before it.
    """

    result: T
    kept: int
    peak: int


def allocated(run: Callable[[Any], T], device: torch.device, prepare: Callable[[], Any] = lambda: None) -> Allocated[T]:
    """Run a function and count the memory that it takes from a device's allocator, the scratch space of its operations included.

    Args:
        run: the function, called with what `prepare` returns.
        device: the device; on "meta", where nothing is allocated, the results of operators count, without their scratch space.
        prepare: function that allocates everything that `run` may free; default: `run` frees nothing older than itself.

    >>> memory = allocated(lambda x: (x + x) + x, torch.device("cpu"), lambda: torch.zeros(256))
    >>> memory.kept, memory.peak
    (1024, 2048)
    """
    if device.type == "cuda":
        given = prepare()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run(given)
        now = torch.cuda.memory_allocated(device)
        most = torch.cuda.max_memory_allocated(device)
        return Allocated(result, now - before, most - before)
    if device.type == "meta":
        with _Counted() as counted:
            given = prepare()
            before = counted.now
            counted.peak = counted.now
            result = run(given)
        return Allocated(result, counted.now - before, counted.peak - before)
    # The allocator of the CPU has no statistics. The profiler sees every allocation, but starting it takes 20 milliseconds, and
    # it does not see older memory being freed.
    silence_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        given = prepare()
        with record_function(_MARK):
            result = run(given)
    running = list(accumulate(memory_changes(profiler, _MARK)))
    return Allocated(result, running[-1] if running else 0, max([0, *running]))


class _Counted(TorchDispatchMode):
    """Counts the storages that operators make, until they are freed."""

    now = peak = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own lacks types
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage() for x in _tensors((args, list((kwargs or {}).values())))}
        made = func(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in _tensors(made)} - given:
            if storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return made

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
