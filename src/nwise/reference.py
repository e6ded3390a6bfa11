"""The definition of nwise's gradients as slow code, which shares nothing with the fast path.

The main parameters of stage ``k`` receive ``sum_j C[j, k] dL_j/d(theta_k)``. The parameters of head ``j`` receive
``dL_j/d(theta_head_j)``. ``L_j`` is the mean loss of head ``j`` over the mini-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def reference_grads(
    stages: Sequence[nn.Module],
    heads: Sequence[nn.Module | None] | None,
    loss_fn: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
    x: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor],
    y: Any,
    credit: Tensor,
    num_microbatches: int = 1,
    *,
    count: Callable[[Any], float] | None = None,
    heads_run: str = "live",
) -> dict[str, Tensor]:
    """Compute gradients from the definition: for every loss and every stage, one `torch.autograd.grad`.

    Args:
        stages: the main network, in order.
        heads: the heads, one for every stage but the last, None for a stage without one; None: no heads.
        loss_fn: function ``loss_fn(head_output, target)`` that returns the mean over samples; or one per stage.
        x: the mini-batch, a tensor, a tuple or a dictionary of them, samples along dimension 0.
        y: the target, likewise, or None.
        credit: credit matrix ``[A, A]``; ``credit[j, k]`` weighs loss ``j`` in the update of stage ``k``. For a strategy that
            rotates with the micro-batch, ``[M, A, A]``.
        num_microbatches: number of micro-batches, M, with sizes that differ by at most one; default: 1.
        count: function from a target to the number of terms that the loss averages over; default: the number of samples.
        heads_run: ``"live"`` (default) for the gradients of the heads that train a stage, ``"all"`` for all heads.

    Returns:
        The gradients, ``{"stages.<k>.<parameter>": gradient, "heads.<k>.<parameter>": gradient}``. The modules are copied
        first, so their buffers and ``.grad`` do not change.

    >>> net = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    >>> for layer in net: _ = nn.init.constant_(layer.weight, 2.0)
    >>> square = lambda output, target: output.square().mean()
    >>> grads = reference_grads(net, [None], square, torch.ones(1, 1), None, torch.tensor([[0, 0], [1, 1]]))
    >>> grads["stages.0.weight"].item(), grads["stages.1.weight"].item()
    (16.0, 16.0)
    """
    stages = [copy.deepcopy(stage) for stage in stages]
    given = [copy.deepcopy(head) for head in heads or []]
    heads = [*given, *[None] * (len(stages) - len(given))]
    losses = list(loss_fn) if isinstance(loss_fn, Sequence) else [loss_fn] * len(stages)
    parts = _cut(x, num_microbatches)
    targets = _cut(y, num_microbatches)
    sizes = [len(index) for index in torch.arange(len(_first(x))).tensor_split(num_microbatches)]
    counts = [float(size if count is None else count(target)) for size, target in zip(sizes, targets, strict=True)]
    credits = credit.expand(num_microbatches, -1, -1) if credit.ndim == 2 else credit

    # A stage without credit from any loss keeps zero gradients: its sum is empty.
    grads = {
        f"stages.{k}.{name}": torch.zeros_like(parameter)
        for k, stage in enumerate(stages)
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    }
    for part, target, terms, matrix in zip(parts, targets, counts, credits, strict=True):
        if not terms:
            continue
        share = terms / sum(counts)
        hidden: Any = part
        for j, stage in enumerate(stages):
            hidden = _call(stage, hidden)
            runs = bool((matrix[j] != 0).any()) or heads_run == "all"
            head = heads[j]
            if not runs or (head is None and j < len(stages) - 1):
                continue
            output = hidden if head is None else _call(head, hidden)
            loss = losses[j](output, target) * share
            for k in range(j + 1):
                _add(grads, f"stages.{k}.", stages[k], loss, float(matrix[j, k]))
            if head is not None:
                _add(grads, f"heads.{j}.", head, loss, 1.0)
    return grads


def late_grads(calls: Sequence[dict[str, Tensor]], ages: Sequence[int]) -> dict[str, Tensor]:
    """Choose the gradients that the newest call leaves under a delay, from the definition.

    Args:
        calls: the result of `reference_grads` for every call of a pipeline's `step` so far, the newest last: the gradients of its
            mini-batch at the parameters that the network had then.
        ages: for every stage the number of calls by which its gradients are late; those of heads are not.

    Returns:
        The gradients; those of a stage whose first gradient is not due yet are missing.

    >>> late_grads([{"stages.0.w": torch.tensor(1.0)}, {"stages.0.w": torch.tensor(2.0)}], [1])
    {'stages.0.w': tensor(1.)}
    """
    grads: dict[str, Tensor] = {}
    for name in calls[-1]:
        part, stage, *_ = name.split(".")
        age = ages[int(stage)] if part == "stages" else 0
        if age < len(calls):
            grads[name] = calls[-1 - age][name]
    return grads


class Call(NamedTuple):
    """A call of a pipeline's `step`, or of its `drain`.

    Args:
        stages, heads: copies of the network at its beginning, as for `reference_grads`.
        x, y: the mini-batch and its target; None for `drain`.
        credit: the credit matrix, ``[A, A]`` or ``[M, A, A]``.
    """

    stages: Sequence[nn.Module]
    heads: Sequence[nn.Module | None]
    x: Any
    y: Any
    credit: Tensor


def in_memory_grads(
    calls: Sequence[Call],
    loss_fn: Callable[..., Tensor],
    ages: Sequence[int],
    passing: Sequence[Sequence[int]],
    num_microbatches: int = 1,
) -> dict[str, Tensor]:
    """Compute the gradients that the newest call leaves under Hogwild with the weights in memory, from the definition.

    The update of stage ``k`` belongs to a mini-batch of ``ages[k]`` calls ago. Its forward is that of then. On the way back from
    loss ``j`` every stage multiplies by the derivative at the activations of then, with the weights that it had in the call in
    which the gradient passed: the slow way to say this is to overwrite the weights after the forward, before each pass.

    Args:
        calls: every call so far, the newest last.
        loss_fn: function ``loss_fn(head_output, target)`` that returns the mean over samples.
        ages: for every stage the number of calls by which its gradients are late; those of heads are not.
        passing: number of calls after which the gradient of loss ``j`` passes stage ``i``, ``passing[j][i]``, on its way to
            earlier stages.
        num_microbatches: number of micro-batches, M; default: 1.

    Returns:
        The gradients, named as by `reference_grads`; those of a stage whose first gradient is not due yet are missing.

    >>> net = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    >>> def call(first, second):
    ...     nn.init.constant_(net[0].weight, first), nn.init.constant_(net[1].weight, second)
    ...     return Call(copy.deepcopy(net), [], torch.ones(1, 1), None, torch.tensor([[0, 0], [1, 1]]))
    >>> calls = [call(2.0, 2.0), call(2.0, 3.0)]
    >>> grads = in_memory_grads(calls, lambda output, target: output.mean(), ages=[1, 0], passing=[[0, 0], [1, 1]])
    >>> grads["stages.0.weight"].item(), grads["stages.1.weight"].item()
    (3.0, 2.0)
    """
    newest = len(calls) - 1
    grads: dict[str, Tensor] = {}
    if calls[newest].x is not None:
        now = calls[newest]
        found = reference_grads(now.stages, now.heads, loss_fn, now.x, now.y, now.credit, num_microbatches)
        grads = {name: gradient for name, gradient in found.items() if name.startswith("heads.")}
    for k, age in enumerate(ages):
        then = newest - age
        if then < 0 or calls[then].x is None:
            continue
        for name, parameter in calls[newest].stages[k].named_parameters():
            grads[f"stages.{k}.{name}"] = torch.zeros_like(parameter)
        _, _, x, y, credit = calls[then]
        credits = credit.expand(num_microbatches, -1, -1) if credit.ndim == 2 else credit
        parts = _cut(x, num_microbatches)
        targets = _cut(y, num_microbatches)
        for part, target, matrix in zip(parts, targets, credits, strict=True):
            for j in range(k, len(ages)):
                if matrix[j, k] and len(_first(part)):
                    share = float(matrix[j, k]) * len(_first(part)) / len(_first(x))
                    gradients = _passed(calls, then, k, j, part, target, loss_fn, age, passing[j])
                    for name, gradient in gradients.items():
                        grads[f"stages.{k}.{name}"] += share * gradient
    return grads


def _passed(
    calls: Sequence[Call],
    then: int,
    k: int,
    j: int,
    x: Any,
    y: Any,
    loss_fn: Callable[..., Tensor],
    age: int,
    passing: Sequence[int],
) -> dict[str, Tensor]:
    """Return the gradients of loss `j` that reach stage `k`, of a micro-batch of call `then`."""
    stages = copy.deepcopy(calls[then].stages)
    head = dict(enumerate(calls[then].heads)).get(j)
    hidden = x
    ins = []
    outs = []
    for i in range(j + 1):
        if i:
            hidden = hidden.detach().requires_grad_()
        ins.append(hidden)
        hidden = _call(stages[i], hidden)
        outs.append(hidden)
    last = outs[j].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_fn(last if head is None else _call(head, last), y), [last])
    # Down from loss j, every stage multiplies by the weights of the call in which the gradient passes it. Autograd has saved the
    # activations of then, and references to the parameters, which now get other values.
    for i in range(j, k, -1):
        _overwrite(stages[i], calls[then + passing[i]].stages[i])
        (gradient,) = torch.autograd.grad(outs[i], [ins[i]], gradient)
    _overwrite(stages[k], calls[then + age].stages[k])
    named = {name: parameter for name, parameter in stages[k].named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(outs[k], list(named.values()), gradient, allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def _overwrite(module: nn.Module, other: nn.Module) -> None:
    """Copy another module's parameters to the memory of a module's, without autograd's notice."""
    for parameter, value in zip(module.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(value.data)


def _first(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return next(iter(value.values() if isinstance(value, Mapping) else value))


def _cut(value: Any, count: int) -> list[Any]:
    """Cut a tensor, or all tensors of a tuple or dictionary, into parts along dimension 0."""
    if value is None or isinstance(value, Tensor):
        return [None] * count if value is None else list(torch.tensor_split(value, count))
    if isinstance(value, Mapping):
        return [dict(zip(value, part, strict=True)) for part in _cut(tuple(value.values()), count)]
    return list(zip(*(torch.tensor_split(tensor, count) for tensor in value), strict=True))


def _call(module: nn.Module, given: Any) -> Any:
    if isinstance(given, Mapping):
        return module(**given)
    return module(*given) if isinstance(given, tuple) else module(given)


def _add(grads: dict[str, Tensor], prefix: str, module: nn.Module, loss: Tensor, weight: float) -> None:
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        grads.setdefault(prefix + name, torch.zeros_like(parameter))
        if weight and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, [parameter], retain_graph=True, allow_unused=True)
            if gradient is not None:
                grads[prefix + name] += weight * gradient
