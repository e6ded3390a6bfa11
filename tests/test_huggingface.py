"""Networks of Hugging Face in stages: what their own forward computes, under their own names, trained and loaded back."""

from __future__ import annotations

import copy
import re
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
from nwise.exits import confidence
from nwise.network.families import FAMILIES, family_for, run_model
from nwise.tensors import Named, Tensors, run_module
from test_contract import assert_same, gradients

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTH = 9


def gpt2(**options: Any) -> Any:
    model = made("GPT2LMHeadModel")
    if not options:
        return model
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**model.config.to_dict(), **options}))


def short(name: str) -> Any:
    """A network with three blocks, which show as much as five and take two thirds of the time."""
    others = name.startswith(("GPT2", "ResNet", "ConvNext")) or "Conditional" in name  # have another name for them
    return made(name) if others else made(name, num_hidden_layers=3)


def vit() -> Any:
    return made("ViTForImageClassification")


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


def own_loss(model: Any) -> Any:
    per_token = re.search("LMHead|LM$|Generation$", type(model).__name__)
    return nwise.losses.TokenCrossEntropy() if per_token else nn.functional.cross_entropy


def target_for(model: Any, inputs: tuple[Tensor, ...]) -> Tensor:
    shape = run_model(model, inputs).shape
    return torch.randint(0, shape[-1], shape[:-1])


def check_outputs(model: Any, inputs: tuple[Tensor, ...]) -> None:
    """Stages compute what the model does: without the optional inputs, and with all."""
    model.eval()
    required = [n for n in family_for(model).inputs if n in ("input_ids", "pixel_values", "decoder_input_ids")]
    least = 1 + max(map(family_for(model).inputs.index, required))
    stages = nwise.split(model, at=2, example=inputs)  # which compares outputs and gradients in training mode too
    for count in range(least, len(inputs) + 1):
        hidden: Tensors = inputs[:count]
        for stage in stages:
            hidden = run_module(stage, hidden, "The output")
        assert torch.equal(hidden[0], run_model(model, inputs[:count]))
        assert len(hidden) == 1
    if len(inputs) > least:  # they are used, not only carried
        assert not torch.equal(hidden[0], run_model(model, inputs[:least]))
    assert {n for stage in stages for n in stage.state_dict()} == set(model.state_dict())


def check_gradients(model: Any, inputs: tuple[Tensor, ...], target: Tensor) -> None:
    """End-to-end gradients of the pipeline are those of the model's own backward."""
    loss_fn, twin = own_loss(model), copy.deepcopy(model)
    loss_fn(run_model(twin, inputs), target).backward()
    nwise.Pipeline(nwise.split(model, at=2), None, loss_fn, "end-to-end").step(*inputs, target=target)
    for (n, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if other.grad is not None:
            scale = float(other.grad.abs().max())
            assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-5 * scale + 1e-9), n
    model.zero_grad()


def check_training(model: Any, inputs: tuple[Tensor, ...], target: Tensor, folder: Path) -> None:
    """2-wise training lowers the losses; what is saved loads back equal."""
    stages = nwise.split(model, at=2)
    widths = {parameter.shape[0] for parameter in stages[0].parameters()} if "Net" in type(model).__name__ else set()
    heads = nwise.heads.fitting(stages, inputs, CLASSES) if widths else nwise.heads.copied(stages, blocks=1)
    pipe = nwise.Pipeline(stages, heads, own_loss(model), "2-wise")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(*inputs, target=target)[-1])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder)
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in model.state_dict().items()
    }
    model.load_state_dict(nwise.checkpoint.main_state(pipe), strict=True)
    model.eval(), again.eval()
    assert torch.equal(run_model(again, inputs), run_model(model, inputs))
    assert torch.equal(pipe.eval()(*inputs), run_model(model, inputs))


@pytest.mark.parametrize("name", FAMILIES)
def test_class_is_cut_trained_and_exported(name: str, tmp_path: Path) -> None:
    model = short(name)
    inputs = inputs_for(model)
    check_outputs(model, inputs)
    model.train()
    target = target_for(model, inputs)
    check_gradients(model, inputs, target)
    check_training(model, inputs, target, tmp_path)


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


