"""Random numbers as functions of names, so that they do not depend on how or where a model runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(*names: int | str) -> int:
    """A seed of 63 bits from names such as ``(seed, "stage", 3, step, microbatch)``.

    >>> derive(0, "a") == derive(0, "a"), derive(0, "a") == derive(0, "b")
    (True, False)
    """
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*names: int | str) -> torch.Generator:
    """A CPU generator that starts from `derive`."""
    return torch.Generator().manual_seed(derive(*names))


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[list[torch.Generator]]:
    """Leave the global generators as they were, whatever draws from them inside.

    They belong to the process: a thread that draws meanwhile gets numbers of the seeds inside, disturbs them, and draws the same
    numbers again afterwards. Such a thread needs a `torch.Generator` of its own.

    Args:
        device: a GPU whose generator to include; default: only the CPU's.
    """
    generators = global_generators(device)
    states = [g.get_state() for g in generators]
    try:
        yield generators
    finally:
        for g, state in zip(generators, states, strict=True):
            g.set_state(state)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from `seed` inside, and leave the global generators as they were; see `preserved`."""
    with preserved(device) as generators:
        for g in generators:
            g.manual_seed(seed)
        yield


def global_generators(device: torch.device | None) -> list[torch.Generator]:
    """Return the CPU's generator and, if the device is a GPU, that GPU's."""
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    return generators
