"""Whether a tensor is cut up over devices, found out without importing `torch.distributed.tensor`, which takes a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, as the parameters of a stage with tensor parallelism are.

    >>> import torch
    >>> is_dtensor(torch.zeros(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")  # whoever made a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)
