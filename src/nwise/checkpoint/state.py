"""The state that a run needs to resume: everything that a step changes, under names that do not depend on the cut.

Tensors of stage k, in ``stage-<k>.safetensors``::

    model.<name>              parameters and buffers of the main network, named as in the unsplit network
    heads.<stage>.<name>      parameters and buffers of the heads
    losses.<stage>.<name>     buffers of the losses, such as a running mean of the outputs

Values of the process whose first stage is k, in ``process-<k>.pt``::

    optimizer                 the optimizer's state (`nwise.checkpoint.optimizer`)
    due                       gradients that the next steps will leave under a delay, by name, a dictionary for each step
    random                    states of the generators of torch, Python and NumPy, for what else draws from them
    extra                     state dictionaries of what the caller has added

The data need no state: the seed and the step's number determine its samples (`nwise.app.data.batch_indices`).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, get_args, get_origin

import numpy as np
import torch
from torch import Size, Tensor

from nwise._torch import plain_name
from nwise.checkpoint import files
from nwise.checkpoint.optimizer import SavedOptimizer, add_momenta, collect_state, optimizer_kind
from nwise.checkpoint.weights import loss_buffers, made_anew, main_state, plain_state, under
from nwise.pipeline import Pipeline
from nwise.runtime.due import Gradients

# Types of the facts that every checkpoint has.
FACTS = {
    "step": int,
    "seed": int,
    "strategy": str,
    "num_microbatches": int,
    "ends": list[str],
    "optimizer": str,
    "compress": str,
}


class Stateful(Protocol):
    """What a checkpoint can hold beside the pipeline: a scheduler, a `GradScaler`, averaged weights."""

    def state_dict(self) -> Any:
        """Return tensors, numbers, texts and their collections."""

    def load_state_dict(self, state: Any) -> Any:
        """Take over what `state_dict` returned."""


Extra = Mapping[str, Stateful]


def collect(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    due: Sequence[Gradients],
    extra: Extra,
    *,
    copied: bool,
) -> dict[str, files.Contents]:
    """Return this process's files by name, each made when it is written; no files where another replica has the same.

    Args:
        pipe, optimizer, extra: what is saved.
        due: the pipeline's `pending_gradients`.
        copied: whether training goes on while they are written.

    Raises:
        TypeError: a value of the state cannot be saved.
        ValueError: the optimizer has parameters of another network.
    """
    stages, update, states = present_state(pipe, optimizer, extra)
    if pipe.processes.replica:
        return {}
    names = parameter_names(pipe)
    for gradients in due:
        if unknown := gradients.keys() - names.keys():
            warnings.warn(
                f"The network should keep its parameters while gradients are due. Found {len(unknown)} gradients of parameters "
                "that it no longer has, lost now; before such a change, update while `pipe.drain()` returns True.",
                stacklevel=3,
            )
    late = [{names[p]: g.to_dense() for p, g in gradients.items() if p in names} for gradients in due]
    values = {"optimizer": update, "due": late, "random": _generators(), "extra": states}
    stages, values = files.plain((stages, values), _clone if copied else Tensor.detach)
    contents: dict[str, files.Contents] = {
        f"stage-{k}.safetensors": _later(files.as_safetensors, tensors) for k, tensors in stages.items()
    }
    return contents | {f"process-{pipe.processes.here[0]}.pt": _later(files.as_values, values)}


def _clone(tensor: Tensor) -> Tensor:
    return tensor.cpu().clone()


def _later(make: Any, value: Any) -> files.Contents:
    return lambda: cast(bytes, make(value))


def present_state(
    pipe: Pipeline, optimizer: torch.optim.Optimizer | None, extra: Extra | None = None
) -> tuple[dict[int, dict[str, Tensor]], Any, dict[str, Any]]:
    """Return tensors by stage, the optimizer's state and the extra ones, not copied; raise what `collect` raises."""
    stages = tensors_by_stage(pipe)
    tensors = {name: tensor for one in stages.values() for name, tensor in one.items()}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype == torch.complex128:  # which safetensors lacks
            found = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise TypeError(f"The state of a module should consist of tensors to be saved. Found {name!r}, {found}.")
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"The state of a module should consist of dense tensors to be saved. Found {name!r}, {tensor.layout}; keep its "
                "indices and values as two buffers, or register it with `persistent=False`."
            )
    # A checkpoint is loaded into the memory that a state dict shows.
    if copies := made_anew(pipe, tensors):
        raise TypeError(
            "The state of a module should be its parameters and buffers, into which a checkpoint is loaded. Found "
            f"{copies[0]!r}, which the module's state dict makes anew, by a hook, `_save_to_state_dict` or `get_extra_state`; "
            "keep it as a buffer, or save the pipeline's `state_dict` instead."
        )
    states = {name: one.state_dict() for name, one in (extra or {}).items()}
    for name, state in states.items():
        try:
            files.plain(state)
        except TypeError as error:
            raise TypeError(
                f"`extra[{name!r}]` should have a state of tensors, numbers, texts and their collections. Found {error}; save it "
                "in another way."
            ) from error
    update = None if optimizer is None else collect_state(optimizer, parameter_names(pipe))
    return stages, update, states


