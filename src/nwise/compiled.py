"""Settings of `torch.compile` for several backward passes.

Compile blocks, not whole stages: a compiled graph computes the gradients of its inputs and of its weights together, so inside
it an input-gradient pass (I) costs as much as a full backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from nwise._torch import compile_call, is_compiled
from nwise.auxiliary import allow_compiled_blocks
from nwise.process import allow_variants, keep_buffers

_MAX_VARIANTS = 256  # of all compiled modules, for training and for tests; torch's own bound for one function


def allow_several_passes(modules: Iterable[nn.Module]) -> None:
    """Call `keep_buffers` if a module is compiled, and keep `nwise.inject` out of what the compiler traces."""
    if any(map(is_compiled, modules)):
        keep_buffers()
    if "torch._dynamo" in sys.modules:  # a forward may call a compiled function, too
        allow_compiled_blocks()


def compile_module(module: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile a module in place.

    ``module.compile()`` has no effect on torch's own containers, such as an `nn.Sequential` of layers. This function has.
    Modules of equal structure share their compiled code.

    Args:
        module: block of a stage, or a head.
        backend: backend of `torch.compile`; default: ``"inductor"``.
    """
    # All modules share one function, and torch stops compiling a function after 8 variants: a ninth module would run uncompiled.
    compile_call(module, backend=backend, **allow_variants(_MAX_VARIANTS))
