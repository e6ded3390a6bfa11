"""Random numbers as functions of names, independent of how and where a model runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[list[torch.Generator]]:
    """Restore the global generators after the body, however much it draws from them.

    The generators belong to the process. A thread that draws meanwhile disturbs the body's numbers, and draws the same numbers
    again afterwards, so give such a thread a separate `torch.Generator`.

    Args:
        device: GPU whose generator to include; default: the CPU's only.

    Yields:
        The global generators.
    """
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    states = [g.get_state() for g in generators]
    try:
        yield generators
    finally:
        for g, state in zip(generators, states, strict=True):
            g.set_state(state)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators for the body and restore them after it; see `preserved`."""
    with preserved(device) as generators:
        for g in generators:
            g.manual_seed(seed)
        yield
