"""Split Hugging Face transformers into stages that call the model's own modules as its forward does.

Nothing is traced or rewritten. A `Family` lists the modules of a class of models in the order they run, and how each is
called. Attention masks and position ids travel from stage to stage with the hidden state.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nwise.models.chain import Chain
from nwise.tensors import HIDDEN_STATES, Tensors, names


class CallContext:
    """Arguments of a stage's modules besides the hidden state, computed once per forward of the stage.

    Args:
        config: the model's configuration.
        given: the model's inputs that this stage has, by name.
        shared: the stage's copies of modules without weights, by the last part of their names.
    """

    def __init__(self, config: Any, given: Mapping[str, Tensor], shared: Mapping[str, nn.Module]) -> None:
        self.config = config
        self.given = given
        self.shared = shared
        self._masks: dict[str, Tensor | None] = {}
        self._rotary: tuple[Tensor, Tensor] | None = None

    def positions(self, x: Tensor) -> Tensor:
        """Return position ids ``[B, T]``, or ``[1, T]`` if none were given."""
        given = self.given.get("position_ids")
        return torch.arange(x.shape[1], device=x.device).unsqueeze(0) if given is None else given

    def mask(self, x: Tensor, kind: str) -> Tensor | None:
        """Make the attention mask as the model's own forward does; None if attention needs none.

        Args:
            x: the hidden state, for its shape and dtype.
            kind: full_attention, sliding_attention, or bidirectional.
        """
        if kind not in self._masks:
            from transformers import masking_utils

            make = {
                "full_attention": masking_utils.create_causal_mask,
                "sliding_attention": masking_utils.create_sliding_window_causal_mask,
                "bidirectional": masking_utils.create_bidirectional_mask,
            }[kind]
            given = {"config": self.config, "inputs_embeds": x, "attention_mask": self.given.get("attention_mask")}
            if kind != "bidirectional":
                given |= {"past_key_values": None, "position_ids": self.positions(x)}
            self._masks[kind] = make(**given)
        return self._masks[kind]

    def rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions."""
        if self._rotary is None:
            self._rotary = self.shared["rotary_emb"](x, position_ids=self.positions(x))
        return self._rotary


Call = Callable[[nn.Module, Tensor, CallContext], Tensor]


