"""Networks of Hugging Face in stages: what their own forward computes, under their own names, trained and loaded back."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import architectures
import nwise
import nwise.training
import settings
from architectures import CLASSES, VOCABULARY
from architectures import tiny as made
from launch import results
from nwise import exits
from nwise.exits import confidence
from nwise.network.families import FAMILIES, run_model
from nwise.tensors import Named, Tensors
from test_contract import assert_same, gradients

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTH = 9


def short(name: str) -> Any:
    """A network with three blocks, which show as much as five and take two thirds of the time."""
    others = name.startswith(("GPT2", "ResNet", "ConvNext")) or "Conditional" in name  # have another name for them
    return made(name) if others else made(name, num_hidden_layers=3)


def own_loss(model: Any) -> Any:
    per_token = re.search("LMHead|LM$|Generation$", type(model).__name__)
    return nwise.losses.TokenCrossEntropy() if per_token else nn.functional.cross_entropy


def target_for(model: Any, inputs: Tensors) -> Tensor:
    shape = run_model(model, inputs).shape
    return torch.randint(0, shape[-1], shape[:-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_class_is_cut_trained_and_exported(name: str, tmp_path: Path) -> None:
    """Stages compute what the model does with each kind of batch, have its gradients and names, learn, and load back."""
    model, batches = short(name).eval(), settings.batches(name)
    outputs = {kind: run_model(model, inputs) for kind, inputs in batches.items()}
    for kind, inputs in batches.items():
        stages = nwise.split(model, at=2, example=inputs)  # which compares outputs and gradients in training mode too
        assert torch.equal(settings.run_stages(stages, inputs), outputs[kind])
    assert len(batches) == 1 or not torch.equal(outputs["all"], outputs["required"]), "used, not only carried"
    assert {n for stage in stages for n in stage.state_dict()} == set(model.state_dict())

    inputs, loss_fn, twin = batches["all"], own_loss(model), copy.deepcopy(model.train())
    target = target_for(model, inputs)
    loss_fn(run_model(twin, inputs), target).backward()
    pipe = nwise.Pipeline(stages, None, loss_fn, "end-to-end")
    pipe.step(**inputs.by_name(), target=target)
    for (n, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            scale = float(other.grad.abs().max())
            assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-5 * scale + 1e-9), n
    pipe.zero_grad()

    convolutional = "Net" in name or "ConvNext" in name
    heads = nwise.heads.fitting(stages, inputs, CLASSES) if convolutional else nwise.heads.copied(stages, blocks=1)
    pipe = nwise.Pipeline(stages, heads, loss_fn, "2-wise")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(**inputs.by_name(), target=target)[-1])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    model.load_state_dict(nwise.checkpoint.main_state(pipe), strict=True)
    expected = run_model(model.eval(), inputs)
    assert torch.equal(run_model(again, inputs), expected)
    assert torch.equal(pipe.eval()(**inputs.by_name()), expected)


def test_page_of_architectures_is_up_to_date() -> None:
    """`python tests/architectures.py` writes it from the classes that the test above checks."""
    assert architectures.PAGE.read_text() == architectures.table()
    assert not set(architectures.NOT_CUT) & set(FAMILIES)
    assert all(hasattr(transformers, name) for name in (*architectures.NOT_CUT, *FAMILIES))
    assert len({*architectures.NOT_CUT, *FAMILIES}) >= 40


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "strategy", "num_microbatches"),
    [
        *(
            ("GPT2LMHeadModel", strategy, m)
            for strategy in ("local", "2-wise", "2-wise-mean", "3-wise")
            for m in (1, 2)
        ),
        *((name, "2-wise-mean", 2) for name in ("LlamaForCausalLM", "ViTForImageClassification")),
        *((name, "3-wise", 1) for name in ("LlamaForCausalLM", "ViTForImageClassification")),
    ],
)
def test_gradients_match_reference(name: str, strategy: str, num_microbatches: int) -> None:
    model, inputs = made(name), settings.batches(name)["all"]
    loss_fn, target = own_loss(model), target_for(model, inputs)
    stages = nwise.split(model, at=4)
    heads = nwise.heads.copied(stages)
    pipe = nwise.Pipeline(stages, heads, loss_fn, strategy, num_microbatches)
    expected = nwise.reference_grads(stages, heads, loss_fn, inputs.by_name(), target, pipe.credit, num_microbatches)
    pipe.step(**inputs.by_name(), target=target)
    found = gradients(pipe)
    # Llama's norms compute in float32 whatever they are given.
    tolerance = 1e-6 if name == "LlamaForCausalLM" else 1e-12
    assert_same({n: g for n, g in found.items() if n in expected}, expected, tolerance)


def test_tied_embeddings_are_refused_and_untied(tmp_path: Path) -> None:
    config = made("GPT2LMHeadModel").config
    config.tie_word_embeddings = True
    model = transformers.GPT2LMHeadModel(config)
    [stage] = nwise.split(model, at=1)
    assert [stage.pieces()["lm_head"]] == [model.lm_head]
    assert model.lm_head.weight is model.transformer.wte.weight, "in one stage they stay tied"
    message = "'lm_head.weight' of stage 1 is 'transformer.wte.weight' of stage 0.*nwise.untie"
    with pytest.raises(ValueError, match=message):
        nwise.split(model, at=["transformer.h.2"])
    assert nwise.untie(nn.ModuleDict({"inner": model})) == ["inner.lm_head.weight"]
    assert nwise.untie(model) == []
    assert not model.config.tie_word_embeddings
    nwise.split(model, at=["transformer.h.2"])
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    assert not torch.equal(again.transformer.wte.weight, model.lm_head.weight)


def test_exits_know_masks_by_position() -> None:
    """Regression: padding could be the least certain position unless all inputs came by name."""
    model = made("BertForMaskedLM")
    stages = nwise.split(model, at=2)
    pipe = nwise.Pipeline(stages, nwise.heads.copied(stages), own_loss(model), "2-wise-mean").double()
    ids, mask = torch.randint(1, VOCABULARY, (6, LENGTH)), torch.arange(LENGTH) < torch.arange(3, 9)[:, None]
    by_name = exits.exit(pipe, input_ids=ids, attention_mask=mask.long(), threshold=0.0).confidence
    assert torch.equal(exits.exit(pipe, ids, mask.long(), threshold=0.0).confidence, by_name)
    assert not torch.allclose(
        exits.exit(pipe, ids, mask.long(), threshold=0.0, confidence=confidence).confidence, by_name
    )


def test_copied_heads_follow_the_models_attention() -> None:
    """Regression: a head's mask came from the model's configuration, and its blocks had a copy: causal in neither."""
    model, ids = made("LlamaForCausalLM", attn_implementation="eager"), torch.randint(0, VOCABULARY, (2, LENGTH))
    stages = nwise.split(model, at=2)
    pipe = nwise.Pipeline(stages, nwise.heads.copied(stages, blocks=1), own_loss(model), "2-wise-mean")
    with torch.no_grad():
        before = pipe.head_outputs(ids)[0]
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(pipe.head_outputs(ids)[0], before)


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertForMaskedLM", {"is_decoder": True}),
        ("BertForSequenceClassification", {"is_decoder": True}),
        ("WhisperForConditionalGeneration", {"encoder_layerdrop": 1.0, "decoder_layerdrop": 1.0}),
    ],
)
def test_settings_that_were_lost_are_followed(name: str, options: Any) -> None:
    """Regressions: blocks saw all tokens, and every layer was called, however often LayerDrop leaves one out."""
    assert settings.follow(name, "", options) == "followed"


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"])
def test_split_accepts_eager_attention(name: str) -> None:
    """Regression: attention with a cache rounds differently, so `split` rejected a correct cut."""
    model = made(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    nwise.split(model, at=3, example=settings.batches(name)["all"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fitting_heads_use_dtype_of_stage_outputs(dtype: torch.dtype) -> None:
    model = made("ViTForImageClassification").to(dtype)
    x = torch.randn(2, 3, 8, 8)  # the model turns images into its own type
    stages = nwise.split(model, at=3, example=x)
    heads = nwise.heads.fitting(stages, x, CLASSES)
    losses = nwise.Pipeline(stages, heads, strategy="local").step(x, target=torch.tensor([0, 1]))
    assert losses.isfinite().all()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen2ForCausalLM", "BertForSequenceClassification"])
def test_batches_by_name(name: str) -> None:
    """As a tokenizer gives them, with any of the optional inputs; positions without a mask cannot be given by place."""
    model = made(name).eval()
    values = settings.batches(name)["all"].by_name()
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
    with pytest.raises(ValueError, match="should be of a class in `nwise.network.families`. Found GPT2Model"):
        nwise.split(unknown, at=2)
    model = made("GPT2LMHeadModel")
    with pytest.raises(ValueError, match=r"at most input_ids, attention_mask, position_ids. Found 1 more"):
        nwise.split(model, at=2)[0](*[torch.zeros(1, 2, dtype=torch.long)] * 4)
    with pytest.raises(TypeError, match="should get decoder_input_ids, which it does not make from labels. Found"):
        nwise.split(made("T5ForConditionalGeneration"), at=["lm_head"])[0](torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="from 1 to the network's 5 GPT2Block modules.*Found 6"):
        nwise.split(model, at=6)
    with pytest.raises(ValueError, match="`blocks` should be an integer from 0 to the network's 5 blocks. Found 6"):
        nwise.heads.copied(nwise.split(model, at=2), blocks=6)


@pytest.mark.parametrize("name", FAMILIES)
def test_class_in_training_with_another_setting(name: str) -> None:
    """One setting of each class, another one for the next class; `test_every_setting_of_a_class` tries all."""
    followed = settings.lines()[name].split("|")[2].replace("`", "").split(", ")
    setting = followed[sorted(FAMILIES).index(name) % len(followed)].strip()
    found = {settings.follow(name, one, options, ["all"]) for one, options in settings.settings(name) if one == setting}
    assert "followed" in found or settings.follow(name, setting, dict(settings.settings(name))[setting]) == "followed"


@pytest.mark.slow("trains every class with every setting of its configuration")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_of_a_class(name: str) -> None:
    """LayerDrop, dropout of the embeddings and bidirectional masks were lost without a word, and only in training or masks.

    `python tests/settings.py` writes the table.
    """
    assert settings.lines()[name] == settings.row(name)
    assert settings.PAGE.read_text().startswith(settings.HEAD)
    assert set(settings.lines()) == set(FAMILIES)


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"]
)
def test_training_with_gradient_checkpoints_and_other_dtypes(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = made(name, **({"resid_pdrop": 0.4} if "GPT2" in name else {})).to(dtype)
        model.activation_checkpointing_enable()
        inputs = settings.batches(name)["all"]
        expected = settings.trained(model, partial(run_model, model), inputs)
        stages = nwise.split(model, at=3, example=inputs)
        found = settings.trained(model, partial(settings.run_stages, stages), inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


ROUTERS = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")
BALANCE, MASKED = {"output_router_logits": True}, {"apply_spec_augment": True}
FOLLOWED_BY_NO_STAGE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, BALANCE, {"router_aux_loss_coef": 0.0}) for name in ROUTERS),
    ("WhisperForConditionalGeneration", MASKED, {"mask_time_prob": 0.0}),
]


@pytest.mark.parametrize(("name", "options", "harmless"), FOLLOWED_BY_NO_STAGE)
def test_settings_that_stages_cannot_follow_are_refused(name: str, options: Any, harmless: Any) -> None:
    """The model adds the balance of routers to its own loss; stages left it out, and the routers' gradients were others."""
    [setting] = options
    message = f"`config.{setting}` should be False.*{'mask the features in the data loader' if options is MASKED else 'inject'}"
    with pytest.raises(ValueError, match=message):
        nwise.split(made(name, **options), at=2)
    assert nwise.split(made(name, **options, **harmless), at=2)