def tensors_by_stage(pipe: Pipeline) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of every stage of this process, its head and its loss, by name."""
    heads = plain_state(pipe.heads)
    losses = loss_buffers(pipe)
    return {
        k: {
            **{f"model.{name}": t for name, t in plain_state(pipe.stages[k]).items()},
            **{f"heads.{name}": t for name, t in heads.items() if name.startswith(f"{k}.")},
            **{name: t for name, t in losses.items() if name.startswith(f"losses.{k}.")},
        }
        for k in pipe.processes.here
    }


def collect_facts(pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the facts `FACTS` of a pipeline, and its compression; all processes call it."""
    # A stage's end is the last name of the main network's state in it. So stages of two cuts that end at one place compare
    # equal, and the head of the one fits the other.
    last = {k: next(reversed(plain_state(pipe.stages[k])), "") for k in pipe.processes.here}
    ends = pipe.processes.by_stage(last)
    # A stage without parameters ends after the one before it: ["a.weight", "", "b.bias"] -> ["a.weight", "a.weight+", "b.bias"]
    for k, end in enumerate(ends):
        ends[k] = end or (f"{ends[k - 1]}+" if k else "+")
    return {
        "step": pipe.steps,
        "seed": pipe.seed,
        "strategy": pipe.strategy.name,
        "num_microbatches": pipe.num_microbatches,
        "ends": ends,
        "optimizer": optimizer_kind(optimizer),
        "compress": pipe.compress,
    }


def check_facts(facts: dict[str, Any], folder: Path, types: Mapping[str, Any] = FACTS) -> dict[str, Any]:
    """Return the facts of a checkpoint; DamagedError if one is missing or of another type, so another program wrote it."""
    for name, kind in types.items():
        value = facts.get(name) if isinstance(facts, dict) else None
        if not _is(value, kind):
            raise files.DamagedError(f"{folder} should have {name!r} among its facts. Found {value!r}.")
    if types is FACTS and (facts["step"] < 0 or not facts["ends"]):
        raise files.DamagedError(f"{folder} should have a step of 0 or more, and stages. Found step {facts['step']!r}.")
    return facts


def _is(value: object, kind: Any) -> bool:
    """Return whether a value of JSON is of a type: a class, a list or a dictionary of one; an integer is a number, too."""
    inner = get_args(kind)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(one, inner[1]) for one in value.values())
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is(one, inner[0]) for one in value)
    return isinstance(value, (int, float) if kind is float else kind)


