"""Split Hugging Face transformers into stages that call the model's own modules as its forward does.

Nothing is traced or rewritten: a `Family` names the modules of a class and says how its forward calls them, and
`nwise.network.families` has the known ones. Attention masks and position ids travel from stage to stage with the hidden state.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from nwise.network.chain import Chain, refuse_buffers, unsaved_buffers
from nwise.randomness import preserved
from nwise.tensors import HIDDEN_STATES, Tensors

__all__ = ["CallContext", "Family", "HuggingFaceStage"]


class CallContext:
    """Arguments of a stage's modules besides the hidden state, computed once per forward of the stage.

    Args:
        config: the model's configuration.
        given: the model's inputs that this stage has, by name, and the values that its modules add for later ones.
        shared: the stage's copies of modules without weights, by the last part of their names.
    """

    def __init__(self, config: Any, given: dict[str, Tensor], shared: Mapping[str, nn.Module]) -> None:
        self.config = config
        self.given = given
        self.shared = shared
        self._masks: dict[str, Tensor | None] = {}
        self._rotary: dict[str, tuple[Tensor, Tensor]] = {}

    def positions(self, x: Tensor) -> Tensor:
        """Return position ids ``[B, T]``, or ``[1, T]`` if none were given."""
        given = self.given.get("position_ids")
        return torch.arange(x.shape[1], device=x.device).unsqueeze(0) if given is None else given

    def attention(self) -> dict[str, bool]:
        """Return what the model passes on to every block beside the mask, if its configuration says it."""
        causal = getattr(getattr(self.config, "vision_config", self.config), "is_causal", None)  # CLIP has two parts
        return {} if causal is None else {"is_causal": causal}

    def mask(
        self, x: Tensor, kind: str, *, packed: bool = True, also: Callable[..., Tensor] | None = None
    ) -> Tensor | None:
        """Make the attention mask as the model's own forward does; None if attention needs none.

        Args:
            x: the hidden state, for its shape and dtype.
            kind: full_attention, sliding_attention or bidirectional; decoder or cross in the second half of a network with two.
            packed: whether positions that begin again separate texts. Default: True.
            also: tells, from sample, head, query and key, which other pairs of positions see each other; default: none.
        """
        # By transformers' own functions: they know the form that the chosen kernel of attention takes.
        if kind not in self._masks:
            from transformers import masking_utils

            causal = {
                "full_attention": masking_utils.create_causal_mask,
                "sliding_attention": masking_utils.create_sliding_window_causal_mask,
                "decoder": masking_utils.create_causal_mask,
            }
            make = causal.get(kind, masking_utils.create_bidirectional_mask)
            name = "decoder_attention_mask" if kind == "decoder" else "attention_mask"
            given = {"config": self.config, "inputs_embeds": x, "attention_mask": self.given.get(name)}
            if kind == "cross":
                given["encoder_hidden_states"] = self.given["encoder_hidden_states"]
            elif kind in causal:
                cache = "cache" if "cache" in inspect.signature(make).parameters else "past_key_values"  # before 5.24
                given |= {cache: None, "position_ids": self.positions(x) if packed else None}
            if also is not None:
                given["or_mask_function"] = also
            self._masks[kind] = make(**given)
        return self._masks[kind]

    def rotary(self, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions, for a kind of attention if the network has one table for each."""
        module = self.shared["rotary_emb"]
        by_kind = "layer_type" in inspect.signature(module.forward).parameters
        # Gemma 3 has other frequencies for sliding attention; others have one table, whatever the kind.
        key = kind if by_kind else ""
        if key not in self._rotary:
            self._rotary[key] = module(x, self.positions(x), *([kind] if by_kind else []))
        return self._rotary[key]


