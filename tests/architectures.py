"""Tiny networks of every class that nwise cuts, and the reasons why it does not cut others; writes the table of the manual.

python tests/architectures.py    # docs/architectures.md
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

import nwise

os.environ["HF_HUB_OFFLINE"] = "1"  # configurations with random weights need no network

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
VOCABULARY, CLASSES = 37, 3
_WIDTHS = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 32}
_TEXT = {**_WIDTHS, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "max_position_embeddings": 64}
_DECODER = {**_TEXT, "num_key_value_heads": 1, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0}
_ENCODER = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
_IMAGE = {**_WIDTHS, "image_size": 8, "patch_size": 2, "num_labels": CLASSES, "hidden_dropout_prob": 0.0}
_SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
_EXPERTS = {
    **{"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_dropout": 0.0}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic", "num_labels": CLASSES}
# Options beside the usual ones. Those that a configuration has for its logits, embeddings or masks are on.
_OPTIONS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 32, **_NO_DROPOUT},
    "MistralForCausalLM": {"sliding_window": 4},
    "Qwen2ForCausalLM": _SLIDING,
    "GemmaForCausalLM": {"head_dim": 8},
    "Gemma2ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 4},
    "Gemma3ForCausalLM": {"head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 4},
    "VaultGemmaForCausalLM": {"head_dim": 8, "final_logit_softcapping": 2.0, "sliding_window": 4},
    "GraniteForCausalLM": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "CohereForCausalLM": {"head_dim": 8, "logit_scale": 0.5},
    "Cohere2ForCausalLM": {"head_dim": 8, "logit_scale": 0.5, "sliding_window": 4},
    "Phi3ForCausalLM": {"pad_token_id": 0, **_NO_DROPOUT},
    "PhiForCausalLM": _NO_DROPOUT,
    "SeedOssForCausalLM": {"head_dim": 8, "residual_dropout": 0.0},
    "GPTNeoXForCausalLM": {"hidden_dropout": 0.0},
    "ResNetForImageClassification": _RESNET,
    "ConvNextForImageClassification": {
        **{"num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2]},
        **{"patch_size": 2, "layer_scale_init_value": 0.5, "num_labels": CLASSES},
    },
    "CLIPForImageClassification": {"vision_config": {**_WIDTHS, "image_size": 8, "patch_size": 2}},
    "SiglipForImageClassification": {"vision_config": {**_WIDTHS, "image_size": 8, "patch_size": 2}},
    "ElectraForSequenceClassification": {"embedding_size": 8},
    "SmolLM3ForCausalLM": {"pad_token_id": 0},
    "T5ForConditionalGeneration": {
        **{"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "dropout_rate": 0.0},
        **{"num_layers": 2, "num_decoder_layers": 2, "tie_word_embeddings": False},
    },
    "WhisperForConditionalGeneration": {
        **{
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "num_mel_bins": 4,
            "max_source_positions": 8,
            "max_target_positions": 32,
        },
        **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "tie_word_embeddings": False},
        **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0},
    },
    **{
        f"{name}ForCausalLM": {"head_dim": 8, "pad_token_id": 0, **(_EXPERTS if name in ("GptOss", "Qwen3Moe") else {})}
        for name in (
            "Exaone4",
            "Ernie4_5",
            "Glm",
            "Glm4",
            "GptOss",
            "Helium",
            "Ministral",
            "Qwen3",
            "Qwen3Moe",
        )
    },
    **{f"{name}ForCausalLM": _EXPERTS for name in ("Mixtral", "Qwen2Moe")},
}
NOT_CUT = {
    "BartForConditionalGeneration": "not tried: an encoder and a decoder as in T5, called differently",
    "OPTForCausalLM": "positions are computed from the mask, and small sizes have projections between modules; stages by hand",
    "BloomForCausalLM": "attention biases are computed from the mask for all blocks; stages by hand",
    "FalconForCausalLM": "attention biases are computed from the mask for all blocks; stages by hand",
    "DeepseekV3ForCausalLM": "not tried: latent attention, whose rotary positions belong to parts of the attention heads",
    "Llama4ForCausalLM": "not tried: masks for chunks of the text",
    "MambaForCausalLM": "not tried: a state-space network without attention",
    "AlbertForMaskedLM": "all blocks share their parameters, so one parameter would belong to several stages",
    "DistilBertForMaskedLM": "the forward has functions between modules; stages by hand",
    "SwinForImageClassification": "windows need the height and width of the image, which are passed as integers; stages by hand",
    "Wav2Vec2ForCTC": "not tried: layers are left out at random, and masks are made inside the forward",
    "CLIPModel": "two networks and a loss over pairs of samples, which micro-batches would cut; its image tower alone is cut",
}


def tiny(name: str, **options: Any) -> Any:
    """Return a network of a class with the same random weights every time, large enough that every operation shows.

    Args:
        name: the class.
        options: values of its configuration, or of the configuration of its blocks, beside those of the tests.
    """
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, name)
    usual = _DECODER if name.endswith("ForCausalLM") else _IMAGE if name.endswith("ImageClassification") else _ENCODER
    if (
        name in ("GPT2LMHeadModel", "ResNetForImageClassification", "ConvNextForImageClassification")
        or "Conditional" in name
    ):
        usual = {"vocab_size": VOCABULARY, "tie_word_embeddings": False} if "GPT2" in name else {}
    own = _OPTIONS.get(name, {})
    own = {"vision_config": {**own["vision_config"], **options}} if "vision_config" in own else {**own, **options}
    model = cls(cls.config_class(**{**usual, **own}))
    nwise.untie(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def table() -> str:
    """Return the page: a row for every class."""
    from nwise.network.families import FAMILIES

    cuts: dict[str, list[str]] = {}
    for name in sorted(FAMILIES):
        cut = ", ".join(f"`{pattern}`" for pattern in FAMILIES[name].pieces if "*" in pattern)
        cuts.setdefault(cut, []).append(f"`{name}`")
    lines = [
        "# Architectures",
        "",
        f"`nwise.split` cuts {len(FAMILIES)} classes of `transformers` by the names of their modules. A test of each, with a",
        "tiny network, compares outputs and gradients with the original, trains it, and saves and loads it bit for bit. A test",
        "of every [setting](../tests/settings.md) of the configurations shows what stages follow; `nwise.split` refuses the few",
        "that they cannot, by name. Version 5.23 was tested.",
        "",
        "| cut at | classes |",
        "|---|---|",
        *(f"| {cut} | {', '.join(names)} |" for cut, names in cuts.items()),
    ]
    lines += ["", "Not cut by name:", "", *(f"- `{name}`: {reason}." for name, reason in sorted(NOT_CUT.items()))]
    lines += [
        "",
        "To add a class, list its modules in `nwise.network.families.FAMILIES`. Any network can be cut by hand, because a stage",
        "is any module ([your model](own.md)). `python tests/architectures.py` writes this page.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert not re.search(r"\| {2,}\|", table())
    PAGE.write_text(table())
