"""Builders of auxiliary heads, for any feature map or token sequence.

B  batch    C  channels    T  sequence length    D  width    V  vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from nwise.checks import check_at_least
from nwise.modes import evaluating
from nwise.network.chain import Chain, most_common
from nwise.network.layers import Norm, TransformerBlock, conv_norm_relu, vocabulary
from nwise.network.section import Section, StageModule, tail
from nwise.tensors import Input, Named, Tensors, as_tuple, main_tensor, run_module

__all__ = [
    "WIDTHS",
    "OnFirstOutput",
    "PooledTokens",
    "convolutional",
    "copied",
    "fitting",
    "linear",
    "shared",
    "transformer",
]

WIDTHS = (128, 64)  # the paper's


def linear(shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """Make one linear layer on the flattened features (the paper's small convolutional network).

    Args:
        shape: shape of one sample's features, e.g. ``(32, 16, 16)``.
        num_classes: number of outputs.

    >>> import torch
    >>> linear((3, 4, 4), 10)(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), num_classes))


def convolutional(
    channels: int, num_classes: int, widths: Sequence[int] = WIDTHS, norm: Norm | None = "batch"
) -> nn.Sequential:
    """Make convolutions (3x3, norm, ReLU), a global average pool and a linear layer (the paper's ResNets).

    Args:
        channels: channels of the feature map ``[B, C, H, W]``, of any height and width.
        num_classes: number of outputs.
        widths: channels of each convolution.
        norm: norm after each convolution, as for `nwise.network.layers.conv_norm_relu`.

    >>> import torch
    >>> convolutional(8, 10)(torch.zeros(2, 8, 5, 5)).shape
    torch.Size([2, 10])
    """
    sizes = [channels, *widths]
    layers = [conv_norm_relu(before, after, norm) for before, after in pairwise(sizes)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], num_classes))


def transformer(width: int, num_heads: int, vocabulary_size: int, num_blocks: int = 2) -> nn.Sequential:
    """Make Transformer blocks, a layer norm and a vocabulary matrix (the paper's language models).

    Args:
        width: width of the tokens ``[B, T, D]``.
        num_heads: attention heads of each block.
        vocabulary_size: number of outputs per token.
        num_blocks: number of blocks.

    >>> import torch
    >>> transformer(8, 2, 50)(torch.zeros(2, 7, 8)).shape
    torch.Size([2, 7, 50])
    """
    return nn.Sequential(
        *(TransformerBlock(width, num_heads) for _ in range(num_blocks)), vocabulary(width, vocabulary_size)
    )


class PooledTokens(nn.Module):
    """Mean over the tokens, layer norm and linear layer, for vision transformers and encoders: ``[B, T, D] -> [B, classes]``.

    Args:
        width: width of the tokens.
        num_classes: number of outputs.

    >>> import torch
    >>> PooledTokens(8, 10)(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, num_classes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.classify(self.norm(x_BTD.mean(dim=1)))


pooled_tokens = PooledTokens  # the builders of heads have names of functions


def copied(stages: Sequence[StageModule], blocks: int = 0) -> list[StageModule]:
    """Make heads that copy the end of the network: its last `blocks` blocks and everything behind them.

    With ``blocks=2`` these are the heads of the paper's language models (section 4.3: two Transformer blocks and a
    vocabulary matrix), for any network whose blocks have equal shapes. Copies start from the values of the originals.

    Args:
        stages: the stages that `nwise.split` returned.
        blocks: number of repeated blocks (pieces of the most common class) to copy.

    Returns:
        A head for every stage but the last.

    Raises:
        ValueError: there is nothing to copy, or the network has fewer blocks.

    >>> from nwise import split
    >>> network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Tanh())
    >>> [list(head.pieces()) for head in copied(split(network, at=3), blocks=1)]
    [['3', '4'], ['3', '4']]
    """
    return [copy.deepcopy(_end(stages, blocks)) for _ in stages[:-1]]


def shared(stages: Sequence[StageModule]) -> list[StageModule]:
    """Make heads that *are* the end of the network, such as its last norm and vocabulary matrix: one head for all losses.

    Its gradient is the sum over the losses that run. It runs in one process. A trained network needs nothing else to exit
    early, so ``generate(..., assistant_early_exit=k)`` of transformers can use it.

    Args:
        stages: the stages that `nwise.split` returned.

    Returns:
        A head for every stage but the last.

    Raises:
        ValueError: nothing follows the last block.

    >>> from nwise import split
    >>> stages = split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Tanh()), at=2)
    >>> shared(stages)[0].pieces()["4"] is stages[1].pieces()["4"]
    True
    """
    return [_end(stages, 0) for _ in stages[:-1]]


def _end(stages: Sequence[StageModule], blocks: int) -> StageModule:
    """Return the last blocks of a network and everything behind them, as a module of the stages' own modules."""
    cut = [stage for stage in stages if isinstance(stage, Section)]
    if not all(isinstance(stage, Chain | Section) for stage in stages) or len(cut) not in (0, len(stages)):
        kinds = ", ".join(type(stage).__name__ for stage in stages)
        raise TypeError(f"`stages` should be those that `nwise.split` returned. Found {kinds}; call `split` first.")
    pieces = {name: piece for stage in stages for name, piece in stage.pieces().items()}
    names = list(pieces)
    repeated = most_common(pieces)
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 0 <= blocks <= len(repeated):
        raise ValueError(
            f"`blocks` should be an integer from 0 to the network's {len(repeated)} blocks. Found {blocks!r}."
        )
    #     embedding   block   block   block   norm   vocabulary
    #                                         |--- blocks=0 ---|
    #                                 |------- blocks=1 -------|
    first = names.index(repeated[-blocks]) if blocks else names.index(repeated[-1]) + 1
    if first == len(names):
        raise ValueError(
            f"The network should end in a module behind its last block, {repeated[-1]!r}, to copy. Found none; copy that block "
            "too (`blocks=1`), or use `heads.fitting`."
        )
    return tail(cut, names[first]) if cut else Chain({name: pieces[name] for name in names[first:]})


