"""Batch normalisation with running statistics of the whole mini-batch.

With M micro-batches a batch norm normalises by each micro-batch's statistics, as in GPipe: a different function, which only
waiting for the whole mini-batch could avoid. It also moves its running statistics M times, each time by the statistics of a
part. `defer_batchnorm` repairs the latter: the running statistics move once per mini-batch, by the mean and variance of all of
it (GPipe, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from nwise._torch import BatchNorm, share_hooks
from nwise.checks import warn

__all__ = ["defer_batchnorm"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class DeferredBatchNorm(BatchNorm):
    """A batch norm that collects statistics from `begin` to `commit`; outside, it moves them as torch's does.

    It shares the parameters and statistics of the batch norm that it replaces, and has the same names in the state dict.
    """

    _sums: Tensor  # for each channel the number of values, their sum, and the sum of their squares

    def __init__(self, original: BatchNorm) -> None:
        super().__init__(
            original.num_features, original.eps, original.momentum, original.affine, original.track_running_stats
        )
        self.weight = original.weight
        self.bias = original.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(self, name, getattr(original, name))
        assert self.running_mean is not None
        zeros = self.running_mean.new_zeros(3, original.num_features, dtype=torch.float64)
        self.register_buffer("_sums", zeros, persistent=False)
        self.train(original.training)
        self._collects = False

    def forward(self, input: Tensor) -> Tensor:
        if not self._collects:
            return super().forward(input)
        mean, variance = (None, None) if self.training else (self.running_mean, self.running_var)
        if self.training:
            # Sums in float64: the variance is a difference of two large numbers. Channels first, and all others in a row:
            #
            #     [B, C, H, W] -> [C, B * H * W] -> count, sum, sum of squares, [3, C]
            values = input.detach().double().transpose(0, 1).flatten(1)
            total = values.sum(1)
            squares = values.square().sum(1)
            self._sums += torch.stack([torch.full_like(total, values.shape[1]), total, squares])
        return functional.batch_norm(input, mean, variance, self.weight, self.bias, self.training, 0.0, self.eps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DeferredBatchNorm:
        """Move the sums with the module, but keep them in float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._sums = self._sums.double()
        return self

    def _check_input_dim(self, input: Tensor) -> None:
        """Take inputs of any number of dimensions from 2 on."""
        if input.ndim < 2:
            raise ValueError(f"The input of a batch norm should have at least 2 dimensions. Found {input.ndim}.")

    def begin(self) -> None:
        """Collect statistics from here on."""
        self.discard()
        self._collects = True

    def discard(self) -> None:
        """Drop what has been collected, for example after an error."""
        self._sums.zero_()
        self._collects = False

    def sum_over(self, replicas: ProcessGroup) -> None:
        """Add what the module's replicas have collected from their parts of the mini-batch; all of them call it."""
        dist.all_reduce(self._sums, group=replicas)

    @torch.no_grad()
    def commit(self) -> None:
        """Move the running statistics by what has been collected."""
        # Without a look at the values: a look waits for the device, and cannot be captured.
        count = self._sums[0, 0]
        total = self._sums[1]
        squares = self._sums[2]
        moves = count > 0
        count = count.clamp(min=1)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += moves
        now = 1 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
        momentum = (moves * now).to(self.running_mean.dtype)
        # Those of torch after one whole mini-batch: r += momentum * (statistic - r), with the variance over count - 1.
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0) * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        self.discard()


def defer_batchnorm(module: ModuleT) -> ModuleT:
    """Make every batch norm that tracks statistics move them once per mini-batch.

    Args:
        module: a stage, a head or a whole `Pipeline`; changed in place. Parameters, buffers and
            their names stay the same.

    Returns:
        The module (a converted copy if it is itself a batch norm).

    Raises:
        ValueError: a batch norm has a forward of its own, or is compiled by TorchScript, which keeps its own code.

    >>> type(defer_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))[0]).__name__
    'DeferredBatchNorm'
    """
    replacements: dict[nn.Module, nn.Module] = {}

    def replacement(child: nn.Module) -> nn.Module:
        if child not in replacements:  # a module used in several places stays shared
            replacements[child] = _deferred(child) if _moves(child) else child
        return replacements[child]

    if scripted := [name for name, child in module.named_modules() if _is_scripted(child)]:
        raise ValueError(
            f"Batch norms should be deferred before they are scripted. Found {scripted[0]!r} in TorchScript; call "
            "`defer_batchnorm` first, or script the network without it."
        )
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and _moves(child):
                setattr(parent, name, replacement(child))
    return replacement(module)  # type: ignore[return-value]


def _deferred(norm: nn.Module) -> DeferredBatchNorm:
    if isinstance(norm, nn.SyncBatchNorm) or not norm.forward.__module__.startswith("torch.nn.modules."):
        raise ValueError(
            f"Batch norms to defer should use the forward of torch's batch norm. Found {type(norm).__name__}, which has its own; "
            "split it into a batch norm and the rest, or train without `defer_batchnorm`."
        )
    deferred = DeferredBatchNorm(norm)  # type: ignore[arg-type]
    share_hooks(norm, deferred)
    return deferred


def _moves(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and not isinstance(module, DeferredBatchNorm) and module.track_running_stats


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in str(module.original_name)


def warn_of_microbatches(module: nn.Module, num_microbatches: int) -> None:
    """Warn that batch norms with several micro-batches compute a different function than with the whole batch.

    One in evaluation mode inside a stage in training mode is frozen.
    """
    stages = [stage for part in module.children() for stage in part.children() if stage.training]
    frozen = {inner for stage in stages for inner in stage.modules() if not inner.training}
    plain = [
        name
        for name, child in module.named_modules()
        if child not in frozen
        and ((isinstance(child, BatchNorm) and not isinstance(child, DeferredBatchNorm)) or _is_scripted(child))
    ]
    if plain and num_microbatches > 1:
        warn(
            f"With {num_microbatches} micro-batches, batch norm normalises by each micro-batch's own statistics, "
            "a different function than with the whole batch, and moves any running statistics with every micro-batch "
            f"({', '.join(plain[:3])}{', ...' if len(plain) > 3 else ''}). `nwise.defer_batchnorm(pipe)`, in a recipe "
            "`defer_batchnorm`, moves the running statistics once per mini-batch."
        )