def restore(
    folder: Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Extra | None = None,
    *,
    settings: bool = True,
) -> list[str]:
    """Load a checkpoint into a pipeline, whose cut may differ; all processes call it.

    Strategy, replicas and heads may differ too. The optimizer is a fresh one, or None to load none of its state. With `settings`
    its groups get the options of the checkpoint, as `load_state_dict` does in torch.

    Returns:
        The differences from the saved state; empty if there are none.

    Raises:
        ValueError: the checkpoint is of another network; nothing has changed.
    """
    # In order: read everything, compare names and shapes, find where each tensor goes, and only then change the pipeline.
    facts = files.read_facts(folder)
    saved = files.read_tensors(folder)
    values = files.read_values(folder)
    sizes = {name: tensor.shape for name, tensor in saved.items()}
    _check_same_network(folder, pipe, sizes)
    present = {name: tensor for one in tensors_by_stage(pipe).values() for name, tensor in one.items()}
    now = collect_facts(pipe, optimizer)
    names, new = _names_there(pipe, present, sizes, facts["ends"], now["ends"])
    targets = {there: present[name] for name, there in names.items()}
    parameters = {p: names[name] for p, name in parameter_names(pipe).items() if name in names}
    first = pipe.processes.here[0]
    loader = None
    due: list[dict[Tensor, Tensor]] = []
    try:
        if optimizer is not None and facts["optimizer"] == now["optimizer"]:
            parts = {k: value["optimizer"] for k, value in values.items() if value["optimizer"] is not None}
            loader = SavedOptimizer(optimizer, parameters, parts, first)
        late = [value["due"] for value in values.values()]
        if facts["strategy"] == pipe.strategy.name:  # for another one they would come too late or too early
            for calls in zip(*late, strict=True):
                found = {name: g for call in calls for name, g in call.items()}
                due.append({p: found[n].to(p.device, copy=True) for p, n in parameters.items() if n in found})
        nearest = values[max(k for k in values if k <= first)]
        states = {name: nearest["extra"][name] for name in (extra or {}) if name in nearest["extra"]}
    except (AttributeError, LookupError, TypeError) as error:
        raise files.DamagedError(
            f"{folder} should have its values in the form that nwise writes. Found {error!r} while reading them; resume from "
            "another checkpoint."
        ) from error
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(saved[name])
    _undo_steps(parameter_names(pipe), optimizer)
    notes = [*_cast(targets, saved), *_merged_losses(targets, saved)]
    notes += [] if loader is None else loader.load(settings=settings)
    if optimizer is not None:
        add_momenta(optimizer)  # those of a new head, or of heads that had no gradient yet
    for name, state in states.items():
        (extra or {})[name].load_state_dict(state)
    if first in values:
        _set_generators(nearest["random"])
    pipe.steps = int(facts["step"])
    kept = pipe.restore_pending(due)
    used = {int(name.split(".")[1]) for name in targets if name.startswith("heads.")}
    together = pipe.processes.by_place("heads", [new["heads"], [*used], new["losses"], notes])
    changes = _differences(facts, now, sizes, together)
    if lost := 0 if kept else max(map(len, late), default=0):
        changes.append(f"dropped the late gradients of {lost} mini-batch{'es' if lost > 1 else ''}")
    return changes


def _names_there(
    pipe: Pipeline,
    present: Mapping[str, Tensor],
    sizes: Mapping[str, Size],
    saved_ends: Sequence[str],
    ends: Sequence[str],
) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Return the name that each tensor of this process has in the checkpoint, and the stages whose heads or losses are new."""
    # A head belongs to the place where its stage ends, not to the stage's number:
    #
    #     saved      | a b | c d | e f |     heads 0, 1
    #     now        | a b   c d | e f |     head 0, which takes the saved head 1; the saved head 0 is dropped
    names = {name: name for name in present if name.startswith("model.")}
    stage_of = {end: k for k, end in enumerate(saved_ends)}
    new: dict[str, list[int]] = {"heads": [], "losses": []}
    for k in pipe.processes.here:
        for what, stages in new.items():
            here = under(present, f"{what}.{k}.")
            there = f"{what}.{stage_of.get(ends[k])}."
            if under(sizes, there) == {name: tensor.shape for name, tensor in here.items()}:
                names |= {f"{what}.{k}.{name}": there + name for name in here}
            elif here or what == "losses":
                stages.append(k)
    return names, new


def _generators() -> dict[str, Any]:
    """Return the states of the generators of torch, Python and NumPy."""
    name, keys, *others = cast(Any, np.random.get_state())  # noqa: NPY002 - users' code draws from it
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, keys.tolist(), *others)}


def _set_generators(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002


def _undo_steps(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer | None) -> None:
    """Forget the gradients and states of the steps that a checkpoint undoes."""
    for parameter in parameters:
        parameter.grad = None
        # Adagrad of torch before 2.13 makes a state with the optimizer, and expects it.
        if optimizer is not None and optimizer.state.get(parameter, {}).get("step") != 0:
            optimizer.state.pop(parameter, None)


def parameter_names(pipe: Pipeline) -> dict[Tensor, str]:
    """Return the names that this process's parameters have in a checkpoint."""
    main: dict[Tensor, str] = {
        p: f"model.{plain_name(name)}" for stage in pipe.stages for name, p in stage.named_parameters()
    }
    return {**main, **{p: f"heads.{plain_name(name)}" for name, p in pipe.heads.named_parameters()}}


