"""What `torch.compile` needs to know about several backward passes.

Compile blocks, not whole stages: a compiled graph computes the gradients of its inputs and of its
weights together, so inside it an input-gradient pass (I) costs as much as a full backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or one inside it, was compiled by ``module.compile()`` or ``torch.compile(module)``."""
    return any(
        child._compiled_call_impl is not None or type(child).__name__ == "OptimizedModule" for child in module.modules()
    )


@contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Let graphs that are compiled inside keep their buffers after a backward pass.

    By default a compiled backward reuses saved activations as scratch memory ("donated buffers"),
    which forbids a second pass over the same graph (pytorch issue 161904).

    Raises:
        ValueError: a graph was compiled outside, without this.
    """
    if not is_compiled(module):
        yield
        return
    import torch._functorch.config as functorch

    with functorch.patch(donated_buffer=False):
        try:
            yield
        except RuntimeError as error:
            if "donated buffer" not in str(error):
                raise
            raise ValueError(
                "Compiled modules should run for the first time inside `Pipeline.step`, so that their graphs allow several "
                "backward passes. Found one that had run before; call `torch.compiler.reset()` first, or set "
                "`torch._functorch.config.donated_buffer = False` before compiling."
            ) from error
