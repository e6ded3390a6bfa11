"""Checks for distributed tensors and modules, without importing torch's packages for them, which takes a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, like the parameters of a stage with tensor parallelism.

    >>> import torch
    >>> is_dtensor(torch.zeros(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")  # making a DTensor imports it
    return module is not None and isinstance(tensor, module.DTensor)


def check_unsharded(module: nn.Module | None, stage: int) -> None:
    """Raise ValueError for a stage or head under `fully_shard`, which exchanges its parameters during the forward."""
    # By name: the import takes a tenth of a second.
    kinds = [
        kind.__name__ for inner in (module.modules() if module is not None else ()) for kind in type(inner).__mro__
    ]
    if "FSDPModule" in kinds:
        raise ValueError(
            f"Stage {stage} should have whole parameters. Found `fully_shard`, which exchanges them during the forward, so no "
            "gradient would reach them; use replicas or tensor parallelism (docs/processes.md)."
        )