def test_a_setting_switched_on_after_the_split_is_refused() -> None:
    model, ids = made("MixtralForCausalLM"), torch.randint(0, VOCABULARY, (2, LENGTH))
    pipe = nwise.Pipeline(nwise.split(model, at=2), None, own_loss(model), "end-to-end")
    pipe.step(ids, target=ids)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="`config.output_router_logits` should be False"):
        pipe.step(ids, target=ids)


def test_left_out_blocks_are_refused() -> None:
    model = made("LlamaForCausalLM")
    model.config.num_hidden_layers = 3
    message = "`config.num_hidden_layers` should be the network's 5 blocks.* Found 3; delete"
    with pytest.raises(ValueError, match=message):
        nwise.split(model, at=2)
    del model.model.layers[3:]
    assert nwise.split(model, at=2, example=torch.randint(0, VOCABULARY, (2, LENGTH)))


def lora(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs the group 'trainers'", exc_type=ImportError)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))


def again(model: Any, name: str) -> None:
    """Put a copy in the place of a module."""
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, copy.deepcopy(model.get_submodule(name)))


CHANGES: list[tuple[Callable[[Any], object], str]] = [
    (lora, "lm_head"),
    (lambda model: again(model, "lm_head"), "lm_head"),
    (lambda model: again(model, "model.layers.1"), "model.layers.1"),
    (lambda model: model.model.layers.append(copy.deepcopy(model.model.layers[2])), "model.layers"),
    (lambda model: again(model, "model.rotary_emb"), "model.rotary_emb"),
    (lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0), "model.rotary_emb"),
    (lambda model: model.model.rotary_emb.inv_freq.mul_(0.5), "model.rotary_emb"),
    (lambda model: setattr(model.model.rotary_emb, "inv_freq", torch.ones(4)), "model.rotary_emb"),
    (lambda model: model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False), "lm_head"),
]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of PEFT
@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_later_changes_of_the_model_are_refused(change: Any, name: str) -> None:
    """Adapters, embeddings and blocks put into the model after the split were not trained, and not called.

    A new frequency of rotary positions did not reach the stages' copies.
    """
    model, ids = made("LlamaForCausalLM"), torch.randint(0, VOCABULARY, (2, LENGTH))
    pipe = nwise.Pipeline(nwise.split(model, at=2), None, own_loss(model), "end-to-end")
    change(model)
    message = f"{re.escape(repr(name))}.* split.* Found .*change the network first, then split"
    with pytest.raises(ValueError, match=message):
        pipe.step(ids, target=ids)


