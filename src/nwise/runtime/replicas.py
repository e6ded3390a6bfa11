"""Replicas: sum a stage's gradients over all its replicas (data parallel) while other gradients are still computed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nwise._dtensor import is_dtensor
from nwise.batchnorm import DeferredBatchNorm
from nwise.stage import Stage

BUCKET_BYTES = 2**22  # size of one sum: large enough to outweigh its latency, small enough to begin early


class Replicas:
    """Sums the gradients of this rank's stage and head over the replicas.

    Every replica has a part of the mini-batch and weights its losses by that part's share, so the sum over the replicas is the
    gradient of the whole mini-batch. Within the last pass that adds to a gradient, a layer's gradients are sent while the
    gradients of the layers before it are computed. The update waits for the sums.
    """

    def __init__(self, group: dist.ProcessGroup, stage: Stage) -> None:
        self._group, self._stage = group, stage
        self._before: list[tuple[Tensor, Tensor]] = []
        self._begun: list[tuple[list[Tensor], Tensor, Any]] = []
        # All replicas begin with the first one's values.
        first = dist.get_process_group_ranks(group)[0]
        for module in (stage.module, stage.head):
            for tensor in () if module is None else module.state_dict().values():
                dist.broadcast(_local(tensor.detach()), first, group=group)

    def start(self) -> None:
        """Put aside the gradients of earlier steps, which are already summed."""
        self._begun.clear()
        learns = self._stage.learns + self._stage.head_learns
        self._before = [(p, p.grad) for p in learns if p.grad is not None]
        for p, _ in self._before:
            p.grad = None

    @contextmanager
    def summing(self, *, head: bool) -> Iterator[None]:
        """Begin to sum gradients, bucket after bucket, during the last pass of the main part or of the head.

        All replicas begin the sums in the same order, even if one of them lacks some gradients.
        """
        # Autograd finishes the gradients of the last layer first, so the last parameters make the first bucket:
        #
        #     backward    layer 4   layer 3   layer 2   layer 1
        #     sums                            [  bucket 0  ]    [  bucket 1  ]
        buckets = list(_buckets(self._stage.head_learns if head else self._stage.learns))
        missing = [len(bucket) for bucket in buckets]
        place = {p: i for i, bucket in enumerate(buckets) for p in bucket}
        begun = 0

        def arrived(parameter: Tensor) -> None:
            nonlocal begun
            missing[place[parameter]] -= 1
            while begun < len(buckets) and not missing[begun]:
                self._begin(buckets[begun])
                begun += 1

        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in place]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in buckets[begun:]:
            self._begin(bucket)

    def _begin(self, parameters: list[Tensor]) -> None:
        # Flags for the parameters with a gradient travel along: a sum must not wait for a gradient that one replica lacks.
        present = [float(p.grad is not None) for p in parameters]
        parts = [_local(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters]
        flat = torch.cat([*parts, parts[0].new_tensor(present)])
        self._begun.append((parameters, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def sum_statistics(self) -> None:
        """Sum what deferred batch norms have collected over the replicas, each of which has a part of the mini-batch."""
        for part in (self._stage.module, self._stage.head):
            for module in () if part is None else part.modules():
                if isinstance(module, DeferredBatchNorm):
                    module.sum_over(self._group)

    def finish(self) -> None:
        """Wait for the sums and write them to each parameter's ``.grad``."""
        for parameters, flat, work in self._begun:
            work.wait()
            place = 0
            for parameter, present in zip(parameters, flat[-len(parameters) :].tolist(), strict=True):
                size = _local(parameter.detach()).numel()
                if present:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    local = _local(parameter.grad)
                    local.copy_(flat[place : place + size].view_as(local))
                place += size
        self._begun.clear()
        for parameter, gradient in self._before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._before = []


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters of each sum, the last parameters first because their gradients are ready first."""
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for p in reversed(list(parameters)):
        kinds[p.dtype].append(p)
        sizes[p.dtype] += _local(p.detach()).nbytes
        if sizes[p.dtype] >= BUCKET_BYTES:
            sizes[p.dtype] = 0
            yield kinds.pop(p.dtype)
    yield from kinds.values()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; the whole tensor unless tensor parallelism has split it."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
