"""What a step does with its batch: cut it, or take it as cut; the first step also looks whether the cut changes a value.

A loss is a mean over the mini-batch. So the network should compute every sample alone, and a loss should be a mean over terms
that can be counted. The code of a module does not tell, but its values do::

    network    stage(whole mini-batch), at the samples of a micro-batch  =  stage(micro-batch)
    loss       loss(all outputs, all targets)                            =  sum over m of weight_m * loss(output_m, target_m)
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from nwise._arguments import check_target
from nwise._torch import BatchNorm, clear_forward_hooks, versions
from nwise.held import held
from nwise.microbatch import Batch, BatchDim, Parts, check_batch_dim, cut, given, leaves
from nwise.randomness import seeded
from nwise.rerun import random_states_kept
from nwise.runtime.processes import Processes
from nwise.schedule.schedule import Schedule
from nwise.stage import LossFn, Stage
from nwise.tensors import Tensors, as_argument, as_inputs, as_tuple, call, each, like
from nwise.terms import make_terms

_OTHERWISE = (
    "pass samples that belong together as micro-batches that are cut already (`step(microbatches=...)`), or set "
    "`num_microbatches=1`"
)


class Cutter:
    """Makes the micro-batches of a pipeline.

    Args:
        stages: all stages; they are replaced in place.
        losses: the loss of each stage.
        processes: the processes.
        batch_dim: dimension of the samples, as `Pipeline` takes it.

    Raises:
        TypeError, ValueError: `batch_dim` is none, or a loss is not a mean.
    """

    def __init__(
        self, stages: Sequence[Stage], losses: Sequence[LossFn], processes: Processes, batch_dim: BatchDim
    ) -> None:
        check_batch_dim(batch_dim)
        self._stages, self._processes, self._batch_dim = stages, processes, batch_dim
        self.terms = make_terms(losses)
        self._seen: set[object] = set()  # the kinds of steps that have been looked at

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
        check_target(whole, target, self._stages[0].module)
        return cut(whole, target, num_microbatches, num_replicas, self._batch_dim)

    def check_samples_first(self, what: str) -> None:
        """Raise ValueError if the samples lie in another dimension than the first."""
        if any(dim for dim in leaves(self._batch_dim)):
            raise ValueError(
                f"{what} should have samples along dimension 0. Found `batch_dim={self._batch_dim!r}`; let the network take them "
                "there, and change the dimensions inside it."
            )

    def looking(self, parts: Parts, batch: Batch, schedule: Schedule, step: int) -> AbstractContextManager[None]:
        """Return a context for a step that looks at it if it is the first of its kind.

        Args:
            parts: the micro-batches of all replicas.
            batch: those of this one.
            schedule: what the step runs.
            step: number of the step.
        """
        turn = step % len(schedule.flows)
        kind = schedule.digest, turn, parts.whole is None
        heads = {k for flow in schedule.flows[turn] for k in flow.heads}
        return nullcontext() if kind in self._seen else self._looking(parts, batch, kind, frozenset(heads))

    @contextmanager
    def _looking(self, parts: Parts, batch: Batch, kind: object, heads: frozenset[int]) -> Iterator[None]:
        cuts = 0 if parts.whole is None else len(parts.inputs)
        here = [self._stages[k] for k in self._processes.here]
        if cuts > 1 and (cuts, heads) not in self._seen:
            with self._processes.watched(None), random_states_kept():  # only the processes of stage 0 look
                check_network(here, heads, parts, parts.weights(self.terms))
            self._seen.add((cuts, heads))
        losses = [
            WatchedLoss(stage, parts)
            for stage in here
            if stage.index in heads and not self.terms[stage.index].known and (cuts, stage.index) not in self._seen
        ]
        try:
            yield
        finally:
            for loss in losses:
                loss.stage.loss_fn = loss.loss_fn
        with random_states_kept():
            for loss in losses:
                loss.compare(batch)
        self._seen |= {kind, *((cuts, loss.stage.index) for loss in losses)}


def check_network(
    stages: Sequence[Stage], heads: Collection[int], parts: Parts, weights: Sequence[Sequence[float]]
) -> None:
    """Raise ValueError if stages, from the first one on, or their heads do not compute every sample alone.

    The whole mini-batch and every micro-batch run once through copies in evaluation mode, without gradients. What cannot be
    copied, fails, or draws random numbers ends the comparison.

    Args:
        stages: stages of this process; only those that follow each other from stage 0 on are checked.
        heads: indices of the stages whose losses are computed.
        parts: the micro-batches.
        weights: their shares in each stage's loss.
    """
    assert parts.whole is not None, "the micro-batches have been cut here"
    runs: list[Tensors] | None = [parts.whole, *parts.inputs]
    for k, stage in enumerate(stages):
        if stage.index != k or runs is None:
            return
        shares = [row[k] for row in weights]
        is_last = k == len(weights[0]) - 1
        runs = _alone(stage.module, f"Stage {k}", runs, parts.sizes, shares if is_last else None)
        if runs is not None and stage.head is not None and k in heads:
            _alone(stage.head, f"The head of stage {k}", runs, parts.sizes, shares)


def _alone(
    module: nn.Module, name: str, runs: Sequence[Tensors], sizes: Sequence[int], shares: Sequence[float] | None
) -> list[Tensors] | None:
    """Return a module's outputs for the whole mini-batch and for every part; None if they cannot be compared.

    Args:
        module: the module.
        name: its name, for the message.
        runs: its inputs, of the whole and of every part.
        sizes: number of samples of every part.
        shares: weights of the parts in a loss, if the outputs go to one, and may be means over samples; else None.

    Raises:
        ValueError: a part has other values than the same samples of the whole.
    """
    noise = max(map(_eps, module.parameters()), default=0.0)
    try:
        fresh = _double(module)
        used = fresh()
        whole, again = (_run(used, runs[0], seed=seed) for seed in (0, 1))  # a generator that it holds moves on
        if any(_gap(x, y, noise) for x, y in zip(whole, again, strict=True)):
            return None  # it draws random numbers
        parts = [_run(fresh(), inputs, seed=0) for inputs in runs[1:]]
        if all(_agree(y, xs, sizes, shares, noise) for y, *xs in zip(whole, *parts, strict=True)):
            return [whole, *parts]
    except Exception:  # the step itself will tell
        return None
    hint = ""
    if any(getattr(inner, "batch_first", True) is False for inner in module.modules()):
        hint = "layers with `batch_first=False` have the samples in dimension 1; "
    raise ValueError(
        f"{name} should compute every sample alone, because the {len(sizes)} micro-batches are computed one by one. Found other "
        f"values for the whole mini-batch than for its micro-batches; {hint}say in which dimension every input has its samples "
        f"by `Pipeline(..., batch_dim=)`, {_OTHERWISE}."
    )


def _agree(
    whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int], shares: Sequence[float] | None, noise: float
) -> bool:
    """Tell whether an output for the whole mini-batch is made of those for its parts, or whether that cannot be told."""
    if any(part.dim() != whole.dim() for part in parts):
        return True
    dims = [d for d in range(whole.dim()) if any(part.size(d) != whole.size(d) for part in parts)]
    if not dims:  # a tensor that every micro-batch has whole, or a mean over samples
        if shares is None or not any(_gap(whole, part, noise) for part in parts):
            return True
        return not _gap(
            whole, torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0), noise
        )
    follows = all((whole.size(d), *(x.size(d) for x in parts)) == (sum(sizes), *sizes) for d in dims)
    if len(dims) > 1:
        return not follows  # values for pairs of samples
    joined = torch.cat(list(parts), dims[0])
    return joined.shape != whole.shape or not _gap(whole, joined, noise) or not follows


def _double(module: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that makes copies of a module in evaluation mode, whose runs leave the module as it is."""
    # Parameters are copied too, once, as a forward may change them. Neither gradients nor an optimizer need memory yet.
    double = copy.deepcopy(module).eval()
    outside = set(held(module).modules)  # what says that it cannot be copied stays as it is
    unregistered = [inner.eval() for inner in held(double).modules if inner not in outside]
    for inner in (*double.modules(), *unregistered):
        if isinstance(vars(inner).get("forward"), FunctionType):
            raise TypeError("A function in place of `forward` still calls the original module.")
        clear_forward_hooks(inner)  # they may keep what they see
        if isinstance(inner, BatchNorm) and inner.running_mean is None:
            inner.forward = nn.Identity().forward  # type: ignore[method-assign] # it mixes samples, as all do in training
    # No run changes the dictionaries of hooks, whose copies would take most of the time.
    hooks = [value for inner in double.modules() for key, value in vars(inner).items() if "_hooks" in key]
    kept = {id(x): x for x in (*double.parameters(), *hooks)}
    return lambda: copy.deepcopy(double, dict(kept))


