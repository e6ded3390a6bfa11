"""The batches of training: an order that needs no storage, and images that worker processes decode ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nwise.app.data.images import Images
from nwise.app.data.text import Tokens
from nwise.checks import check_at_least
from nwise.machine import num_cores
from nwise.progress import MANY
from nwise.randomness import generator
from nwise.runtime.launch import variable

_SPARE = MANY  # images; with fewer, processes would take longer to start than to decode them

Wanted = tuple[Tensor, torch.Generator | None]  # as `Images.batch` takes it


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Count the mini-batches of an epoch; training leaves out an incomplete last one."""
    check_at_least(1, batch_size=batch_size)
    if num_samples < batch_size:
        raise ValueError(f"`batch_size` should be at most the {num_samples} samples there are. Found {batch_size}.")
    return num_samples // batch_size


@lru_cache(maxsize=2)
def permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return all samples in the order of an epoch. The tensor is cached: do not change it."""
    return torch.randperm(num_samples, generator=generator(seed, "order", epoch))


def batch_indices(num_samples: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Return the samples of a training step; steps count from 0 over all epochs.

    >>> batch_indices(10, 4, seed=0, step=3).tolist() == batch_indices(10, 4, seed=0, step=3).tolist()
    True
    """
    epoch, place = divmod(step, steps_per_epoch(num_samples, batch_size))
    return permutation(num_samples, seed, epoch)[place * batch_size : (place + 1) * batch_size]


def batches(data: Images | Tokens, wanted: Iterable[Wanted]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what ``data.batch(indices, random)`` returns, for some indices and generators.

    Args:
        data: the data set. If its images are decoded on access and many, as many processes as cores decode them.
        wanted: indices and the generator of each batch. Worker processes ask for some of them in advance.

    Raises:
        ValueError: an image cannot be read.
    """
    if not isinstance(data, Images) or isinstance(data.pixels, Tensor) or len(data) < _SPARE:
        yield from (data.batch(*one) for one in wanted)
        return
    asked: deque[Wanted] = deque()

    def keys() -> Iterator[Any]:
        for one in wanted:
            asked.append(one)
            yield data.keys(*one)

    workers = max(1, num_cores() // variable("LOCAL_WORLD_SIZE", 1))
    lazy: Any = replace(data, labels=data.labels.cpu())
    seeds = torch.Generator()  # of the workers, which use none; by default torch would draw them from the global one
    loader = DataLoader(lazy, batch_sampler=keys(), num_workers=workers, generator=seeds)
    try:
        for pixels in loader:
            yield data.finished(pixels, *asked.popleft())
    except ValueError:
        data.batch(*asked[0])  # raises the error itself, without the traceback of a worker
        raise
