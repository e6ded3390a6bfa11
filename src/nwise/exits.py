"""Inference through the heads along the way."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from nwise._arguments import HeadDict
from nwise.microbatch import Tensors
from nwise.stage import unchanged

# One output for every stage; None where the head is missing or was not requested.
Outputs = list[Tensor | Tensors | None]


def head_output(heads: HeadDict, k: int, hidden: Tensors, only: Collection[int] | None) -> Tensor | Tensors | None:
    """Run the head of a stage on its output, if it has one and is among those to run.

    Args:
        heads: the heads.
        k: index of the stage.
        hidden: the stage's output.
        only: indices of the stages whose heads run; None for all.
    """
    head = heads.get(k) if only is None or k in only else None
    with unchanged(hidden, f"The head of stage {k}"):
        return None if head is None else head(*hidden)
