"""A check for distributed tensors, without importing torch's package for them, which takes a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

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
