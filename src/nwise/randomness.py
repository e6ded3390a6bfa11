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
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw from `seed` inside, and leave the global generators as they were.

    They are the process's: a thread that draws from them meanwhile gets numbers of this seed, disturbs what is drawn here, and
    draws the same again afterwards. It should have a `torch.Generator` of its own.

    Args:
        seed: as from `derive`.
        device: also this device's generator, if it is a GPU.
    """
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[index])
    before = [g.get_state() for g in generators]
    for g in generators:
        g.manual_seed(seed)
    try:
        yield
    finally:
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)
