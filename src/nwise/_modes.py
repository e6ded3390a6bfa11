"""Training and evaluation modes of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode without gradients, then restore each module's mode.

    >>> layer = nn.Sequential(nn.Dropout())
    >>> with evaluating(layer):
    ...     layer[0].training
    False
    >>> layer[0].training
    True
    """
    modes = {inner: inner.training for module in modules for inner in module.modules()}
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode
