"""Training and evaluation modes of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

__all__ = ["evaluating"]


def evaluating(*modules: nn.Module) -> AbstractContextManager[None]:
    """Run the body in evaluation mode without gradients, then restore each module's mode.

    >>> layer = nn.Sequential(nn.Dropout())
    >>> with evaluating(layer):
    ...     layer[0].training
    False
    >>> layer[0].training
    True
    """
    return _switched(modules, lambda module: module.eval())


def training(*modules: nn.Module) -> AbstractContextManager[None]:
    """Run the body in training mode without gradients, then restore each module's mode."""
    return _switched(modules, lambda module: module.train())


@contextmanager
def _switched(modules: Sequence[nn.Module], switch: Callable[[nn.Module], object]) -> Iterator[None]:
    before = {inner: inner.training for module in modules for inner in module.modules()}
    try:
        with torch.no_grad():
            for module in modules:
                switch(module)  # not by the flags: a module's `eval` may do more
            yield
    finally:
        # By the flags: some modules inside may have had another mode, such as frozen norms.
        for inner, mode in before.items():
            inner.training = mode


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device, None while it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
