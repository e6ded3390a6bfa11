"""Cut a mini-batch into micro-batches (GPipe), weighted so the gradients do not change.

A loss is the mean over the whole mini-batch. Micro-batch ``m`` with ``c_m`` of the ``c`` counted terms therefore has
weight ``c_m / c``; uneven micro-batches are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwise.randomness import StepSeeds
from nwise.tensors import Tensors, as_tuple, names, scatter
from nwise.terms import Terms

__all__ = ["Batch", "check_parts"]

Weight = float | Tensor  # share of a micro-batch in a loss; a tensor of one number if it is known on the device alone

_REMEDY = "; cut the mini-batch yourself, by `step(microbatches=...)`"


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
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Tensors | None]
    weights: Sequence[Sequence[Weight]]
    draws: StepSeeds = field(default_factory=StepSeeds)
    samples: Sequence[float] = (1.0,)
    losses: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def results(self, num_stages: int) -> Results:
        """Return what the step has computed beside gradients."""
        losses: dict[int, list[Tensor]] = {}
        weights: dict[int, list[Weight]] = {}
        for (k, m), loss in self.losses.items():
            losses.setdefault(k, []).append(loss)
            weights.setdefault(k, []).append(self.weights[m][k])
        shares: dict[int, Weight] = {k: sum(of[1:], of[0]) for k, of in weights.items()}
        means: dict[int, Tensor] = {}
        for k, of in losses.items():
            mean = _mean(of, weights[k], shares[k])
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


def full_like(tensor: Tensor, weight: Weight) -> Tensor:
    """Return a tensor of the shape and dtype of another, filled with a weight."""
    return weight.to(tensor).expand_as(tensor) if isinstance(weight, Tensor) else torch.full_like(tensor, weight)


def _mean(losses: Sequence[Tensor], weights: Sequence[Weight], total: Weight) -> Tensor:
    """Return the mean of losses with weights of this total; nan if all weights are 0."""
    loss = losses[0]
    weight = weights[0]
    if len(losses) == 1 and not isinstance(weight, Tensor) and weight:
        return loss
    # The weights are all tensors, or all numbers.
    filled: Callable[..., Tensor] = full_like if isinstance(total, Tensor) else torch.full_like
    weighted = [*map(torch.mul, losses, map(filled, losses, weights))]
    return torch.stack(weighted).sum() / filled(loss, total)


@dataclass(frozen=True, slots=True)
class Parts:
    """The micro-batches of all replicas.

    Args:
        inputs: the model's input, per micro-batch.
        targets: the targets, per micro-batch; None without a target.
        sizes: number of samples, per micro-batch.
        whole: whether nwise has cut them out of a mini-batch; False if they were given.
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Tensors | None]
    sizes: Sequence[int]
    whole: bool

    def batch(
        self, terms: Sequence[Terms], num_microbatches: int, draws: StepSeeds, *, on_device: bool = False
    ) -> Batch:
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
            if not isinstance(total, Tensor) and not total:
                raise ValueError("`target` should have at least one term that counts. Found only ignored ones.")
            if isinstance(total, Tensor):  # without terms the weights are 0, and the loss is nan
                total = total.clamp(min=1e-300)
            shares[of] = [count / total for count in counts]
        return list(map(list, zip(*map(shares.__getitem__, terms), strict=True)))


