"""Layers of both models and heads.

B  batch    T  sequence length    D  width    V  vocabulary
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from nwise.checks import check_at_least
from nwise.losses import AT_ONCE

__all__ = [
    "Embedding",
    "Linear",
    "NormalEmbedding",
    "SelfAttention",
    "TransformerBlock",
    "Vocabulary",
    "conv_norm_relu",
    "vocabulary",
]


class Linear(nn.Linear):
    """A linear layer initialised as in GPT-2: normal with deviation 0.02, zero bias."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class SelfAttention(nn.Module):
    """Causal multi-head self-attention, ``[B, T, D] -> [B, T, D]``."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"`width` should be a multiple of `num_heads = {num_heads}`. Found {width}.")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        # [B, T, 3 D] -> [B, T, 3, heads, D / heads] -> three of [B, heads, T, D / heads]
        q, k, v = self.qkv(x_BTD).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """The block of GPT-2: attention and a four times wider MLP, each behind a layer norm, with residuals."""

    def __init__(self, width: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.drop(self.down(functional.gelu(self.up(self.norm2(x_BTD)))))


class NormalEmbedding(nn.Embedding):
    """An embedding initialised as in GPT-2: normal with deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Embedding(nn.Module):
    """Token and learned position embedding, ``[B, T] -> [B, T, D]``."""

    def __init__(self, vocabulary_size: int, sequence_length: int, width: int) -> None:
        super().__init__()
        self.tokens = NormalEmbedding(vocabulary_size, width)
        self.positions = NormalEmbedding(sequence_length, width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        if length > self.positions.num_embeddings:
            raise ValueError(
                f"A sequence should have at most `sequence_length = {self.positions.num_embeddings}` tokens. Found {length}."
            )
        return self.tokens(tokens_BT) + self.positions(torch.arange(length, device=tokens_BT.device))


def vocabulary(width: int, size: int) -> nn.Sequential:
    """Make a layer norm and a vocabulary matrix, ``[B, T, D] -> [B, T, V]``."""
    return nn.Sequential(nn.LayerNorm(width), Linear(width, size, bias=False))


class Vocabulary(nn.Sequential):
    """The layers of `vocabulary`; where the logits would take too much memory, the output is their two factors.

    `nwise.losses.TokenCrossEntropy` takes both, and `nwise.losses.logits_of` multiplies the factors of some tokens.

    Of a low `rank` the matrix is a product of two, so a token takes ``rank (D + V)`` multiplications instead of ``D V``. In one
    process heads may share the larger one (``head[-1] = other[-1]``).

    Args:
        width: width of the tokens, D.
        size: number of different tokens, V.
        at_once: most logits to return; 0 for factors always in training, and otherwise as by default: 2^28, half a GiB in bf16.
        rank: rank of the matrix; default: any.

    Raises:
        ValueError: a matrix of the `rank` would take more multiplications, not fewer.

    >>> x, output = torch.zeros(2, 3, 4), Vocabulary(4, 7, at_once=41)
    >>> [list(factor.shape) for factor in output(x)], list(output(x[:1]).shape)
    ([[2, 3, 4], [7, 4]], [1, 3, 7])
    """

    def __init__(self, width: int, size: int, at_once: int = AT_ONCE, rank: int | None = None) -> None:
        norm, matrix = vocabulary(width, size)
        if rank is None:
            super().__init__(norm, matrix)
        else:
            check_at_least(1, rank=rank)
            if rank * (width + size) >= width * size:
                raise ValueError(
                    f"`rank` should be less than {width * size / (width + size):.4g}, or two factors multiply no less than the "
                    f"matrix of {width} x {size}. Found {rank}; use a lower rank, or None."
                )
            super().__init__(norm, nn.Linear(width, rank, bias=False), Linear(rank, size, bias=False))
        self.at_once = at_once

    def forward(self, x_BTD: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        *before, matrix = self.children()
        hidden = x_BTD
        weight = matrix.weight
        for layer in before:
            hidden = layer(hidden)
        assert isinstance(weight, Tensor)  # under a delay a copy of the parameter
        most = self.at_once if self.at_once or self.training else AT_ONCE
        if hidden[..., 0].numel() * len(weight) > most:
            return hidden, weight.view_as(weight)  # a step gives its outputs gradients, which a parameter has already
        logits: Tensor = matrix(hidden)
        return logits


Norm = Literal["batch", "group"]


def conv_norm_relu(in_channels: int, out_channels: int, norm: Norm | None = "batch") -> nn.Sequential:
    """Make a 3x3 convolution of stride and padding 1, a norm, and a ReLU.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        norm: ``"batch"``, ``"group"`` (one group, independent of other samples), or None.

    Raises:
        ValueError: `norm` is something else.
    """
    if norm not in (*get_args(Norm), None):
        raise ValueError(f"`norm` should be {', '.join(get_args(Norm))} or None. Found {norm!r}.")
    layers: list[nn.Module] = [nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=norm is None)]
    if norm is not None:
        layers.append(nn.BatchNorm2d(out_channels) if norm == "batch" else nn.GroupNorm(1, out_channels))
    return nn.Sequential(*layers, nn.ReLU())
