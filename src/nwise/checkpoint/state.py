"""The state that a run needs to resume: everything that a step changes, under names that do not depend on the cut.

    model.<name>                   parameters and buffers of the main network, named as in the unsplit network
    heads.<stage>.<name>           parameters and buffers of the heads
    losses.<stage>.<name>          buffers of the losses, such as a running mean of the outputs
    optimizer.<parameter>.<entry>  the optimizer's state, such as ``optimizer.model.blocks.0.weight.exp_avg``
    due.<n>.<parameter>            gradient that the step after n further ones will leave, under a delay
    random.<stage>                 states of the generators of torch, Python and NumPy, for what else draws from them

The data need no state: the seed and the step's number determine its samples (`nwise.app.data.batch_indices`).
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
from torch import Size, Tensor

from nwise._torch import plain_name
from nwise.checkpoint import files
from nwise.checkpoint.optimizer import SavedOptimizer, add_momenta, collect_state, optimizer_kind
from nwise.checkpoint.weights import local_weights, loss_buffers, made_anew, main_state, plain_state, under
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
    "due": int,
}


def collect_tensors(
    pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None, due: Sequence[Gradients] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return copies, on the CPU, of this process's part of the state, and the part of the optimizer's that is JSON.

    There are no tensors where another replica has the same. `due` are the pipeline's `pending_gradients`.

    Raises:
        TypeError: a value of the state cannot be saved.
        ValueError: the optimizer has parameters of another network.
    """
    tensors, plain = present_state(pipe, optimizer)
    if pipe.processes.replica:
        return {}, plain
    names = parameter_names(pipe)
    for n, gradients in enumerate(due):
        if unknown := gradients.keys() - names.keys():
            warnings.warn(
                f"The network should keep its parameters while gradients are due. Found {len(unknown)} gradients of parameters "
                "that it no longer has, lost now; before such a change, update while `pipe.drain()` returns True.",
                stacklevel=3,
            )
        due_now = {f"due.{n}.{names[p]}": gradient for p, gradient in gradients.items() if p in names}
        tensors |= {name: g.to_dense() if g.is_sparse else g for name, g in due_now.items()}
    tensors[f"random.{pipe.processes.here[0]}"] = _generators()
    # Copies, because training goes on while the writer's thread works.
    order = torch.contiguous_format
    return {name: tensor.detach().cpu().clone(memory_format=order) for name, tensor in tensors.items()}, plain


def present_state(pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what `collect_tensors` does of modules, losses and optimizer, not copied; raise the same errors."""
    tensors = {**local_weights(pipe), **loss_buffers(pipe)}
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
    if optimizer is None:
        return tensors, {}
    states, plain = collect_state(optimizer, parameter_names(pipe), pipe.processes.here[0])
    return tensors | states, plain


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


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raise DamagedError if the body finds the state of an optimizer in another form than nwise writes."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise files.DamagedError(
            f"{folder} should have the state of an optimizer in the form that nwise writes. Found {error!r} while reading it; "
            "resume from another checkpoint."
        ) from error


def restore(
    folder: Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
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
    # In order: compare names and shapes, find where each tensor goes, read all of them, and only then change the pipeline.
    facts = files.read_facts(folder)
    layout = files.read_layout(folder)
    sizes = {name: tensor.shape for name, tensor in layout.items()}
    _check_same_network(folder, pipe, sizes)
    # A head belongs to the place where its stage ends, not to the stage's number:
    #
    #     saved      | a b | c d | e f |     heads 0, 1
    #     now        | a b   c d | e f |     head 0, which takes the saved head 1; the saved head 0 is dropped
    present, _ = present_state(pipe, None)
    names = {name: name for name in present if name.startswith("model.")}  # here -> in the checkpoint
    saved_ends = {end: k for k, end in enumerate(facts["ends"])}
    now = collect_facts(pipe, optimizer)
    old_stages = [saved_ends.get(end) for end in now["ends"]]
    new: dict[str, list[int]] = {"heads": [], "losses": []}
    for k in pipe.processes.here:
        for what, stages in new.items():
            here = under(present, f"{what}.{k}.")
            saved = f"{what}.{old_stages[k]}."
            if under(sizes, saved) == {name: tensor.shape for name, tensor in here.items()}:
                names |= {f"{what}.{k}.{name}": saved + name for name in here}
            elif here or what == "losses":
                stages.append(k)
    targets = {saved: present[name] for name, saved in names.items()}
    loader = None
    if optimizer is not None and facts["optimizer"] == now["optimizer"]:
        found = {names[name]: p for p, name in parameter_names(pipe).items() if name in names}
        with _reading(folder):
            loader = SavedOptimizer(optimizer, found, facts.get("optimizer_state", ()), layout, pipe.processes.here[0])
    # Memory for all of it: an unreadable file is found before anything is changed.
    due = _due_gradients(pipe, facts, layout)
    wanted = targets | {name: p for call in due for p, name in call.items()}
    fresh = {n: torch.empty_like(t.detach(), device="cpu") for n, t in wanted.items()}
    fresh |= {} if loader is None else loader.fresh
    generators = f"random.{pipe.processes.here[0]}"
    if generators in sizes:
        fresh[generators] = torch.empty(sizes[generators], dtype=torch.uint8)
    files.read(folder, fresh, group)
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(fresh[name])
    _undo_steps(parameter_names(pipe), optimizer)
    notes = [*_cast(targets, layout), *_merged_losses(targets, fresh)]
    if loader is not None:
        with _reading(folder):
            notes += loader.load(settings=settings)
    if optimizer is not None:
        add_momenta(optimizer)  # those of a new head, or of heads that had no gradient yet
    if generators in sizes:
        _set_generators(fresh[generators])
    pipe.steps = int(facts["step"])
    kept = pipe.restore_pending([{p: fresh[name].to(p.device) for p, name in call.items()} for call in due])
    used = {int(name.split(".")[1]) for name in targets if name.startswith("heads.")}
    parts = pipe.processes.by_place("heads", [new["heads"], [*used], new["losses"], notes])
    changes = _differences(facts, now, sizes, parts)
    if lost := 0 if kept else int(facts["due"]):
        changes.append(f"dropped the late gradients of {lost} mini-batch{'es' if lost > 1 else ''}")
    return changes


def _generators() -> Tensor:
    """Return the states of the generators of torch, Python and NumPy, as bytes."""
    name, keys, *others = cast(Any, np.random.get_state())  # noqa: NPY002 - users' code draws from it
    text = json.dumps([random.getstate(), [name, keys.tolist(), *others]])
    return torch.cat([torch.get_rng_state(), torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)])


def _set_generators(state: Tensor) -> None:
    """Set the generators; a checkpoint of 0.2 has the state of torch's alone."""
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    if len(state) > size:
        (version, numbers, gauss), numpy_state = json.loads(bytes(state[size:].tolist()))
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state(tuple(numpy_state))  # noqa: NPY002


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


def _due_gradients(pipe: Pipeline, facts: Mapping[str, Any], layout: Mapping[str, Tensor]) -> list[dict[Tensor, str]]:
    """Return the gradients that the next steps leave, as names in the checkpoint by parameter.

    There are none if the next step has another strategy than the last one, for which they would come too late or too early.
    """
    if facts["strategy"] != pipe.strategy.name:
        return []
    parameters = parameter_names(pipe)
    return [
        {p: full for p, name in parameters.items() if (full := f"due.{n}.{name}") in layout}
        for n in range(int(facts["due"]))
    ]


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