def test_exits_know_masks_by_position() -> None:
    """Regression: padding could be the least certain position unless all inputs came by name."""
    model = made("BertForMaskedLM")
    stages = nwise.split(model, at=2)
    pipe = nwise.Pipeline(stages, nwise.heads.copied(stages), own_loss(model), "2-wise-mean").double()
    ids, mask = torch.randint(1, VOCABULARY, (6, LENGTH)), torch.arange(LENGTH) < torch.arange(3, 9)[:, None]
    by_name = pipe.exit(input_ids=ids, attention_mask=mask.long(), threshold=0.0).confidence
    assert torch.equal(pipe.exit(ids, mask.long(), threshold=0.0).confidence, by_name)
    assert not torch.allclose(pipe.exit(ids, mask.long(), threshold=0.0, confidence=confidence).confidence, by_name)


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


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_bert_decoder_attention_is_causal(name: str) -> None:
    """Regression: its blocks saw all tokens, and only an `example` revealed it."""
    model = made(name)
    model.config.is_decoder = True
    model = type(model)(model.config).eval()
    stages = nwise.split(model, at=2)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    assert torch.equal(stages[1](stages[0](ids)), run_model(model, (ids,)))
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
    values = dict(zip(family_for(model).inputs, inputs_for(model), strict=True))
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
    with pytest.raises(ValueError, match=r"at most input_ids, attention_mask, position_ids. Found 1 more"):
        nwise.split(gpt2(), at=2)[0](*[torch.zeros(1, 2, dtype=torch.long)] * 4)
    with pytest.raises(TypeError, match="should get decoder_input_ids, which it does not make from labels. Found"):
        nwise.split(made("T5ForConditionalGeneration"), at=["lm_head"])[0](torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="from 1 to the network's 5 GPT2Block modules.*Found 6"):
        nwise.split(gpt2(), at=6)
    with pytest.raises(ValueError, match="`blocks` should be an integer from 0 to the network's 5 blocks. Found 6"):
        nwise.heads.copied(nwise.split(gpt2(), at=2), blocks=6)


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


def test_layer_drop_of_every_block_trains_the_rest() -> None:
    """Every layer was called, however often LayerDrop leaves one out."""
    name = "WhisperForConditionalGeneration"
    model = made(name, encoder_layerdrop=1.0, decoder_layerdrop=1.0).train()
    inputs, twin, loss_fn = settings.batches(name)["required"], copy.deepcopy(model), nwise.losses.TokenCrossEntropy()
    target = torch.randint(0, VOCABULARY, (4, LENGTH - 1))
    loss_fn(run_model(twin, inputs), target).backward()
    at = ["model.encoder.layers.1", "model.decoder.embed_tokens", "model.decoder.layers.1"]
    pipe = nwise.Pipeline(nwise.split(model, at=at), None, loss_fn, "end-to-end", 2)
    pipe.step(inputs.by_name(), target=target)
    for (n, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), n
        if other.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"]
)
def test_balance_loss_of_routers_is_refused(name: str) -> None:
    """The model adds it to its own loss; stages left it out, and the routers' gradients were others."""
    with pytest.raises(ValueError, match="`config.output_router_logits` should be False.*`nwise.inject`"):
        nwise.split(made(name, output_router_logits=True), at=2)
    assert nwise.split(made(name, output_router_logits=True, router_aux_loss_coef=0.0), at=2)


def test_balance_loss_switched_on_after_the_split_is_refused() -> None:
    model, ids = made("MixtralForCausalLM"), torch.randint(0, VOCABULARY, (2, LENGTH))
    pipe = nwise.Pipeline(nwise.split(model, at=2), None, own_loss(model), "end-to-end")
    pipe.step(ids, target=ids)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="`config.output_router_logits` should be False"):
        pipe.step(ids, target=ids)


def test_masked_features_and_left_out_blocks_are_refused() -> None:
    name = "WhisperForConditionalGeneration"
    with pytest.raises(
        ValueError, match="`config.apply_spec_augment` should be False.*mask the features in the data loader"
    ):
        nwise.split(made(name, apply_spec_augment=True), at=2)
    assert nwise.split(made(name, apply_spec_augment=True, mask_time_prob=0.0), at=2)
    model = made("LlamaForCausalLM")
    model.config.num_hidden_layers = 3
    with pytest.raises(
        ValueError, match="`config.num_hidden_layers` should be the network's 5 blocks.* Found 3; delete"
    ):
        nwise.split(model, at=2)
    del model.model.layers[3:]
    assert nwise.split(model, at=2, example=torch.randint(0, VOCABULARY, (2, LENGTH)))


def lora(model: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs the group 'trainers'", exc_type=ImportError)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"]))


def head_replaced(model: Any) -> None:
    model.lm_head = nn.Linear(16, VOCABULARY, bias=False)


def block_replaced(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[2])


def block_added(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[2]))


def rotary_replaced(model: Any) -> None:
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)


def rotary_scaled(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 2.0


def rotary_slowed(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def rotary_shared(model: Any) -> None:
    model.model.rotary_emb.inv_freq = torch.ones(4)


def resized(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of PEFT
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lora, "lm_head"),
        (head_replaced, "lm_head"),
        (block_replaced, "model.layers.1"),
        (block_added, "model.layers"),
        (rotary_replaced, "model.rotary_emb"),
        (rotary_scaled, "model.rotary_emb"),
        (rotary_slowed, "model.rotary_emb"),
        (rotary_shared, "model.rotary_emb"),
        (resized, "lm_head"),
    ],
)
def test_later_changes_of_the_model_are_refused(change: Any, name: str) -> None:
    """Adapters, embeddings and blocks put into the model after the split were not trained, and not called.

    A new frequency of rotary positions did not reach the stages' copies.
    """
    model, ids = made("LlamaForCausalLM"), torch.randint(0, VOCABULARY, (2, LENGTH))
    pipe = nwise.Pipeline(nwise.split(model, at=2), None, own_loss(model), "end-to-end")
    change(model)
    with pytest.raises(
        ValueError, match=f"{re.escape(repr(name))}.* split.* Found .*change the network first, then split"
    ):
        pipe.step(ids, target=ids)


def halved(model: Any) -> None:
    model.to(torch.bfloat16)


def run_longer(model: Any) -> None:
    model(torch.zeros(1, 3 * LENGTH, dtype=torch.long))


@pytest.mark.parametrize("change", [halved, run_longer])
def test_rotary_positions_may_be_cast_and_depend_on_the_length(change: Any) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0} if change is run_longer else None
    model = made("LlamaForCausalLM", **({"rope_parameters": rope, "max_position_embeddings": LENGTH} if rope else {}))
    stages, before = nwise.split(model, at=2), model.model.rotary_emb.inv_freq.clone()
    change(model)
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    for stage in stages:
        stage.check_origin()


class Reversed(nn.ModuleList):
    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


def test_lists_with_an_order_of_their_own_are_refused() -> None:
    """The network's forward gets other blocks from such a list than the stages run."""
    model = made("LlamaForCausalLM")
    model.model.layers = Reversed(model.model.layers)
    with pytest.raises(ValueError, match="'model.layers' should run .* Found a Reversed with a custom __iter__"):
        nwise.split(model, at=2)
    with pytest.raises(ValueError, match="Found another output for `example`"):
        nwise.split(model, at=2, example=torch.randint(0, VOCABULARY, (2, LENGTH)))


@pytest.mark.parametrize("inner", [False, True])
def test_classes_and_forwards_that_only_have_a_known_name_are_refused(
    inner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a class of a known name was cut like that of transformers, whatever its own forward computes."""
    whole, body = transformers.LlamaForCausalLM, transformers.LlamaModel

    class LlamaForCausalLM(whole):  # type: ignore[misc, valid-type]
        def forward(self, *inputs: Any, **named: Any) -> Any:
            output = super().forward(*inputs, **named)
            output.logits = output.logits / 2
            return output

    model, ids = made("LlamaForCausalLM"), torch.randint(0, VOCABULARY, (2, LENGTH))
    if inner:
        monkeypatch.setattr(body, "forward", lambda self, *inputs, **named: None)
    else:
        model = LlamaForCausalLM(model.config)
    with pytest.raises(ValueError, match=f"a {'LlamaModel' if inner else 'LlamaForCausalLM'} with a custom forward"):
        nwise.split(model, at=2)
    if not inner:
        with pytest.raises(ValueError, match="The stages should compute what the model's own forward does"):
            nwise.split(model, at=2, example=ids)
        assert nwise.split(model, at=2, unchecked=True)


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

    model = gpt2().eval()
    ids = inputs_for(model)[0]
    stages = nwise.split(model, at=["transformer.h.1"])
    expected = nwise.Pipeline(stages, [None], strategy="end-to-end")(ids)
    original, called = masking_utils.create_causal_mask, []

    def renamed(config: Any, inputs_embeds: Tensor, attention_mask: Any, cache: Any, position_ids: Any = None) -> Any:
        called.append(cache)
        return original(config, inputs_embeds, attention_mask, cache, position_ids)

    monkeypatch.setattr(masking_utils, "create_causal_mask", renamed)
    assert torch.equal(nwise.Pipeline(stages, [None], strategy="end-to-end")(ids), expected)
    assert called == [None] * len(called) != []