Call = Callable[[nn.Module, Tensor, CallContext], Tensor]


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
        return next(call for pattern, call in self.pieces.items() if _matches(pattern, name))

    def ordered_pieces(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the model's modules by name, in the order they run."""
        # Some configurations leave modules out. Others have one module in two places, such as T5's embedding.
        modules = list(model.named_modules(remove_duplicate=False))
        return {name: module for pattern in self.pieces for name, module in modules if _matches(pattern, name)}


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


class HuggingFaceStage(Chain):
    """A stage of a Hugging Face network: some of its modules, called as the network's own forward calls them.

    `kind` and `config` are the model's class and configuration. The stage copies the modules without weights that every stage
    needs (`shared`). The first stage takes the model's inputs, and the output of the last one is the model's.
    """

    def __init__(
        self,
        pieces: Mapping[str, nn.Module],
        family: Family,
        kind: type[nn.Module],
        config: Any,
        shared: Mapping[str, nn.Module],
        *,
        begins: bool,
        ends: bool,
    ) -> None:
        super().__init__(pieces)
        self.family = family
        self.kind = kind
        self.config = config
        self.ends = ends
        self.input_names = family.inputs if begins else (HIDDEN_STATES, *family.carried)
        self._calls = {name: family.call_for(name) for name in pieces}
        self._shared = tuple(shared)
        self._restored: dict[str, Tensor] = {}  # values of buffers to set before the next forward
        for name, module in shared.items():
            self.place(name, copy.deepcopy(module))

    def places(self) -> list[str]:
        return [*super().places(), *self._shared]

    def like(self, pieces: Mapping[str, nn.Module]) -> HuggingFaceStage:
        """Make a head of other pieces, which ends where the model does."""
        shared = {name: self.get_submodule(name) for name in self._shared}
        return HuggingFaceStage(pieces, self.family, self.kind, self.config, shared, begins=False, ends=True)

    def restore_later(self, buffers: Sequence[str]) -> None:
        """Compute the buffers from the configuration; the next forward sets them, when the file has been loaded."""
        # `to_empty` is not over yet, and a file may still be loaded: hence later.
        values = computed_buffers(self.kind, self.config)
        refuse_buffers(name for name in buffers if name not in values)
        self._restored = {name: values[name] for name in buffers}

    def check_origin(self) -> None:
        super().check_origin()
        if not torch.compiler.is_compiling():
            refuse_settings(self.config)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | Tensors | dict[str, Tensor]:
        self.check_origin()
        if self._restored:
            with torch.no_grad():
                for name, value in self._restored.items():
                    self.get_buffer(name).copy_(value)
            self._restored = {}
        wanted = self.input_names
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
        # A position is enough if no name before it is left out: with `carried` = (mask, positions)
        #
        #     both, or the mask alone    (x, mask, positions), (x, mask)
        #     the positions alone        {"hidden_states": x, "position_ids": positions}
        if passed_on and (named or list(passed_on) != list(self.family.carried[: len(passed_on)])):
            return {HIDDEN_STATES: x, **passed_on}
        return (x, *passed_on.values()) if passed_on else x


def is_hugging_face(model: nn.Module) -> bool:
    """Check for a model of transformers without importing the package: a model that exists has imported it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def changes_itself(module: nn.Module) -> bool:
    """Return whether a module's forward changes the module's values: rotary positions that depend on the length of the text."""
    kinds = str(getattr(module, "rope_type", ""))
    return "dynamic" in kinds or "longrope" in kinds


# Settings whose part in the loss or the input is outside the modules: its name, when it is on, and what to do instead.
_OUTSIDE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "output_router_logits": (
        lambda config: config.router_aux_loss_coef != 0,
        "whose balance loss the model adds to its own loss, and stages would drop. Set it to False, or add the loss inside a "
        "stage by `nwise.inject`",
    ),
    "apply_spec_augment": (
        lambda config: config.mask_time_prob > 0 or config.mask_feature_prob > 0,
        "whose masks the model makes before its first module, and stages would drop. Set it to False, and mask the features in "
        "the data loader",
    ),
}


def refuse_settings(config: Any) -> None:
    """Raise ValueError for a setting of the model's configuration that the stages would drop."""
    for name, (is_on, remedy) in _OUTSIDE.items():
        if getattr(config, name, False) and is_on(config):
            raise ValueError(f"`config.{name}` should be False. Found {getattr(config, name)}, {remedy}.")


def computed_buffers(kind: type[nn.Module], config: Any) -> dict[str, Tensor]:
    """Compute the buffers that are not in the state dict of a model, by name, from its class and configuration."""
    # A second model without memory, of which only the buffers get some: their values follow from the configuration.
    with preserved():
        with torch.device("meta"):
            model: Any = kind(config)
        for name, buffer in unsaved_buffers(model).items():
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, torch.empty_like(buffer, device="cpu"))
        for module in model.modules():
            if module._buffers:  # as transformers does after it has read a file; parameters on meta stay there
                model._init_weights(module)
    return unsaved_buffers(model)


def hf_stages(model: nn.Module, family: Family, groups: list[dict[str, nn.Module]]) -> list[Chain]:
    """Make a stage of every group of the model's pieces."""
    config = cast(Any, model.config)
    # The model's own forward runs the first `num_hidden_layers` of its blocks.
    blocks = sum(name.split(".")[-1].isdecimal() for group in groups for name in group)
    if getattr(config, "rope_parameters", None) and config.num_hidden_layers < blocks:  # of a decoder
        raise ValueError(
            f"`config.num_hidden_layers` should be the network's {blocks} blocks, because stages run all of them. Found "
            f"{config.num_hidden_layers}; delete the other blocks, or correct the setting."
        )
    shared = {name: model.get_submodule(name) for name in family.shared}
    make = partial(HuggingFaceStage, family=family, kind=type(model), config=config, shared=shared)
    return [make(group, begins=group is groups[0], ends=group is groups[-1]) for group in groups]
