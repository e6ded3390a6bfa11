"""Cut a mini-batch into micro-batches (GPipe), weighted so the gradients do not change.

A loss is the mean over the whole mini-batch. Micro-batch ``m`` with ``c_m`` of the ``c`` counted terms therefore has
weight ``c_m / c``; uneven micro-batches are allowed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nwise.tensors import Tensors, as_argument, as_tuple, scatter


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch cut into micro-batches.

    Args:
        inputs: the model's input, per micro-batch.
        targets: the targets, per micro-batch; None without a target.
        weights: share of each micro-batch in each stage's loss, ``[M][A]``.
        seed: seed of the step, from which every action derives its own.
        first: index of the first micro-batch in the whole mini-batch; not 0 where a replica runs a later part of it.
        losses: the results, by (stage, micro-batch); filled by the heads.
        input_gradients: gradients to the inputs that ask for one, by micro-batch; filled by the first stage.
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Tensors | None]
    weights: Sequence[Sequence[float]]
    seed: int
    first: int = 0
    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    input_gradients: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)

    def hand_back(self) -> None:
        """Send the gradients to the inputs back into the graphs that the inputs came from."""
        pairs = [
            (x, gradient)
            for m, gradients in self.input_gradients.items()
            for x, gradient in zip(self.inputs[m], gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])

    def shares(self) -> dict[int, float]:
        """Return for every stage whose head ran the weight of its micro-batches, as a share of the mini-batch."""
        shares: dict[int, float] = {}
        for k, m in self.losses:
            shares[k] = shares.get(k, 0.0) + self.weights[m][k]
        return shares

    def mean_losses(self, num_stages: int) -> Tensor:
        """Return each stage's mean loss over the micro-batches in which its head ran, ``[A]``; nan where it did not run."""
        by_stage: dict[int, list[tuple[float, Tensor]]] = {}
        for (k, m), loss in self.losses.items():
            by_stage.setdefault(k, []).append((self.weights[m][k], loss))
        means = {k: _mean(losses) for k, losses in by_stage.items()}
        means = {k: loss if loss.is_floating_point() else loss.float() for k, loss in means.items()}
        absent = torch.full_like(next(iter(means.values()), torch.zeros(())), torch.nan)
        return torch.stack([means.get(k, absent) for k in range(num_stages)])


def _mean(losses: list[tuple[float, Tensor]]) -> Tensor:
    """Return the mean of losses with weights; nan if all weights are 0."""
    if len(losses) == 1 and losses[0][0]:
        return losses[0][1]
    return torch.stack([loss * weight for weight, loss in losses]).sum() / sum(weight for weight, _ in losses)


def cut(
    inputs: Tensors,
    target: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None,
    num_microbatches: int,
    terms: Sequence[Terms],
    *,
    seed: int,
    replica: int = 0,
    num_replicas: int = 1,
) -> Batch:
    """Cut a mini-batch into micro-batches and weight them.

    Args:
        inputs: inputs of the first stage, samples along dimension 0.
        target: the second argument of the losses, or None.
        num_microbatches: number of micro-batches of this replica, M.
        terms: counter of each stage's loss.
        seed: seed of the step.
        replica, num_replicas: index of this process's replica, and how many share the mini-batch.

    Raises:
        ValueError: there are too few samples, the target has another number of them, or none of them counts.
    """
    targets = None if target is None else as_tuple(target, "`target`")
    size = batch_size(inputs, "The input of `step`")
    if targets is not None and batch_size(targets, "`target`") != size:
        raise ValueError(f"`target` should have the input's {size} samples. Found {len(targets[0])}.")
    if not size:
        raise ValueError("The mini-batch should have at least one sample. Found none.")
    check_parts(size, num_microbatches, num_replicas)
    num_parts = num_microbatches * num_replicas
    parts = scatter(inputs, num_parts)
    target_parts = [None] * num_parts if targets is None else scatter(targets, num_parts)
    weights = [[1.0] * len(terms)] if num_parts == 1 else _weights(parts, target_parts, terms)
    first = replica * num_microbatches
    mine = slice(first, first + num_microbatches)
    return Batch(parts[mine], target_parts[mine], weights[mine], seed, first=first)


def _weights(parts: Sequence[Tensors], targets: Sequence[Tensors | None], terms: Sequence[Terms]) -> list[list[float]]:
    """Return the share of each micro-batch in each stage's loss, ``[M][A]``."""
    counts = []
    for x, y in zip(parts, targets, strict=True):
        by_loss = {count: float(len(x[0])) if y is None else count(y) for count in dict.fromkeys(terms)}
        counts.append([by_loss[count] for count in terms])
    totals = [sum(column) for column in zip(*counts, strict=True)]
    if not all(totals):
        raise ValueError("`target` should have at least one term that counts. Found only ignored ones.")
    return [[count / total for count, total in zip(row, totals, strict=True)] for row in counts]


