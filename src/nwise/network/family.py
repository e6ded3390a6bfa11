"""A family of Hugging Face networks: the arguments that the calls of its modules share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CallContext", "Family", "attend", "run", "run_without_mask", "skip"]


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


def run(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Call a module with the hidden state alone."""
    return piece(x)


def run_without_mask(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Call a block of attention that sees all positions, whatever the configuration says."""
    return piece(x, attention_mask=None)


def attend(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Call a block of attention that sees all positions, unless the configuration says otherwise."""
    return piece(x, attention_mask=None, **context.attention())


def skip(piece: nn.Module, x: Tensor, context: CallContext) -> Tensor:
    """Return the hidden state as it is: the forward does not use the module, whose weights belong to the network's file."""
    return x


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
