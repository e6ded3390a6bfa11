"""Training and evaluation modes of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["evaluating"]

Modes = Mapping[nn.Module, bool]


def modes_in(*modules: nn.Module) -> dict[nn.Module, bool]:
    """Return whether each module, and each module inside it, is in training mode."""
    return {inner: inner.training for module in modules for inner in module.modules()}


@contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Run the body with modules in these modes, then restore each module's mode."""
    before = {module: module.training for module in modes}
    _set(modes)
    try:
        yield
    finally:
        _set(before)


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
    with in_modes(modes_in(*modules)), torch.no_grad():
        for module in modules:
            module.eval()  # not by the flags: a module's `eval` may do more
        yield


@contextmanager
def training(*modules: nn.Module) -> Iterator[None]:
    """Run the body in training mode without gradients, then restore each module's mode."""
    with in_modes(modes_in(*modules)), torch.no_grad():
        for module in modules:
            module.train()
        yield


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device, None while it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _set(modes: Modes) -> None:
    for module, training in modes.items():
        module.training = training
