"""Buffers outside the state dict, whose values no file brings back, such as the frequencies of rotary positions.

A network built on the device ``meta`` has no values. `to_empty` gives it memory and a file its parameters; these buffers would
keep what happened to be in that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from nwise.batchnorm import DeferredBatchNorm


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in the state dict, by name.

    >>> module = nn.Module()
    >>> module.register_buffer("steps", Tensor(3), persistent=False)
    >>> list(unsaved_buffers(module))
    ['steps']
    """
    # By the state dict, not by torch's list of such buffers: a module may leave out others by a hook.
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name not in saved}


def emptied_buffers(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> list[str]:
    """Return the names of buffers without values that a function, such as that of `to_empty`, would give meaningless ones."""
    return [
        name
        for name, buffer in unsaved_buffers(module).items()
        if buffer.is_meta
        # Every step sets those of a `DeferredBatchNorm` to zero before it reads them.
        and not isinstance(module.get_submodule(name.rpartition(".")[0]), DeferredBatchNorm)
        and not fn(buffer).is_meta
    ]


def refuse_buffers(names: Iterable[str]) -> None:
    """Raise ValueError if there is a buffer that `to_empty` would leave without a meaning."""
    for name in names:
        raise ValueError(
            "Buffers outside the state dict should have values before the network leaves the device 'meta', because no file "
            f"brings them back. Found {name!r} without; build the network on a CPU, or register the buffer as persistent."
        )
