"""Plain networks, one layer a stage: a perceptron, and the paper's small convolutional network (experiment E1)."""

from __future__ import annotations

from torch import nn

from nwise import heads
from nwise.app.models.staged import StagedModel, build, name_blocks
from nwise.checks import check_at_least


def convnet(
    num_stages: int = 6,
    num_classes: int = 10,
    *,
    in_channels: int = 3,
    image_size: int = 32,
    filters: int = 32,
    seed: int = 0,
) -> StagedModel:
    """Build a network with one 3x3 convolution, batch norm and ReLU per stage.

    The last two stages have twice as many filters and a 2x2 max pool of stride 1; the last one ends in a linear layer. Every
    head is one linear layer. Images are ``[B, in_channels, image_size, image_size]``; the paper has 3 to 10 stages.

    >>> [sum(p.numel() for p in stage.parameters()) for stage in convnet(3, image_size=8).stages]
    [960, 18624, 60106]
    """
    check_at_least(1, num_stages=num_stages, num_classes=num_classes, in_channels=in_channels, filters=filters)
    check_at_least(3, image_size=image_size)
    blocks: dict[str, nn.Module] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    channels = in_channels
    size = image_size
    for k in range(num_stages):
        pooled = k >= num_stages - 2
        width = 2 * filters if pooled else filters
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        if pooled:
            layers.append(nn.MaxPool2d(2, stride=1))
            size -= 1
        channels = width
        blocks[f"blocks.{k}"] = nn.Sequential(*layers)
        shapes[f"blocks.{k}"] = (channels, size, size)
    pieces = {**blocks, "output": heads.linear((channels, size, size), num_classes)}
    return build(pieces, list(blocks)[1:], lambda piece: heads.linear(shapes[piece], num_classes), seed)


def mlp(
    num_stages: int = 4, in_features: int = 64, width: int = 128, num_classes: int = 10, *, seed: int = 0
) -> StagedModel:
    """Build a perceptron with one linear layer and ReLU per stage; the last stage and each head have an output layer.

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
