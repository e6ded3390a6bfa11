"""Batches in order, with images that are decoded on access decoded ahead by worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nwise.app.data.images import Images
from nwise.app.data.text import Tokens
from nwise.machine import num_cores
from nwise.progress import MANY
from nwise.runtime.launch import variable

__all__ = ["batches"]

_SPARE = MANY  # images; with fewer, processes would take longer to start than to decode them

Wanted = tuple[Tensor, torch.Generator | None]  # as `Images.batch` takes it


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
    own = (
        torch.Generator()
    )  # for the workers' seeds, which nothing uses; by default torch would draw them from the global one
    loader = DataLoader(lazy, batch_sampler=keys(), num_workers=workers, generator=own)
    try:
        for pixels in loader:
            yield data.finished(pixels, *asked.popleft())
    except ValueError:
        data.batch(*asked[0])  # raises the error itself, without the traceback of a worker
        raise
