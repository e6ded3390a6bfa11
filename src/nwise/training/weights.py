"""Weights by the names of the unsplit network, ``model.<name>`` and ``heads.<stage>.<name>``, and files of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nwise.pipeline import Pipeline

T = TypeVar("T")


def under(weights: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The values whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def weights_of(pipe: Pipeline) -> dict[str, Tensor]:
    """Weights of the main network (``model.<name>``) and of the heads (``heads.<stage>.<name>``).

    Of a pipeline of several processes, all of them call it, and those of all stages are on rank 0.
    """
    here = weights_here(pipe)
    return here if pipe.team is None else pipe.team.collect(here)


def weights_here(pipe: Pipeline) -> dict[str, Tensor]:
    """Those of `weights_of` that this process holds, where they are."""
    model = {f"model.{name}": tensor for name, tensor in main_state(pipe).items()}
    return {**model, **{f"heads.{name}": tensor for name, tensor in pipe.heads.state_dict().items()}}


def main_state(pipe: Pipeline) -> dict[str, Tensor]:
    """State of the main network under the names of the unsplit one (those of its stages, which must differ)."""
    state: dict[str, Tensor] = {}
    for k, stage in enumerate(pipe.stages):
        for name, tensor in stage.state_dict().items():
            if name in state:
                raise ValueError(_SAME_NAME.format(name=name, stage=k))
            state[name] = tensor
    return state


def load_main_state(pipe: Pipeline, state: dict[str, Tensor]) -> None:
    """Load what `main_state` gave, every name exactly once."""
    expected = set(main_state(pipe))
    if expected != set(state):
        odd = sorted(expected ^ set(state))[0]
        raise ValueError(
            f"Weights should have the names of the network's parameters and buffers. Found that {odd!r} differs."
        )
    try:
        for stage in pipe.stages:
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    except RuntimeError as error:
        raise ValueError(f"Weights should have the shapes of the network's parameters. Found: {error}") from error


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file aside and rename it, so that there is never half of one.

    Raises:
        OSError: it cannot be written; the file of before stays.
    """
    aside = path.with_name(path.name + ".part")
    try:
        # safetensors refuses tensors that share memory, as those of a module in two places do.
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, aside)
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            aside.unlink()  # a full disk has room again for the rest
        raise OSError(f"{path} should be written. Found: {error}") from error


def check_names(pipe: Pipeline) -> None:
    """Refuse stages whose names do not differ before anything is trained; a call for all processes."""
    state = main_state(pipe)
    if pipe.team is None:
        return
    stages = dict(pipe.team.world.everyone("names", [pipe.team.stage, list(state)]))
    seen: set[str] = set()
    for k in range(pipe.num_stages):
        for name in stages[k]:
            if name in seen:
                raise ValueError(_SAME_NAME.format(name=name, stage=k))
        seen |= set(stages[k])


_SAME_NAME = (
    "Stages should keep the names of the unsplit network, as those of `nwise.split` do; stages of your own get one by "
    "`nwise.Chain({{'first': stage}})`. Found {name!r} in stage {stage} and in one before."
)
