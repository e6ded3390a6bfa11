"""The terms that a loss averages over: counts of them weight uneven micro-batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nwise._torch import MODULE_CALLS, uncompiled, version
from nwise.tensors import Tensors, as_argument

# Losses of torch that average over the elements of their target, as functions and as modules.
_OVER_ELEMENTS = {
    functional.binary_cross_entropy, nn.BCELoss,
    functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss,
    functional.gaussian_nll_loss, nn.GaussianNLLLoss,
    functional.hinge_embedding_loss, nn.HingeEmbeddingLoss,
    functional.huber_loss, nn.HuberLoss,
    functional.kl_div, nn.KLDivLoss,
    functional.l1_loss, nn.L1Loss,
    functional.mse_loss, nn.MSELoss,
    functional.poisson_nll_loss, nn.PoissonNLLLoss,
    functional.smooth_l1_loss, nn.SmoothL1Loss,
    functional.soft_margin_loss, nn.SoftMarginLoss,
}  # fmt: skip
_KNOWN = {functional.__name__, nn.modules.loss.__name__, "nwise.losses"}  # modules whose losses count as they say


class Terms:
    """Counts the terms of a micro-batch's target that a loss averages over.

    By default these are the samples. Cross-entropy and ``nll_loss`` average over the targets that are not ``ignore_index``,
    each with the ``weight`` of its class; torch's losses of single elements, such as ``mse_loss``, average over these; and a
    custom loss may have a method ``count(target)``. Partial, compiled and wrapped losses, and bound methods of a loss, count like
    the loss inside.

    Args:
        loss_fn: the loss function.

    Attributes:
        known: whether the loss is one of torch or nwise, whose value follows from those of its micro-batches.

    Raises:
        ValueError: the loss has a reduction other than the mean.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self._loss_fn = loss_fn
        inner, _, decorated = unwrapped(loss_fn)
        count = getattr(inner, "count", None)
        self._count = count if callable(count) else None
        options = self._options()
        owner = inner if hasattr(inner, "__name__") else type(inner)
        self.known = (
            not decorated and options.get("reduction", "mean") == "mean" and getattr(owner, "__module__", "") in _KNOWN
        )
        self._over_elements = self.known and owner in _OVER_ELEMENTS
        # The weights of classes, their version, and whether all count: finding out waits for the device, so once for each value.
        self._weighted: tuple[object, int, bool] = None, 0, True
        # What a loss averages over decides how uneven micro-batches weigh:
        #
        #     a method `count`             what it returns
        #     `ignore_index`               targets that count, by the weights of their classes
        #     torch's, over elements       all elements of the target
        #     anything else                samples

    def _options(self) -> dict[str, Any]:
        """Return the present options of the loss, which may be set during training, such as the weights of classes."""
        inner, options, _ = unwrapped(self._loss_fn)
        if self._count is None:
            options = {**_defaults(inner), **options}
        reduction = options.get("reduction", "mean")
        if reduction not in ("mean", "batchmean"):
            raise ValueError(
                f"`loss_fn` should be the mean over a micro-batch. Found reduction = {reduction!r}; use reduction='mean'."
            )
        return options

    def counts(
        self, targets: Sequence[Tensors | None], samples: Sequence[int], *, on_device: bool = False
    ) -> list[float | Tensor]:
        """Count the terms of every micro-batch's target; without a target these are the samples.

        Args:
            targets: the target of every micro-batch, or None.
            samples: number of samples of every micro-batch.
            on_device: whether a number that depends on values stays on the device, if a loss of no terms is harmless.

        Raises:
            ValueError: the loss's own method returns no number of terms.
        """
        options = self._options()
        pairs = zip(targets, samples, strict=True)
        counts = [float(size) if y is None else self._terms(y, size, options) for y, size in pairs]
        if on_device:
            return counts
        counts = list(map(float, counts))
        for count in counts:
            if not 0 <= count < math.inf:
                raise ValueError(f"`count` of the loss should be a number of terms, 0 or more. Found {count}.")
        return counts

    def _terms(self, target: Tensors, samples: int, options: Mapping[str, Any]) -> float | Tensor:
        """Return the number of terms, as a tensor on the device if it depends on values and a loss of no terms is harmless."""
        if self._count is not None:
            count = self._count(as_argument(target))
            # A loss of the user's may be 0/0 for a micro-batch without terms, so its count has to be known before.
            return count.double() if isinstance(count, Tensor) and self.known else float(count)
        # Targets of 3 and 1 counted tokens: the whole mean is (3 a + 1 b) / 4, so they weigh 3/4 and 1/4, not halves.
        labels = target[0]
        if self._over_elements:
            return float(labels.numel())
        if "ignore_index" not in options:
            return float(samples)
        if labels.is_floating_point():  # class probabilities: every sample counts
            return float(labels.numel() // labels.shape[1]) if labels.dim() > 1 else float(samples)
        kept = labels != options["ignore_index"]
        weight = options.get("weight")
        if not isinstance(weight, Tensor):  # a custom loss may have something else of this name
            return kept.sum(dtype=torch.float64)
        count = torch.where(kept, weight[labels.where(kept, 0)], 0).sum(dtype=torch.float64)
        if self._all_count(weight):
            return count
        number = float(count)  # waits for the device
        if not number and options.get("label_smoothing") and bool(kept.any()):
            raise ValueError(
                "A micro-batch should have a target whose class has a weight above 0, because label smoothing adds to the loss "
                "of every target, and torch divides by the sum of the weights. Found a sum of 0; use fewer micro-batches, or a "
                "small weight instead of 0."
            )
        return number

    def _all_count(self, weight: Tensor) -> bool:
        """Return whether every class has a weight; one without may be alone in a micro-batch, whose loss is then 0/0."""
        known, number, every = self._weighted
        if weight is not known or version(weight) != number:
            every = bool((weight > 0).all())
            self._weighted = weight, version(weight), every
        return every


def make_terms(losses: Sequence[Callable[..., Tensor]]) -> list[Terms]:
    """Return the terms of every loss; equal losses share theirs."""
    try:
        terms = {loss: Terms(loss) for loss in dict.fromkeys(losses)}
        return [terms[loss] for loss in losses]
    except TypeError:  # a loss that has no hash
        return [Terms(loss) for loss in losses]


def unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any], bool]:
    """Return the loss inside partial functions, compiled ones, decorators and bound methods.

    With it come the options of partial functions, and whether there is a decorator, which may change the loss.
    """
    #     partial(cross_entropy, label_smoothing=0.1)    cross_entropy, {"label_smoothing": 0.1}, False
    #     torch.compile(loss), loss.forward              loss, {}, False
    #     @doubled def loss(...)                         loss, {}, True: its value may be another one
    options: dict[str, Any] = {}
    decorated = False
    while True:
        if isinstance(loss_fn, partial):
            loss_fn, options = loss_fn.func, {**loss_fn.keywords, **options}
        elif (inner := _inner(loss_fn)) is not None:
            decorated = decorated or getattr(loss_fn, "__wrapped__", None) is inner
            loss_fn = inner
        else:
            return loss_fn, options, decorated


