"""Inference through the main network and the heads along the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from nwise._arguments import HeadDict
from nwise.microbatch import Tensors, as_tuple
from nwise.stage import unchanged

# One output for every stage; None where the head is missing or was not requested.
Outputs = list[Tensor | Tensors | None]


def all_outputs(stages: Sequence[nn.Module], heads: HeadDict, inputs: Tensors, only: Collection[int] | None) -> Outputs:
    """Run the main network and its heads.

    Args:
        stages: the main network, in order.
        heads: the heads.
        inputs: inputs of the first stage.
        only: indices of the stages whose heads run; None for all.

    Returns:
        The heads' outputs, None for a head that did not run; the last entry is the network's output.
    """
    outputs: Outputs = []
    output: Any = inputs
    for k, stage in enumerate(stages):
        output = stage(*inputs)
        inputs = as_tuple(output, f"The output of stage {k}")
        if k < len(stages) - 1:
            outputs.append(head_output(heads, k, inputs, only))
    return [*outputs, output]


def head_output(heads: HeadDict, k: int, hidden: Tensors, only: Collection[int] | None) -> Tensor | Tensors | None:
    """Run the head of stage `k` on its output, if the stage has one and `only` includes it; see `all_outputs`."""
    head = heads.get(k) if only is None or k in only else None
    with unchanged(hidden, f"The head of stage {k}"):
        return None if head is None else head(*hidden)
