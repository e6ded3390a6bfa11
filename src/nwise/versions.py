"""Old versions of a stage's parameters, for passes that come after an update.

Under a delay the passes of a mini-batch come after later updates, but use the parameters of its forward. Here the delay is 1, and
w[s] are the parameters in step s::

    step        0        1        2
    forward     F w[0]   F w[1]   F w[2]
    passes               W w[0]   W w[1]    their gradient goes to the ``.grad`` of the present parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from nwise._hooks import add_to_grad
from nwise._torch import hold


def copy_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters by name, for passes that come after the next update."""
    return {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}


def holding(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> AbstractContextManager[None]:
    """Let a module hold these parameters and buffers instead of its own while the body runs.

    A backward pass may run parts of the module again, as `torch.utils.checkpoint` does, and they must find the old versions.

    Args:
        module: the module.
        tensors: the parameters and buffers, by name.
        name: the module's name, for errors.

    Raises:
        ValueError: the module is TorchScript, whose tensors cannot be replaced.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with holding(layer, {"weight": torch.ones(1, 1)}, "the layer"):
    ...     layer(torch.full((1, 1), 3.0)).item()
    3.0
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ValueError(
            f"{name.capitalize()} should not be TorchScript when it runs with replaced parameters or buffers, as under a "
            "delay or with `recompute`. Found a scripted module; pass the original module."
        )
    return hold(module, tensors)


def move_gradients(versions: Mapping[str, Tensor], module: nn.Module, name: str) -> None:
    """Move gradients from old versions to the present parameters, where they are late.

    Raises:
        ValueError: the module has other parameters now.
    """
    parameters = dict(module.named_parameters())
    if parameters.keys() != versions.keys():
        changed = ", ".join(sorted(parameters.keys() ^ versions.keys()))
        raise ValueError(
            f"{name.capitalize()} should keep its parameters while gradients are due. Found other ones ({changed}); before "
            "the change, update while `pipe.drain()` returns True."
        )
    for key, parameter in parameters.items():
        old = versions[key]
        if old.grad is not None and parameter.requires_grad:
            add_to_grad(parameter, old.grad)
            old.grad = None
