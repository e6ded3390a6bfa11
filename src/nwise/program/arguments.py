"""Checks of a pipeline's arguments, before any tensor work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nwise._torch import gradient_hooks
from nwise.checks import check_at_least
from nwise.runtime.modules import RemoteModule
from nwise.stage.stage import LossFn

T = TypeVar("T")

# A module, or a function that makes it; only the process that holds the module calls it.
ModuleOrFactory = nn.Module | Callable[[], nn.Module]


@runtime_checkable
class Planned(Protocol):
    """A placement with what a planner knows of the stages; `nwise.plan` returns one."""

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of every stage."""

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, M."""

    def check_stages(self, stages: Sequence[object]) -> None:
        """Raise ValueError unless the stages are those that were planned."""

    def prices(self, num_ranks: int) -> tuple[Any, ...]:
        """Return the costs by which orders are compared, and the memory of every rank."""


def checked(
    stage_modules: Sequence[ModuleOrFactory],
    heads: Sequence[ModuleOrFactory | None] | None,
    loss_fn: LossFn | Sequence[LossFn],
) -> tuple[list[ModuleOrFactory | None], list[LossFn]]:
    """Check the modules and losses of a pipeline; return the heads (None for the last stage) and the losses, one per stage."""
    if not stage_modules or not all(callable(stage) for stage in stage_modules):
        types = ", ".join(type(stage).__name__ for stage in stage_modules) or "none"
        raise TypeError(f"`stages` should be one or more nn.Modules, or functions that make them. Found {types}.")
    num_stages = len(stage_modules)
    if heads is not None and not isinstance(heads, Iterable):
        raise TypeError(f"`heads` should be a list of nn.Modules or None. Found {type(heads).__name__}.")
    head_modules = [None] * (num_stages - 1) if heads is None else list(heads)
    if len(head_modules) == num_stages and head_modules[-1] is None:
        head_modules.pop()
    if len(head_modules) != num_stages - 1:
        raise ValueError(
            f"`heads` should have {num_stages - 1} entries, one for every stage but the last, whose output goes to the "
            f"loss, or be None. Found {len(head_modules)}."
        )
    for k, head in enumerate(head_modules):
        if head is not None and not callable(head):
            raise TypeError(
                f"`heads[{k}]` should be an nn.Module, a function that makes it, or None. Found {type(head).__name__}."
            )
    for k, module in [*enumerate(stage_modules), *enumerate(head_modules)]:
        if isinstance(module, nn.Module):
            where = f"`stages[{k}]`" if module is stage_modules[k] else f"`heads[{k}]`"
            refuse_wrappers(module.modules(), where)
            if any(p.is_inference() for p in module.parameters() if not is_lazy(p)):
                raise ValueError(
                    f"{where} should be made outside `torch.inference_mode`, whose tensors get no gradients. Found a parameter "
                    "that was made inside; build the network after it, or copy it with `copy.deepcopy`."
                )
    several = isinstance(loss_fn, Sequence) and not isinstance(loss_fn, str)
    losses: list[LossFn] = list(loss_fn) if several else [loss_fn] * num_stages  # type: ignore[arg-type, list-item]
    if len(losses) != num_stages:
        raise ValueError(f"`loss_fn` should be one function or a list of {num_stages}. Found {len(losses)}.")
    for loss in losses:
        if isinstance(loss, type):
            raise TypeError(
                f"`loss_fn` should be a function of output and target. Found the class {loss.__name__}; make an instance, "
                f"`{loss.__name__}()`."
            )
        if not callable(loss):
            raise TypeError(f"`loss_fn` should be callable, `loss_fn(output, target)`. Found {type(loss).__name__}.")
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ValueError(
                f"`loss_fn` should have no parameters. Found some in {type(loss).__name__}; put them into the heads."
            )
    return [*head_modules, None], losses


_WRAPPERS = {
    "DataParallel": "torch.nn.DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "`replicate`",
    "FSDPModule": "`fully_shard`",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "ShardedDataParallel": "ShardedDataParallel",
    "DeepSpeedEngine": "a DeepSpeed engine",
}


def refuse_wrappers(modules: Iterable[nn.Module], where: str = "a stage or head", *, several: bool = False) -> None:
    """Raise ValueError for modules that exchange parameters or gradients with other processes or devices by themselves.

    Args:
        modules: all modules of the stages and heads.
        where: place of the modules, for the message; default: some stage or head.
        several: whether there are several processes, which `nn.SyncBatchNorm` would mix up; default: False.
    """
    given = list(modules)
    # Of parameters alone: a DTensor has a mesh, and asking for its class would import torch's package for them.
    if any(hasattr(p, "device_mesh") for module in given for p in module._parameters.values()):
        raise ValueError(
            f"Stages and heads should have plain parameters. Found a DTensor in {where}; leave tensor parallelism out, and give "
            "the ranks to stages or replicas."
        )
    for kind in set(map(type, given)):
        if found := [_WRAPPERS[base.__name__] for base in kind.__mro__ if base.__name__ in _WRAPPERS]:
            raise ValueError(
                f"Stages and heads should exchange nothing with other processes; nwise sums the gradients. Found {found[0]} in "
                f"{where}; pass the plain module. For replicas, start a multiple of the processes or pass a mesh with a "
                "dimension 'dp' (docs/processes.md)."
            )
        if several and issubclass(kind, nn.SyncBatchNorm):
            raise ValueError(
                f"Stages and heads should exchange nothing with other processes. Found nn.SyncBatchNorm in {where}; use batch "
                "norm with `nwise.defer_batchnorm`, whose statistics are those of the whole mini-batch."
            )


def check_only(only: object, num_stages: int) -> None:
    """Raise ValueError or TypeError unless `only` is None or has indices of stages."""
    if only is None:
        return
    if not isinstance(only, Collection):
        raise TypeError(f"`only` should be a collection of indices of stages, such as [0]. Found {only!r}.")
    for k in only:
        if k not in range(num_stages):
            raise ValueError(f"`only` should have indices of stages, from 0 to {num_stages - 1}. Found {k!r}.")


def checked_when(checks: str) -> str:
    """Return the argument `checks`; raise ValueError if it is something else."""
    if checks not in ("first", "never"):
        raise ValueError(
            f"`checks` should be 'first' or 'never'. Found {checks!r}; to check at any other time, call `nwise.check`."
        )
    return checks


def refuse_update_hooks(parameters: Iterable[tuple[str, Tensor]], why: str) -> None:
    """Raise ValueError for parameters with hooks that run after each addition to their gradients, as updates in a backward do.

    Args:
        parameters: the parameters, by name.
        why: what lets a step add to a gradient several times.
    """
    if hooked := [name for name, p in parameters if gradient_hooks(p)[1]]:
        raise ValueError(
            f"Parameters should have no hooks of `register_post_accumulate_grad_hook` with {why}, because these run after each "
            f"of several additions to a gradient. Found one on {hooked[0]}; update after `step`, by an optimizer."
        )


def placed(
    stages: Sequence[ModuleOrFactory], placement: str | Sequence[int] | Planned, num_microbatches: int | None
) -> tuple[Planned | None, str | Sequence[int], int]:
    """Return the plan, if the placement is one, the placement itself, and the number of micro-batches."""
    if num_microbatches is not None:
        check_at_least(1, num_microbatches=num_microbatches)
    if not isinstance(placement, Planned):
        return None, placement, int(num_microbatches or 1)
    placement.check_stages(stages)
    return placement, placement.placement, int(num_microbatches or placement.num_microbatches)


def _refuse_lazy(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse parameters and buffers without values: other stages, optimizers and processes need their shapes."""
    for owner, module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(
                    f"Parameters and buffers should have values. Found {owner}.{name} of a lazy module without any; run the "
                    "network once on an input before you pass it to `Pipeline`."
                )


