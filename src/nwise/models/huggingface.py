"""Networks of Hugging Face's transformers as stages: their own modules under their own names, called as their forward does.

Nothing is traced and nothing rewritten: a `Family` says in which order a class of models runs its modules, and what each
of them is given beside the hidden state. Attention masks and position ids travel from stage to stage with it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nwise.microbatch import Tensors
from nwise.models.chain import Chain


class Around:
    """What the modules of a stage are given beside the hidden state, worked out once in a forward of the stage.

    Args:
        config: of the model.
        given: the inputs that were given and are still known here, by name.
        beside: modules without weights that the stage has a copy of, by the last part of their names.
    """

    def __init__(self, config: Any, given: Mapping[str, Tensor], beside: Mapping[str, nn.Module]) -> None:
        self.config = config
        self.given = given
        self.beside = beside
        self._masks: dict[str, Tensor | None] = {}
        self._rotary: tuple[Tensor, Tensor] | None = None

    def positions(self, x: Tensor) -> Tensor:
        """Position ids ``[B, T]``, or ``[1, T]`` if none were given."""
        given = self.given.get("position_ids")
        return torch.arange(x.shape[1], device=x.device).unsqueeze(0) if given is None else given

    def mask(self, x: Tensor, kind: str) -> Tensor | None:
        """The attention mask as the model's own forward makes it; None where attention needs none.

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
        """Cosines and sines of the positions."""
        if self._rotary is None:
            self._rotary = self.beside["rotary_emb"](x, position_ids=self.positions(x))
        return self._rotary


Call = Callable[[nn.Module, Tensor, Around], Tensor]


