"""The paper's decoder-only Transformer (experiments E6 and E7), GPT-2-like."""

from __future__ import annotations

from torch import nn

from nwise.app.models.staged import StagedModel, build, name_blocks
from nwise.checks import check_at_least
from nwise.losses import AT_ONCE
from nwise.network.layers import Embedding, TransformerBlock, Vocabulary


def gpt(
    num_stages: int = 4,
    blocks_per_stage: int = 6,
    width: int = 1024,
    num_heads: int = 4,
    sequence_length: int = 128,
    vocabulary_size: int = 50257,
    *,
    head_blocks: int = 2,
    head_rank: int | None = None,
    loss_fraction: float = 1.0,
    dropout: float = 0.0,
    seed: int = 0,
) -> StagedModel:
    """Build a Transformer in stages, tokens ``[B, T]`` to logits ``[B, T, V]``, with the embedding in the first stage.

    Embedding and output projection are not tied: they lie on different stages, and with local losses a
    shared value would have two credits. A stage of the default size with its head has 152M parameters. More than 2^28 logits
    are returned as their factors, which `nwise.losses.TokenCrossEntropy` takes too.

    The arguments are the fields of `nwise.app.recipes.Gpt`, and the dropout of attention and of both branches of the main
    network's blocks.

    >>> len(gpt(2, blocks_per_stage=1, width=8, num_heads=2, vocabulary_size=11).stages)
    2
    """
    check_at_least(1, num_stages=num_stages, blocks_per_stage=blocks_per_stage, width=width, num_heads=num_heads)
    check_at_least(1, sequence_length=sequence_length, vocabulary_size=vocabulary_size)
    check_at_least(0, head_blocks=head_blocks)
    blocks = name_blocks(TransformerBlock(width, num_heads, dropout) for _ in range(num_stages * blocks_per_stage))
    # A loss of some tokens is cheaper if it multiplies by the matrix itself.
    at_once = AT_ONCE if loss_fraction == 1 else 0
    pieces: dict[str, nn.Module] = {
        "embedding": Embedding(vocabulary_size, sequence_length, width),
        **blocks,
        "output": Vocabulary(width, vocabulary_size, at_once),
    }
    starts = [f"blocks.{k * blocks_per_stage}" for k in range(1, num_stages)]

    def head(_: str) -> nn.Module:
        blocks = (TransformerBlock(width, num_heads) for _ in range(head_blocks))
        return nn.Sequential(*blocks, Vocabulary(width, vocabulary_size, at_once, head_rank))

    return build(pieces, starts, head, seed)
