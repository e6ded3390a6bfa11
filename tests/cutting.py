"""Tiny networks that `nwise.split` cuts, of several libraries; writes a page of the manual from the cuts.

python tests/cutting.py    # docs/cut.md; needs timm and torchvision beside the packages of the tests
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.network.splitting import bind, selected

os.environ["HF_HUB_OFFLINE"] = "1"  # configurations with random weights need no network

PAGE = Path(__file__).parents[1] / "docs" / "cut.md"
VOCABULARY, CLASSES, LENGTH = 37, 3, 9
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

# Classes whose configuration has names of its own.
_LATENT = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_experts_per_tok": 1},
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
_SMALL = {**_WIDTHS, **_SPECIAL, "vocab_size": VOCABULARY, "num_hidden_layers": 4}
_BRANCH = {**_WIDTHS, "num_hidden_layers": 2}
_NO_USUAL: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {
        **{
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
        },
        **{"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32},
        **{**_SPECIAL, "forced_eos_token_id": 0, "decoder_start_token_id": 0},
    },
    "OPTForCausalLM": {
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "ffn_dim": 32,
        },
        **{"word_embed_proj_dim": 16, "max_position_embeddings": 32, **_SPECIAL},
    },
    "BloomForCausalLM": {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 4, "n_head": 2, **_SPECIAL},
    "FalconForCausalLM": _SMALL,
    "DeepseekV2ForCausalLM": {**_SMALL, **_LATENT, "n_routed_experts": 2},
    "DeepseekV3ForCausalLM": {**_SMALL, **_LATENT, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    "Llama4ForCausalLM": {
        **{**_SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 16},
        "attention_chunk_size": 4,
    },
    "MambaForCausalLM": {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "state_size": 4,
        **_SPECIAL,
    },
    "Mamba2ForCausalLM": {
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, **_SPECIAL},
        **{"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    },
    "DistilBertForMaskedLM": {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 32},
    "SwinForImageClassification": {
        **{"image_size": 8, "patch_size": 1, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4},
        "num_labels": CLASSES,
    },
    "SegformerForImageClassification": {
        **{"num_encoder_blocks": 2, "depths": [2, 2], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2]},
        **{"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2], "num_labels": CLASSES},
    },
    "Wav2Vec2ForCTC": {
        **{**_SMALL, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0},
    },
    "CLIPModel": {
        "text_config": {
            **_BRANCH,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 16,
            **_SPECIAL,
            "eos_token_id": 2,
        },
        "vision_config": {**_BRANCH, "image_size": 8, "patch_size": 2},
        "projection_dim": 8,
    },
    "ModernBertForMaskedLM": {
        **{**_SMALL, "global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 0, "sep_token_id": 0}
    },
    "GPTJForCausalLM": {
        **{"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "rotary_dim": 4, "n_positions": 32},
        **_SPECIAL,
    },
    "MptForCausalLM": {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 4, "n_heads": 2, "max_seq_len": 32},
    "BertModel": _SMALL,
    "GPT2ForSequenceClassification": {
        **{"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32, "num_labels": CLASSES},
        **_SPECIAL,
    },
}
_TEXTS = (
    "Apertus Arcee BitNet Cohere Cohere2 Ernie4_5 Exaone4 Gemma Gemma2 Gemma3 Glm Glm4 GPTNeoX GptOss Granite Helium Llama "
    "Ministral Mistral Mixtral Nemotron Olmo Olmo2 Olmo3 Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3 StableLm "
    "Starcoder2 VaultGemma"
).split()
_IMAGES = "CLIP ConvNext DeiT Dinov2 ResNet Siglip ViT".split()
HUGGING_FACE = sorted(
    [
        *(f"{name}ForCausalLM" for name in _TEXTS),
        *(f"{name}ForImageClassification" for name in _IMAGES),
        *(
            f"{name}For{task}"
            for name in ("Bert", "Roberta", "XLMRoberta")
            for task in ("MaskedLM", "SequenceClassification")
        ),
        *("GPT2LMHeadModel", "ElectraForSequenceClassification"),
        *("T5ForConditionalGeneration", "WhisperForConditionalGeneration", *_NO_USUAL),
    ]
)


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
    whole = {**_NO_USUAL[name], **options} if name in _NO_USUAL else {**usual, **own}
    model = cls(cls.config_class(**whole))
    nwise.untie(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def batch(name: str) -> dict[str, Any]:
    """Return inputs of a class of Hugging Face: padded on the right, with a mask where it takes one."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (4, LENGTH), generator=generator)
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 6:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    images = torch.randn(4, 3, 8, 8, generator=generator)
    if "ImageClassification" in name:
        return {"pixel_values": images}
    if name == "CLIPModel":
        return {**text, "pixel_values": images}
    if name.startswith("Mamba"):
        return {"input_ids": ids, "use_cache": False}
    if name == "Wav2Vec2ForCTC":
        return {"input_values": torch.randn(4, 400, generator=generator)}
    if name.startswith("Whisper"):
        return {"input_features": torch.randn(4, 4, 16, generator=generator), "decoder_input_ids": ids}
    if "Conditional" in name:
        return {**text, "decoder_input_ids": ids[:, 1:]}
    return text


