"""Families of networks with two halves: an encoder, and a decoder that reads the encoder's output in every block.

    input_ids -> embedding -> encoder blocks -> norm --+-----------+-----------+
                                                       v           v           v
    decoder_input_ids ---------------> embedding -> block ... -> block ... -> norm -> logits

The encoder's output travels from stage to stage beside the hidden state, and its gradient comes back. So do T5's position biases,
which the first block of each half computes for all others.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu

from nwise.network.family import CallContext, Family, attend, run, skip

_ENCODED = "encoder_hidden_states"
_BIAS = "position_bias"


def _begin_decoder(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Keep the encoder's output for the blocks that follow, and embed the decoder's tokens."""
    # Biases of the encoder are for its own positions.
    context.given[_ENCODED] = x
    context.given.pop(_BIAS, None)
    if "decoder_input_ids" not in context.given:
        raise TypeError(
            f"The network should get decoder_input_ids, which it does not make from labels. Found {', '.join(context.given)}."
        )
    return piece(context.given.pop("decoder_input_ids"))


# T5 -------------------------------------------------------------------------------------------------


def _t5_begin_decoder(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return _begin_decoder(piece, dropout(x, context.config.dropout_rate, piece.training), context)


def _t5_block(piece: nn.Module, x: Tensor, context: CallContext, decoder: bool = False) -> Tensor:
    mask, bias = context.mask(x, "decoder" if decoder else "bidirectional"), context.given.get(_BIAS)
    encoded = (context.given[_ENCODED], context.mask(x, "cross")) if decoder else ()
    # The first block has the table of biases and makes them; it returns what later blocks get.
    x, context.given[_BIAS], _ = piece(x, mask, bias, *encoded, **context.attention())
    return x


def _t5_logits(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    x = dropout(x, context.config.dropout_rate, piece.training)
    return piece(x * context.config.d_model**-0.5 if context.config.scale_decoder_outputs else x)


T5 = Family(
    ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
    ("attention_mask", "decoder_input_ids", "decoder_attention_mask", _ENCODED, _BIAS),
    {
        "shared": skip,  # an untied network does not use the embedding that its halves used to share
        "encoder.embed_tokens": run,
        "encoder.dropout": run,
        "encoder.block.*": _t5_block,
        "encoder.final_layer_norm": run,
        "decoder.embed_tokens": _t5_begin_decoder,
        "decoder.dropout": run,
        "decoder.block.*": partial(_t5_block, decoder=True),
        "decoder.final_layer_norm": run,
        "lm_head": _t5_logits,
    },
)


# Whisper --------------------------------------------------------------------------------------------


def _convolve(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return gelu(piece(x))


def _add_frame_positions(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    positions = torch.arange(x.shape[2], device=x.device)
    return dropout(x.permute(0, 2, 1) + piece(positions), context.config.dropout, piece.training)


def _add_text_positions(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    x = x + piece(x, position_ids=context.positions(x))
    return dropout(x, context.config.dropout, piece.training)


def _is_left_out(block: nn.Module, probability: float) -> bool:
    """Draw whether LayerDrop leaves a block out, with the random number that the model would draw."""
    return block.training and probability > 0 and bool(torch.rand([]) < probability)


def _whisper_encoder_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return x if _is_left_out(piece, context.config.encoder_layerdrop) else attend(piece, x, context)


def _whisper_decoder_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    if _is_left_out(piece, context.config.decoder_layerdrop):
        return x
    mask, encoded = context.mask(x, "decoder"), context.given[_ENCODED]
    return piece(x, mask, encoded, use_cache=False, **context.attention())


WHISPER = Family(
    ("input_features", "decoder_input_ids", "decoder_attention_mask"),
    ("decoder_input_ids", "decoder_attention_mask", _ENCODED),
    {
        "model.encoder.conv1": _convolve,
        "model.encoder.conv2": _convolve,
        "model.encoder.embed_positions": _add_frame_positions,
        "model.encoder.layers.*": _whisper_encoder_block,
        "model.encoder.layer_norm": run,
        "model.decoder.embed_tokens": _begin_decoder,
        "model.decoder.embed_positions": _add_text_positions,
        "model.decoder.layers.*": _whisper_decoder_block,
        "model.decoder.layer_norm": run,
        "proj_out": run,
    },
)
