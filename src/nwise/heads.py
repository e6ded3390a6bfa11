"""Builders of auxiliary heads, for any feature map or token sequence.

B  batch    C  channels    T  sequence length    D  width    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from nwise.layers import TransformerBlock, conv_bn_relu, vocabulary


def linear(shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """One linear layer on the flattened features (the paper's small convolutional network).

    Args:
        shape: of the features of one sample, such as ``(32, 16, 16)``.
        num_classes: number of outputs.

    >>> import torch
    >>> linear((3, 4, 4), 10)(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), num_classes))


def convolutional(channels: int, num_classes: int, widths: Sequence[int] = (128, 64)) -> nn.Sequential:
    """Convolutions (3x3, batch norm, ReLU), global average pool, linear (the paper's ResNets).

    Args:
        channels: of the feature map ``[B, C, H, W]``, of any height and width.
        num_classes: number of outputs.
        widths: channels of each convolution.

    >>> import torch
    >>> convolutional(8, 10)(torch.zeros(2, 8, 5, 5)).shape
    torch.Size([2, 10])
    """
    layers: list[nn.Module] = [
        conv_bn_relu(before, after) for before, after in zip([channels, *widths], widths, strict=False)
    ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear([channels, *widths][-1], num_classes)
    )


def transformer(width: int, num_heads: int, vocabulary_size: int, num_blocks: int = 2) -> nn.Sequential:
    """Transformer blocks, layer norm and vocabulary matrix (the paper's language models).

    Args:
        width: of the tokens ``[B, T, D]``.
        num_heads: attention heads of each block.
        vocabulary_size: number of outputs per token.
        num_blocks: how many blocks.

    >>> import torch
    >>> transformer(8, 2, 50)(torch.zeros(2, 7, 8)).shape
    torch.Size([2, 7, 50])
    """
    return nn.Sequential(
        *(TransformerBlock(width, num_heads) for _ in range(num_blocks)), vocabulary(width, vocabulary_size)
    )


class PooledTokens(nn.Module):
    """Mean over the tokens, layer norm and linear layer: ``[B, T, D] -> [B, classes]``.

    Args:
        width: of the tokens.
        num_classes: number of outputs.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, num_classes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.classify(self.norm(x_BTD.mean(dim=1)))


def pooled_tokens(width: int, num_classes: int) -> PooledTokens:
    """Classifier of a token sequence of any length, for vision transformers and encoders.

    >>> import torch
    >>> pooled_tokens(8, 10)(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 10])
    """
    return PooledTokens(width, num_classes)