# Networks as people write them


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class CausalBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A dictionary of modules, learned positions, an in-place sum, and targets that are left out."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(VOCABULARY, 16), "wpe": nn.Embedding(32, 16), "drop": nn.Dropout(0.1)}
        blocks = nn.ModuleList(CausalBlock(16) for _ in range(4))
        self.transformer = nn.ModuleDict({**parts, "h": blocks, "ln_f": nn.LayerNorm(16)})
        self.lm_head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        net: Any = self.transformer
        x = net.wte(idx)
        x += net.wpe(torch.arange(idx.shape[1], device=idx.device))
        x = net.drop(x)
        for block in net.h:
            x = block(x)
        logits = self.lm_head(net.ln_f(x))
        return logits, None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class UNet(nn.Module):
    """Two skips past the middle, and a parameter of the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, padding=1)
        self.middle, self.up = nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, 2)
        self.out, self.scale = nn.Conv2d(8, 2, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x).relu()
        second = self.down2(first).relu()
        y = self.up(second + self.middle(second))
        return self.scale * self.out(torch.cat([first, y], 1))


class VisionTransformer(nn.Module):
    """Parameters of the network itself: a class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 2, 2)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(layer(16, 2, 32, batch_first=True) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@dataclass(frozen=True)
class Case:
    """A network to cut.

    Args:
        library: where it comes from.
        make: function that makes it.
        example: its inputs.
        at: names or a number; default: four stages.
    """

    library: str
    make: Callable[[], nn.Module]
    example: Any
    at: Any = 4


def cases() -> Iterator[tuple[str, Case]]:
    """Yield every network by name; those of libraries that are not installed are left out."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    small, large = (torch.randn(4, 3, size, size, generator=generator) for size in (8, 64))
    pair = torch.randn(4, 5, 8, generator=generator), torch.randn(4, 3, 8, generator=generator)
    encoder_layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    yield "GPT in the style of nanoGPT", Case("own", Gpt, ids)
    yield "U-Net with two skips", Case("own", UNet, small, ["down2", "up", "out"])
    yield "vision transformer with a class token", Case("own", VisionTransformer, small)
    yield "nn.Transformer", Case("torch", lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True), pair)
    encoder = partial(nn.TransformerEncoder, encoder_layer, 4, enable_nested_tensor=False)
    yield "nn.TransformerEncoder", Case("torch", encoder, pair[0])
    for name in HUGGING_FACE:
        shallow = name in ("ResNetForImageClassification", "ConvNextForImageClassification")
        yield name, Case("transformers", partial(tiny, name), batch(name), 2 if shallow else 4)
    for library in ("timm", "torchvision"):
        if importlib.util.find_spec(library):
            yield from _of_library(library, small, large)


def _of_library(library: str, small: Tensor, large: Tensor) -> Iterator[tuple[str, Case]]:
    if library == "timm":
        make = importlib.import_module("timm").create_model
        sizes = {"img_size": 8, "patch_size": 2, "depth": 4, "embed_dim": 24, "num_heads": 2, "drop_path_rate": 0.2}
        yield "timm: vit_tiny", Case(library, partial(make, "vit_tiny_patch16_224", **sizes), small)
        windows = {"img_size": 56, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}
        swin = partial(make, "swin_tiny_patch4_window7_224", **windows)
        yield "timm: swin_tiny", Case(library, swin, large[..., :56, :56])
        for name in ("resnet18", "convnext_atto", "efficientnet_b0", "regnetx_002", "densenet121"):
            yield f"timm: {name}", Case(library, partial(make, name, num_classes=CLASSES), large)
    else:
        models = importlib.import_module("torchvision.models")
        yield (
            "torchvision: VisionTransformer",
            Case(library, partial(models.VisionTransformer, 8, 2, 4, 2, 16, 32), small),
        )
        plain = {"aux_logits": False, "init_weights": False}
        for name in ("resnet18", "vgg11", "googlenet", "swin_t", "mobilenet_v3_small"):
            options = plain if name == "googlenet" else {}
            make = partial(getattr(models, name), num_classes=CLASSES, **options)
            yield f"torchvision: {name}", Case(library, make, large)


def tensors(model: nn.Module, example: Any) -> dict[str, Tensor]:
    """Return the inputs of an example by name."""
    return {name: x for name, x in bind(model, example).items() if isinstance(x, Tensor)}


def _loss(output: Any) -> Tensor:
    """Return a number that depends on all outputs."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    return torch.stack([x.square().mean() for x in values]).sum()


def _kept(model: nn.Module, output: Any) -> tuple[Any, dict[str, Tensor]]:
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    model.zero_grad()
    return output, grads


def outputs_and_gradients(model: nn.Module, inputs: dict[str, Tensor], m: int) -> tuple[Any, dict[str, Tensor]]:
    """Return what a network returns, and the gradients of the mean over micro-batches of a loss, by plain autograd."""
    constants = {"use_cache": False} if "Mamba" in type(model).__name__ else {}
    for part in zip(*(x.tensor_split(m) for x in inputs.values()), strict=True):
        output = selected(None, model(**dict(zip(inputs, part, strict=True)), **constants))
        (_loss(output) / m).backward()
    with torch.no_grad():
        return _kept(model, selected(None, model(**inputs, **constants)))


def in_stages(model: nn.Module, stages: Any, inputs: dict[str, Tensor], m: int) -> tuple[Any, dict[str, Tensor]]:
    """Return the same of a pipeline of its stages."""
    pipe = nwise.Pipeline(stages, None, lambda output, _: _loss(output), "end-to-end", m, checks="never").eval()
    pipe.step(inputs)
    with torch.no_grad():
        return _kept(model, pipe(inputs))


def row(name: str, case: Case) -> str:
    """Cut a network, compare it with its stages, and return its line of the page."""
    torch.manual_seed(0)
    return line(name, nwise.split(case.make(), case.at, case.example))


def line(name: str, stages: Any) -> str:
    """Return the line of a network that was cut."""
    starts = [f"`{next(iter(stage.pieces()))}`" for stage in stages[1:]]
    received = list(dict.fromkeys(key for stage in stages[1:] for key in stage.input_names))
    cells = [f"`{name}`" if name.isidentifier() else name, ", ".join(starts), ", ".join(f"`{key}`" for key in received)]
    return f"| {' | '.join(cells)} |"


HEAD = """# What can be cut

Any network can be cut through its own forward: `nwise.split(model, at=4, example=x)` runs it once and sees what every stage needs
([your model](own.md)). Nothing below is in a list of the library. `python tests/cutting.py` cuts each of these networks in a tiny
size, compares outputs and gradients in training mode with those of the whole, and writes this page.

`hidden` is what a stage's head sees: of the outputs that later stages read, the one with the longest chain of calls behind it.
The other names are inputs, and other outputs.

| network | stages begin at | what travels |
|---|---|---|
"""
FOOT = """
What cannot be cut, or not there; an error says so:

- A module that is called on both sides of a cut, as in ALBERT, whose layers are one. Cut in front of the head.
- A random number, or a buffer that the forward changes, if several stages use it outside modules. Put it into a module.
- A function outside modules that is not torch's own: a script, `torch.vmap`, an extension. Call it in a module.
- Modules that are left out in some steps: layers at random (LayerDrop), experts without a token. Call them inside one module.
- Other image sizes, where the network's own code reads the size of a map that a module made.
- A module that stores a tensor on itself for the code around it, instead of returning it. Here there is no error.
- A network on the device `meta`, because the example runs through it.

The code between modules runs in every stage. A residual sum that stands there, and not inside a block, reads the outputs of all
blocks before it, so all of them travel. Put the sum into the block.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(f"{row(name, case)}\n" for name, case in cases()) + FOOT


if __name__ == "__main__":
    PAGE.write_text(page())
