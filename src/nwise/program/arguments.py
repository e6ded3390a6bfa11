"""Checks of a pipeline's arguments, before any tensor work."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nwise._torch import caches_parametrizations
from nwise.checks import check_at_least
from nwise.looks import is_due
from nwise.microbatch import Parts
from nwise.network.chain import Chain, emptied_buffers, refuse_buffers
from nwise.runtime.engine import Recorder
from nwise.runtime.modules import RemoteModule
from nwise.runtime.processes import Processes
from nwise.stage.stage import LossFn
from nwise.strategies import Strategy
from nwise.tensors import Tensors, call, names

if TYPE_CHECKING:
    from nwise.capture.capture import Capture

T = TypeVar("T")

# A module, or a function that makes it; only the process that holds the module calls it.
ModuleOrFactory = nn.Module | Callable[[], nn.Module]


class Observes(Protocol):
    """What looks at the first steps of a planned pipeline."""

    def through(self, recorder: Recorder | None) -> Recorder | None:
        """Return a recorder of this step that also calls another one."""

    def look(self) -> None:
        """Look at the step that has ended; all ranks call it together."""


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

    def observer(self, processes: Processes) -> Observes:
        """Return what looks at the first steps."""


def checked(
    mains: Sequence[ModuleOrFactory], heads: Sequence[ModuleOrFactory | None] | None, loss_fn: LossFn | Sequence[LossFn]
) -> tuple[list[ModuleOrFactory | None], list[LossFn]]:
    """Check the modules and losses of a pipeline; return the heads (None for the last stage) and the losses, one per stage."""
    if not mains or not all(callable(stage) for stage in mains):
        types = ", ".join(type(stage).__name__ for stage in mains) or "none"
        raise TypeError(f"`stages` should be one or more nn.Modules, or functions that make them. Found {types}.")
    num_stages = len(mains)
    if heads is not None and not isinstance(heads, Iterable):
        raise TypeError(f"`heads` should be a list of nn.Modules or None. Found {type(heads).__name__}.")
    sides = [None] * (num_stages - 1) if heads is None else list(heads)
    if len(sides) == num_stages and sides[-1] is None:
        sides.pop()
    if len(sides) != num_stages - 1:
        raise ValueError(
            f"`heads` should have {num_stages - 1} entries, one for every stage but the last, whose output goes to the "
            f"loss, or be None. Found {len(sides)}."
        )
    for k, head in enumerate(sides):
        if head is not None and not callable(head):
            raise TypeError(
                f"`heads[{k}]` should be an nn.Module, a function that makes it, or None. Found {type(head).__name__}."
            )
    for k, module in [*enumerate(mains), *enumerate(sides)]:
        if isinstance(module, nn.Module):
            where = f"`stages[{k}]`" if module is mains[k] else f"`heads[{k}]`"
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
    return [*sides, None], losses


def check_surroundings() -> None:
    """Raise ValueError if a context around a step would change its gradients.

    >>> with torch.inference_mode():
    ...     check_surroundings()
    Traceback (most recent call last):
    ...
    ValueError: `step` should run outside `torch.inference_mode`, because it computes gradients. Found it on; end it first.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "`step` should run outside `torch.inference_mode`, because it computes gradients. Found it on; end it first."
        )
    if caches_parametrizations():
        raise ValueError(
            "`step` should run outside `torch.nn.utils.parametrize.cached`, because its micro-batches and passes have graphs of "
            "their own. Found it on; end it first."
        )


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
    for kind in set(map(type, modules)):
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


def check_target(inputs: Tensors, target: object, first: nn.Module) -> None:
    """Raise TypeError for ``step(x, y)`` if the first stage takes one input: the target needs its keyword."""
    if target is None and len(inputs) > 1 and not _takes(first, inputs):
        given = ", ".join(names(inputs)) or f"{len(inputs)} inputs"
        raise TypeError(
            f"The first stage should get the inputs that its forward takes. Found {given} and no target; pass the target by "
            "name, `pipe.step(x, target=y)`."
        )


def checks_always(checks: str) -> bool:
    """Return whether checks of what modules and losses do run in every step."""
    if checks not in ("first", "always"):
        raise ValueError(f"`checks` should be 'first' or 'always'. Found {checks!r}.")
    return checks == "always"


