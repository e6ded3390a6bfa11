"""Random numbers as functions of names, independent of how and where a model runs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

__all__ = ["derive", "generator", "seeded"]

T = TypeVar("T")
StreamKey = tuple[str, int, int]  # the forward of a "stage", or a "head" with its loss; its stage, and the micro-batch


def derive(*names: int | str) -> int:
    """Return a seed of 63 bits from names such as ``(seed, "stage", 3, step, microbatch)``.

    >>> derive(0, "a") == derive(0, "a"), derive(0, "a") == derive(0, "b")
    (True, False)
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*names: int | str) -> torch.Generator:
    """Return a CPU generator seeded by `derive`."""
    return torch.Generator().manual_seed(derive(*names))


class StepSeeds:
    """Seeds the random numbers that the parts of a step draw: each a function of the part's name, not of the order of work.

    Args:
        seed: seed of the step, from which every part derives its own; default: 0.
        first: index of the first micro-batch in the whole mini-batch; not 0 where a replica runs a later part of it.
    """

    def __init__(self, seed: int = 0, first: int = 0) -> None:
        self.seed = seed
        self.first = first

    def run(self, part: StreamKey, device: torch.device, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that runs a part, with the global generators seeded for it; return what it returns."""
        # `seed_all(self.seed_of(part), device)`, in two calls less
        seed = derive(self.seed, part[0], part[1], self.first + part[2])
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        return function(*arguments)

    def seed_of(self, part: StreamKey) -> int:
        """Return the seed of a part."""
        what, stage, microbatch = part
        # Micro-batches are numbered over all replicas, so each draws the same numbers however the mini-batch is shared out.
        return derive(self.seed, what, stage, self.first + microbatch)


class SeedsAll(StepSeeds):
    """Seeds the generators of Python and NumPy too, so a part draws the same numbers whenever it runs."""

    def run(self, part: StreamKey, device: torch.device, function: Callable[..., T], *arguments: Any) -> T:
        random.seed(self.seed_of(part))
        np.random.seed(self.seed_of(part) % 2**32)  # noqa: NPY002 - users' code draws from it
        return super().run(part, device, function, *arguments)


def preserved(device: torch.device | None = None) -> AbstractContextManager[None]:
    """Restore the global generators after the body, however much it draws from them.

    The generators belong to the process. A thread that draws meanwhile disturbs the body's numbers, and draws the same numbers
    again afterwards, so give such a thread a separate `torch.Generator`.

    Args:
        device: GPU whose generator to include; default: the CPU's only.
    """
    return torch.random.fork_rng([device] if device is not None and device.type == "cuda" else [])


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of the CPU and of a GPU."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators for the body and restore them after it; see `preserved`."""
    with preserved(device):
        seed_all(seed, device)
        yield


States = Iterable[tuple[Callable[[Any], object], Any]]  # what restores a state, and the state


def restore(states: States) -> None:
    """Put states back."""
    for put, state in states:
        put(state)


@contextmanager
def restoring(states: States) -> Iterator[None]:
    """Put states back after the body."""
    try:
        yield
    finally:
        restore(states)


def random_states() -> States:
    """Return the states of the global random generators of Python, NumPy and every GPU; a step seeds torch's on the CPU."""
    # While a step is captured, the GPU's random numbers come from generators of the graph.
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() and not capturing else ()
    return [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 - users' code draws from it
        *((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)) for device in devices),
    ]