def _plainly(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    del around
    return piece(x)


def _of_first_token(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    del around
    return piece(x[:, 0])


def _added_positions(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    return x + piece(around.positions(x))


def _gpt2_block(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    return piece(x, attention_mask=around.mask(x, "full_attention"), position_ids=around.positions(x))


def _rotary_block(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    return piece(
        x,
        attention_mask=around.mask(x, _attention_of(piece, around.config)),
        position_ids=around.positions(x),
        position_embeddings=around.rotary(x),
    )


def _attention_of(block: nn.Module, config: Any) -> str:
    """Qwen says it of every layer, Mistral of all of them by the width of its window."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return kinds[block.self_attn.layer_idx]  # type: ignore[union-attr]
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def _encoder_block(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    decoder = getattr(around.config, "is_decoder", False)
    return piece(x, around.mask(x, "full_attention" if decoder else "bidirectional"))


def _bert_embeddings(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    return piece(input_ids=x, token_type_ids=around.given.get("token_type_ids"))


def _vit_embeddings(piece: nn.Module, x: Tensor, around: Around) -> Tensor:
    del around
    return piece(x.to(next(piece.parameters()).dtype))


@dataclass(frozen=True)
class Family:
    """How the forward of a class of models goes through its modules.

    Args:
        inputs: names of what the model takes, in the order of `Pipeline.step`; the last ones may be left out.
        carried: which of them later stages need.
        pieces: modules in the order they run, and how each is called; ``*`` stands for the entries of a list.
        beside: modules without weights that every stage needs.
    """

    inputs: tuple[str, ...]
    carried: tuple[str, ...]
    pieces: Mapping[str, Call]
    beside: tuple[str, ...] = ()
    patterns: Mapping[re.Pattern[str], Call] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        regular = {re.compile(re.escape(p).replace(r"\*", r"\d+")): call for p, call in self.pieces.items()}
        object.__setattr__(self, "patterns", regular)

    def call_of(self, name: str) -> Call:
        """How the module of that name is called."""
        return next(call for pattern, call in self.patterns.items() if pattern.fullmatch(name))

    def pieces_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """The model's modules in the order they run, by name."""
        found: dict[str, nn.Module] = {}
        for pattern in self.pieces:
            found |= dict(_matching(model, "", pattern.split(".")))
        return found


def _matching(module: nn.Module, prefix: str, parts: list[str]) -> list[tuple[str, nn.Module]]:
    if not parts:
        return [(prefix.removesuffix("."), module)]
    here, *rest = parts
    names = list(module._modules) if here == "*" else [here]
    return [item for name in names for item in _matching(module.get_submodule(name), f"{prefix}{name}.", rest)]


_TEXT = ("input_ids", "attention_mask", "position_ids")
_GPT2 = Family(
    _TEXT,
    ("attention_mask", "position_ids"),
    {
        "transformer.wte": _plainly,
        "transformer.wpe": _added_positions,
        "transformer.drop": _plainly,
        "transformer.h.*": _gpt2_block,
        "transformer.ln_f": _plainly,
        "lm_head": _plainly,
    },
)
_LLAMA = Family(
    _TEXT,
    ("attention_mask", "position_ids"),
    {"model.embed_tokens": _plainly, "model.layers.*": _rotary_block, "model.norm": _plainly, "lm_head": _plainly},
    ("model.rotary_emb",),
)
_VIT = Family(
    ("pixel_values",),
    (),
    {
        "vit.embeddings": _vit_embeddings,
        "vit.layers.*": _encoder_block,
        "vit.layernorm": _plainly,
        "classifier": _of_first_token,
    },
)
_BERT = {"bert.embeddings": _bert_embeddings, "bert.encoder.layer.*": _encoder_block}
_BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_RESNET = Family(
    ("pixel_values",),
    (),
    {
        "resnet.embedder": _plainly,
        "resnet.encoder.stages.*.layers.*": _plainly,
        "resnet.pooler": _plainly,
        "classifier": _plainly,
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
        {**_BERT, "bert.pooler": _plainly, "dropout": _plainly, "classifier": _plainly},
    ),
    "BertForMaskedLM": Family(_BERT_INPUTS, ("attention_mask",), {**_BERT, "cls": _plainly}),
    "ResNetForImageClassification": _RESNET,
}


class Passage(Chain):
    """A stage of a network of Hugging Face: some of its modules, called as its own forward calls them.

    Args:
        pieces: modules by their names in the model, in the order they run.
        family: how they are called.
        config: of the model.
        beside: modules without weights that every stage needs, by name; copied.
        begins: whether the model begins with this stage, which then takes the model's inputs.
        ends: whether its output is the model's.
    """

    def __init__(
        self,
        pieces: Mapping[str, nn.Module],
        family: Family,
        config: Any,
        beside: Mapping[str, nn.Module],
        *,
        begins: bool,
        ends: bool,
    ) -> None:
        super().__init__(pieces)
        self.family = family
        self.config = config
        self.begins = begins
        self.ends = ends
        self._calls = {name: family.call_of(name) for name in pieces}
        self._beside = tuple(beside)
        for name, module in beside.items():
            self.place(name, copy.deepcopy(module))

    def like(self, pieces: Mapping[str, nn.Module]) -> Passage:
        """A head of other pieces, which ends where the model does."""
        beside = {name: self.get_submodule(name) for name in self._beside}
        return Passage(pieces, self.family, self.config, beside, begins=False, ends=True)

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        x, *carried = inputs
        names = self.family.inputs[1:] if self.begins else self.family.carried
        if len(carried) > len(names):
            raise ValueError(
                f"The network should be given at most {', '.join(self.family.inputs)}. Found {len(carried) - len(names)} more."
            )
        given = dict(zip(names, carried, strict=False))
        beside = {name.rpartition(".")[2]: self.get_submodule(name) for name in self._beside}
        around = Around(self.config, given, beside)
        for name, piece in self.pieces().items():
            x = self._calls[name](piece, x, around)
        on = tuple(given[name] for name in self.family.carried if name in given)
        return x if self.ends or not on else (x, *on)


def family_of(model: nn.Module) -> Family:
    """How a model's forward goes, by its class.

    Raises:
        ValueError: it is of a class that is not known.
    """
    name = type(model).__name__
    if name not in FAMILIES:
        raise ValueError(
            f"A model of Hugging Face should be one of {', '.join(FAMILIES)}. Found {name}; write its stages as modules of your "
            "own, or add a `nwise.models.huggingface.Family` to `nwise.models.huggingface.FAMILIES`."
        )
    return FAMILIES[name]


def outputs_of(model: nn.Module, inputs: Tensors) -> Any:
    """What the model itself makes of the inputs."""
    named: dict[str, Any] = dict(zip(family_of(model).inputs, inputs, strict=False))
    if "input_ids" in named:
        named["use_cache"] = False  # which stages do not have, and which rounds otherwise
    return model(**named, return_dict=True).logits


def passages(model: nn.Module, groups: list[dict[str, nn.Module]]) -> list[Chain]:
    """Stages of groups of the model's pieces."""
    family = family_of(model)
    beside = {name: model.get_submodule(name) for name in family.beside}
    last = len(groups) - 1
    return [
        Passage(group, family, model.config, beside, begins=k == 0, ends=k == last) for k, group in enumerate(groups)
    ]
