"""What a step asks of its batch and of its surroundings before any tensor work."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from nwise._torch import caches_parametrizations
from nwise.microbatch import Parts, cut, given
from nwise.program.arguments import refuse_update_hooks
from nwise.runtime.processes import Processes
from nwise.schedule.schedule import Schedule
from nwise.tensors import Tensors, as_inputs, asks, invoke, names


def cut_batch(
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    target: Any,
    microbatches: Any,
    targets: Any,
    num_microbatches: int,
    num_replicas: int,
    first: nn.Module,
) -> Parts:
    """Return the micro-batches of all replicas, from the arguments of `Pipeline.step`; `first` is the first stage.

    Raises:
        ValueError, TypeError: the batch does not fit the pipeline.
    """
    if microbatches is not None:
        if inputs or named or target is not None:
            raise TypeError(
                "`microbatches` should come alone, or with `targets`. Found other inputs or a target; leave them out."
            )
        parts = given(microbatches, targets, num_microbatches * num_replicas)
    else:
        if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
            raise TypeError(
                f"The input of `step` should be tensors by position or by name. Found one {type(inputs[0]).__name__}; unpack it, "
                "`step(*x)`, or pass micro-batches that are cut already as `step(microbatches=...)`."
            )
        if targets is not None:
            raise TypeError("`targets` should come with `microbatches`. Found none; pass `target=`.")
        whole = as_inputs(inputs, named, "The input of `step`")
        if target is None and len(whole) > 1:
            _check_inputs(whole, first)
        parts = cut(whole, target, num_microbatches, num_replicas)
    if any(map(asks, chain.from_iterable(parts.inputs))):
        raise ValueError(
            "The input of `step` should not require a gradient, because its graph ends at the input. Found one that does; make "
            "the module that computes it a part of the first stage, or detach it."
        )
    return parts


def check_first(
    processes: Processes, parts: Parts, parameters: Iterable[tuple[str, Tensor]], schedule: Schedule
) -> None:
    """Raise ValueError if all processes did not get the same batch, or an update would run inside a step.

    Args:
        processes: the processes; all call it together, before the first step.
        parts: the micro-batches.
        parameters: the parameters of this process, by name.
        schedule: what is executed.
    """
    several = "replicas" if processes.num_replicas > 1 else "a delay" if schedule.oldest else ""
    if why := "several micro-batches" if schedule.num_microbatches > 1 else several:
        refuse_update_hooks(parameters, why)
    if processes.size > 1:
        check_same_batch(processes, parts)


def check_same_batch(processes: Processes, parts: Parts) -> None:
    """Raise ValueError unless all processes have the same targets, and all replicas of the first stage the same inputs."""
    used = parts.inputs if processes.num_replicas > 1 and 0 in processes.here else ()
    processes.agree(inputs=_code(used), target=_code(parts.targets))


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


def _check_inputs(inputs: Tensors, first: nn.Module) -> None:
    """Raise TypeError for ``step(x, y)`` if the first stage takes one input: the target needs its keyword."""
    if not _takes(first, inputs):
        given = ", ".join(names(inputs)) or f"{len(inputs)} inputs"
        raise TypeError(
            f"The first stage should get the inputs that its forward takes. Found {given} and no target; pass the target by "
            "name, `pipe.step(x, target=y)`."
        )


def _takes(module: nn.Module, inputs: Tensors) -> bool:
    """Return whether a module's forward accepts the inputs, judged by its signature."""
    # Look into containers only: a forward of its own has a telling signature.
    outer = None
    while outer is not module:
        outer = module
        if type(module) is nn.Sequential:
            module = next(iter(module), nn.Identity())
        elif hasattr(type(module), "entry_module"):  # a chain (`nwise.network.chain`)
            module = cast(Any, module).entry_module()
    try:
        invoke(inspect.signature(module.forward).bind, inputs)
    except (TypeError, ValueError):
        return False
    return True


def _code(parts: Sequence[Tensors | None]) -> str | None:
    """Return a text that is equal for equal tensors; None for no tensors."""
    code = sha256()
    tensors = [tensor for part in parts for tensor in part or ()]
    for tensor in tensors:
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        code.update(dense.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return code.hexdigest()[:8] if tensors else None
