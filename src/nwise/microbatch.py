"""Cut a mini-batch into micro-batches (GPipe), weighted so the gradients do not change.

A loss is the mean over the whole mini-batch. Micro-batch ``m`` with ``c_m`` of the ``c`` counted terms therefore has
weight ``c_m / c``; uneven micro-batches are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwise.randomness import Draws
from nwise.tensors import Tensors, as_tuple, asks, names, scatter
from nwise.terms import Terms

__all__ = ["Batch", "check_parts"]

Weight = float | Tensor  # share of a micro-batch in a loss; a tensor of one number if it is known on the device alone

Dim = int | None  # dimension of the samples; None for a tensor that is the same for all micro-batches
# One dimension for everything, one for each input and perhaps the target, or dimensions by name.
BatchDim = int | Sequence[Any] | Mapping[str, Any]
_REMEDY = (
    "; say in which dimension every tensor has its samples by `Pipeline(..., batch_dim=)`, or cut the mini-batch yourself by "
    "`step(microbatches=...)`"
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch cut into micro-batches.

    Args:
        inputs: the model's input, per micro-batch.
        targets: the targets, per micro-batch; None without a target.
        weights: share of each micro-batch in each stage's loss, ``[M][A]``.
        draws: what seeds the random numbers; default: with seed 0.
        samples: share of each micro-batch in the samples, by which auxiliary losses count; default: all.
        losses: the results, by (stage, micro-batch); filled by the heads.
        input_gradients: gradients to the inputs that ask for one, by micro-batch; filled by the first stage.
        looked: the stages and heads that have looked in this mini-batch for gradients that their graphs add.
        watched: stages whose inputs are to be noted. Default: none.
        entering: these inputs, by (stage, micro-batch).
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Tensors | None]
    weights: Sequence[Sequence[Weight]]
    draws: Draws = field(default_factory=Draws)
    samples: Sequence[float] = (1.0,)
    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    input_gradients: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    looked: set[str] = field(default_factory=set)
    watched: set[int] = field(default_factory=set)
    entering: dict[tuple[int, int], Tensors] = field(default_factory=dict)

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

    def results(self, num_stages: int) -> Results:
        """Return what the step has computed beside gradients."""
        by_stage: dict[int, list[tuple[Weight, Tensor]]] = {}
        shares: dict[int, Weight] = {}
        for (k, m), loss in self.losses.items():
            weight = self.weights[m][k]
            by_stage.setdefault(k, []).append((weight, loss))
            shares[k] = shares[k] + weight if k in shares else weight
        means: dict[int, Tensor] = {}
        for k, losses in by_stage.items():
            mean = _mean(losses, shares[k])
            means[k] = mean if mean.is_floating_point() else mean.float()
        absent = torch.full_like(next(iter(means.values())), torch.nan) if means else torch.tensor(torch.nan)
        return Results(torch.stack([means.get(k, absent) for k in range(num_stages)]), self.losses, shares)


class Results(NamedTuple):
    """What a step has computed beside gradients.

    Args:
        means: mean loss of each stage, ``[A]``; nan where no head ran.
        losses: losses by (stage, micro-batch).
        shares: weight of the micro-batches of every stage whose head ran, as a share of the mini-batch.
    """

    means: Tensor
    losses: Mapping[tuple[int, int], Tensor]
    shares: Mapping[int, Weight]

    @property
    def ran(self) -> set[int]:
        """Stages whose head ran on a micro-batch that counts."""
        return {k for k, share in self.shares.items() if may_count(share)}


def may_count(weight: Weight) -> bool:
    """Return whether a weight is not 0, or is known on the device alone."""
    return isinstance(weight, Tensor) or bool(weight)


def full_like(tensor: Tensor, weight: Weight) -> Tensor:
    """Return a tensor of the shape and dtype of another, filled with a weight."""
    return weight.to(tensor).expand_as(tensor) if isinstance(weight, Tensor) else torch.full_like(tensor, weight)


def _mean(losses: list[tuple[Weight, Tensor]], total: Weight) -> Tensor:
    """Return the mean of losses with weights of this total; nan if all weights are 0."""
    weight, loss = losses[0]
    if len(losses) == 1 and not isinstance(weight, Tensor) and weight:
        return loss
    weighted = [loss * full_like(loss, weight) for weight, loss in losses]
    return torch.stack(weighted).sum() / full_like(loss, total)


@dataclass(frozen=True, slots=True)
class Parts:
    """The micro-batches of all replicas.

    Args:
        inputs: the model's input, per micro-batch.
        targets: the targets, per micro-batch; None without a target.
        sizes: number of samples, per micro-batch.
        dims, target_dims: dimension of the samples in each input and in each tensor of a target.
        whole: the model's input before the cut; None if the micro-batches were given.
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Tensors | None]
    sizes: Sequence[int]
    dims: Sequence[Dim]
    target_dims: Sequence[Dim]
    whole: Tensors | None

    @property
    def ask_gradients(self) -> bool:
        """Whether an input requires a gradient."""
        return any(map(asks, chain.from_iterable(self.inputs)))

    def batch(self, terms: Sequence[Terms], num_microbatches: int, draws: Draws, *, on_device: bool = False) -> Batch:
        """Return the part of a replica, weighted.

        Args:
            terms: counter of each stage's loss.
            num_microbatches: number of micro-batches of the replica, M.
            draws: what seeds the random numbers of the replica.
            on_device: whether weights that depend on values stay on the device.

        Raises:
            ValueError: no term of the target counts.
        """
        one = [[1.0] * len(terms)]
        weights: Sequence[Sequence[Weight]] = one if len(self.inputs) == 1 else self.weights(terms, on_device=on_device)
        mine = slice(draws.first, draws.first + num_microbatches)
        total = sum(self.sizes)
        samples = [size / total for size in self.sizes[mine]]
        return Batch(self.inputs[mine], self.targets[mine], weights[mine], draws, samples)

    def weights(self, terms: Sequence[Terms], *, on_device: bool = False) -> list[list[Any]]:
        """Return the share of each micro-batch in each stage's loss, ``[M][A]``."""
        shares: dict[Terms, list[Any]] = {}
        for of in dict.fromkeys(terms):  # equal losses share theirs
            counts = of.counts(self.targets, self.sizes, on_device=on_device)
            total: Any = sum(counts)
            if not may_count(total):
                raise ValueError("`target` should have at least one term that counts. Found only ignored ones.")
            if isinstance(total, Tensor):  # without terms the weights are 0, and the loss is nan
                total = total.clamp(min=1e-300)
            shares[of] = [count / total for count in counts]
        return list(map(list, zip(*map(shares.__getitem__, terms), strict=True)))


