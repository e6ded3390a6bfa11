"""Memory that a piece of work takes from torch's allocator: what it keeps, and what it needs at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nwise._torch import memory_changes
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
        device: the device.
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
        now, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return Allocated(result, now - before, most - before)
    # The allocator of the CPU has no statistics. The profiler sees every allocation, but starting it takes 20 milliseconds, and
    # it does not see older memory being freed.
    silence_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        given = prepare()
        with record_function(_MARK):
            result = run(given)
    running = list(accumulate(memory_changes(profiler, _MARK)))
    return Allocated(result, running[-1] if running else 0, max([0, *running]))
