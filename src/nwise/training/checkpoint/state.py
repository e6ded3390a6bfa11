"""The state that a run needs to resume: everything that a step changes, under names that do not depend on the cut.

    model.<name>                   parameters and buffers of the main network, named as in the unsplit network
    heads.<stage>.<name>           parameters and buffers of the heads
    optimizer.<parameter>.<entry>  the optimizer's state, such as ``optimizer.model.blocks.0.weight.exp_avg``
    due.<n>.<parameter>            gradient that the step after n further ones will leave, under a delay
    random.<stage>                 torch's random state, which no step uses (`nwise.randomness`)

The data need no state: the seed and the step's number determine its samples (`nwise.data.batch_indices`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from nwise._dtensor import is_dtensor
from nwise.pipeline import Pipeline
from nwise.runtime.due import Gradients
from nwise.training.checkpoint import files
from nwise.training.late import MuonWithAdam
from nwise.training.optimizers import add_momenta
from nwise.training.weights import local_weights, main_state, under

# Types of the facts that every checkpoint has. Those of version 0.1 lack "compress", which was "none", "due" and
# "last_strategy".
FACTS = {
    "step": int,
    "seed": int,
    "strategy": str,
    "num_microbatches": int,
    "ends": list[str],
    "optimizer": str,
}


def collect_tensors(
    pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None, due: Sequence[Gradients] = ()
) -> dict[str, Tensor]:
    """Return copies, on the CPU, of this process's part of the state; nothing where another replica has the same.

    Args:
        pipe: the pipeline.
        optimizer: its optimizer; default: none.
        due: its `Pipeline.pending_gradients`; default: none.

    Raises:
        TypeError: a value of the state is not a tensor.
        ValueError: the optimizer has parameters of another network.
    """
    if pipe.processes.replica:
        return {}
    tensors = local_weights(pipe)
    names = parameter_names(pipe)
    state: Mapping[Any, dict[str, Any]] = {} if optimizer is None else optimizer.state
    for parameter, entries in state.items():
        if parameter not in names:
            raise ValueError(
                f"The optimizer should be of the pipeline's parameters. Found another one, of shape {tuple(parameter.shape)}."
            )
        for entry, value in entries.items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"An optimizer's state should consist of tensors to be saved. Found {entry!r} of "
                    f"{type(optimizer).__name__}, a {type(value).__name__}."
                )
            tensors[f"optimizer.{names[parameter]}.{entry}"] = value
    for n, gradients in enumerate(due):
        if unknown := gradients.keys() - names.keys():
            warnings.warn(
                f"The network should keep its parameters while gradients are due. Found {len(unknown)} gradients of parameters "
                "that it no longer has, lost now; before such a change, update while `pipe.drain()` returns True.",
                stacklevel=3,
            )
        named = {f"due.{n}.{names[p]}": gradient for p, gradient in gradients.items() if p in names}
        tensors |= {name: g.to_dense() if g.is_sparse else g for name, g in named.items()}
    tensors[f"random.{pipe.processes.here[0]}"] = torch.get_rng_state()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"The state of a module should consist of tensors to be saved. Found {name!r}, a {type(tensor).__name__}."
            )
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def collect_facts(pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the facts `FACTS` of a pipeline, and the strategy of its last step; all processes call it."""
    # A stage's end is the last name of the main network's state in it. So stages of two cuts that end at one place compare
    # equal, and the head of the one fits the other.
    last = {k: next(reversed(pipe.stages[k].state_dict()), "") for k in pipe.processes.here}
    ends = pipe.processes.by_stage(last)
    for k, end in enumerate(ends):  # a stage without parameters ends after the one before it
        ends[k] = end or (f"{ends[k - 1]}+" if k else "+")
    return {
        "step": pipe.steps,
        "seed": pipe.seed,
        "strategy": pipe.strategy.name,
        "last_strategy": pipe.strategy.in_force(max(0, pipe.steps - 1)).name,
        "num_microbatches": pipe.num_microbatches,
        "ends": ends,
        "optimizer": _optimizer_kind(optimizer),
        "compress": pipe.compress,
    }


