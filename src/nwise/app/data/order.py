"""The order of samples is a function of seed, epoch and step, so a resumed run needs no stored order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nwise.checks import check_at_least
from nwise.randomness import generator


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