def cut(inputs: Tensors, target: Any, num_microbatches: int, num_replicas: int, batch_dim: BatchDim) -> Parts:
    """Cut a mini-batch into micro-batches; one alone may have any shapes.

    Args:
        inputs: inputs of the first stage.
        target: the second argument of the losses: a tensor, a sequence or mapping of them, or None.
        num_microbatches: number of micro-batches of each replica, M.
        num_replicas: number of replicas that share the mini-batch.
        batch_dim: dimension of the samples, as `Pipeline` takes it.

    Raises:
        ValueError: there are too few samples, or a tensor has another number of them.
        TypeError: the target is something else.
    """
    targets = None if target is None else as_tuple(target, "`target`")
    if not any(map(Tensor.numel, inputs)):
        raise ValueError("The mini-batch should have at least one sample. Found none.")
    num_parts = num_microbatches * num_replicas
    if num_parts == 1:
        return Parts([inputs], [targets], [1], (), (), inputs)
    dims, target_dims = _dims(inputs, targets or (), batch_dim)
    size = batch_size(inputs, "The input of `step`", dims)
    found = batch_size(targets, "`target`", target_dims) if targets and {*target_dims} != {None} else size
    if found != size:
        raise ValueError(f"`target` should have the input's {size} samples. Found {found}{_REMEDY}.")
    check_parts(size, num_microbatches, num_replicas)
    target_parts = [None] * num_parts if targets is None else scatter(targets, num_parts, target_dims)
    sizes = [size // num_parts + (m < size % num_parts) for m in range(num_parts)]
    return Parts(scatter(inputs, num_parts, dims), target_parts, sizes, dims, target_dims, inputs)


def given(microbatches: Any, targets: Any, num_parts: int, terms: Sequence[Terms], batch_dim: BatchDim) -> Parts:
    """Take micro-batches that the caller has cut.

    Args:
        microbatches: the model's input for each of them, a list of tensors, sequences or mappings of them.
        targets: the target for each of them, likewise, or None; None: no targets.
        num_parts: number of micro-batches of all replicas.
        terms: counter of each stage's loss; warns of a loss that may average over something other than samples.
        batch_dim: dimension of the samples, as `Pipeline` takes it.

    Raises:
        ValueError: their number is wrong, or they differ in the number or names of their inputs.
        TypeError: one is something else.
    """
    inputs = [
        as_tuple(x, f"`microbatches[{m}]`") for m, x in enumerate(_listed(microbatches, "microbatches", num_parts))
    ]
    for m, x in enumerate(inputs):
        if (len(x), names(x)) != (len(inputs[0]), names(inputs[0])):
            found = [", ".join(names(one)) or len(one) for one in (inputs[0], x)]
            raise ValueError(
                f"All `microbatches` should have the same inputs. Found {found[0]} in 0 and {found[1]} in {m}."
            )
    listed = [None] * num_parts if targets is None else _listed(targets, "targets", num_parts)
    parts = [None if y is None else as_tuple(y, f"`targets[{m}]`") for m, y in enumerate(listed)]
    firsts, sizes = [], []  # what a loss averages over: the target, or without one the input
    for x, y in zip(inputs, parts, strict=True):
        dims, target_dims = _dims(x, y or (), batch_dim)
        # The first tensor that is cut tells the number of samples: of the target, or else of the input.
        pairs = [*zip(y or (), target_dims, strict=True), *zip(x, dims, strict=True)]
        first, dim = next(((one, d) for one, d in pairs if d is not None and one.dim()), (x[0], None))
        firsts.append(first)
        sizes.append(1 if dim is None else first.size(dim))
    if len({first.numel() / size for first, size in zip(firsts, sizes, strict=True) if size}) > 1:
        for count in dict.fromkeys(terms):
            count.warn_of_lengths()
    return Parts(inputs, parts, sizes, (), (), None)


def _listed(values: Any, name: str, num_parts: int) -> Sequence[Any]:
    """Return values that should be a list with one entry for each micro-batch."""
    if not isinstance(values, tuple | list):
        raise TypeError(
            f"`{name}` should be a list with one entry for each micro-batch. Found {type(values).__name__}."
        )
    if len(values) != num_parts:
        raise ValueError(
            f"`{name}` should have {num_parts} entries, `num_microbatches` for each replica. Found {len(values)}; set "
            "`pipe.num_microbatches`, or cut the mini-batch into as many."
        )
    return values


def check_batch_dim(batch_dim: Any) -> None:
    """Raise TypeError unless this is a dimension, or a sequence or mapping of dimensions."""
    found = leaves(batch_dim)
    if batch_dim is None or any(not (d is None or (isinstance(d, int) and not isinstance(d, bool))) for d in found):
        raise TypeError(
            "`batch_dim` should be a dimension, or a list or dictionary of dimensions, with None for a tensor that is not cut. "
            f"Found {batch_dim!r}."
        )


def leaves(value: Any) -> list[Any]:
    """Return the dimensions in a `batch_dim`."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, tuple | list) else [value]


def _dims(inputs: Tensors, targets: Tensors, batch_dim: BatchDim) -> tuple[list[Dim], list[Dim]]:
    """Return the dimension of the samples in every input and in every tensor of the target."""
    own: Any = batch_dim
    target: Any = batch_dim
    if isinstance(batch_dim, Mapping):
        own = {name: dim for name, dim in batch_dim.items() if name != "target"}
        target = batch_dim.get("target", 0)
    elif not isinstance(batch_dim, int):
        longer = len(batch_dim) == len(inputs) + 1
        own, target = (batch_dim[:-1], batch_dim[-1]) if longer else (batch_dim, 0)
    return _dim_of_each(inputs, own, "input"), _dim_of_each(targets, target, "target")


def _dim_of_each(tensors: Tensors, dims: Any, what: str) -> list[Dim]:
    if isinstance(dims, Mapping) and not dims.keys() - set(names(tensors)):
        return [dims.get(name, 0) for name in names(tensors)] or [0] * len(tensors)
    if isinstance(dims, tuple | list) and len(dims) == len(tensors) and not names(tensors):
        return list(dims)
    if isinstance(dims, Mapping | tuple | list):
        known = ", ".join(names(tensors)) or f"{len(tensors)} by position"
        raise ValueError(
            f"`batch_dim` should fit the {what}, {known}. Found {dims!r}; give one dimension for all, a list with an entry for "
            "each, or, for inputs by name, a dictionary."
        )
    return [dims] * len(tensors)


def check_parts(size: int, num_microbatches: int, num_replicas: int) -> None:
    """Raise ValueError if a mini-batch of so many samples has too few for every micro-batch of every replica."""
    if num_microbatches * num_replicas > size:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise ValueError(
            f"`num_microbatches` should be at most the {size} samples of the mini-batch, over all replicas. Found "
            f"{num_microbatches}{replicas}; use fewer, or a larger batch, for example without a small last one (`drop_last`)."
        )


def batch_size(tensors: Tensors, what: str, dims: Sequence[Dim] | None = None) -> int:
    """Return the common number of samples.

    Args:
        tensors: the tensors.
        what: what they are, for the message.
        dims: dimension of the samples in each tensor, None for a tensor that is not cut; default: 0 for all.

    Raises:
        ValueError: the tensors differ in it, or lack the dimension.
    """
    remedy = "" if dims is None else _REMEDY
    sizes = set[int]()
    for x, dim in zip(tensors, dims or [0] * len(tensors), strict=True):
        if dim is None:
            continue
        if not -x.dim() <= dim < x.dim():
            found = f"a tensor of shape {list(x.shape)}" if x.dim() else "a tensor without dimensions"
            raise ValueError(f"{what} should have samples along dimension {dim}. Found {found}{remedy}.")
        if x.is_nested or x.layout is not torch.strided:
            kind = "a nested one" if x.is_nested else f"one of layout {x.layout}"
            raise ValueError(f"{what} should be dense tensors, which can be cut. Found {kind}{remedy}.")
        sizes.add(x.size(dim))
    if len(sizes) != 1:
        found = str(sorted(sizes)) if sizes else "no tensor to cut"
        raise ValueError(f"{what} should have the same number of samples in every tensor. Found {found}{remedy}.")
    return sizes.pop()
