"""Every setting of the classes that nwise cuts: other values for each field of their configurations, and what the stages make of it.

python tests/settings.py    # docs/settings.md
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import nwise
from architectures import CLASSES, VOCABULARY, tiny
from nwise.models.families import FAMILIES
from nwise.models.huggingface import family_for, run_model
from nwise.tensors import Named, Tensors, run_module

Options = dict[str, Any]
LENGTH = 9

# Fields that describe the network to other programs, or the values it starts with. The forward reads none of them.
DESCRIBE = set(
    "transformers_version architectures return_dict is_encoder_decoder id2label label2id problem_type initializer_range init_std "
    "initializer_factor use_cache eos_token_id bos_token_id decoder_start_token_id output_hidden_states dtype tie_word_embeddings "
    "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout summary_last_dropout "
    "pretraining_tp encoder_stride pooler_output_size pooler_act _out_features _out_indices apply_layernorm reshape_hidden_states "
    "suppress_tokens begin_suppress_tokens use_weighted_layer_sum classifier_proj_size median_filter_width projection_dim "
    "no_rope_layer_interval sliding_window_pattern original_max_position_embeddings num_stages "
    "router_aux_loss_coef".split()
)
# Sizes: every size runs the same code.
SIZES = set(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size max_position_embeddings num_key_value_heads "
    "head_dim type_vocab_size num_channels image_size patch_size n_positions n_embd n_layer n_head n_inner num_local_experts "
    "moe_intermediate_size num_experts shared_expert_intermediate_size d_model embedding_size hidden_sizes depths d_kv d_ff "
    "num_layers num_decoder_layers num_heads num_mel_bins encoder_layers encoder_attention_heads decoder_layers "
    "decoder_attention_heads decoder_ffn_dim encoder_ffn_dim max_source_positions max_target_positions mlp_ratio".split()
)
_SPEC = {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2, "mask_feature_length": 2}
_WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
# Other values of the fields that have more to them than another number or the opposite.
VALUES: dict[str, list[Options]] = {
    "chunk_size_feed_forward": [{"chunk_size_feed_forward": 1}],
    "hidden_act": [{"hidden_act": "tanh"}],
    "hidden_activation": [{"hidden_activation": "tanh"}],
    "activation_function": [{"activation_function": "tanh"}],
    "pad_token_id": [{"pad_token_id": 3}],
    "sliding_window": [{**_WINDOW, "sliding_window": 2}, {"sliding_window": None}],
    "use_sliding_window": [_WINDOW, {**_WINDOW, "use_sliding_window": False}],
    "max_window_layers": [{**_WINDOW, "max_window_layers": 0}, {**_WINDOW, "max_window_layers": 4}],
    "is_decoder": [{"is_decoder": True}],
    "add_cross_attention": [{"add_cross_attention": True, "is_decoder": True}],
    "use_bidirectional_attention": [{"use_bidirectional_attention": True}],
    "num_experts_per_tok": [{"num_experts_per_tok": 2}],
    "clip_qkv": [{"clip_qkv": 0.3}],
    "output_router_logits": [{"output_router_logits": True, "router_aux_loss_coef": 0.5}],
    "mlp_only_layers": [{"mlp_only_layers": [1]}],
    "decoder_sparse_step": [{"decoder_sparse_step": 2}],
    "no_rope_layers": [{"no_rope_layers": [0, 1, 1, 0, 1]}],
    "feed_forward_proj": [{"feed_forward_proj": "gated-gelu"}],
    "layer_type": [{"layer_type": "bottleneck"}],
    "hidden_dropout_prob": [{"hidden_dropout_prob": 0.3}],
    "apply_spec_augment": [_SPEC],
    "mask_time_prob": [{**_SPEC, "mask_time_prob": 0.9}],
    "mask_time_length": [{**_SPEC, "mask_time_length": 3}],
    "mask_time_min_masks": [{**_SPEC, "mask_time_min_masks": 4}],
    "mask_feature_prob": [{**_SPEC, "mask_time_prob": 0.0, "mask_feature_prob": 0.5}],
    "mask_feature_length": [{**_SPEC, "mask_feature_prob": 0.5, "mask_feature_length": 1}],
    "mask_feature_min_masks": [{**_SPEC, "mask_feature_prob": 0.1, "mask_feature_min_masks": 2}],
    "attn_logit_softcapping": [{"attn_logit_softcapping": 1.5, "attn_implementation": "eager"}],
    "relative_attention_num_buckets": [{"relative_attention_num_buckets": 4}],
    "relative_attention_max_distance": [{"relative_attention_num_buckets": 4, "relative_attention_max_distance": 4}],
    "vision_use_head": [{"vision_use_head": False}],
    "layerscale_value": [{"layerscale_value": 0.3}],
}
_ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 4},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}


def configuration(model: Any) -> Any:
    """Return the configuration of a network's blocks."""
    return getattr(model.config, "vision_config", model.config)


