"""Weights under the names of the unsplit network, ``model.<name>`` and ``heads.<stage>.<name>``, and files of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from nwise._torch import plain_name
from nwise.checkpoint.files import replacing, unshared
from nwise.checks import needed
from nwise.pipeline import Pipeline
from nwise.tensors import Named, names
from nwise.terms import modules_of

T = TypeVar("T")


def under(weights: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the values whose names begin with a prefix, under the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def gather_weights(pipe: Pipeline) -> dict[str, Tensor]:
    """Return the weights of the main network (``model.<name>``) and of the heads (``heads.<stage>.<name>``).

    With several processes all of them call it, and rank 0 gets the weights of all stages.

    Raises:
        ValueError: two stages use the same name.
    """
    check_names(pipe)
    processes = pipe.processes
    weights = local_weights(pipe)
    if processes.size == 1:
        return weights
    with processes.telling("the collection of weights"):
        assert processes.control  # also on ranks that send nothing: all ranks make the group
        # One rank of every place sends, and rank 0 takes them one after the other.
        if processes.rank:
            if 0 in processes.ranks:
                processes.send(Named(weights), 0)
            return {}
        collected = {name: t.detach().cpu() for name, t in weights.items()}
        for rank in processes.ranks[1:]:
            received = processes.receive(rank)
            collected.update(zip(names(received), received, strict=True))
        return collected


def local_weights(pipe: Pipeline) -> dict[str, Tensor]:
    """Return the part of `gather_weights` that this process holds, without copying."""
    model = {f"model.{name}": tensor for name, tensor in main_state(pipe).items()}
    return {**model, **{f"heads.{name}": tensor for name, tensor in plain_state(pipe.heads).items()}}


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state under the names that it has without `torch.compile`."""
    return {plain_name(name): tensor for name, tensor in module.state_dict().items()}


def loss_buffers(pipe: Pipeline) -> dict[str, Tensor]:
    """Return the buffers of the losses of this process's stages (``losses.<stage>.<name>``), without copying."""
    # A loss may hold a layer of the network, whose parameters are saved with the network.
    found: dict[str, Tensor] = {}
    for k in pipe.processes.here:
        for path, module in modules_of(pipe.loss_fns[k]).items():
            parameters = {plain_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
            state = plain_state(module).items()
            found |= {f"losses.{k}.{path}{name}": tensor for name, tensor in state if name not in parameters}
    return found


def made_anew(pipe: Pipeline, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names in a state whose tensors are no memory of a parameter or buffer of this process."""
    losses = [module for k in pipe.processes.here for module in modules_of(pipe.loss_fns[k]).values()]
    own = {None, *(_storage(x) for module in (pipe, *losses) for x in (*module.parameters(), *module.buffers()))}
    return [name for name, tensor in state.items() if _storage(tensor) not in own and tensor.numel()]


def _storage(tensor: Tensor) -> int | None:
    """Return where the memory of a tensor begins; None if its class may have several parts."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else None


def main_state(pipe: Pipeline) -> dict[str, Tensor]:
    """Return the main network's state under the names of the unsplit one.

    Raises:
        ValueError: two stages use the same name.
    """
    states = [plain_state(stage) for stage in pipe.stages]
    _refuse_same_name(states)
    return {name: tensor for state in states for name, tensor in state.items()}


def load_main_state(pipe: Pipeline, state: dict[str, Tensor]) -> None:
    """Load the result of `main_state`.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs.
    """
    expected = set(main_state(pipe))
    state = {plain_name(name): tensor for name, tensor in state.items()}
    # All names are compared before any stage is loaded: an error leaves the network as it was.
    if odd := min(expected ^ set(state), default=""):
        problem = "no" if odd in expected else "an unknown name,"
        raise ValueError(
            f"Weights should have the names of the network's parameters and buffers. Found {problem} {odd!r}; load the weights "
            "of this network."
        )
    try:
        for stage in pipe.stages:
            stage.load_state_dict({name: state[plain_name(name)] for name in stage.state_dict()})
    except RuntimeError as error:
        raise ValueError(f"Weights should have the shapes of the network's parameters. Found: {error}") from error


def discard_unsaved_heads(pipe: Pipeline, saved: Iterable[str]) -> None:
    """Discard all heads if the strategy needs none and the saved names contain none."""
    if not any(name.startswith("heads.") for name in saved) and not pipe.needed_heads():
        pipe.discard_heads()


def save_tensors(tensors: dict[str, Tensor], path: Path, facts: dict[str, str] | None = None) -> None:
    """Write a safetensors file, with texts to keep beside the tensors; it is complete or not there.

    Raises:
        OSError: the file cannot be written; the earlier one stays.
    """
    package, tools = (needed(name, "checkpoint", "A file of weights") for name in ("safetensors", "safetensors.torch"))
    try:
        with replacing(path) as partial:
            tools.save_file(unshared(tensors), partial, facts)
    except (OSError, package.SafetensorError) as error:
        raise OSError(f"{path} should be written. Found: {error}") from error


def check_names(pipe: Pipeline) -> None:
    """Raise ValueError before any training if two stages use the same name; all processes call it."""
    _refuse_same_name(pipe.processes.by_stage({k: list(plain_state(pipe.stages[k])) for k in pipe.processes.here}))


def _refuse_same_name(stages: Iterable[Iterable[str]]) -> None:
    owners: dict[str, int] = {}
    for k, stage in enumerate(stages):
        for name in stage:
            if owners.setdefault(name, k) != k:
                raise ValueError(
                    f"Stages should keep the distinct names of the unsplit network, as `nwise.split` does. Found {name!r} in "
                    f"stage {k} and in an earlier one; give custom stages a name with `nwise.Chain({{'first': stage}})`."
                )
