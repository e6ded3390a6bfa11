"""Replicas: sums a stage's gradients over all that hold it (data parallel), while its other actions go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nwise.dtensor import is_dtensor


class Replicas:
    """The gradients of this rank's stage and head.

    Every replica has a part of the mini-batch, whose losses are weighted by its share, so that the sum over replicas is the
    gradient of the whole. It is begun with the last pass that adds to it and waited for at the update.

    Args:
        group: the ranks that hold the stage.
        main, head: give the parameters that learn.
    """

    def __init__(
        self, group: dist.ProcessGroup, main: Callable[[], Iterable[Tensor]], head: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._group = group
        self._parameters = {False: main, True: head}
        self._before: list[tuple[Tensor, Tensor]] = []
        self._begun: list[tuple[list[Tensor], Tensor, Any]] = []

    def make_equal(self, tensors: Iterable[Tensor]) -> None:
        """Before the first step, give all replicas the values of the first."""
        first = dist.get_process_group_ranks(self._group)[0]
        for tensor in tensors:
            dist.broadcast(_local(tensor.detach()), first, group=self._group)

    def start(self) -> None:
        """Put aside gradients of earlier steps, which have been summed already."""
        self._begun.clear()
        learns = [p for parameters in self._parameters.values() for p in parameters()]
        self._before = [(p, p.grad) for p in learns if p.grad is not None]
        for p, _ in self._before:
            p.grad = None

    def begin(self, *, head: bool) -> None:
        """Begin to sum the gradients of the main part or of the head."""
        groups: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for p in self._parameters[head]():
            groups[p.dtype].append(p)
        for parameters in groups.values():
            # Which parameters have a gradient travels with it: a sum must not wait for what one replica lacks.
            present = [float(p.grad is not None) for p in parameters]
            parts = [_local(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters]
            flat = torch.cat([*parts, parts[0].new_tensor(present)])
            self._begun.append((parameters, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def finish(self) -> None:
        """Wait for the sums, and put them where the optimizer looks."""
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


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that tensor parallelism has cut up."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