def _inner(loss_fn: Any) -> Any:
    """Return the loss inside a compiled or decorated loss or a bound method; None if there is no wrapper."""
    if (inner := uncompiled(loss_fn)) is not loss_fn:
        return inner
    if (inner := getattr(loss_fn, "__wrapped__", None)) is not None:
        return inner
    owner = getattr(loss_fn, "__self__", None)
    return owner if owner is not None and getattr(loss_fn, "__name__", "") in MODULE_CALLS else None


def _defaults(loss_fn: Any) -> dict[str, Any]:
    """Return the options of a known loss that affect the mean; empty for an unknown one."""
    if isinstance(loss_fn, nn.Module):
        names = ("reduction", "ignore_index", "weight", "label_smoothing")
        return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    return {"ignore_index": -100} if loss_fn in (functional.cross_entropy, functional.nll_loss) else {}


def modules_of(loss: Any) -> dict[str, nn.Module]:
    """Return the modules whose buffers a loss may change, by the beginning of their names."""
    #     nn.Module, partial(module), module.method    {"": module}
    #     a function that reads `ema` from outside     {"ema.": ema}
    #     an object with an attribute `ema`            {"ema.": ema}
    while not isinstance(loss, nn.Module):
        inner = getattr(loss, "func", getattr(loss, "__wrapped__", getattr(loss, "__self__", None)))
        if inner is None or isinstance(inner, ModuleType):  # of a built-in function
            break
        loss = inner
    if isinstance(loss, nn.Module):
        return {"": loss}
    try:
        used = inspect.getclosurevars(loss)
        known: dict[str, Any] = {**used.globals, **used.nonlocals}
    except (TypeError, ValueError):  # no function of Python, or one without its values yet
        known = getattr(loss, "__dict__", {})
    return {f"{name}.": module for name, module in sorted(known.items()) if isinstance(module, nn.Module)}
