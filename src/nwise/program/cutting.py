"""What a step does with its batch: check it, and cut it; some steps also look whether the cut changes a value."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import sha256
from typing import Any, cast

import torch
from torch import nn

from nwise._torch import caches_parametrizations
from nwise.held import random_states_kept
from nwise.looks import looks_at
from nwise.microbatch import Batch, BatchDim, Parts, check_batch_dim, cut, given, leaves
from nwise.runtime.processes import Processes
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import LossFn, Stage
from nwise.tensors import Tensors, as_inputs, call, names
from nwise.terms import make_terms


class Cutter:
    """Makes the micro-batches of a pipeline.

    Args:
        stages: all stages; they are replaced in place.
        losses: the loss of each stage.
        processes: the processes.
        batch_dim: dimension of the samples, as `Pipeline` takes it.
        always: whether to look at the losses in every step.

    Raises:
        TypeError, ValueError: `batch_dim` is none, or a loss is not a mean.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        losses: Sequence[LossFn],
        processes: Processes,
        batch_dim: BatchDim,
        always: bool,
    ) -> None:
        check_batch_dim(batch_dim)
        self._always = always
        self._stages, self._processes, self._batch_dim = stages, processes, batch_dim
        self.terms = make_terms(losses)
        self._seen: set[object] = set()  # with which numbers of micro-batches and heads the network has been compared
        self._steps: Counter[object] = Counter()  # by kind
        self._told: set[object] = set()  # the losses that have been warned of, with the numbers of micro-batches

    def parts(
        self,
        inputs: Sequence[Any],
        named: Mapping[str, Any],
        target: Any,
        microbatches: Any,
        targets: Any,
        num_microbatches: int,
    ) -> Parts:
        """Return the micro-batches of all replicas, from the arguments of `Pipeline.step`.

        Raises:
            ValueError, TypeError: the batch does not fit the pipeline.
        """
        num_replicas = self._processes.num_replicas
        if microbatches is not None:
            if inputs or named or target is not None:
                raise TypeError(
                    "`microbatches` should come alone, or with `targets`. Found other inputs or a target; leave them out."
                )
            return given(microbatches, targets, num_microbatches * num_replicas, self.terms, self._batch_dim)
        if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
            raise TypeError(
                f"The input of `step` should be tensors by position or by name. Found one {type(inputs[0]).__name__}; unpack it, "
                "`step(*x)`, or pass micro-batches that are cut already as `step(microbatches=...)`."
            )
        if targets is not None:
            raise TypeError("`targets` should come with `microbatches`. Found none; pass `target=`.")
        whole = as_inputs(inputs, named, "The input of `step`")
        if target is None and len(whole) > 1:
            _check_inputs(whole, self._stages[0].module)
        return cut(whole, target, num_microbatches, num_replicas, self._batch_dim)

    def check_samples_first(self, what: str) -> None:
        """Raise ValueError if the samples lie in another dimension than the first."""
        if any(dim for dim in leaves(self._batch_dim)):
            raise ValueError(
                f"{what} should have samples along dimension 0. Found `batch_dim={self._batch_dim!r}`; let the network take them "
                "there, and change the dimensions inside it."
            )

    def looking(self, parts: Parts, batch: Batch, schedule: Schedule, step: int) -> AbstractContextManager[None]:
        """Return a context for a step that looks at it if it is number 1, 2, 4, 8, ... of its kind, or always if asked.

        Args:
            parts: the micro-batches of all replicas.
            batch: those of this one.
            schedule: what the step runs.
            step: number of the step.
        """
        call = step % len(schedule.flows)
        kind = schedule.digest, call, parts.whole is None
        self._steps[kind] += 1
        if not (self._always or looks_at(self._steps[kind])):
            return nullcontext()
        heads = frozenset(k for flow in schedule.flows[call] for k in flow.heads)
        return self._looking(parts, batch, heads)

    @contextmanager
    def _looking(self, parts: Parts, batch: Batch, heads: frozenset[int]) -> Iterator[None]:
        from nwise.program.separable import WatchedLoss, check_network, entered

        cuts = 0 if parts.whole is None else len(parts.inputs)
        here = [self._stages[k] for k in self._processes.here]
        rest: Sequence[Stage] = ()
        if parts.whole is not None and cuts > 1 and (cuts, heads) not in self._seen:
            # The stages from the first one on are compared before the step, and the others by what they get in it.
            first = [parts.whole, *parts.inputs]
            with self._processes.watched(None), random_states_kept():
                weights = parts.weights(self.terms)
                rest = check_network(here, heads, lambda k: None if k else first, parts.sizes, weights)
            batch.watched.update(stage.index for stage in rest)
        losses = [
            WatchedLoss(stage, parts)
            for stage in here
            if stage.index in heads and not self.terms[stage.index].known and (cuts, stage.index) not in self._told
        ]
        try:
            yield
        finally:
            for loss in losses:
                loss.stage.loss_fn = loss.loss_fn
        with random_states_kept():
            self._told |= {(cuts, loss.stage.index) for loss in losses if loss.warns(batch)}
        if rest:
            sizes = parts.sizes[batch.draws.first :][: len(batch.inputs)]
            entering = partial(entered, batch, sizes=sizes, dims=parts.dims)
            with self._processes.watched(None), random_states_kept():
                check_network(rest, heads, entering, sizes, batch.weights)
        self._seen.add((cuts, heads))


def check_input_gradients(processes: Processes, delay: int) -> None:
    """Raise ValueError for an input that requires a gradient where the step cannot give one."""
    if processes.size > 1 or delay:
        where = "several processes" if processes.size > 1 else "a delay"
        raise ValueError(
            f"The input of `step` should not require a gradient with {where}. Found one that does; make the module that computes "
            "it a part of the first stage, or detach it."
        )


def check_same_batch(processes: Processes, parts: Parts) -> None:
    """Raise ValueError unless all processes have the same targets, and all replicas of the first stage the same inputs, as from
    equal loaders; at the steps 1, 2, 4, 8, ..., because a shuffle may come to differ after an epoch.
    """
    if looks_at(processes.steps + 1):
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


def _code(parts: Sequence[Tensors | None]) -> str | None:
    """Return a text that is equal for equal tensors; None for no tensors."""
    code, tensors = sha256(), [tensor for part in parts for tensor in part or ()]
    for tensor in tensors:
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        code.update(dense.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return code.hexdigest()[:8] if tensors else None