def check_input_gradients(processes: Processes, delay: int) -> None:
    """Raise ValueError for an input that requires a gradient where the step cannot give one."""
    if processes.size > 1 or delay:
        where = "several processes" if processes.size > 1 else "a delay"
        raise ValueError(
            f"The input of `step` should not require a gradient with {where}. Found one that does; make the module that computes "
            "it a part of the first stage, or detach it."
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


def check_same_batch(processes: Processes, parts: Parts) -> None:
    """Raise ValueError unless all processes have the same targets, and all replicas of the first stage the same inputs, as from
    equal loaders; at the steps 1, 2, 4, 8, ..., because a shuffle may come to differ after an epoch.
    """
    if processes.size > 1 and is_due(processes.progress.steps + 1):
        used = parts.inputs if processes.num_replicas > 1 and 0 in processes.here else ()
        processes.agree(inputs=_code(used), target=_code(parts.targets))


def _code(parts: Sequence[Tensors | None]) -> str | None:
    """Return a text that is equal for equal tensors; None for no tensors."""
    code, tensors = sha256(), [tensor for part in parts for tensor in part or ()]
    for tensor in tensors:
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        code.update(dense.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return code.hexdigest()[:8] if tensors else None


def _takes(module: nn.Module, inputs: Tensors) -> bool:
    """Return whether a module's forward accepts the inputs, judged by its signature."""
    # Look into containers only: a custom forward, as in stages of Hugging Face networks, has a telling signature.
    outer = None
    while outer is not module:
        outer = module
        if type(module) is nn.Sequential:
            module = next(iter(module), nn.Identity())
        elif hasattr(type(module), "entry_module"):  # a chain (`nwise.network.chain`)
            module = cast(Any, module).entry_module(by_name=bool(names(inputs)))
    try:
        call(inspect.signature(module.forward).bind, inputs)
    except (TypeError, ValueError):
        return False
    return True


def _refuse_lazy(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse parameters and buffers without values: other stages, optimizers and processes need their shapes."""
    for owner, module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(
                    f"Parameters and buffers should have values. Found {owner}.{name} of a lazy module without any; run the "
                    "network once on an input before you pass it to `Pipeline`."
                )


def refuse_emptied(modules: Iterable[nn.Module], fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse to let buffers come out of a function such as that of `to_empty` with meaningless values; chains see to theirs."""
    for module in modules:
        refuse_buffers(() if isinstance(module, Chain) else emptied_buffers(module, fn))


class Sharing:
    """Finds a parameter in two places that would give it two credits.

    Heads and the output may share parameters: the gradient is the sum over their losses. With ``tied="sum"`` the first stage may
    share them too, as a tied embedding does.

    Args:
        stages, heads: what the caller has passed, those of other processes included.
        tied: ``"sum"`` or ``"refuse"``.
        several: whether there are several processes, which cannot share parameters.

    Raises:
        ValueError: `tied` is something else.
    """

    def __init__(
        self, stages: Sequence[ModuleOrFactory], heads: Sequence[ModuleOrFactory | None], tied: str, several: bool
    ) -> None:
        if tied not in ("refuse", "sum"):
            raise ValueError(f"`tied` should be 'refuse' or 'sum'. Found {tied!r}.")
        self._tied, self._several = tied, several
        # Weakly, because the caller may free what other processes train.
        self._given: Mapping[str, Mapping[str, Tensor]] = {
            place: WeakValueDictionary(module.named_parameters())
            for place, module in _places(stages, heads)
            if isinstance(module, nn.Module)
        }

    def check(self, stages: Sequence[nn.Module], heads: Sequence[nn.Module | None]) -> tuple[str, str] | None:
        """Return two names of a shared parameter, or None; raise ValueError if it may not be shared."""
        owners = list(_places(stages, heads))
        allowed = {f"stages.{len(stages) - 1}", *(["stages.0"] if self._tied == "sum" else [])}
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
                places = {place for place in (first[0], owner) if not place.startswith("heads.")} - allowed
                if places or self._several:
                    alone = "one stage or head in several processes" if self._several else ""
                    hint = ", or pass `tied='sum'`" if places == {"stages.0"} and not self._several else ""
                    raise ValueError(
                        f"Every parameter should belong to {alone or 'one stage, or to heads and the output'}. Found {shared[0]} "
                        f"again as {shared[1]}; untie them by `nwise.untie(model)` or a copy.deepcopy of one{hint}."
                    )
        return shared

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the parameters of other processes."""
        return {**self.__dict__, "_given": {}}


def _places(stages: Iterable[T], heads: Iterable[T | None]) -> Iterator[tuple[str, T]]:
    for what, modules in (("stages", stages), ("heads", heads)):
        yield from ((f"{what}.{k}", module) for k, module in enumerate(modules) if module is not None)


def warn_of_wide_windows(strategy: Strategy, num_stages: int, stacklevel: int) -> None:
    """Warn of a window that is wider than the network; `stacklevel` counts from the caller of this function."""
    if (text := strategy.caution(num_stages)) is not None:
        warnings.warn(text, stacklevel=1 + stacklevel)


def capture_of(losses: Sequence[LossFn], processes: Processes, compression: object, always: bool) -> Capture:
    """Return what captures the steps of a pipeline; raise ValueError if an argument of it rules that out."""
    size, ranks = processes.size, processes.num_ranks
    others = {
        f"{size} processes for {ranks} rank{'s' * (ranks > 1)}; start {ranks}": size > ranks,
        "`compress`; leave it out": compression is not None,
        "`checks='always'`, which reads values in every step; use `checks='first'`": always,
    }
    if any(others.values()):
        found = next(name for name, is_given in others.items() if is_given)
        raise ValueError(
            "A captured pipeline should have whole stages without replicas, messages without compression, and few checks. "
            f"Found {found}."
        )
    from nwise.capture.capture import Capture

    return Capture(losses)