def check_facts(facts: dict[str, Any], folder: Path, types: Mapping[str, Any] = FACTS) -> dict[str, Any]:
    """Return the facts of a checkpoint; DamagedError if one is missing or of another type, so another program wrote it."""
    for name, kind in types.items():
        value = facts.get(name) if isinstance(facts, dict) else None
        try:
            check_type(value, kind, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except TypeCheckError as error:
            raise files.DamagedError(f"{folder} should have {name!r} among its facts. Found {value!r}.") from error
    if types is FACTS and (facts["step"] < 0 or not facts["ends"]):
        raise files.DamagedError(f"{folder} should have a step of 0 or more, and stages. Found step {facts['step']!r}.")
    return facts


def restore(
    folder: Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Load a checkpoint into a pipeline, whose cut may differ; all processes call it.

    Strategy, replicas and heads may differ too. The optimizer is a fresh one, or None to load none of its state.

    Returns:
        The differences from the saved state, in one line; empty if there are none.

    Raises:
        ValueError: the checkpoint is of another network; nothing has changed.
    """
    facts, layout = files.read_facts(folder), files.read_layout(folder)
    sizes = {name: tensor.shape for name, tensor in layout.items()}
    _check_same_network(folder, pipe, sizes)
    # A head belongs to the place where its stage ends, not to the stage's number:
    #
    #     saved      | a b | c d | e f |     heads 0, 1
    #     now        | a b   c d | e f |     head 0, which takes the saved head 1; the saved head 0 is dropped
    targets: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in main_state(pipe).items()}
    saved_ends = {end: k for k, end in enumerate(facts["ends"])}
    old_stages = [saved_ends.get(end) for end in collect_facts(pipe)["ends"]]
    renamed: dict[str, str] = {}  # a parameter of this pipeline's heads -> its name in the checkpoint
    new_heads = []
    for k, module in pipe.heads.items():
        head, saved = module.state_dict(), f"heads.{old_stages[int(k)]}."
        if head and under(sizes, saved) != {name: tensor.shape for name, tensor in head.items()}:
            new_heads.append(int(k))
            continue
        targets.update({saved + name: tensor for name, tensor in head.items()})
        renamed.update({f"heads.{k}.{name}": saved + name for name in head})
    entries = _optimizer_entries(pipe, optimizer, facts, layout, renamed)
    groups = () if optimizer is None else optimizer.param_groups
    # As in torch, the number of steps stays on the CPU unless a fused or capturable kernel reads it.
    counted_on_device = {p for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    # Everything is read before anything is changed: an unreadable file leaves the pipeline as it is.
    fresh = {name: torch.empty_like(tensor, device=_read_device(tensor)) for name, tensor in targets.items()}
    fresh.update({name: tensor for name, (_, _, tensor) in entries.items()})
    due = _due_gradients(pipe, facts, layout)
    fresh |= {name: torch.empty_like(p.detach(), device=_read_device(p)) for call in due for p, name in call.items()}
    random = f"random.{pipe.processes.here[0]}"
    if random in sizes:
        fresh[random] = torch.empty(sizes[random], dtype=torch.uint8)
    files.read(folder, fresh, group)
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(fresh[name])
    for parameter in parameter_names(pipe):
        parameter.grad = None  # it belongs to steps that are undone now, and so does the state
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
    for parameter, entry, tensor in entries.values():
        device = parameter.device if entry != "step" or parameter in counted_on_device else tensor.device
        optimizer.state[parameter][entry] = tensor.to(device)  # type: ignore[union-attr]
    if optimizer is not None:
        add_momenta(optimizer)  # those of a new head, or of heads that had no gradient yet
    if random in sizes:
        torch.set_rng_state(fresh[random])
    pipe.steps = int(facts["step"])
    kept = pipe.restore_pending([{p: fresh[name].to(p.device) for p, name in call.items()} for call in due])
    changes = _differences(pipe, facts, sizes, new_heads, sorted(renamed.values()), optimizer)
    lost = 0 if kept else int(facts.get("due", 0))
    dropped = f"dropped the late gradients of {lost} mini-batch{'es' if lost > 1 else ''}"
    return "; ".join([*([changes] if changes else []), *([dropped] if lost else [])])


def parameter_names(pipe: Pipeline) -> dict[Tensor, str]:
    """Return the names that this process's parameters have in a checkpoint."""
    main: dict[Tensor, str] = {p: f"model.{name}" for stage in pipe.stages for name, p in stage.named_parameters()}
    return {**main, **{p: f"heads.{name}" for name, p in pipe.heads.named_parameters()}}


def _optimizer_kind(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name of the class, with the options that add to its state."""
    options = {} if optimizer is None else optimizer.defaults
    names = ("amsgrad", "centered", *(["momentum"] if isinstance(optimizer, torch.optim.RMSprop) else []))
    extra = [name for name in names if options.get(name)]
    return type(optimizer).__name__ + (f" with {', '.join(extra)}" if extra else "")


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


def _optimizer_entries(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
    layout: Mapping[str, Tensor],
    renamed: Mapping[str, str],
) -> dict[str, tuple[Tensor, str, Tensor]]:
    """Return by name in the checkpoint: the parameter, the entry of its state, and an empty tensor to read it into."""
    entries: dict[str, tuple[Tensor, str, Tensor]] = {}
    if optimizer is None or facts["optimizer"] != _optimizer_kind(optimizer):
        return entries
    by_parameter: dict[str, list[str]] = {}
    for name in layout:
        if name.startswith("optimizer."):
            parameter, _, entry = name.removeprefix("optimizer.").rpartition(".")
            by_parameter.setdefault(parameter, []).append(entry)
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    for p, name in parameter_names(pipe).items():
        saved = renamed.get(name, name if name.startswith("model.") else "")
        present = by_parameter.get(saved, [])
        # In another cut Muon may train a matrix that AdamW trained before, or the other way round.
        changed = isinstance(optimizer, MuonWithAdam) and optimizer.trains_by_muon(p) == ("exp_avg" in present)
        for entry in present if p in updated and not changed else ():
            full = f"optimizer.{saved}.{entry}"
            shape, dtype = layout[full].shape, layout[full].dtype
            if shape == p.shape and entry != "step":  # same strides as the parameter: fused optimizers go by memory
                empty = torch.empty_like(p.detach(), dtype=dtype, device=_read_device(p))
            else:
                empty = torch.empty(shape, dtype=dtype)
            entries[full] = p, entry, empty
    return entries


def _due_gradients(pipe: Pipeline, facts: Mapping[str, Any], layout: Mapping[str, Tensor]) -> list[dict[Tensor, str]]:
    """Return the gradients that the next steps leave, as names in the checkpoint by parameter.

    There are none if the next step has another strategy than the last one, for which they would come too late or too early.
    """
    if facts.get("last_strategy") != pipe.strategy.in_force(int(facts["step"])).name:
        return []
    parameters = parameter_names(pipe)
    return [
        {p: full for p, name in parameters.items() if (full := f"due.{n}.{name}") in layout}
        for n in range(int(facts.get("due", 0)))
    ]


def _differences(
    pipe: Pipeline,
    facts: Mapping[str, Any],
    sizes: Mapping[str, Size],
    new_heads: Iterable[int],
    used: Iterable[str],
    optimizer: torch.optim.Optimizer | None,
) -> str:
    """Describe in one line how the pipeline of all processes differs from the saved one."""
    local = [sorted(new_heads), sorted({name.split(".")[1] for name in used})]
    parts = pipe.processes.by_place("heads", local)
    new = sorted(k for heads, _ in parts for k in heads)
    kept = {k for _, heads in parts for k in heads}
    dropped = sorted({name.split(".")[1] for name in sizes if name.startswith("heads.")} - kept, key=int)
    changes = []
    facts, now = {"compress": "none", **facts}, collect_facts(pipe, optimizer)
    for key, what in (("strategy", "strategy"), ("num_microbatches", "micro-batches"), ("seed", "seed")):
        if facts[key] != now[key]:
            changes.append(f"{what} {facts[key]} -> {now[key]}")
    if facts["compress"] != now["compress"]:
        before, after = (str(form["compress"]).partition("(")[0] for form in (facts, now))
        changes.append(f"compression {before} -> {f'another {after}' if before == after else after}")
    if optimizer is not None and facts["optimizer"] != now["optimizer"]:
        changes.append(f"optimizer {facts['optimizer']} -> {now['optimizer']}, with fresh state")
    if len(facts["ends"]) != len(now["ends"]):
        changes.append(f"stages {len(facts['ends'])} -> {len(now['ends'])}")
    elif facts["ends"] != now["ends"]:
        changes.append("another cut")
    if new:
        changes.append(f"new heads at stages {', '.join(map(str, new))}")
    if dropped:
        changes.append(f"dropped the heads of the former stages {', '.join(dropped)}")
    return "; ".join(changes)


def _read_device(tensor: Tensor) -> torch.device | None:
    """Return the device to read a tensor to: the CPU, except that parts of a DTensor stay on their mesh's device."""
    return None if is_dtensor(tensor) else torch.device("cpu")