def _call(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    del context
    return piece(x)


def _call_on_first_token(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    del context
    return piece(x[:, 0])


def _add_positions(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return x + piece(context.positions(x))


def _gpt2_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(x, attention_mask=context.mask(x, "full_attention"), position_ids=context.positions(x))


def _rotary_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(
        x,
        attention_mask=context.mask(x, _attention_kind(piece, context.config)),
        position_ids=context.positions(x),
        position_embeddings=context.rotary(x),
    )


def _attention_kind(block: nn.Module, config: Any) -> str:
    """Read the kind of mask from the configuration: Qwen lists it per layer, Mistral has one window for all."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return kinds[block.self_attn.layer_idx]  # type: ignore[union-attr]
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def _encoder_block(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    decoder = getattr(context.config, "is_decoder", False)
    return piece(x, context.mask(x, "full_attention" if decoder else "bidirectional"))


def _bert_embeddings(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    return piece(input_ids=x, token_type_ids=context.given.get("token_type_ids"))


def _vit_embeddings(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    del context
    return piece(x.to(next(piece.parameters()).dtype))


@dataclass(frozen=True)
class Family:
    """The modules of a class of models in the order that its forward calls them, and how.

    Args:
        inputs: names of the model's inputs, in the order of `Pipeline.step`; the last ones are optional.
        carried: those inputs that later stages need.
        pieces: names of the modules in the order they run, with the function that calls each; ``*`` matches every entry of a
            list.
        shared: names of modules without weights that every stage needs.
    """

    inputs: tuple[str, ...]
    carried: tuple[str, ...]
    pieces: Mapping[str, Call]
    shared: tuple[str, ...] = ()

    def call_for(self, name: str) -> Call:
        """Return the function that calls the module of that name."""
        patterns = {re.escape(piece).replace(r"\*", r"\d+"): call for piece, call in self.pieces.items()}
        return next(call for pattern, call in patterns.items() if re.fullmatch(pattern, name))

    def ordered_pieces(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the model's modules by name, in the order they run."""
        return dict(item for pattern in self.pieces for item in _match(model, "", pattern.split(".")))


def _match(module: nn.Module, prefix: str, parts: list[str]) -> list[tuple[str, nn.Module]]:
    if not parts:
        return [(prefix.removesuffix("."), module)]
    part, *rest = parts
    names = list(module._modules) if part == "*" else [part]
    return [item for name in names for item in _match(module.get_submodule(name), f"{prefix}{name}.", rest)]


_TEXT = ("input_ids", "attention_mask", "position_ids")
_GPT2 = Family(
    _TEXT,
    ("attention_mask", "position_ids"),
    {
        "transformer.wte": _call,
        "transformer.wpe": _add_positions,
        "transformer.drop": _call,
        "transformer.h.*": _gpt2_block,
        "transformer.ln_f": _call,
        "lm_head": _call,
    },
)
_LLAMA = Family(
    _TEXT,
    ("attention_mask", "position_ids"),
    {"model.embed_tokens": _call, "model.layers.*": _rotary_block, "model.norm": _call, "lm_head": _call},
    ("model.rotary_emb",),
)
_VIT = Family(
    ("pixel_values",),
    (),
    {
        "vit.embeddings": _vit_embeddings,
        "vit.layers.*": _encoder_block,
        "vit.layernorm": _call,
        "classifier": _call_on_first_token,
    },
)
_BERT = {"bert.embeddings": _bert_embeddings, "bert.encoder.layer.*": _encoder_block}
_BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_RESNET = Family(
    ("pixel_values",),
    (),
    {
        "resnet.embedder": _call,
        "resnet.encoder.stages.*.layers.*": _call,
        "resnet.pooler": _call,
        "classifier": _call,
    },
)
FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "ViTForImageClassification": _VIT,
    "BertForSequenceClassification": Family(
        _BERT_INPUTS,
        ("attention_mask",),
        {**_BERT, "bert.pooler": _call, "dropout": _call, "classifier": _call},
    ),
    "BertForMaskedLM": Family(_BERT_INPUTS, ("attention_mask",), {**_BERT, "cls": _call}),
    "ResNetForImageClassification": _RESNET,
}


class HuggingFaceStage(Chain):
    """A stage of a Hugging Face network: some of its modules, called as the network's own forward calls them.

    Args:
        pieces: the stage's modules by their names in the model, in the order they run.
        family: the family of the model, which knows how to call them.
        config: the model's configuration.
        shared: modules without weights that every stage needs, by name; the stage copies them.
        begins: whether this is the first stage, which takes the model's inputs.
        ends: whether this is the last stage, whose output is the model's.
    """

    def __init__(
        self,
        pieces: Mapping[str, nn.Module],
        family: Family,
        config: Any,
        shared: Mapping[str, nn.Module],
        *,
        begins: bool,
        ends: bool,
    ) -> None:
        super().__init__(pieces)
        self.family = family
        self.config = config
        self.begins = begins
        self.ends = ends
        self._calls = {name: family.call_for(name) for name in pieces}
        self._shared = tuple(shared)
        for name, module in shared.items():
            self.place(name, copy.deepcopy(module))

    def like(self, pieces: Mapping[str, nn.Module]) -> HuggingFaceStage:
        """Make a head of other pieces, which ends where the model does."""
        shared = {name: self.get_submodule(name) for name in self._shared}
        return HuggingFaceStage(pieces, self.family, self.config, shared, begins=False, ends=True)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | Tensors | dict[str, Tensor]:
        wanted = self.family.inputs if self.begins else (HIDDEN_STATES, *self.family.carried)
        if len(inputs) > len(wanted):
            raise ValueError(
                f"The network should get at most {', '.join(wanted)}. Found {len(inputs) - len(wanted)} more."
            )
        given = {**dict(zip(wanted, inputs, strict=False)), **named}
        if unknown := sorted(set(given) - set(wanted)):
            raise TypeError(
                f"The network's inputs should be of {', '.join(wanted)}. Found {', '.join(unknown)}; labels are the `target`."
            )
        if wanted[0] not in given:
            raise TypeError(f"The network should get {wanted[0]}. Found {', '.join(given) or 'nothing'}.")
        x = given.pop(wanted[0])
        shared = {name.rpartition(".")[2]: self.get_submodule(name) for name in self._shared}
        context = CallContext(self.config, given, shared)
        for name, piece in self.pieces().items():
            x = self._calls[name](piece, x, context)
        passed_on = {} if self.ends else {name: given[name] for name in self.family.carried if name in given}
        if named and passed_on:
            return {HIDDEN_STATES: x, **passed_on}
        return (x, *passed_on.values()) if passed_on else x


def family_for(model: nn.Module) -> Family:
    """Look up the family of a model by its class.

    Raises:
        ValueError: the class is unknown.
    """
    name = type(model).__name__
    if name not in FAMILIES:
        raise ValueError(
            f"A Hugging Face model should be one of {', '.join(FAMILIES)}. Found {name}; write its stages yourself, or add a "
            "`nwise.models.huggingface.Family` to `nwise.models.huggingface.FAMILIES`."
        )
    return FAMILIES[name]


def run_model(model: nn.Module, inputs: Tensors) -> Any:
    """Return the logits of the unsplit model."""
    named: dict[str, Any] = dict(zip(names(inputs) or family_for(model).inputs, inputs, strict=False))
    if "input_ids" in named:
        named["use_cache"] = False  # stages have no cache, and using one rounds differently
    return model(**named, return_dict=True).logits


def hf_stages(model: nn.Module, groups: list[dict[str, nn.Module]]) -> list[Chain]:
    """Make a stage of every group of the model's pieces."""
    family = family_for(model)
    shared = {name: model.get_submodule(name) for name in family.shared}
    last = len(groups) - 1
    return [
        HuggingFaceStage(group, family, model.config, shared, begins=k == 0, ends=k == last)
        for k, group in enumerate(groups)
    ]