class OnFirstOutput(nn.Sequential):
    """Layers on the first of a stage's outputs, or on the hidden state of named ones; they ignore the other tensors."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        x = main_tensor(Named(named) if named else inputs)
        for layer in self:
            x = layer(x)
        return x


def fitting(
    stages: Sequence[nn.Module], example: Input | Tensors, num_outputs: int, *, per_token: bool = False
) -> list[nn.Module]:
    """Make heads for the stages' outputs: `convolutional` for maps, `pooled_tokens` for sequences, `linear` for vectors.

    Convolutions are at most as wide as the stage's output and as the paper's, and have a norm if the network has one.
    `Pipeline.summary` reports the number of their parameters.

    Args:
        stages: the main network, which runs once on the example, in eval mode without gradients.
        example: an input, or a tuple or dictionary of them; one sample is enough.
        num_outputs: number of classes, or size of the vocabulary.
        per_token: whether a sequence has an output for every token (layer norm and vocabulary matrix), not one for all.

    Returns:
        A head for every stage but the last.

    >>> import torch
    >>> [head[0].classify.in_features for head in fitting([nn.Linear(3, 8), nn.Linear(8, 2)], torch.zeros(1, 5, 3), 2)]
    [8]
    """
    check_at_least(1, num_outputs=num_outputs)
    hidden = as_tuple(example, "`example`")
    heads: list[nn.Module] = []
    norm = _infer_norm(stages)
    # One run of the network: each stage's output is the example of its head and of the next stage.
    for k, stage in enumerate(stages[:-1]):
        with evaluating(stage):
            hidden = run_module(stage, hidden, f"The output of stage {k}")
        main = main_tensor(hidden)
        head = _infer_head(main, num_outputs, per_token, k, norm)
        heads.append(OnFirstOutput(head.to(main.device, main.dtype)))
    return heads


def _infer_norm(stages: Iterable[nn.Module]) -> Norm | None:
    """Choose the heads' norm: none if the network has none, and batch norm only if the network uses it."""
    names = {type(module).__name__ for stage in stages for module in stage.modules()}
    if any("BatchNorm" in name for name in names):
        return "batch"
    return "group" if any("Norm" in name for name in names) else None


def _infer_head(output: Tensor, num_outputs: int, per_token: bool, stage: int, norm: Norm | None) -> nn.Module:
    shape = output.shape[1:]
    if per_token and len(shape) == 2:
        return vocabulary(shape[1], num_outputs)
    if per_token or not 1 <= len(shape) <= 3:
        expected = "[B, T, D]" if per_token else "[B, D], [B, T, D] or [B, C, H, W]"
        raise ValueError(
            f"Stage {stage} should return a tensor of shape {expected} for a head to fit. Found {list(output.shape)}; write the "
            "head yourself."
        )
    if len(shape) == 3:
        return convolutional(shape[0], num_outputs, [min(width, shape[0]) for width in WIDTHS], norm)
    return pooled_tokens(shape[1], num_outputs) if len(shape) == 2 else linear(shape, num_outputs)
