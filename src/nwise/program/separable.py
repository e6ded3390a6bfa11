"""Whether a mini-batch can be computed in parts: every sample alone, and a loss as a mean over terms that can be counted.

The code of a module does not tell, but its values do::

    network    stage(whole mini-batch), at the samples of a micro-batch  =  stage(micro-batch)
    loss       loss(all outputs, all targets)                            =  sum over m of weight_m * loss(output_m, target_m)
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import BatchNorm, Norm, clear_forward_hooks, versions
from nwise.checks import warn
from nwise.held import held
from nwise.microbatch import Batch, Dim, Parts
from nwise.randomness import seeded
from nwise.stage.stage import Stage
from nwise.tensors import Tensors, as_argument, as_tuple, call, each, like

OTHERWISE = (
    "pass samples that belong together as micro-batches that are cut already (`step(microbatches=...)`), or set "
    "`num_microbatches=1`"
)


def check_network(
    stages: Sequence[Stage],
    heads: Collection[int],
    entering: Callable[[int], Sequence[Tensors] | None],
    sizes: Sequence[int],
    weights: Sequence[Sequence[Any]],
) -> Sequence[Stage]:
    """Check that stages and their heads compute every sample alone; return those that could not be checked.

    The whole mini-batch and every micro-batch run once through copies in evaluation mode, without gradients, and once more in
    training mode. What cannot be copied or fails is not checked.

    Args:
        stages: stages of this process.
        heads: indices of the stages whose losses are computed.
        entering: function that returns the inputs of a stage, of the mini-batch and of every micro-batch, or None if they are
            unknown; not asked behind a stage that was checked.
        sizes: number of samples of every micro-batch.
        weights: their shares in each stage's loss.

    Raises:
        ValueError: a sample has other values in the mini-batch than in its micro-batch.
    """
    made: dict[int, Sequence[Tensors]] = {}  # what the stages checked hand on, by the next stage
    left = []
    for stage in stages:
        k = stage.index
        runs = made.pop(k, None) or entering(k)
        shares, is_last = [row[k] for row in weights], k == len(weights[0]) - 1
        leaving = None if runs is None else _alone(stage.module, f"Stage {k}", runs, sizes, shares if is_last else None)
        if leaving is None:
            left.append(stage)
            continue
        if stage.head is not None and k in heads:
            _alone(stage.head, f"The head of stage {k}", leaving, sizes, shares)
        made[k + 1] = leaving
    return left


def entered(batch: Batch, stage: int, sizes: Sequence[int], dims: Sequence[Dim]) -> Sequence[Tensors] | None:
    """Return the inputs that a stage had in a step, of the mini-batch and of every micro-batch; None if they are unknown."""
    runs = [batch.entering[k, m] for k, m in sorted(batch.entering) if k == stage]
    if not 1 < len(runs) == len(sizes):
        return None
    try:
        return [like(runs[0], [joined(xs, sizes, dims) for xs in zip(*runs, strict=True)]), *runs]
    except ValueError:  # they do not say which dimension has the samples
        return None


def _alone(
    module: nn.Module, name: str, runs: Sequence[Tensors], sizes: Sequence[int], shares: Sequence[float] | None
) -> Sequence[Tensors] | None:
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
    try:
        made, apart = _outputs(module, runs, sizes, shares, training=False)
    except Exception:  # the step itself will tell
        return None
    if apart:
        hint = ""
        if any(getattr(inner, "batch_first", True) is False for inner in module.modules()):
            hint = "layers with `batch_first=False` have the samples in dimension 1; "
        raise ValueError(
            f"{name} should compute every sample alone, because the {len(sizes)} micro-batches are computed one by one. Found "
            f"other values for the whole mini-batch than for its micro-batches; {hint}say in which dimension every input has its "
            f"samples by `Pipeline(..., batch_dim=)`, {OTHERWISE}."
        )
    # Torch's own modules mix no samples while they train, but for batch norms, of which nwise warns.
    if any(inner.training and not _is_torchs(inner) for inner in module.modules()):
        try:
            _, apart = _outputs(module, runs, sizes, shares, training=True)
        except Exception:
            apart = False
        if apart:  # this warning appears once
            warn(
                f"{name} should compute every sample alone in training mode, too. Found other values for the whole mini-batch "
                f"than for its {len(sizes)} micro-batches, as of a batch normalisation that is written by hand, so the gradients "
                f"are those of other statistics; use `torch.nn.BatchNorm1d` and its like, {OTHERWISE}."
            )
    return made


def _outputs(
    module: nn.Module, runs: Sequence[Tensors], sizes: Sequence[int], shares: Sequence[float] | None, *, training: bool
) -> tuple[list[Tensors], bool]:
    """Return what a module makes of the whole and of every part, and whether the parts differ from the whole."""
    fresh, noise = _double(module, training=training), max(map(_eps, module.parameters()), default=0.0)
    used = fresh()
    whole, again = (_run(used, runs[0], seed=seed) for seed in (0, 1))  # a generator that it holds moves on
    parts = [_run(fresh(), inputs, seed=0) for inputs in runs[1:]]
    columns = list(zip(*parts, strict=True))
    if any(_differ(x, y, noise) for x, y in zip(whole, again, strict=True)):
        # It draws random numbers. The next modules are checked with those of the parts.
        return [like(parts[0], [joined(xs, sizes, ()) for xs in columns]), *parts], False
    return [whole, *parts], not all(_agree(y, xs, sizes, shares, noise) for y, xs in zip(whole, columns, strict=True))


def joined(xs: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[Dim]) -> Tensor:
    """Return the micro-batches' tensors as one of the mini-batch.

    Args:
        xs: a tensor for every micro-batch.
        sizes: number of samples of every micro-batch.
        dims: the likeliest dimensions of the samples.

    Raises:
        ValueError: they have no dimension of samples, and differ.

    >>> joined([torch.zeros(3, 2), torch.zeros(2, 2)], [3, 2], ()).shape
    torch.Size([5, 2])
    """
    for dim in (*(dim for dim in dims if dim is not None), *range(8)):
        if all(-x.dim() <= dim < x.dim() and x.size(dim) == n for x, n in zip(xs, sizes, strict=True)):
            return torch.cat(list(xs), dim)
    if all(x.equal(xs[0]) for x in xs):  # each has it whole
        return xs[0]
    raise ValueError(f"Tensors should have {list(sizes)} samples. Found shapes {[list(x.shape) for x in xs]}.")


def _agree(
    whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int], shares: Sequence[float] | None, noise: float
) -> bool:
    """Tell whether an output for the whole mini-batch is made of those for its parts, or whether that cannot be told."""
    if any(part.dim() != whole.dim() for part in parts):
        return True
    dims = [d for d in range(whole.dim()) if any(part.size(d) != whole.size(d) for part in parts)]
    if not dims:  # a tensor that every micro-batch has whole, or a mean over samples
        if shares is None or not any(_differ(whole, part, noise) for part in parts):
            return True
        mean = torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)
        return not _differ(whole, mean, noise)
    follows = all((whole.size(d), *(x.size(d) for x in parts)) == (sum(sizes), *sizes) for d in dims)
    if len(dims) > 1:
        return not follows  # values for pairs of samples
    joined = torch.cat(list(parts), dims[0])
    return joined.shape != whole.shape or not _differ(whole, joined, noise) or not follows


def _double(module: nn.Module, *, training: bool) -> Callable[[], nn.Module]:
    """Return a function that makes copies of a module, in evaluation mode or as it is; their runs leave it as it is."""
    # Parameters are copied too, once, as a forward may change them. Neither gradients nor an optimizer need memory yet.
    double = copy.deepcopy(module)
    outside = set(held(module).modules)  # what says that it cannot be copied stays as it is
    unregistered = [inner for inner in held(double).modules if inner not in outside]
    everything = (*double.modules(), *unregistered)
    for inner in everything:
        inner.training = inner.training and training and not isinstance(inner, Norm)  # nwise warns of torch's own
        if isinstance(vars(inner).get("forward"), FunctionType):
            raise TypeError("A function in place of `forward` still calls the original module.")
        clear_forward_hooks(inner)  # they may keep what they see
        if isinstance(inner, BatchNorm) and inner.running_mean is None:
            inner.forward = nn.Identity().forward  # type: ignore[method-assign] # it mixes samples, as all do in training
    if not training and all(map(_is_torchs, everything)):
        return lambda: double  # in evaluation mode torch's own modules keep nothing of a run
    # No run changes the dictionaries of hooks, whose copies would take most of the time.
    hooks = [value for inner in double.modules() for key, value in vars(inner).items() if "_hooks" in key]
    kept = {id(x): x for x in (*double.parameters(), *hooks)}
    return lambda: copy.deepcopy(double, dict(kept))


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _run(double: nn.Module, inputs: Tensors, seed: int) -> Tensors:
    """Run the copy of a module, without gradients."""
    # A compiled module would be compiled for shapes that do not come again.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.no_grad(), eager, warnings.catch_warnings(), seeded(seed, inputs[0].device):
        warnings.simplefilter("ignore")  # the step itself will warn
        return as_tuple(call(double, each(inputs, torch.clone)), "")


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _differ(a: Tensor, b: Tensor, noise: float = 0.0) -> bool:
    """Return whether two tensors differ by more than rounding.

    Args:
        a, b: the tensors; those without gradients are not compared.
        noise: the relative rounding error of what they were computed from, if it is larger than their own.
    """
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point() or not a.numel():
        return False
    bound = max(noise, _eps(a), _eps_of_autocast(a.device)) ** 0.5
    # GPUs choose another algorithm for another size.
    return _difference(a, b) > max(bound, 0.01 if a.device.type == "cuda" else 0.0)


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference between two tensors, relative to their largest value."""
    a, b = a.detach().double(), b.detach().double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max()
    return float(gap / torch.stack([a.abs().max(), b.abs().max()]).max())