def _check_same_network(folder: Path, pipe: Pipeline, sizes: Mapping[str, Size]) -> None:
    local = {name: list(tensor.shape) for name, tensor in main_state(pipe).items()}
    parts = pipe.processes.by_place("network", local)
    here = {name: shape for part in parts for name, shape in part.items()}
    saved = {name: list(size) for name, size in under(sizes, "model.").items()}
    for name in sorted({*here, *saved}):
        if here.get(name) != saved.get(name):
            raise ValueError(
                f"The network should be that of {folder}, whatever its cut. Found that {name!r} has shape {here.get(name)} "
                f"here and {saved.get(name)} there; None means that it has no such tensor."
            )


def _cast(targets: Mapping[str, Tensor], layout: Mapping[str, Tensor]) -> list[str]:
    """Say which dtypes of the checkpoint are other ones here."""
    pairs = {(layout[name].dtype, tensor.dtype) for name, tensor in targets.items()}
    return sorted(f"{then} -> {now}".replace("torch.", "") for then, now in pairs if then != now)


def _merged_losses(targets: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> list[str]:
    """Say if a loss of several stages was several losses, in several processes, whose buffers have come to differ."""
    first: dict[int, str] = {}
    for name, tensor in targets.items():
        if name.startswith("losses.") and not torch.equal(
            fresh[name], fresh[first.setdefault(tensor.data_ptr(), name)]
        ):
            return ["a loss of several stages has the buffers of the last of them"]
    return []


def _differences(
    facts: Mapping[str, Any], now: Mapping[str, Any], sizes: Mapping[str, Size], parts: Sequence[Any]
) -> list[str]:
    """Describe how the pipeline of all processes differs from the saved one."""
    # Of every process: its new heads, the saved heads that it uses, its losses with fresh buffers, and notes.
    new, used, losses = (sorted(one for part in parts for one in part[i]) for i in range(3))
    dropped = sorted({int(name.split(".")[1]) for name in sizes if name.startswith("heads.")} - {*used})
    whats = {"strategy": "strategy", "num_microbatches": "micro-batches", "seed": "seed"}
    changes = [f"{what} {facts[key]} -> {now[key]}" for key, what in whats.items() if facts[key] != now[key]]
    if facts["compress"] != now["compress"]:
        before, after = (str(form["compress"]).partition("(")[0] for form in (facts, now))
        changes.append(f"compression {before} -> {f'another {after}' if before == after else after}")
    if now["optimizer"] not in (facts["optimizer"], optimizer_kind(None)):
        changes.append(f"optimizer {facts['optimizer']} -> {now['optimizer']}, with fresh state")
    if len(facts["ends"]) != len(now["ends"]):
        changes.append(f"stages {len(facts['ends'])} -> {len(now['ends'])}")
    elif facts["ends"] != now["ends"]:
        changes.append("another cut")
    stages = {
        "new heads at stages": new,
        "dropped the heads of the former stages": dropped,
        "fresh buffers of the losses at stages": losses,
    }
    changes += [f"{what} {', '.join(map(str, which))}" for what, which in stages.items() if which]
    return [*changes, *dict.fromkeys(note for part in parts for note in part[3])]
