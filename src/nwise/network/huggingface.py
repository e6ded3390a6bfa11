"""Split Hugging Face transformers into stages that call the model's own modules as its forward does.

Nothing is traced or rewritten: `nwise.network.families` knows the modules of a class and how its forward calls them. Attention
masks and position ids travel from stage to stage with the hidden state.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from nwise.checks import hint
from nwise.network.chain import Chain, refuse_buffers, unsaved_buffers
from nwise.network.families import FAMILIES
from nwise.network.family import CallContext, Family
from nwise.randomness import preserved
from nwise.tensors import HIDDEN_STATES, Tensors, names

__all__ = ["HuggingFaceStage", "family_for"]


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
        self.family, self.kind, self.config, self.ends = family, kind, config, ends
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


def family_for(model: nn.Module) -> Family:
    """Look up the family of a model by its class.

    Raises:
        ValueError: the class is unknown.
    """
    if (name := type(model).__name__) not in FAMILIES:
        raise ValueError(
            f"A Hugging Face model should be of a class in `nwise.network.families`. Found {name}.{hint(name, FAMILIES)} "
            "Write its stages yourself, or add a `Family`."
        )
    return FAMILIES[name]


def is_hugging_face(model: nn.Module) -> bool:
    """Check for a model of transformers without importing the package: a model that exists has imported it."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def run_model(model: nn.Module, inputs: Tensors) -> Any:
    """Return the logits of the unsplit model."""
    named: dict[str, Any] = dict(zip(names(inputs) or family_for(model).inputs, inputs, strict=False))
    if getattr(model.config, "is_encoder_decoder", False) or "input_ids" in named:
        named["use_cache"] = False  # stages have no cache, and using one rounds differently
    return model(**named, return_dict=True).logits


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


def hf_stages(model: nn.Module, groups: list[dict[str, nn.Module]]) -> list[Chain]:
    """Make a stage of every group of the model's pieces."""
    family, config = family_for(model), cast(Any, model.config)
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