def _eps_of_autocast(device: torch.device) -> float:
    on = torch.is_autocast_enabled(device.type)
    return torch.finfo(torch.get_autocast_dtype(device.type)).eps if on else 0.0


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

    def warns(self, batch: Batch) -> bool:
        """Warn if the micro-batches' losses do not make the loss of all of them, and return whether.

        A loss that raises or draws is not compared.
        """
        k = self.stage.index
        called = [m for j, m in batch.losses if j == k]
        order = sorted(called)
        if self._before is None or len(order) < 2 or len(order) != len(self._outputs):
            return False
        losses = torch.stack([batch.losses[k, m].double() for m in order])
        weights = losses.new_tensor([batch.weights[m][k] for m in order])
        apart, size = (losses * weights).sum() / weights.sum(), losses.abs().mean()
        # Both are of the same outputs, so only the loss itself rounds.
        own = batch.losses[k, order[0]]
        bound = max(_eps(own) ** 0.5, _eps_of_autocast(own.device))

        def differs(a: Tensor, b: Tensor) -> bool:
            return _difference(torch.stack([a, size]), torch.stack([b, size])) > bound

        outputs = [self._outputs[called.index(m)] for m in order]
        try:
            whole = self._of_all(outputs, batch, order, seed=0)
            if not whole.isfinite() or not differs(whole, apart):
                return False
            if differs(whole, self._of_all(outputs, batch, order, seed=1)):
                return False  # it draws random numbers
        except Exception:  # a loss may not take another size
            return False
        warn(
            f"The loss of stage {k} should be a mean over the samples, or over terms that its method `count(target)` counts. "
            f"Found {float(whole):.6g} for the whole mini-batch and {float(apart):.6g} from {len(order)} micro-batches, so the "
            f"gradients are those of another loss; give it such a method, {OTHERWISE}. This warning appears once."
        )
        return True

    def _of_all(self, outputs: Sequence[Any], batch: Batch, order: Sequence[int], seed: int) -> Tensor:
        """Return the loss of all micro-batches as one."""
        parts, device = self._parts, next(iter(batch.losses.values())).device
        sizes = [parts.sizes[batch.draws.first + m] for m in order]
        dims = (*parts.target_dims, *parts.dims)

        def together(xs: Sequence[Tensor]) -> Tensor:
            return joined(xs, sizes, dims).to(device).requires_grad_(xs[0].is_floating_point())

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
            return copy.deepcopy(self._before)(_rebuilt(outputs, together), target).detach().double().reshape(())


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