def _run(double: nn.Module, inputs: Tensors, seed: int) -> Tensors:
    """Run the copy of a module, without gradients."""
    # A compiled module would be compiled for shapes that do not come again.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.no_grad(), eager, warnings.catch_warnings(), seeded(seed, inputs[0].device):
        warnings.simplefilter("ignore")  # the step itself will warn
        return as_tuple(call(double, each(inputs, torch.clone)), "")


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _gap(a: Tensor, b: Tensor, noise: float = 0.0) -> float:
    """Return the largest difference between two tensors relative to their largest value; 0 within rounding.

    Args:
        a, b: the tensors; those without gradients are not compared.
        noise: the relative rounding error of what they were computed from, if it is larger than their own.
    """
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point() or not a.numel():
        return 0.0
    kind = a.device.type
    noise = max(noise, _eps(a))
    if torch.is_autocast_enabled(kind):
        noise = max(noise, torch.finfo(torch.get_autocast_dtype(kind)).eps)
    a, b = a.detach().double(), b.detach().double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max()
    relative = float(gap / torch.stack([a.abs().max(), b.abs().max()]).max())
    # GPUs choose another algorithm for another size.
    return relative if relative > max(noise**0.5, 0.01 if kind == "cuda" else 0.0) else 0.0


class WatchedLoss:
    """A loss while it is looked at. It takes the place of the loss of a stage.

    Args:
        stage: the stage.
        parts: the micro-batches of all replicas.

    Attributes:
        stage, loss_fn: the stage, and the loss itself.
    """

    def __init__(self, stage: Stage, parts: Parts) -> None:
        self.stage, self.loss_fn, self._parts = stage, stage.loss_fn, parts
        try:
            self._before: Callable[..., Tensor] | None = copy.deepcopy(self.loss_fn)
        except Exception:  # it holds a lock, or a tensor with a graph
            self._before = None
        self._outputs: list[Any] = []  # in the order of the calls, away from the device
        stage.loss_fn = self

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss.

        Raises:
            ValueError: it changes the target.
        """
        if self._parts.whole is not None and len(self._parts.inputs) > 1:
            self._outputs.append(_kept(output))
        tensors = () if target is None else as_tuple(target, "`target`")
        before = versions(tensors)
        loss = self.loss_fn(output, target)
        if versions(tensors) != before:
            raise ValueError(
                f"The loss of stage {self.stage.index} should not change its target in place, because other losses and later "
                "steps use it. Found an in-place operation; clone the target first."
            )
        return loss

    def compare(self, batch: Batch) -> None:
        """Warn if the micro-batches' losses do not make the loss of all of them; a loss that raises or draws is not compared."""
        k = self.stage.index
        called = [m for j, m in batch.losses if j == k]
        order = sorted(called)
        if self._before is None or len(order) < 2 or len(order) != len(self._outputs):
            return
        losses = torch.stack([batch.losses[k, m].double() for m in order])
        weights = losses.new_tensor([batch.weights[m][k] for m in order])
        apart, size = (losses * weights).sum() / weights.sum(), losses.abs().mean()
        noise = max(map(_eps, (*self.stage.learns, *self.stage.head_learns, batch.losses[k, order[0]])))
        outputs = [self._outputs[called.index(m)] for m in order]
        try:
            whole = self._of_all(outputs, batch, order, seed=0)
            if not whole.isfinite() or not _gap(torch.stack([whole, size]), torch.stack([apart, size]), noise):
                return
            if _gap(whole, self._of_all(outputs, batch, order, seed=1), noise):
                return  # it draws random numbers
        except Exception:  # a loss may not take another size
            return
        warnings.warn(
            f"The loss of stage {k} should be a mean over the samples, or over terms that its method `count(target)` counts. "
            f"Found {float(whole):.6g} for the whole mini-batch and {float(apart):.6g} from {len(order)} micro-batches, so the "
            f"gradients are those of another loss; give it such a method, {_OTHERWISE}. This warning appears once.",
            stacklevel=6,  # from here through `_looking`, `__exit__`, `Step.run` and `step` to the training loop
        )

    def _of_all(self, outputs: Sequence[Any], batch: Batch, order: Sequence[int], seed: int) -> Tensor:
        """Return the loss of all micro-batches as one."""
        parts, device = self._parts, next(iter(batch.losses.values())).device
        sizes = [parts.sizes[batch.draws.first + m] for m in order]
        dims = [*(dim for dim in (*parts.target_dims, *parts.dims) if dim is not None), *range(8)]  # likeliest first

        def joined(xs: Sequence[Tensor]) -> Tensor:
            dim = next(
                d
                for d in dims
                if all(-x.dim() <= d < x.dim() and x.size(d) == n for x, n in zip(xs, sizes, strict=True))
            )
            return torch.cat(list(xs), dim).to(device).requires_grad_(xs[0].is_floating_point())

        target, first = None, batch.targets[order[0]]
        if first is not None:
            columns = zip(*(batch.targets[m] or () for m in order), strict=True)
            ys = [
                xs[0] if dim is None else torch.cat(xs, dim) for xs, dim in zip(columns, parts.target_dims, strict=True)
            ]
            target = as_argument(like(first, ys))
        assert self._before is not None, "the loss has a copy"
        with torch.enable_grad(), warnings.catch_warnings(), seeded(seed, device):
            warnings.simplefilter("ignore")
            return copy.deepcopy(self._before)(_rebuilt(outputs, joined), target).detach().double().reshape(())


def _kept(output: Any) -> Any:
    """Return a copy of what a head returned, on the CPU, as memory of the device is short; None if it is not of tensors."""
    try:
        return _rebuilt([output], lambda xs: xs[0].detach().to("cpu", copy=True))
    except (TypeError, AttributeError):
        return None


def _rebuilt(values: Sequence[Any], function: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Apply a function to the tensors in one place of several tensors, tuples or mappings; return one of the same type."""
    kind = type(values[0])
    if isinstance(values[0], Tensor):
        return function(values)
    if isinstance(values[0], Mapping):
        return kind(**{name: function([value[name] for value in values]) for name in values[0]})
    return getattr(kind, "_make", kind)([function(xs) for xs in zip(*values, strict=True)])
