"""What a run needs to go on: everything in a pipeline and its optimizer that a step changes, by names that no cut changes.

model.<name>                    parameters and buffers of the main network, named as in the unsplit network
heads.<stage>.<name>            of the heads
optimizer.<parameter>.<entry>   of the optimizer, such as ``optimizer.model.blocks.0.weight.exp_avg``
random.<stage>                  the state of torch's random numbers, which nothing in a step uses (`nwise.randomness`)

The data have no state: which samples a step sees is a function of the seed and its number (`nwise.data.batch_indices`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from nwise._dtensor import is_dtensor
from nwise.pipeline import Pipeline
from nwise.training import checkpoint
from nwise.training.weights import main_state, under, weights_here


def tensors_of(pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copies, on the CPU, of this process's part of the state; nothing where another replica has the same.

    Args:
        pipe: the pipeline, between two steps.
        optimizer: of its parameters.

    Raises:
        TypeError: the optimizer's state does not consist of tensors.
    """
    if pipe.team is not None and pipe.team.world.replica:
        return {}
    found = weights_here(pipe)
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
            found[f"optimizer.{names[parameter]}.{entry}"] = value
    stage = 0 if pipe.team is None else pipe.team.stage
    found[f"random.{stage}"] = torch.get_rng_state()
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"The state of a module should consist of tensors to be saved. Found {name!r}, a {type(tensor).__name__}."
            )
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def facts_of(pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Numbers that go with the tensors; of several processes all call it.

    Returns:
        The step, and where the stages end, by the last name of the main network's state in each.
    """
    last = [next(reversed(stage.state_dict()), "") for stage in pipe.stages]
    ends = last if pipe.team is None else pipe.team.facts(last[pipe.team.stage])
    for k, end in enumerate(ends):  # a stage without parameters ends after the one before it
        ends[k] = end or (f"{ends[k - 1]}+" if k else "+")
    return {
        "step": pipe.steps,
        "seed": pipe.seed,
        "strategy": pipe.strategy.name,
        "num_microbatches": pipe.num_microbatches,
        "ends": ends,
        "optimizer": _kind_of(optimizer),
    }


# Types of the facts that every checkpoint has.
FACTS = {
    "step": int,
    "seed": int,
    "strategy": str,
    "num_microbatches": int,
    "ends": list[str],
    "optimizer": str,
}


def checked(facts: dict[str, Any], folder: Path, kinds: Mapping[str, Any] = FACTS) -> dict[str, Any]:
    """The facts of a checkpoint, which should be what `facts_of` gives, and more.

    Args:
        facts: read from a file.
        folder: of the checkpoint.
        kinds: types of those that there should be.

    Raises:
        nwise.training.DamagedError: they are of another kind; some other program wrote them.
    """
    for name, kind in kinds.items():
        found = facts.get(name) if isinstance(facts, dict) else None
        try:
            check_type(found, kind, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except TypeCheckError as error:
            raise checkpoint.DamagedError(f"{folder} should have {name!r} among its facts. Found {found!r}.") from error
    if kinds is FACTS and (facts["step"] < 0 or not facts["ends"]):
        raise checkpoint.DamagedError(f"{folder} should be of a step and of some stages. Found {facts['step']!r}.")
    return facts


def restore(
    folder: Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """Put the state of a checked checkpoint into a pipeline that may be cut otherwise; of several processes all call it.

    Args:
        folder: the checkpoint.
        pipe: of the same main network; its cut, its strategy, its replicas and its heads may be others.
        optimizer: of its parameters, fresh; None to leave its state.
        group: see `nwise.training.checkpoint.write`.

    Returns:
        What is not as it was saved, in one line; empty if everything is.

    Raises:
        ValueError: the checkpoint is of another network; nothing has been changed then.
    """
    facts, layout = checkpoint.facts_of(folder), checkpoint.layout_of(folder)
    sizes = {name: tensor.shape for name, tensor in layout.items()}
    _refuse_another_network(folder, pipe, sizes)
    old_stages = _old_stages(pipe, facts)
    targets: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in main_state(pipe).items()}
    renamed: dict[str, str] = {}  # names of this pipeline's heads' parameters -> names in the checkpoint
    new_heads = []
    for k, module in pipe.heads.items():
        head = {f"heads.{k}.{name}": tensor for name, tensor in module.state_dict().items()}
        saved = {name: name.replace(f"heads.{k}.", f"heads.{old_stages[int(k)]}.", 1) for name in head}
        prefix = f"heads.{old_stages[int(k)]}."
        there = {name for name in sizes if name.startswith(prefix)}
        fits = all(sizes.get(saved[name]) == tensor.shape for name, tensor in head.items())
        if fits and (not head or there == set(saved.values())):
            targets.update({saved[name]: tensor for name, tensor in head.items()})
            renamed.update(saved)
        else:
            new_heads.append(int(k))
    entries = _optimizer_entries(pipe, optimizer, facts, layout, renamed)
    stage = 0 if pipe.team is None else pipe.team.stage
    random = {name: torch.empty(sizes[name], dtype=torch.uint8) for name in (f"random.{stage}",) if name in sizes}
    groups = () if optimizer is None else optimizer.param_groups
    # As torch does: the number of steps stays on the CPU unless a fused or captured kernel reads it.
    counted_there = {p for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    fresh = {name: torch.empty_like(tensor, device=_cpu(tensor)) for name, tensor in targets.items()}
    fresh.update({name: tensor for name, (_, _, tensor) in entries.items()} | random)
    checkpoint.read(folder, fresh, group)
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(fresh[name])
    for parameter, entry, tensor in entries.values():
        place = parameter.device if entry != "step" or parameter in counted_there else tensor.device
        optimizer.state[parameter][entry] = tensor.to(place)  # type: ignore[union-attr]
    for state in random.values():
        torch.set_rng_state(state)
    pipe.steps = int(facts["step"])
    pipe.forget_versions()
    return _differences(pipe, facts, sizes, new_heads, sorted(renamed.values()), optimizer)


def parameter_names(pipe: Pipeline) -> dict[nn.Parameter, str]:
    """Names of this process's parameters in a checkpoint."""
    main = {p: f"model.{name}" for stage in pipe.stages for name, p in stage.named_parameters()}
    return {**main, **{p: f"heads.{name}" for name, p in pipe.heads.named_parameters()}}


def _kind_of(optimizer: torch.optim.Optimizer | None) -> str:
    """Its class, and what makes its state another."""
    options = {} if optimizer is None else optimizer.defaults
    extra = [name for name in ("amsgrad", "centered") if options.get(name)]
    return type(optimizer).__name__ + (f" with {', '.join(extra)}" if extra else "")


def _refuse_another_network(folder: Path, pipe: Pipeline, sizes: Mapping[str, Size]) -> None:
    mine = {name: list(tensor.shape) for name, tensor in main_state(pipe).items()}
    parts = [mine] if pipe.team is None else pipe.team.facts(mine)
    here = {name: shape for part in parts for name, shape in part.items()}
    saved = {name: list(size) for name, size in under(sizes, "model.").items()}
    for name in sorted({*here, *saved}):
        if here.get(name) != saved.get(name):
            raise ValueError(
                f"The network should be that of {folder}, whatever its cut. Found that {name!r} has shape {here.get(name)} "
                f"here and {saved.get(name)} there; None means that it has no such tensor."
            )


def _old_stages(pipe: Pipeline, facts: Mapping[str, Any]) -> list[int | None]:
    """For every stage the one of the checkpoint that ended at the same place, whose head fits."""
    ends = {end: k for k, end in enumerate(facts["ends"])}
    return [ends.get(end) for end in facts_of(pipe)["ends"]]


def _optimizer_entries(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    facts: Mapping[str, Any],
    layout: Mapping[str, Tensor],
    renamed: Mapping[str, str],
) -> dict[str, tuple[nn.Parameter, str, Tensor]]:
    """By name in the checkpoint: the parameter, what it is, and a tensor for it."""
    found: dict[str, tuple[nn.Parameter, str, Tensor]] = {}
    if optimizer is None or facts["optimizer"] != _kind_of(optimizer):
        return found
    by_parameter: dict[str, list[str]] = {}
    for name in layout:
        if name.startswith("optimizer."):
            parameter, _, entry = name.removeprefix("optimizer.").rpartition(".")
            by_parameter.setdefault(parameter, []).append(entry)
    for p, name in parameter_names(pipe).items():
        saved = renamed.get(name, name if name.startswith("model.") else "")
        for entry in by_parameter.get(saved, ()):
            full = f"optimizer.{saved}.{entry}"
            shape, dtype = layout[full].shape, layout[full].dtype
            if shape == p.shape and entry != "step":  # lies as its parameter does, since fused optimizers go by memory
                empty = torch.empty_like(p.detach(), dtype=dtype, device=_cpu(p))
            else:
                empty = torch.empty(shape, dtype=dtype)
            found[full] = p, entry, empty
    return found


def _differences(
    pipe: Pipeline,
    facts: Mapping[str, Any],
    sizes: Mapping[str, Size],
    new_heads: Iterable[int],
    used: Iterable[str],
    optimizer: torch.optim.Optimizer | None,
) -> str:
    """In one line, from all processes."""
    mine = [sorted(new_heads), sorted({name.split(".")[1] for name in used})]
    parts: list[Any] = [mine] if pipe.team is None else pipe.team.facts(mine)
    new = sorted(k for heads, _ in parts for k in heads)
    kept = {k for _, heads in parts for k in heads}
    dropped = sorted({name.split(".")[1] for name in sizes if name.startswith("heads.")} - kept, key=int)
    changes = []
    now = facts_of(pipe, optimizer)
    for key, what in (("strategy", "strategy"), ("num_microbatches", "micro-batches"), ("seed", "seed")):
        if facts[key] != now[key]:
            changes.append(f"{what} {facts[key]} -> {now[key]}")
    if optimizer is not None and facts["optimizer"] != now["optimizer"]:
        changes.append(f"optimizer {facts['optimizer']} -> {now['optimizer']}, begun anew")
    if len(facts["ends"]) != len(now["ends"]):
        changes.append(f"stages {len(facts['ends'])} -> {len(now['ends'])}")
    elif facts["ends"] != now["ends"]:
        changes.append("another cut")
    if new:
        changes.append(f"new heads at stages {', '.join(map(str, new))}")
    if dropped:
        changes.append(f"dropped the heads of the former stages {', '.join(dropped)}")
    return "; ".join(changes)


def _cpu(tensor: Tensor) -> torch.device | None:
    """Where it is read to; parts of a DTensor stay where its mesh is."""
    return None if is_dtensor(tensor) else torch.device("cpu")
