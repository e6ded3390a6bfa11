"""Replicas: sum a stage's gradients over all its replicas (data parallel) while other gradients are still computed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nwise.batchnorm import DeferredBatchNorm
from nwise.randomness import derive
from nwise.runtime.processes import Processes
from nwise.stage.stage import Stage

T = TypeVar("T")

BUCKET_BYTES = 2**22  # size of one sum: large enough to outweigh its latency, small enough to begin early


class Replicas:
    """Sums the gradients of this rank's stage and head over the replicas.

    Every replica has a part of the mini-batch and weights its losses by that part's share, so the sum over the replicas is the
    gradient of the whole mini-batch. Within the last pass that adds to a gradient, a layer's gradients are sent while the
    gradients of the layers before it are computed. The update waits for the sums.

    Raises:
        ValueError: the replicas of the stage differ in their parameters, modes or loss.
    """

    def __init__(self, group: dist.ProcessGroup, stage: Stage) -> None:
        self._group, self._stage = group, stage
        self._before: list[tuple[Tensor, Tensor]] = []
        self._begun: list[tuple[list[Tensor], Tensor, Any]] = []
        # Groups of parameters of the stage and of its head; one that is unfrozen later begins a new group.
        self._groups: dict[bool, list[dict[Tensor, None]]] = {False: [], True: []}
        self._flags: list[float] = []  # of the modes and the trainable parameters of this replica
        make_equal(group, stage)

    def start(self) -> None:
        """Put aside the gradients of earlier steps, which are already summed."""
        self._begun.clear()
        self._flags = _flags(self._stage)
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
        #
        # A parameter that is frozen later keeps its place, and one that is unfrozen comes last. So if that happens in one replica
        # only, the sizes of the first sums still match, and their flags tell.
        groups, learns = self._groups[head], self._stage.head_learns if head else self._stage.learns
        if new := {p: None for p in learns if not any(p in group for group in groups)}:
            groups.append(new)
        buckets = [bucket for group in groups for bucket in _buckets(group)]
        missing = [len(bucket) for bucket in buckets]
        place = {p: i for i, bucket in enumerate(buckets) for p in bucket}
        begun = 0

        def arrived(parameter: Tensor) -> None:
            nonlocal begun
            missing[place[parameter]] -= 1
            while begun < len(buckets) and not missing[begun]:
                self._begin(buckets[begun])
                begun += 1

        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in place if p.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for bucket in buckets[begun:]:
            self._begin(bucket)

    def _begin(self, parameters: list[Tensor]) -> None:
        # Flags of the parameters travel along: a sum must not wait for a gradient that one replica lacks. Any number but 0 means
        # yes, whatever the precision of the sum. Two parameters, of which only the first has a gradient here:
        #
        #     gradient of p0 | zeros for p1 | p0 present: 1 | p1 present: 0 | 32 flags of modes (`_flags`)
        #
        # A sparse gradient is sent as a dense one, and its sum is dense.
        kind, gradients = _kind(parameters[0]), [p.grad if p.requires_grad else None for p in parameters]
        flags = [float(g is not None) for g in gradients]
        parts = [
            (torch.zeros_like(p) if g is None else g.to_dense()).resolve_conj().flatten().to(kind)
            for p, g in zip(parameters, gradients, strict=True)
        ]
        flat = torch.cat([*parts, parts[0].new_tensor(flags + self._flags)])
        self._begun.append((parameters, flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def sum_statistics(self) -> None:
        """Sum what deferred batch norms have collected over the replicas, each of which has a part of the mini-batch."""
        for part in _parts(self._stage).values():
            for module in part.modules():
                if isinstance(module, DeferredBatchNorm):
                    module.sum_over(self._group)

    def finish(self) -> None:
        """Wait for the sums and write them to each parameter's ``.grad``.

        Raises:
            ValueError: the replicas have other trainable parameters or modes.
        """
        for parameters, flat, work in self._begun:
            work.wait()
            own = len(self._flags)
            alike = flat[-own:].tolist()
            if any(yes and no for yes, no in zip(alike[::2], alike[1::2], strict=True)):
                raise ValueError(
                    f"All replicas of stage {self._stage.index} should have the same trainable parameters and modes. Found "
                    "others on some ranks; freeze parameters and call `train` and `eval` alike in all replicas."
                )
            # The layout of `_begin`, read from its end, and then the values from its beginning.
            place, flags = 0, flat[-own - len(parameters) : -own].tolist()
            for parameter, present in zip(parameters, flags, strict=True):
                size = parameter.numel()
                if present:
                    if parameter.grad is None or parameter.grad.is_sparse:
                        parameter.grad = torch.zeros_like(parameter, dtype=flat.dtype)
                    parameter.grad.copy_(flat[place : place + size].view_as(parameter.grad))
                place += size
        self._begun.clear()
        # Those of earlier steps, which are summed already. In place: the caller may hold the tensor.
        for parameter, gradient in self._before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._before = []


def _parts(stage: Stage) -> dict[str, nn.Module]:
    """Return the main part of a stage and its head, if it has one, by name."""
    return {"stage": stage.module} | ({} if stage.head is None else {"head": stage.head})


def _named(stage: Stage, of: Callable[[nn.Module], Iterable[tuple[str, T]]]) -> list[tuple[str, T]]:
    """Return what the parts of a stage have, such as parameters, by name."""
    return [(f"{owner}.{name}", x) for owner, part in _parts(stage).items() for name, x in of(part)]


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return the values of all replicas, by rank."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, value, group=group)
    return everywhere


def _flags(stage: Stage) -> list[float]:
    """Return 16 bits of a digest of what the caller may change, each with its opposite."""
    # A sum over replicas tells whether they are equal: where two bits differ, both the bit and its opposite are above 0.
    #
    #     replica 0   1 0   0 1            1 0   0 1
    #     replica 1   1 0   0 1            0 1   0 1
    #     sum         2 0   0 2   alike    1 1   0 2   not alike
    parts = _parts(stage).values()
    trainable = [p.requires_grad for part in parts for p in part.parameters()]
    digest = derive(repr((trainable, [module.training for part in parts for module in part.modules()])))
    return [float(bit) for i in range(16) for bit in (digest >> i & 1, ~digest >> i & 1)]


def make_equal(group: dist.ProcessGroup, stage: Stage) -> None:
    """Give all replicas of a stage the values of the first one.

    Raises:
        ValueError: they have other parameters, modes, options or losses.
    """
    facts = {}
    parameters = _named(stage, lambda part: part.named_parameters())
    own_buffers = _named(stage, lambda part: part.named_buffers())
    for name, p in parameters:
        facts[f"parameter {name}"] = f"{list(p.shape)}, {p.dtype}, {'trainable' if p.requires_grad else 'frozen'}"
    for name, module in _named(stage, lambda part: part.named_modules()):
        facts[f"mode of {name}"] = "training" if module.training else "evaluation"
        facts[f"options of {name}"] = re.sub(r" at 0x[0-9a-f]+", "", module.extra_repr())
    facts["loss"] = _options(stage.loss_fn)
    buffers = {name: f"{list(b.shape)}, {b.dtype}" for name, b in own_buffers}
    everywhere = _gathered(group, (facts, buffers))
    ranks = dist.get_process_group_ranks(group)
    first, first_buffers = everywhere[0]
    for rank, (other, _) in zip(ranks[1:], everywhere[1:], strict=True):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"All replicas of stage {stage.index} should be alike. Found {name}: {first.get(name, 'none')} on rank "
                    f"{ranks[0]} and {other.get(name, 'none')} on rank {rank}; build them by the same code on all ranks."
                )
    for name, tensor in (*parameters, *own_buffers):
        # A buffer that is no state, such as a table that grows with the input, may have other shapes elsewhere.
        shape = first_buffers.get(name)
        if tensor.numel() and all(found.get(name) == shape for _, found in everywhere):
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


def _options(loss: Any) -> str:
    """Return the name and the options of a loss, without what differs from process to process."""
    if isinstance(loss, partial):
        return f"{_options(loss.func)} with {_plain(loss.keywords)}"
    if isinstance(loss, nn.Module):
        return f"{type(loss).__qualname__} with {_plain({**vars(loss), **loss._buffers})}"
    return str(getattr(loss, "__qualname__", type(loss).__qualname__))


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are numbers, texts or tensors."""
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}
    kinds = (bool, int, float, str, list)
    return {name: value for name, value in plain.items() if isinstance(value, kinds) and not name.startswith("_")}


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters of each sum, the last parameters first because their gradients are ready first."""
    kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    sizes: dict[torch.dtype, int] = defaultdict(int)
    for p in reversed(list(parameters)):
        kind = _kind(p)
        kinds[kind].append(p)
        sizes[kind] += p.nbytes
        if sizes[kind] >= BUCKET_BYTES:
            sizes[kind] = 0
            yield kinds.pop(kind)
    yield from kinds.values()


def _kind(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