class Sharing:
    """Finds a parameter in two places that would give it two credits.

    Heads and the output may share parameters: the gradient is the sum over their losses.

    Args:
        stages, heads: what the caller has passed, those of other processes included.
        several: whether there are several processes, which cannot share parameters.
    """

    def __init__(
        self, stages: Sequence[ModuleOrFactory], heads: Sequence[ModuleOrFactory | None], several: bool
    ) -> None:
        self._several = several
        # Weakly, because the caller may free what other processes train.
        self._given: Mapping[str, Mapping[str, Tensor]] = {
            place: WeakValueDictionary(module.named_parameters())
            for place, module in _places(stages, heads)
            if isinstance(module, nn.Module)
        }

    def check(self, stages: Sequence[nn.Module], heads: Sequence[nn.Module | None]) -> tuple[str, str] | None:
        """Return two names of a shared parameter, or None; raise ValueError if it may not be shared."""
        owners = list(_places(stages, heads))
        last = f"stages.{len(stages) - 1}"
        _refuse_lazy(owners)
        seen: dict[Tensor, tuple[str, str]] = {}
        shared = None
        for owner, module in owners:
            remote = isinstance(module, RemoteModule)
            for name, parameter in self._given.get(owner, {}).items() if remote else module.named_parameters():
                first = seen.setdefault(parameter, (owner, name))
                if first[0] == owner:
                    continue
                shared = ".".join(first), f"{owner}.{name}"
                if self._several or any(place.startswith("stages.") and place != last for place in (first[0], owner)):
                    alone = "one stage or head in several processes" if self._several else ""
                    raise ValueError(
                        f"Every parameter should belong to {alone or 'one stage, or to heads and the output'}. Found {shared[0]} "
                        f"again as {shared[1]}; untie them by `nwise.untie(model)` or a copy.deepcopy of one."
                    )
        return shared

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the parameters of other processes."""
        return {**self.__dict__, "_given": {}}


def _places(stages: Iterable[T], heads: Iterable[T | None]) -> Iterator[tuple[str, T]]:
    for what, modules in (("stages", stages), ("heads", heads)):
        yield from ((f"{what}.{k}", module) for k, module in enumerate(modules) if module is not None)
