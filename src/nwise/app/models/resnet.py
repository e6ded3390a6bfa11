"""Residual networks (experiments E2 to E5), cut where the feature map shrinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from nwise import heads
from nwise.app.models.staged import StagedModel, build
from nwise.checks import check_at_least


class Conv2d(nn.Conv2d):
    """A convolution without bias, initialised as He et al.: normal by fan out."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class Shorten(nn.Module):
    """He's parameter-free shortcut (option A): every second pixel, new channels zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, ::2, ::2]
        return functional.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1]))


class Residual(nn.Module):
    """A residual block, ``relu(body(x) + shortcut(x))``."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _projection(before: int, after: int, stride: int) -> nn.Module:
    if before == after and stride == 1:
        return nn.Identity()
    return nn.Sequential(Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))


def _layers(*convolutions: tuple[int, int, int, int]) -> nn.Sequential:
    """Return convolutions of some channels, kernel and stride, with batch norms, and ReLU in between."""
    layers: list[nn.Module] = []
    for before, after, kernel, stride in convolutions:
        layers += [Conv2d(before, after, kernel, stride), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _basic(before: int, width: int, stride: int, *, projected: bool = True) -> tuple[Residual, int]:
    body = _layers((before, width, 3, stride), (width, width, 3, 1))
    plain = nn.Identity() if before == width else Shorten(width)
    return Residual(body, _projection(before, width, stride) if projected else plain), width


def _bottleneck(before: int, width: int, stride: int) -> tuple[Residual, int]:
    body = _layers((before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
    return Residual(body, _projection(before, 4 * width, stride)), 4 * width


_Block = Callable[[int, int, int], tuple[Residual, int]]
# name: block, channels and number of blocks of each group, channels of the stem
_SHAPES: dict[str, tuple[_Block, list[tuple[int, int]], int]] = {
    "paper-32": (_basic, [(64, 3), (128, 4), (256, 6), (512, 3)], 64),
    "18": (_basic, [(64, 2), (128, 2), (256, 2), (512, 2)], 64),
    "32": (partial(_basic, projected=False), [(16, 5), (32, 5), (64, 5)], 16),
    "50": (_bottleneck, [(64, 3), (128, 4), (256, 6), (512, 3)], 64),
}


def resnet(
    name: Literal["paper-32", "18", "32", "50"] = "paper-32",
    num_classes: int | None = None,
    image_size: int | None = None,
    *,
    width_factor: float = 1.0,
    seed: int = 0,
) -> StagedModel:
    """Build a residual network with one stage for each size of the feature map.

    A head has convolutions of 128 and 64 channels, a global pool and a linear layer.

    Args:
        name: ``"paper-32"`` is the paper's ResNet-32: basic blocks 64x3, 128x4, 256x6, 512x3 behind a 3x3 stem, the shape of
            ResNet-34; ``"18"`` has two of each. ``"32"`` is He's CIFAR ResNet-32 (16, 32, 64 channels, 5 blocks each), whose
            three sizes make three stages. ``"50"`` is ResNet-50 (stride in the 3x3 convolution).
        num_classes: number of outputs; default: 1000 for ``"50"``, else 10.
        image_size: height and width of the images; default: 224 for ``"50"``, else 32. From 64 on, the stem is a 7x7
            convolution of stride 2 and a 3x3 max pool of stride 2, below that a 3x3 convolution.
        width_factor: factor of all channels, including the heads', for small trials; 1 is the full network.
        seed: seed of the initial values.

    >>> sum(p.numel() for stage in resnet("paper-32").stages for p in stage.parameters())
    21282122
    """
    if name not in _SHAPES:
        raise ValueError(f"`name` should be one of {', '.join(map(repr, _SHAPES))}. Found {name!r}.")
    if width_factor <= 0:
        raise ValueError(f"`width_factor` should be above 0. Found {width_factor}.")
    classes, size = (1000, 224) if name == "50" else (10, 32)
    num_classes = classes if num_classes is None else num_classes
    image_size = size if image_size is None else image_size
    check_at_least(1, num_classes=num_classes)
    check_at_least(8, image_size=image_size)
    make, groups, stem = _SHAPES[name]
    channels = max(1, round(stem * width_factor))
    pieces: dict[str, nn.Module] = {"stem": _stem(channels, large=image_size >= 64)}
    starts = []
    widths = {"stem": channels}
    for group, (width, count) in enumerate(groups):
        for i in range(count):
            stride = 2 if group and not i else 1
            piece = f"groups.{group}.{i}"
            pieces[piece], channels = make(channels, max(1, round(width * width_factor)), stride)
            widths[piece] = channels
        starts.append(f"groups.{group}.0")
    pieces["output"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    head_widths = [max(1, round(width * width_factor)) for width in heads.WIDTHS]
    return build(pieces, starts[1:], lambda piece: heads.convolutional(widths[piece], num_classes, head_widths), seed)


def _stem(channels: int, large: bool) -> nn.Sequential:
    first = Conv2d(3, channels, 7, 2) if large else Conv2d(3, channels, 3)
    pool = [nn.MaxPool2d(3, stride=2, padding=1)] if large else []
    return nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU(), *pool)