@pytest.mark.parametrize("longer", [False, True])
def test_rotary_positions_may_be_cast_and_depend_on_the_length(longer: bool) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = made("LlamaForCausalLM", **({"rope_parameters": rope, "max_position_embeddings": LENGTH} if longer else {}))
    stages, before = nwise.split(model, at=2), model.model.rotary_emb.inv_freq.clone()
    model(torch.zeros(1, 3 * LENGTH, dtype=torch.long)) if longer else model.to(torch.bfloat16)
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    for stage in stages:
        stage.check_origin()


class Reversed(nn.ModuleList):
    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


class LlamaForCausalLM(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    def forward(self, *inputs: Any, **named: Any) -> Any:
        output = super().forward(*inputs, **named)
        output.logits = output.logits / 2
        return output


@pytest.mark.parametrize("kind", ["a list", "a class", "a forward"])
def test_what_only_has_a_known_name_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a class of a known name was cut like that of transformers, whatever its own forward computes.

    A list with an order of its own gives the network's forward other blocks than the stages run.
    """
    model, ids = made("LlamaForCausalLM"), torch.randint(0, VOCABULARY, (2, LENGTH))
    message, other = (
        "a LlamaForCausalLM with a custom forward",
        "The stages should compute what the model's own forward",
    )
    if kind == "a list":
        model.model.layers = Reversed(model.model.layers)
        message, other = (
            "'model.layers' should run .* a Reversed with a custom __iter__",
            "another output for `example`",
        )
    elif kind == "a class":
        model = LlamaForCausalLM(model.config)
    else:
        monkeypatch.setattr(transformers.LlamaModel, "forward", lambda self, *inputs, **named: None)
        message = "a LlamaModel with a custom forward"
    with pytest.raises(ValueError, match=message):
        nwise.split(model, at=2)
    assert nwise.split(model, at=2, unchecked=True)
    if kind != "a forward":
        with pytest.raises(ValueError, match=other):
            nwise.split(model, at=2, example=ids)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
def test_adapters_inside_blocks_take_effect_after_the_split() -> None:
    peft = pytest.importorskip("peft", reason="needs the group 'trainers'", exc_type=ImportError)
    model, ids = made("LlamaForCausalLM"), torch.randint(0, VOCABULARY, (2, LENGTH))
    pipe = nwise.Pipeline(nwise.split(model, at=2), None, own_loss(model), "end-to-end")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    assert torch.equal(pipe(ids), run_model(model, (ids,)))
    pipe.step(ids, target=ids)
    assert {n.split(".")[-2] for n, p in model.named_parameters() if p.grad is not None} == {"default"}


@pytest.mark.parametrize("name", FAMILIES)
def test_model_without_values_gets_its_buffers_back(name: str) -> None:
    """Rotary frequencies and numbers of positions are in no file: after `to_empty` they were what the memory held."""
    real = short(name).eval()
    inputs = settings.batches(name)["all"]
    with torch.device("meta"):
        model = type(real)(real.config).eval()
    stages = nwise.split(model, at=2)
    heads = None if "Conditional" in name else nwise.heads.copied(stages)  # a decoder's head does not fit an encoder
    pipe = nwise.Pipeline(stages, heads, own_loss(real), "end-to-end").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*pipe.parameters(), *pipe.buffers()):
            tensor.fill_(7)  # what memory may hold
    for stage in pipe.stages:
        stage.load_state_dict({n: t for n, t in real.state_dict().items() if n in stage.state_dict()}, strict=True)
    with torch.no_grad():
        assert torch.equal(pipe(**inputs.by_name()), run_model(real, inputs))


def test_multi_process_matches_single_process(tmp_path: Path) -> None:
    from ranks.huggingface import routed, train

    first, other = results(2, "huggingface.py", tmp_path)
    assert first["loaded"], "the class itself should take the weights of all stages"
    assert first["weights"] == train()["weights"]
    for name, gradients_of_all in routed().items():
        parts = [rank["routed"][name] for rank in (first, other)]
        assert {n: bits for part in parts for n, bits in part.items()} == gradients_of_all, name


def test_mask_functions_of_version_5_24_are_called_without_deprecated_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with transformers 5.24, which calls `past_key_values` `cache`, every run began with a FutureWarning."""
    from transformers import masking_utils

    model = made("GPT2LMHeadModel").eval()
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    stages = nwise.split(model, at=["transformer.h.1"])
    expected = nwise.Pipeline(stages, [None], strategy="end-to-end")(ids)
    original, called = masking_utils.create_causal_mask, []

    def renamed(config: Any, inputs_embeds: Tensor, attention_mask: Any, cache: Any, position_ids: Any = None) -> Any:
        called.append(cache)
        return original(config, inputs_embeds, attention_mask, cache, position_ids)

    monkeypatch.setattr(masking_utils, "create_causal_mask", renamed)
    assert torch.equal(nwise.Pipeline(stages, [None], strategy="end-to-end")(ids), expected)
    assert called == [None] * len(called) != []