def cut(inputs: Tensors, target: Any, num_microbatches: int, num_replicas: int) -> Parts:
    """Cut a mini-batch into micro-batches along dimension 0; one alone may have any shapes.

    Args:
        inputs: inputs of the first stage.
        target: the second argument of the losses: a tensor, a sequence or mapping of them, or None.
        num_microbatches: number of micro-batches of each replica, M.
        num_replicas: number of replicas that share the mini-batch.

    Raises:
        ValueError: there are too few samples, or a tensor has another number of them.
        TypeError: the target is something else.
    """
    targets = None if target is None else as_tuple(target, "`target`")
    if not any(map(Tensor.numel, inputs)):
        raise ValueError("The mini-batch should have at least one sample. Found none.")
    num_parts = num_microbatches * num_replicas
    if num_parts == 1:
        return Parts([inputs], [targets], [1], whole=True)
    size = batch_size(inputs, "The input of `step`", _REMEDY)
    found = size if targets is None else batch_size(targets, "`target`", _REMEDY)
    if found != size:
        raise ValueError(f"`target` should have the input's {size} samples. Found {found}{_REMEDY}.")
    check_parts(size, num_microbatches, num_replicas)
    target_parts = [None] * num_parts if targets is None else scatter(targets, num_parts)
    sizes = [size // num_parts + (m < size % num_parts) for m in range(num_parts)]
    return Parts(scatter(inputs, num_parts), target_parts, sizes, whole=True)


def given(microbatches: Any, targets: Any, num_parts: int) -> Parts:
    """Take micro-batches that the caller has cut; each counts by the samples along dimension 0 of its target, or of its input.

    Args:
        microbatches: the model's input for each of them, a list of tensors, sequences or mappings of them.
        targets: the target for each of them, likewise, or None; None: no targets.
        num_parts: number of micro-batches of all replicas.

    Raises:
        ValueError: their number is wrong, or they differ in the number or names of their inputs.
        TypeError: one is something else.
    """
    listed = _listed(microbatches, "microbatches", num_parts)
    inputs = [as_tuple(x, f"`microbatches[{m}]`") for m, x in enumerate(listed)]
    for m, x in enumerate(inputs):
        if (len(x), names(x)) != (len(inputs[0]), names(inputs[0])):
            found = [", ".join(names(one)) or len(one) for one in (inputs[0], x)]
            raise ValueError(
                f"All `microbatches` should have the same inputs. Found {found[0]} in 0 and {found[1]} in {m}."
            )
    answers = [None] * num_parts if targets is None else _listed(targets, "targets", num_parts)
    parts = [None if y is None else as_tuple(y, f"`targets[{m}]`") for m, y in enumerate(answers)]
    pairs = zip(inputs, parts, strict=True)
    sizes = [next((one.size(0) for one in (*(y or ()), *x) if one.dim()), 1) for x, y in pairs]
    if not sum(sizes):
        raise ValueError("`microbatches` should have at least one sample in all. Found none.")
    return Parts(inputs, parts, sizes, whole=False)


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


def check_parts(size: int, num_microbatches: int, num_replicas: int) -> None:
    """Raise ValueError if a mini-batch of so many samples has too few for every micro-batch of every replica."""
    if num_microbatches * num_replicas > size:
        replicas = f" in each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise ValueError(
            f"`num_microbatches` should be at most the {size} samples of the mini-batch, over all replicas. Found "
            f"{num_microbatches}{replicas}; use fewer, or a larger batch, for example without a small last one (`drop_last`)."
        )


def batch_size(tensors: Tensors, what: str, remedy: str = "") -> int:
    """Return the common number of samples along dimension 0; raise ValueError if the tensors differ in it, or lack it.

    Args:
        tensors: the tensors.
        what: what they are, for the message.
        remedy: end of the message; default: none.
    """
    for x in tensors:
        if not x.dim():
            raise ValueError(
                f"{what} should have samples along dimension 0. Found a tensor without dimensions{remedy}."
            )
        if x.is_nested or x.layout is not torch.strided:
            kind = "a nested one" if x.is_nested else f"one of layout {x.layout}"
            raise ValueError(f"{what} should be dense tensors, which can be cut. Found {kind}{remedy}.")
    sizes = sorted({x.size(0) for x in tensors})
    if len(sizes) != 1:
        raise ValueError(f"{what} should have the same number of samples in every tensor. Found {sizes}{remedy}.")
    return sizes[0]
