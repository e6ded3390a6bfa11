"""Families of Hugging Face networks: the modules of a class in the order they run, and how its forward calls each.

To add a class, list its modules. Operations that a forward performs between them, such as a mean over tokens, go into the
function that calls the next module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu

from nwise.checks import hint
from nwise.network.huggingface import Call, CallContext, Family
from nwise.tensors import Tensors, names

__all__ = ["FAMILIES", "family_for", "run_model"]


def run(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Call a module with the hidden state alone."""
    return piece(x)


def run_without_mask(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Call a block of attention that sees all positions, whatever the configuration says."""
    return piece(x, attention_mask=None)


def attend(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Call a block of attention that sees all positions, unless the configuration says otherwise."""
    return piece(x, attention_mask=None, **context.attention())


def skip(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Return the hidden state as it is: the forward does not use the module, whose weights belong to the network's file."""
    return x


def _call_on_first_token(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(x[:, 0])


def _call_on_mean(piece: nn.Module, x: Tensor, context: CallContext, first: int = 0) -> Tensor:
    return piece(x[:, first:].mean(dim=1))


def _call_on_first_and_mean(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(torch.cat([x[:, 0], x[:, 1:].mean(dim=1)], dim=1))


def _call_on_pooled(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(x.mean([-2, -1]))


def _embed(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    # Settings of single classes, without effect in all others: 1.0 and 0.0 change no bit.
    x = piece(x) * getattr(context.config, "embedding_multiplier", 1.0)  # Granite
    return dropout(x, getattr(context.config, "embedding_dropout", 0.0), piece.training)  # Starcoder 2


def _logits(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Call the output matrix, then scale or bound the logits as some configurations ask."""
    logits = piece(x)
    config = context.config
    logits = logits * (getattr(config, "logit_scale", None) or 1.0)  # Cohere
    logits = logits / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    bound = getattr(config, "final_logit_softcapping", None)  # Gemma
    return logits if bound is None else bound * torch.tanh(logits / bound)


def _add_positions(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return x + piece(context.positions(x))


def _gpt2_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    mask = context.mask(x, "full_attention")
    return piece(x, attention_mask=mask, position_ids=context.positions(x), **context.attention())


def _rotary_block(
    piece: nn.Module, x: Tensor, context: CallContext, packed: bool = True, also: Callable[..., Tensor] | None = None
) -> Tensor:
    kind = _attention_kind(piece, context.config)
    return piece(
        x,
        attention_mask=context.mask(x, kind, packed=packed, also=also),
        position_ids=context.positions(x),
        position_embeddings=context.rotary(x, kind),
        **context.attention(),
    )


def _gemma3_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    # Gemma 3 for embeddings sees positions on both sides, as far as the window of the layer reaches.
    def also(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        full = _attention_kind(piece, context.config) == "full_attention"
        return torch.tensor(True, device=x.device) if full else abs(query - key) < context.config.sliding_window

    return _rotary_block(piece, x, context, also=also if context.config.use_bidirectional_attention else None)


def _attention_kind(block: nn.Module, config: Any) -> str:
    """Read the kind of mask from the configuration: Qwen lists it per layer, Mistral has one window for all."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return kinds[block.self_attn.layer_idx]  # type: ignore[union-attr]
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def _encoder_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    decoder = getattr(context.config, "is_decoder", False)
    return piece(x, context.mask(x, "full_attention" if decoder else "bidirectional"), **context.attention())


def _bert_embeddings(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(input_ids=x, token_type_ids=context.given.get("token_type_ids"))


def _image_embeddings(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(x.to(next(piece.parameters()).dtype))


# Networks with two halves: a decoder reads the encoder's output in every block.
#
#     input_ids -> embedding -> encoder blocks -> norm --+-----------+-----------+
#                                                        v           v           v
#     decoder_input_ids ---------------> embedding -> block ... -> block ... -> norm -> logits
#
# The encoder's output travels from stage to stage beside the hidden state, and its gradient comes back. So do T5's position
# biases, which the first block of each half computes for all others.
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


def _t5_begin_decoder(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return _begin_decoder(piece, dropout(x, context.config.dropout_rate, piece.training), context)


def _t5_block(piece: nn.Module, x: Tensor, context: CallContext, decoder: bool = False) -> Tensor:
    mask = context.mask(x, "decoder" if decoder else "bidirectional")
    bias = context.given.get(_BIAS)
    encoded = (context.given[_ENCODED], context.mask(x, "cross")) if decoder else ()
    # The first block has the table of biases and makes them; it returns what later blocks get.
    x, context.given[_BIAS], _ = piece(x, mask, bias, *encoded, **context.attention())
    return x


def _t5_logits(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    x = dropout(x, context.config.dropout_rate, piece.training)
    return piece(x * context.config.d_model**-0.5 if context.config.scale_decoder_outputs else x)


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
    mask = context.mask(x, "decoder")
    encoded = context.given[_ENCODED]
    return piece(x, mask, encoded, use_cache=False, **context.attention())


_TEXT = ("input_ids", "attention_mask", "position_ids")
_CARRIED = ("attention_mask", "position_ids")
_GPT2 = Family(
    _TEXT,
    _CARRIED,
    {
        "transformer.wte": run,
        "transformer.wpe": _add_positions,
        "transformer.drop": run,
        "transformer.h.*": _gpt2_block,
        "transformer.ln_f": run,
        "lm_head": run,
    },
)


def _decoder(prefix: str, embedding: str, dropout: str, norm: str) -> Family:
    """Return a family of decoders with rotary positions. A network may lack some of the modules."""
    pieces = {f"{prefix}.{embedding}": _embed, f"{prefix}.{dropout}": run, f"{prefix}.layers.*": _rotary_block}
    return Family(_TEXT, _CARRIED, {**pieces, f"{prefix}.{norm}": run, "lm_head": _logits}, (f"{prefix}.rotary_emb",))


_LLAMA = _decoder("model", "embed_tokens", "embed_dropout", "norm")
# Decoders whose modules have Llama's names, whatever is in their blocks.
_LIKE_LLAMA = (
    "Apertus", "Arcee", "BitNet", "Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Gemma", "Gemma2", "Glm",
    "Glm4", "Granite", "Helium", "Llama", "Ministral", "Mistral", "Mixtral", "Nemotron", "Olmo", "Olmo2",
    "Olmo3", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2",
    "VaultGemma",
)  # fmt: skip


def _bert(prefix: str, ends: Mapping[str, Call]) -> Family:
    """Return a family of encoders with BERT's names; the mask of attention is needed in every block."""
    body = {
        f"{prefix}.embeddings": _bert_embeddings,
        f"{prefix}.embeddings_project": run,  # of ELECTRA
        f"{prefix}.encoder.layer.*": _encoder_block,
    }
    return Family(("input_ids", "attention_mask", "token_type_ids"), ("attention_mask",), {**body, **ends})


def _vision(pieces: Mapping[str, Call]) -> Family:
    return Family(("pixel_values",), (), pieces)


def _vit(prefix: str, blocks: str = "layers", classify: Call = _call_on_first_token) -> Family:
    pieces = {f"{prefix}.embeddings": _image_embeddings, f"{prefix}.{blocks}.*": attend}
    return _vision({**pieces, f"{prefix}.layernorm": run, "classifier": classify})


_T5 = Family(
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
_WHISPER = Family(
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

# Names of the modules in the order of the forward, with how each is called. `*` runs over the blocks.
FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": _GPT2,
    **{f"{name}ForCausalLM": _LLAMA for name in _LIKE_LLAMA},
    "Gemma3ForCausalLM": replace(_LLAMA, pieces={**_LLAMA.pieces, "model.layers.*": _gemma3_block}),
    "GptOssForCausalLM": replace(
        _LLAMA, pieces={**_LLAMA.pieces, "model.layers.*": partial(_rotary_block, packed=False)}
    ),
    "PhiForCausalLM": _decoder("model", "embed_tokens", "embed_dropout", "final_layernorm"),
    "T5ForConditionalGeneration": _T5,
    "WhisperForConditionalGeneration": _WHISPER,
    "GPTNeoXForCausalLM": _decoder("gpt_neox", "embed_in", "emb_dropout", "final_layer_norm"),
    "BertForSequenceClassification": _bert("bert", {"bert.pooler": run, "dropout": run, "classifier": run}),
    "BertForMaskedLM": _bert("bert", {"cls": run}),
    "RobertaForSequenceClassification": _bert("roberta", {"classifier": run}),
    "RobertaForMaskedLM": _bert("roberta", {"lm_head": run}),
    "XLMRobertaForSequenceClassification": _bert("roberta", {"classifier": run}),
    "XLMRobertaForMaskedLM": _bert("roberta", {"lm_head": run}),
    "ElectraForSequenceClassification": _bert("electra", {"classifier": run}),
    "ViTForImageClassification": _vit("vit"),
    "DeiTForImageClassification": _vit("deit"),
    "Dinov2ForImageClassification": _vit("dinov2", "encoder.layer", _call_on_first_and_mean),
    "CLIPForImageClassification": _vision(
        {
            "vision_model.embeddings": _image_embeddings,
            "vision_model.pre_layrnorm": run,
            "vision_model.encoder.layers.*": attend,
            "vision_model.post_layernorm": skip,
            "classifier": partial(_call_on_mean, first=1),
        }
    ),
    "SiglipForImageClassification": _vision(
        {
            "vision_model.embeddings": _image_embeddings,
            "vision_model.encoder.layers.*": run_without_mask,
            "vision_model.post_layernorm": run,
            "vision_model.head": skip,
            "classifier": _call_on_mean,
        }
    ),
    "ResNetForImageClassification": _vision(
        {"resnet.embedder": run, "resnet.encoder.stages.*.layers.*": run, "resnet.pooler": run, "classifier": run}
    ),
    "ConvNextForImageClassification": _vision(
        {
            "convnext.embeddings": run,
            "convnext.encoder.stages.*": run,
            "convnext.layernorm": _call_on_pooled,
            "classifier": run,
        }
    ),
}


def family_for(model: nn.Module) -> Family:
    """Look up the family of a model by its class.

    Raises:
        ValueError: the class is unknown.
    """
    if (name := type(model).__name__) not in FAMILIES:
        raise ValueError(
            f"A Hugging Face model should be of a class in `nwise.network.families`. Found {name}.{hint(name, FAMILIES)} "
            "Write its stages yourself, or add a `Family`."
        )
    return FAMILIES[name]


def run_model(model: nn.Module, inputs: Tensors) -> Any:
    """Return the logits of the unsplit model."""
    named: dict[str, Any] = dict(zip(names(inputs) or family_for(model).inputs, inputs, strict=False))
    if getattr(model.config, "is_encoder_decoder", False) or "input_ids" in named:
        named["use_cache"] = False  # stages have no cache, and using one rounds differently
    return model(**named, return_dict=True).logits
