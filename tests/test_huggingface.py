"""Networks of Hugging Face in stages: what their own forward computes, under their own names, trained and loaded back."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
import nwise.models.huggingface
import nwise.training
from launch import results
from nwise.tensors import Named
from test_contract import assert_same, gradients

os.environ["HF_HUB_OFFLINE"] = "1"  # configurations with random weights need no network, and should not look for one
transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY, LENGTH, CLASSES = 37, 9, 3
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "tie_word_embeddings": False,
}
_DECODER = {**_TEXT, "num_key_value_heads": 1, "attention_dropout": 0.0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(**options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 32}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **none, **options}))


def resnet() -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, num_labels=CLASSES))


def vit() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    image = {"image_size": 8, "patch_size": 2, "num_labels": CLASSES}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **image, **_NO_DROPOUT))


def made(name: str) -> Any:
    """A tiny model of a class, with random weights that are the same every time."""
    t = transformers
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    builders: dict[str, Callable[[], Any]] = {
        "GPT2LMHeadModel": gpt2,
        "LlamaForCausalLM": lambda: t.LlamaForCausalLM(t.LlamaConfig(**_DECODER)),
        "MistralForCausalLM": lambda: t.MistralForCausalLM(t.MistralConfig(**_DECODER, sliding_window=4)),
        "Qwen2ForCausalLM": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**_DECODER, **sliding)),
        "Qwen3ForCausalLM": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**_DECODER, head_dim=8)),
        "BertForSequenceClassification": lambda: t.BertForSequenceClassification(
            t.BertConfig(**_TEXT, **_NO_DROPOUT, num_labels=CLASSES)
        ),
        "BertForMaskedLM": lambda: t.BertForMaskedLM(t.BertConfig(**_TEXT, **_NO_DROPOUT)),
        "ViTForImageClassification": vit,
        "ResNetForImageClassification": resnet,
    }
    torch.manual_seed(0)
    return builders[name]()


def inputs_for(model: Any) -> tuple[Tensor, ...]:
    if model.main_input_name == "pixel_values":
        return (torch.randn(4, 3, 8, 8),)
    ids, mask = torch.randint(0, VOCABULARY, (4, LENGTH)), torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 6:] = 0  # a sequence that is padded
    if type(model).__name__.startswith("Bert"):
        return ids, mask, torch.randint(0, 2, (4, LENGTH))
    positions = torch.arange(LENGTH).expand(4, LENGTH).clone()
    positions[2] += 3
    return ids, mask, positions


def own_loss(model: Any) -> Any:
    per_token = type(model).__name__.endswith("LM") or "LMHead" in type(model).__name__
    return nwise.losses.TokenCrossEntropy() if per_token else nn.functional.cross_entropy


def target_for(model: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    shape = nwise.models.huggingface.run_model(model, inputs).shape
    return torch.randint(0, shape[-1], shape[:-1])


NAMES = [
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "BertForSequenceClassification",
    "BertForMaskedLM",
    "ViTForImageClassification",
    "ResNetForImageClassification",
]


def test_every_known_class_is_tested() -> None:
    nwise.split(gpt2(), at=2)
    assert sorted(nwise.models.huggingface.FAMILIES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_split_stages_match_model_outputs(name: str) -> None:
    model = made(name).eval()
    inputs = inputs_for(model)
    for count in range(1, len(inputs) + 1):  # without mask, without positions, with all
        stages = nwise.split(model, at=3, example=inputs[:count])
        hidden: Any = inputs[:count]
        for stage in stages:
            hidden = stage(*hidden)
            hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        assert torch.equal(hidden[0], nwise.models.huggingface.run_model(model, inputs[:count]))
        assert len(hidden) == 1
    if len(inputs) > 1:  # they are used, not only carried
        assert not torch.equal(hidden[0], nwise.models.huggingface.run_model(model, inputs[:1]))
    assert {n for stage in stages for n in stage.state_dict()} == set(model.state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_end_to_end_gradients_match_model(name: str) -> None:
    model = made(name)
    inputs, loss_fn = inputs_for(model), own_loss(model)
    target = target_for(model, inputs)
    twin = copy.deepcopy(model)
    loss_fn(nwise.models.huggingface.run_model(twin, inputs), target).backward()
    nwise.Pipeline(nwise.split(model, at=3), None, loss_fn, "end-to-end").step(*inputs, target=target)
    for (n, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            assert torch.allclose(parameter.grad, other.grad, atol=1e-6), n


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"])
@pytest.mark.parametrize("strategy", ["local", "2-wise", "2-wise-mean", "3-wise"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradients_match_reference(name: str, strategy: str, num_microbatches: int) -> None:
    model = made(name)
    inputs, loss_fn = inputs_for(model), own_loss(model)
    target = target_for(model, inputs)
    stages = nwise.split(model, at=4)
    heads = nwise.heads.copied(stages)
    pipe = nwise.Pipeline(stages, heads, loss_fn, strategy, num_microbatches)
    expected = nwise.reference_grads(stages, heads, loss_fn, inputs, target, pipe.credit, num_microbatches)
    pipe.step(*inputs, target=target)
    found = gradients(pipe)
    # Llama's norms compute in float32 whatever they are given.
    tolerance = 1e-6 if name == "LlamaForCausalLM" else 1e-12
    assert_same({n: g for n, g in found.items() if n in expected}, expected, tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_two_wise_trained_model_saves_and_loads_back(name: str, tmp_path: Path) -> None:
    model = made(name).train()
    inputs, loss_fn = inputs_for(model), own_loss(model)
    target = target_for(model, inputs)
    stages = nwise.split(model, at=3)
    heads = (
        nwise.heads.fitting(stages, inputs, CLASSES)
        if "ResNet" in name  # blocks of several widths
        else nwise.heads.copied(stages, blocks=1)
    )
    pipe = nwise.Pipeline(stages, heads, loss_fn, "2-wise")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    first = pipe.step(*inputs, target=target)
    for _ in range(8):
        optimizer.step()
        optimizer.zero_grad()
        last = pipe.step(*inputs, target=target)
    assert (last[1:] < first[1:]).all()
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in model.state_dict().items()
    }
    made(name).load_state_dict(nwise.training.main_state(pipe), strict=True)
    model.eval(), again.eval()
    assert torch.equal(
        nwise.models.huggingface.run_model(again, inputs), nwise.models.huggingface.run_model(model, inputs)
    )
    assert torch.equal(pipe.eval()(*inputs), nwise.models.huggingface.run_model(model, inputs))


def test_tied_embeddings_are_refused_and_untied(tmp_path: Path) -> None:
    model = gpt2(tie_word_embeddings=True)
    message = "'lm_head.weight' of stage 1 is 'transformer.wte.weight' of stage 0.*nwise.untie"
    with pytest.raises(ValueError, match=message):
        nwise.split(model, at=["transformer.h.2"])
    assert nwise.untie(model) == ["lm_head.weight"]
    assert nwise.untie(model) == []
    stages = nwise.split(model, at=["transformer.h.2"])
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert not torch.equal(stages[0].state_dict()["transformer.wte.weight"], model.lm_head.weight)
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)


def test_tied_embeddings_in_one_stage_stay_tied() -> None:
    model = gpt2(tie_word_embeddings=True)
    [stage] = nwise.split(model, at=1)
    assert stage.pieces()["lm_head"] is model.lm_head
    assert model.lm_head.weight is model.transformer.wte.weight


def test_copied_heads_repeat_last_blocks_and_output() -> None:
    model = made("LlamaForCausalLM")
    stages = nwise.split(model, at=["model.layers.2", "model.layers.3"])
    heads = nwise.heads.copied(stages, blocks=2)
    assert [list(head.pieces()) for head in heads] == [
        ["model.layers.3", "model.layers.4", "model.norm", "lm_head"]
    ] * 2
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    hidden = stages[2](stages[1](stages[0](ids)))
    assert torch.equal(heads[0](stages[1](stages[0](ids))), hidden)  # layers 3 and 4 again, on the same input
    assert not {id(p) for p in heads[0].parameters()} & {id(p) for p in [*model.parameters(), *heads[1].parameters()]}


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_bert_decoder_attention_is_causal(name: str) -> None:
    """Regression: its blocks saw all tokens, and only an `example` revealed it."""
    model = made(name)
    model.config.is_decoder = True
    model = type(model)(model.config).eval()
    stages = nwise.split(model, at=2)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    assert torch.equal(stages[1](stages[0](ids)), nwise.models.huggingface.run_model(model, (ids,)))
    nwise.split(model, at=2, example=ids)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"])
def test_split_accepts_eager_attention(name: str) -> None:
    """Regression: attention with a cache rounds differently, so `split` rejected a correct cut."""
    model = made(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    nwise.split(model, at=3, example=inputs_for(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fitting_heads_use_dtype_of_stage_outputs(dtype: torch.dtype) -> None:
    model = vit().to(dtype)
    x = torch.randn(2, 3, 8, 8)  # the model turns images into its own type
    stages = nwise.split(model, at=3, example=x)
    heads = nwise.heads.fitting(stages, x, CLASSES)
    losses = nwise.Pipeline(stages, heads, strategy="local").step(x, target=torch.tensor([0, 1]))
    assert losses.isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
def test_split_of_compiled_model_warns() -> None:
    model = gpt2()
    with pytest.warns(UserWarning, match="`model` is compiled, and its stages are not"):
        stages = nwise.split(torch.compile(model), at=2)  # type: ignore[arg-type]
    assert stages[0].pieces()["transformer.h.0"] is model.transformer.h[0]


def test_untie_reaches_nested_model() -> None:
    model = gpt2(tie_word_embeddings=True)
    assert nwise.untie(nn.ModuleDict({"inner": model})) == ["inner.lm_head.weight"]
    assert not model.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen2ForCausalLM", "BertForSequenceClassification"])
def test_batches_by_name(name: str) -> None:
    """As a tokenizer gives them, with any of the optional inputs; positions without a mask cannot be given by place."""
    model = made(name).eval()
    values = dict(zip(nwise.models.huggingface.family_for(model).inputs, inputs_for(model), strict=True))
    for left_out in ("", "attention_mask", *list(values)[-1:]):
        batch = transformers.BatchEncoding({key: value for key, value in values.items() if key != left_out})
        stages = nwise.split(model, at=3, example=batch)
        heads = nwise.heads.fitting(stages, batch, CLASSES, per_token="LM" in name)
        pipe = nwise.Pipeline(stages, heads, own_loss(model), "2-wise", num_microbatches=2)
        with torch.no_grad():
            assert torch.equal(pipe(batch), model(**batch, **({"use_cache": False} if "LM" in name else {})).logits)
        losses = pipe.step(batch, target=target_for(model, Named(batch)) % CLASSES)
        assert losses[1:].isfinite().all()
    with pytest.raises(TypeError, match="inputs should be of input_ids, .* Found labels; labels are the `target`"):
        pipe.step(**batch, labels=batch["input_ids"], target=batch["input_ids"])
    with pytest.raises(TypeError, match="The network should get input_ids. Found attention_mask"):
        pipe(attention_mask=values["attention_mask"])


def test_unsupported_models_and_arguments_raise() -> None:
    unknown = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2))
    with pytest.raises(ValueError, match="should be one of GPT2LMHeadModel.*Found GPT2Model"):
        nwise.split(unknown, at=2)
    with pytest.raises(ValueError, match=r"at most input_ids, attention_mask, position_ids. Found 1 more"):
        nwise.split(gpt2(), at=2)[0](*[torch.zeros(1, 2, dtype=torch.long)] * 4)
    with pytest.raises(ValueError, match="from 1 to the network's 5 GPT2Block modules.*Found 6"):
        nwise.split(gpt2(), at=6)
    with pytest.raises(ValueError, match="`blocks` should be an integer from 0 to the network's 5 blocks. Found 6"):
        nwise.heads.copied(nwise.split(gpt2(), at=2), blocks=6)


def test_multi_process_matches_single_process(tmp_path: Path) -> None:
    from ranks.huggingface import train

    first = results(3, "huggingface.py", tmp_path)[0]
    assert first["loaded"], "the class itself should take the weights of all stages"
    assert first["weights"] == train()["weights"]