def check_parts(size: int, num_microbatches: int, num_replicas: int) -> None:
    """Raise ValueError if a mini-batch of so many samples has too few for every micro-batch of every replica."""
    if num_microbatches * num_replicas > size:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise ValueError(
            f"`num_microbatches` should be at most the {size} samples of the mini-batch, over all replicas. Found "
            f"{num_microbatches}{replicas}; use fewer, or a larger batch, for example without a small last one (`drop_last`)."
        )


def batch_size(tensors: Tensors, what: str) -> int:
    """Return the common length of dimension 0."""
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ValueError(f"{what} should have samples along dimension 0. Found a tensor without dimensions.")
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1:
        raise ValueError(f"{what} should have the same number of samples in every tensor. Found {sorted(sizes)}.")
    return sizes.pop()


class Terms:
    """Counts the terms of a micro-batch's target that a loss averages over.

    By default these are the samples. Cross-entropy and ``nll_loss`` average over the targets that are not ``ignore_index``,
    each with the ``weight`` of its class, and a custom loss may have a method ``count(target)``. Partial, compiled and
    wrapped losses, and bound methods of a loss, count like the loss inside.

    Args:
        loss_fn: the loss function.

    Raises:
        ValueError: the loss has a reduction other than the mean.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        inner, self._options = unwrapped(loss_fn)
        self._count = getattr(inner, "count", None)
        if not callable(self._count):
            self._count = None
            self._options = {**_defaults(inner), **self._options}
        self._unknown = self._count is None and not (
            "ignore_index" in self._options or type(inner).__module__ == nn.modules.loss.__name__
        )
        reduction = self._options.get("reduction", "mean")
        if reduction not in ("mean", "batchmean"):
            raise ValueError(
                f"`loss_fn` should be the mean over a micro-batch. Found reduction = {reduction!r}; use reduction='mean'."
            )

    def __call__(self, target: Tensors) -> float:
        """Count the terms of a micro-batch's target."""
        if self._count is not None:
            count = float(self._count(as_argument(target)))
            if not 0 <= count < math.inf:
                raise ValueError(f"`count` of the loss should be a number of terms, 0 or more. Found {count}.")
            return count
        labels = target[0]
        for tensor in target if self._unknown else ():
            self._warn_of_ignored(tensor)
        if "ignore_index" not in self._options:
            return float(len(labels))
        if labels.is_floating_point():  # class probabilities: every sample counts
            return float(labels.numel() // labels.shape[1])
        kept = labels[labels != self._options["ignore_index"]]
        weight = self._options.get("weight")
        return float(kept.numel() if weight is None else weight[kept].sum())

    def _warn_of_ignored(self, labels: Tensor) -> None:
        """Warn once that an unknown loss may ignore some targets."""
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or not labels.numel():
            return
        least = int(labels.min())
        if least < 0:
            self._unknown = False
            warnings.warn(
                f"The target has negative labels ({least}), which losses usually ignore. nwise cannot tell whether this one "
                "does, and weights its micro-batches by samples. If it does, use `functools.partial(cross_entropy, "
                "ignore_index=...)`, `nwise.losses.TokenCrossEntropy`, or an object with a method `count(target)` that returns "
                "how many terms the loss averages over.",
                stacklevel=6,  # from here through `_weights`, `cut` and `step` to the training loop
            )


def make_terms(losses: Sequence[Callable[..., Tensor]]) -> list[Terms]:
    """Return the terms of every loss; equal losses share theirs, so one that cannot be counted warns once."""
    try:
        terms = {loss: Terms(loss) for loss in dict.fromkeys(losses)}
        return [terms[loss] for loss in losses]
    except TypeError:  # a loss that has no hash
        return [Terms(loss) for loss in losses]


def unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss inside partial functions, compiled ones, decorators and bound methods, and the options of partials."""
    options: dict[str, Any] = {}
    while True:
        if isinstance(loss_fn, partial):
            loss_fn, options = loss_fn.func, {**loss_fn.keywords, **options}
        elif (inner := _inner(loss_fn)) is not None:
            loss_fn = inner
        else:
            return loss_fn, options


def _inner(loss_fn: Any) -> Any:
    """Return the loss inside a compiled or decorated loss or a bound method; None if there is no wrapper."""
    for name in ("_orig_mod", "_torchdynamo_orig_callable", "__wrapped__"):
        if (inner := getattr(loss_fn, name, None)) is not None:
            return inner
    owner = getattr(loss_fn, "__self__", None)
    calls = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
    return owner if owner is not None and getattr(loss_fn, "__name__", "") in calls else None


def _defaults(loss_fn: Any) -> dict[str, Any]:
    """Return the options of a known loss that affect the mean; empty for an unknown one."""
    if isinstance(loss_fn, nn.Module):
        names = ("reduction", "ignore_index", "weight")
        return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    return {"ignore_index": -100} if loss_fn in (functional.cross_entropy, functional.nll_loss) else {}
