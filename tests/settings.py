"""The settings of every class that nwise cuts: other values for the fields of its configuration, and whether stages follow them.

python tests/settings.py    # tests/settings.md, in some minutes
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from architectures import VOCABULARY, tiny
from nwise.network.families import FAMILIES, run_model
from nwise.tensors import Named, Tensors, each, run_module

Options = dict[str, Any]
PAGE = Path(__file__).with_suffix(".md")
LENGTH = 9

# Fields that no forward reads: they describe the network to other programs, or belong to another task or to initial values.
_UNREAD = set(
    "transformers_version architectures return_dict is_encoder_decoder id2label label2id problem_type initializer_range "
    "init_std initializer_factor use_cache eos_token_id bos_token_id decoder_start_token_id output_hidden_states dtype "
    "tie_word_embeddings summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
    "summary_last_dropout pretraining_tp encoder_stride pooler_output_size pooler_act _out_features _out_indices "
    "apply_layernorm reshape_hidden_states suppress_tokens begin_suppress_tokens use_weighted_layer_sum classifier_proj_size "
    "median_filter_width projection_dim no_rope_layer_interval sliding_window_pattern original_max_position_embeddings "
    "num_stages router_aux_loss_coef".split()
)
# Fields for which every value runs the same code.
_SIZES = set(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size max_position_embeddings type_vocab_size "
    "num_key_value_heads head_dim num_channels image_size patch_size n_positions n_embd n_layer n_head n_inner num_experts "
    "num_local_experts moe_intermediate_size shared_expert_intermediate_size d_model embedding_size hidden_sizes depths d_kv "
    "d_ff num_layers num_decoder_layers num_heads num_mel_bins encoder_layers encoder_attention_heads decoder_layers "
    "decoder_attention_heads decoder_ffn_dim encoder_ffn_dim max_source_positions max_target_positions mlp_ratio".split()
)
_SPEC = {"apply_spec_augment": True, "mask_time_prob": 0.9, "mask_time_length": 2, "mask_feature_length": 2}
_WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
_EAGER = {"attn_implementation": "eager"}
# Fields that need others beside them, or a value that is not just another number, the opposite, or a probability.
_VALUES: dict[str, list[Options]] = {
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
    "router_jitter_noise": [{"router_jitter_noise": 0.4}],
    "swiglu_limit": [{"swiglu_limit": 0.1}],
    "mlp_only_layers": [{"mlp_only_layers": [1]}],
    "decoder_sparse_step": [{"decoder_sparse_step": 2}],
    "no_rope_layers": [{"no_rope_layers": [0, 1, 1, 0, 1]}],
    "feed_forward_proj": [{"feed_forward_proj": "gated-gelu"}],
    "layer_type": [{"layer_type": "bottleneck"}],
    "downsample_in_bottleneck": [{"layer_type": "bottleneck", "downsample_in_bottleneck": True}],
    "reorder_and_upcast_attn": [{"reorder_and_upcast_attn": True, **_EAGER}],
    "attn_logit_softcapping": [{"attn_logit_softcapping": 1.5, **_EAGER}],
    "apply_spec_augment": [_SPEC],
    "mask_time_prob": [_SPEC],
    "mask_time_length": [{**_SPEC, "mask_time_length": 3}],
    "mask_time_min_masks": [{**_SPEC, "mask_time_min_masks": 4}],
    "mask_feature_prob": [{**_SPEC, "mask_time_prob": 0.0, "mask_feature_prob": 0.9}],
    "mask_feature_length": [{**_SPEC, "mask_feature_prob": 0.9, "mask_feature_length": 1}],
    "mask_feature_min_masks": [{**_SPEC, "mask_feature_prob": 0.1, "mask_feature_min_masks": 2}],
    "relative_attention_num_buckets": [{"relative_attention_num_buckets": 4}],
    "relative_attention_max_distance": [{"relative_attention_num_buckets": 4, "relative_attention_max_distance": 4}],
}
_ROPE: dict[str, Options] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 4},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
    "default": {"partial_rotary_factor": 0.5},
}


def settings(name: str) -> Iterator[tuple[str, Options]]:
    """Yield the settings of a class, each with options of the configuration that give it another value."""
    whole = tiny(name).config
    config = getattr(whole, "vision_config", whole)
    known = {field.name for field in dataclasses.fields(config)}
    for field in sorted(known - _UNREAD - _SIZES - {"rope_parameters"}):
        for options in _values(field, config):
            yield field, {key: value for key, value in options.items() if key in known or key == "attn_implementation"}
    for kind in _ROPE if getattr(config, "rope_parameters", None) else ():
        sizes = {"head_dim": 8, "max_position_embeddings": 4 if kind == "dynamic" else 64}
        own = {key: value for key, value in sizes.items() if key in known}
        yield f"rope_parameters: {kind}", {"rope_parameters": _rope(config.rope_parameters, kind), **own}
    yield "attn_implementation", _EAGER
    if "num_experts_per_tok" in known:
        yield "experts_implementation", {"experts_implementation": "eager"}
        yield "experts_implementation", {"experts_implementation": "batched_mm"}
    for causal in (False, True):  # no field, but the base class of all models reads it
        yield "is_causal", {"is_causal": causal}


def _values(field: str, config: Any) -> list[Options]:
    """Return options that give a field another value."""
    present = getattr(config, field)
    if field == "layer_types":
        kinds = sorted({*(present or ()), "full_attention", "sliding_attention"})
        return [{**_WINDOW, field: [kinds[i % 2] for i in range(config.num_hidden_layers)]}]
    if field in _VALUES:
        return _VALUES[field]
    if any(part in field for part in ("dropout", "drop_path", "pdrop", "layerdrop")):
        return [{field: 0.4}]
    if isinstance(present, bool):
        return [{field: not present}]
    assert isinstance(present, int | float), (
        f"give other values for {field}, now {present!r}, or say that nothing reads it"
    )
    return [{field: 3 * present + (0.3 if isinstance(present, float) else 0)}]


def _rope(present: Mapping[str, Any], kind: str) -> Options:
    if "rope_type" not in present:  # one for each kind of attention
        return {attention: _rope(one, kind) for attention, one in present.items()}
    made = {**present, **_ROPE[kind], "rope_type": kind}
    if "partial_rotary_factor" in present:
        made["partial_rotary_factor"] = 0.5
    if kind == "longrope":
        half = 2 if "partial_rotary_factor" in present else 4
        made |= {"short_factor": [1.0 + i for i in range(half)], "long_factor": [2.0 + i for i in range(half)]}
    return made


def batches(name: str) -> dict[str, Named]:
    """Return mini-batches of a class: with all inputs, with the required ones only, and with other paddings and positions."""
    torch.manual_seed(0)
    known = FAMILIES[name].inputs
    if "pixel_values" in known:
        return {"all": Named({"pixel_values": torch.randn(4, 3, 8, 8)})}
    ids, mask = torch.randint(4, VOCABULARY, (4, LENGTH)), torch.ones(4, LENGTH, dtype=torch.long)
    ids[1, 6:] = 1  # the number of padding for RoBERTa
    right, left = mask.clone(), mask.clone()
    right[1, 6:] = 0
    left[1, :3] = left[2, :1] = 0
    if "decoder_input_ids" in known:
        first = {"input_features": torch.randn(4, 4, 16)} if "input_features" in known else {"input_ids": ids}
        least = {**first, "decoder_input_ids": ids[:, 1:]}
        masks = {"decoder_attention_mask": left[:, 1:], **({"attention_mask": right} if "input_ids" in known else {})}
        return {"all": Named({**least, **masks}), "required": Named(least)}
    wide = torch.ones(4, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    made = {"required": {}, "left": {"attention_mask": left}, "4D": {"attention_mask": wide}}
    if "token_type_ids" in known:
        made["all"] = {"attention_mask": right, "token_type_ids": torch.randint(0, 2, (4, LENGTH))}
    else:
        positions = torch.arange(LENGTH).expand(4, LENGTH).clone()
        positions[2] += 3
        made["all"] = {"attention_mask": right, "position_ids": positions}
        made["packed"] = {"position_ids": torch.cat([torch.arange(4), torch.arange(5)]).expand(4, LENGTH).clone()}
    return {key: Named({"input_ids": ids, **others}) for key, others in made.items()}


def run_stages(stages: Sequence[nn.Module], inputs: Tensors) -> Tensor:
    """Run stages in order; return what the last one returns."""
    for stage in stages:
        inputs = run_module(stage, inputs, "The output")
    return inputs[0]


def trained(model: nn.Module, run: Callable[[Tensors], Tensor], inputs: Tensors) -> list[Tensor]:
    """Return the output in training mode and the gradients of a sum of it, with the random numbers of one seed."""
    model.train()
    model.zero_grad()
    torch.manual_seed(7)
    output = run(each(inputs, torch.clone))
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype))
    return [output.detach(), *(torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters())]


def follow(name: str, setting: str, options: Options, kinds: Sequence[str] = ("all", "required")) -> str:
    """Compare the stages with the model in training mode, in outputs and gradients.

    Args:
        name: the class.
        setting: name of the setting that the options change.
        options: options of the configuration.
        kinds: kinds of mini-batches.

    Returns:
        "followed", "refused", or an empty string if the setting has no effect or transformers does not take the value.
    """
    effect = False
    for kind, inputs in batches(name).items():
        if kind not in kinds:
            continue
        try:
            model = tiny(name, **options)
            expected = trained(model, partial(run_model, model), inputs)
        except Exception:  # transformers refuses the value, in one of many ways
            return ""
        try:
            stages = nwise.split(model, at=2)
        except ValueError as error:
            if "`config." not in str(error):
                raise
            return "refused"
        found = trained(model, partial(run_stages, stages), inputs)
        assert torch.equal(found[0], expected[0]), f"{name}: another output with {options}, {kind}"
        for i, (a, b) in enumerate(zip(found[1:], expected[1:], strict=True)):
            scale = float(b.abs().nan_to_num().max())
            near = torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale + 1e-9, equal_nan=True)
            assert near, f"{name}: another gradient of parameter {i} with {options}, {kind}"
        effect = effect or not torch.equal(_usual(name, kind), expected[0])
    return "followed" if effect else ""


@cache
def _usual(name: str, kind: str) -> Tensor:
    """Return the output of a class with the usual settings."""
    model = tiny(name)
    return trained(model, partial(run_model, model), batches(name)[kind])[0]


def row(name: str) -> str:
    """Return the line of a class in the table."""
    kinds = list(batches(name))
    follow(name, "", {}, kinds)
    found: dict[str, dict[str, None]] = {"followed": {}, "refused": {}, "": {}}
    for setting, options in settings(name):
        found[follow(name, setting, options)][setting] = None
    followed, refused = (", ".join(f"`{one}`" for one in found[key]) or "–" for key in ("followed", "refused"))
    return f"| `{name}` | {followed} | {refused} |"


HEAD = """# Settings of the architectures

A split network is the network, in training too. For every [class that nwise cuts by name](../docs/architectures.md), a test
changes the settings of the configuration one at a time, in a tiny network. It runs the model and its stages in training mode with
one seed, with all inputs and with the required ones only. Outputs are equal bit for bit, and gradients up to rounding. With the
usual settings the test also pads on the left, packs two texts into one row, and gives a mask of four dimensions.

The table leaves out sizes, settings that no forward reads, and settings that change nothing in a class. If stages cannot do what
a setting asks, `nwise.split` refuses it by name. `python tests/settings.py` writes this page; transformers 5.23 was tested.

| class | followed | refused |
|---|---|---|
"""


def lines() -> dict[str, str]:
    """Return the lines of the page's table, by class."""
    text = PAGE.read_text() if PAGE.exists() else ""
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


if __name__ == "__main__":
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    made = {name: row(name) for name in sys.argv[1:] or sorted(FAMILIES)}
    PAGE.write_text(HEAD + "".join(line + "\n" for _, line in sorted({**lines(), **made}.items())))