def settings(name: str) -> Iterator[tuple[str, Options]]:
    """Yield the settings of a class, each with the options of a configuration that has another value for it."""
    model = tiny(name)
    config = configuration(model)
    for field in dataclasses.fields(config):
        if field.name in DESCRIBE | SIZES or field.name == "rope_parameters":
            continue
        present = getattr(config, field.name)
        if field.name == "layer_types":
            kinds = sorted(set(present or ()) | {"full_attention", "sliding_attention"})
            yield "layer_types", {**_WINDOW, "layer_types": [kinds[i % 2] for i in range(config.num_hidden_layers)]}
        elif field.name in VALUES:
            for i, options in enumerate(VALUES[field.name]):
                yield field.name + (f" ({i + 1})" if i else ""), options
        elif "dropout" in field.name or "drop_path" in field.name or "pdrop" in field.name or "layerdrop" in field.name:
            yield field.name, {field.name: 0.4}
        elif isinstance(present, bool):
            yield field.name, {field.name: not present}
        elif isinstance(present, int | float):
            yield field.name, {field.name: present * 3 + (0.3 if isinstance(present, float) else 0)}
        else:
            raise ValueError(f"{name}: give a value to {field.name}, now {present!r}")
    rope = getattr(config, "rope_parameters", None)
    for kind, options in _ROPE.items() if rope else ():
        yield f"rope {kind}", {"rope_parameters": _rope(rope, options, config)}
    for implementation in ("eager", "sdpa"):
        yield f"attention {implementation}", {"attn_implementation": implementation}
    if "num_experts_per_tok" in {field.name for field in dataclasses.fields(config)}:
        for implementation in ("eager", "batched_mm", "grouped_mm"):
            yield f"experts {implementation}", {"experts_implementation": implementation}


def _rope(rope: Mapping[str, Any], options: Options, config: Any) -> Options:
    if "rope_type" not in rope:  # one for each kind of attention
        return {kind: _rope(one, options, config) for kind, one in rope.items()}
    made = {**rope, **options}
    if made["rope_type"] == "longrope":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(size * made.get("partial_rotary_factor", 1.0)) // 2
        made |= {"short_factor": [1.0 + i for i in range(half)], "long_factor": [2.0 + i for i in range(half)]}
    return made


def inputs_for(model: Any) -> tuple[Tensor, ...]:
    """Every input of a network: padded text, with other positions or segments, or images."""
    if model.main_input_name == "pixel_values":
        return (torch.randn(4, 3, 8, 8),)
    if model.main_input_name == "input_features":
        sound, ids, mask = torch.randn(4, 4, 16), torch.randint(2, VOCABULARY, (4, LENGTH)), torch.ones(4, LENGTH)
        mask[2, :2] = 0
        return sound, ids, mask
    ids, mask = torch.randint(2, VOCABULARY, (4, LENGTH)), torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 6:] = 0  # a sequence that is padded
    if "decoder_input_ids" in FAMILIES[type(model).__name__].inputs:
        other = torch.ones(4, 7, dtype=torch.long)
        other[3, 5:] = 0
        return ids, mask, torch.randint(2, VOCABULARY, (4, 7)), other
    if "token_type_ids" in FAMILIES[type(model).__name__].inputs:
        return ids, mask, torch.randint(0, model.config.type_vocab_size, (4, LENGTH))
    positions = torch.arange(LENGTH).expand(4, LENGTH).clone()
    positions[2] += 3
    return ids, mask, positions


def run_stages(stages: Any, inputs: Tensors) -> Tensor:
    for stage in stages:
        inputs = run_module(stage, inputs, "The output")
    return inputs[0]


def in_training(model: Any, run: Any, inputs: Tensors) -> tuple[Tensor, list[Tensor | None]]:
    """Return outputs and gradients of a sum of them, with the random numbers of one seed."""
    model.train()
    model.zero_grad()
    torch.manual_seed(7)
    output = run()
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    return output.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def outcome(name: str, options: Options, inputs: Tensors) -> str:
    """Compare the stages with the model: "equal", "refused", "no effect", "invalid" or what differs."""
    try:
        model = tiny(name, **options)
        expected, gradients = in_training(model, lambda: run_model(model, inputs), inputs)
    except Exception as e:
        return f"invalid {type(e).__name__} {str(e)[:110]}"
    try:
        stages = nwise.split(model, at=2)
    except ValueError as error:
        return "refused " + str(error)
    try:
        found, others = in_training(model, lambda: run_stages(stages, inputs), inputs)
    except Exception as e:
        return f"STAGES RAISE {type(e).__name__} {str(e)[:110]}"
    if not torch.equal(found, expected):
        return f"OUTPUT {float((found - expected).abs().max()):.2g} of {float(expected.abs().max()):.2g}"
    for (n, _), a, b in zip(model.named_parameters(), gradients, others, strict=True):
        if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max()) + 1e-9)):
            return f"GRADIENT {n}"
    base = tiny(name)
    plain, _ = in_training(base, lambda: run_model(base, inputs), inputs)
    return "no effect" if torch.equal(plain, expected) else "equal"


if __name__ == "__main__":
    import transformers
    import warnings
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    only = sys.argv[1:]
    for name in FAMILIES:
        if only and not any(o in name for o in only):
            continue
        torch.manual_seed(0)
        inputs = inputs_for(tiny(name))
        print("==", name, flush=True)
        for label, options in settings(name):
            print("  ", label, "->", outcome(name, options, inputs), flush=True)
