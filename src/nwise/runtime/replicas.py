"""Replicas: sum a stage's gradients over all its replicas (data parallel), once they are complete.

Every replica has a part of the mini-batch and weights its losses by that part's share, so the sum over the replicas is the
gradient of the whole mini-batch. There is one sum for each stage. It begins after the stage's last task that adds to a gradient,
while the rank works for other stages, and the update waits for it::

    stage 0    F    H         I    W                  U
    stage 1         F    H    B                  U
    sums                        [ stage 1 ]  [ stage 0 ]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nwise.batchnorm import DeferredBatchNorm
from nwise.runtime.processes import Processes
from nwise.stage.stage import Stage, learning


class Replicas:
    """Sums the gradients of one of this rank's stages, with its head, over the replicas.

    Args:
        group: the processes that hold the stage.
        stage: the stage.

    Raises:
        ValueError: the replicas of the stage differ in their parameters.
    """

    def __init__(self, group: dist.ProcessGroup, stage: Stage) -> None:
        self._group = group
        self._stage = stage
        self._learns = learning([stage])
        self._kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for p in self._learns:
            self._kinds[getattr(p, "grad_dtype", None) or p.dtype].append(p)
        self._before: list[tuple[Tensor, Tensor]] = []
        self._sums: list[tuple[list[Tensor], Tensor, Any]] = []
        make_equal(group, stage)

    def start(self) -> None:
        """Put aside the gradients of earlier steps, which are already summed.

        Raises:
            ValueError: other parameters are trained than before, so a sum would have another size than in the other replicas.
        """
        learns = learning([self._stage])
        if len(learns) != len(self._learns) or not all(map(is_, learns, self._learns)):
            raise ValueError(
                f"Stage {self._stage.index} should train the same parameters as in its first step, because its replicas rely on "
                "it. Found others; freeze and replace parameters before the first step, or make a new pipeline."
            )
        self._sums.clear()
        self._before = [(p, p.grad) for p in learns if p.grad is not None]
        for p, _ in self._before:
            p.grad = None

    def begin(self) -> None:
        """Begin to sum the gradients of this step."""
        # Whether there is a gradient travels along, because a sum must not wait for one that a replica lacks. Two parameters, of
        # which only the first has a gradient here:
        #
        #     gradient of p0 | zeros for p1 | 1 | 0
        #
        # A sparse gradient is sent as a dense one, and its sum is dense.
        for kind, parameters in self._kinds.items():
            parts = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
            flat = [part.resolve_conj().flatten().to(kind) for part in parts]
            present = flat[0].new_tensor([float(p.grad is not None) for p in parameters])
            whole = torch.cat([*flat, present])
            self._sums.append((parameters, whole, dist.all_reduce(whole, group=self._group, async_op=True)))

    def finish(self) -> None:
        """Wait for the sums, and write them to each parameter's ``.grad``."""
        if not self._sums:  # the tasks of this call were those of a mini-batch that does not exist
            self.begin()
        for parameters, whole, work in self._sums:
            work.wait()
            *sums, present = whole.split([*(p.numel() for p in parameters), len(parameters)])
            for p, total, number in zip(parameters, sums, present.tolist(), strict=True):
                if number:
                    if p.grad is None or p.grad.is_sparse:
                        p.grad = torch.zeros_like(p, dtype=total.dtype)
                    p.grad.copy_(total.view_as(p.grad))
        # In place: the caller may hold the tensor.
        for p, gradient in self._before:
            p.grad = gradient if p.grad is None else gradient.add_(p.grad)
        self._before = []

    def sum_statistics(self) -> None:
        """Sum what deferred batch norms have collected over the replicas, each of which has a part of the mini-batch."""
        for part in _parts(self._stage).values():
            for module in part.modules():
                if isinstance(module, DeferredBatchNorm):
                    module.sum_over(self._group)


def _parts(stage: Stage) -> dict[str, nn.Module]:
    """Return the main part of a stage and its head, if it has one, by name."""
    return {"stage": stage.module} | ({} if stage.head is None else {"head": stage.head})


def make_equal(group: dist.ProcessGroup, stage: Stage) -> None:
    """Give all replicas of a stage the values of the first one.

    Raises:
        ValueError: they have other parameters.
    """
    parts = _parts(stage).items()
    parameters = {f"{owner}.{name}": p for owner, part in parts for name, p in part.named_parameters()}
    buffers = {f"{owner}.{name}": b for owner, part in parts for name, b in part.named_buffers()}
    trained = {
        name: f"{list(p.shape)}, {p.dtype}, {'trainable' if p.requires_grad else 'frozen'}"
        for name, p in parameters.items()
    }
    state = {name: (b.shape, b.dtype) for name, b in buffers.items()}
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, (trained, state), group=group)
    ranks = dist.get_process_group_ranks(group)
    first, _ = everywhere[0]
    for rank, (other, _) in zip(ranks[1:], everywhere[1:], strict=True):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"All replicas of stage {stage.index} should have the same parameters. Found {name}: "
                    f"{first.get(name, 'none')} on rank {ranks[0]} and {other.get(name, 'none')} on rank {rank}; build them by "
                    "the same code on all ranks."
                )
    # A buffer that is no state, such as a table that grows with the input, may have other shapes elsewhere.
    alike = [b for name, b in buffers.items() if all(found.get(name) == state[name] for _, found in everywhere)]
    for tensor in (*parameters.values(), *alike):
        if tensor.numel():
            local = tensor.detach()
            whole = local.contiguous()
            dist.broadcast(whole, ranks[0], group=group)
            if whole.data_ptr() != local.data_ptr():
                local.copy_(whole)


def unlike(processes: Processes, state: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters and buffers whose values differ from replica to replica; all ranks call it together."""
    known = {name: x.detach().double().nan_to_num() for name, x in state.items() if x.is_floating_point()}
    sums = {name: [float(x.sum()), 1e-6 * float(x.abs().sum())] for name, x in known.items()}
    others = processes.gather("sums", sums)
    return [n for n, (x, bound) in sums.items() if any(abs(other.get(n, [x])[0] - x) > bound for other in others)]
