"""A multi-layer perceptron, the smallest network worth cutting."""

from __future__ import annotations

from torch import nn

from nwise import heads
from nwise.app.models.staged import StagedModel, build, name_blocks
from nwise.checks import check_at_least


def mlp(
    num_stages: int = 4, in_features: int = 64, width: int = 128, num_classes: int = 10, *, seed: int = 0
) -> StagedModel:
    """Build a perceptron with one linear layer and ReLU per stage; the last stage also has the output layer, as has each head.

    Args:
        num_stages: number of stages, at least 1.
        in_features: size of the flattened input ``[B, ...]``.
        width: width of every hidden layer.
        num_classes: number of outputs.
        seed: seed of the initial values.

    >>> len(mlp(3).stages), len(mlp(3).heads)
    (3, 2)
    """
    check_at_least(1, num_stages=num_stages, in_features=in_features, width=width, num_classes=num_classes)
    sizes = [in_features, *[width] * (num_stages - 1)]
    blocks = name_blocks(
        nn.Sequential(*([] if k else [nn.Flatten()]), nn.Linear(size, width), nn.ReLU()) for k, size in enumerate(sizes)
    )
    pieces = {**blocks, "output": nn.Linear(width, num_classes)}
    return build(pieces, list(blocks)[1:], lambda piece: heads.linear([width], num_classes), seed)
