"""Preparations for a plan: checked arguments, a copy of the network in pieces, and agreement between processes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nwise._torch import versions
from nwise.checks import check_optimizer
from nwise.network.section import StageModule
from nwise.network.splitting import cut_points, split
from nwise.planning.profiling import Network, Profile
from nwise.runtime.connections import connected
from nwise.runtime.launch import default_store, exchange, start
from nwise.runtime.links import Link
from nwise.runtime.processes import Processes
from nwise.schedule.costs import Costs
from nwise.stage.stage import LossFn
from nwise.tensors import Tensors, as_argument, as_tuple, each, run_module

Heads = Callable[[list[StageModule]], Sequence[nn.Module | None]]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_SAME = 0.15  # share by which times may differ on equal devices
_numbers = itertools.count()  # numbers the exchanges, equally on every rank because all run the same script


def batch_size(inputs: Tensors, target: Tensors | None) -> int:
    """Return the number of samples in a mini-batch.

    Raises:
        ValueError: a tensor has no samples, or another number of them.
    """
    given = (*inputs, *(target or ()))
    if not inputs[0].dim() or not inputs[0].numel() or any(not x.dim() or len(x) != len(inputs[0]) for x in given):
        shapes = ", ".join(str(list(x.shape)) for x in given)
        raise ValueError(
            f"`example` and `target` should have the samples of a mini-batch along dimension 0. Found shapes {shapes}."
        )
    return len(inputs[0])


def check_functions(model: Any, **functions: Any) -> None:
    """Raise TypeError unless the model is a module or known, and every function None or callable."""
    if not isinstance(model, nn.Module | Profile | Costs):
        raise TypeError(
            f"`model` should be an nn.Module, the `measured` of a plan, or `nwise.schedule.Costs`. Found {type(model).__name__}."
        )
    for name, function in functions.items():
        if function is not None and (not callable(function) or (isinstance(function, type) and name == "loss_fn")):
            raise TypeError(f"`{name}` should be a function. Found {type(function).__name__}.")


def network_in_pieces(
    model: nn.Module,
    example: Tensors,
    target: Tensors | None,
    heads: Heads | None,
    loss_fn: LossFn,
    optimizer: Optimizers | None,
) -> Network:
    """Return a copy of a network in its smallest pieces, each with its head.

    Raises:
        ValueError, TypeError: the network cannot be cut, or the heads or the optimizer do not fit.
    """
    device = next((p.device for p in model.parameters()), example[0].device)
    some = each(example, lambda x: x[:2].to(device))
    own = copy.deepcopy(model).train()
    given = as_argument(some)
    at = _independent(split(own, cut_points(own, given), given, check=False), some)
    stages = split(own, at, given)
    made = None if heads is None else heads(stages)
    modules = [None] * (len(stages) - 1) if made is None else _checked_heads(made, len(stages))

    def batch(count: int) -> tuple[Tensors, Any]:
        inputs = each(example, lambda x: x[:count].to(device))
        if target is None:
            return inputs, None
        return inputs, as_argument(each(target, lambda y: y[:count].to(device)))

    return Network(
        {next(iter(stage.pieces())): stage for stage in stages},
        [*modules, None],
        batch,
        len(example[0]),
        _mean_square if target is None else loss_fn,
        None if optimizer is None else partial(_made, optimizer),
        device,
    )


def _independent(stages: Sequence[StageModule], inputs: Tensors) -> list[str]:
    """Return the names of the pieces that do not change their inputs in place, so a stage may begin with them.

    A piece that hands its input on, such as an identity, may be followed by one that changes it; so they are tried together.
    """
    # Piece i may begin a stage if nothing up to the next such piece changes the tensor that i gets. Backwards, the next is known:
    #
    #     Linear  ReLU(inplace)  Identity  Linear       ReLU changes its input, so it stays with the Linear before it
    given = [inputs]
    pieces = [stage.pieces() for stage in stages]
    with torch.no_grad():
        for stage in stages[:-1]:
            given.append(run_module(copy.deepcopy(stage), each(given[-1], torch.clone), "The output of a piece"))
        at: list[str] = []
        end = len(stages)
        for i in reversed(range(1, len(stages))):
            hidden = before = each(given[i], torch.clone)
            counters = versions(before)
            for stage in stages[i:end]:
                hidden = run_module(copy.deepcopy(stage), hidden, "The output of a piece")
            if counters == versions(before):
                at.append(next(iter(pieces[i])))
                end = i
    return at[::-1]


def _checked_heads(heads: Any, num_stages: int) -> list[nn.Module | None]:
    modules = list(heads) if isinstance(heads, Iterable) else [heads]
    if len(modules) != num_stages - 1 or not all(head is None or isinstance(head, nn.Module) for head in modules):
        kinds = ", ".join(type(head).__name__ for head in modules) or "none"
        raise ValueError(
            f"`heads` should return a module or None for every stage but the last: {num_stages - 1} for {num_stages}. "
            f"Found {kinds}."
        )
    return copy.deepcopy(modules)  # those of the caller may be used elsewhere


def _made(optimizer: Optimizers, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = optimizer(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"`optimizer` should return an optimizer of torch. Found {type(made).__name__}.")
    check_optimizer(made)
    for group in made.param_groups:
        group["lr"] = 0.0
    return made


def _mean_square(output: Any, target: object) -> Tensor:
    tensors = [y for y in as_tuple(output, "The output of a head") if y.is_floating_point()]
    return torch.stack([y.float().square().mean() for y in tensors]).sum()


def slowest_link() -> Link:
    """Measure the links between processes of neighbouring ranks; return the slowest. All of them call it together."""
    processes = Processes(dist.get_world_size())
    connected(processes, torch.device("cpu"))
    everywhere = processes.gather("links", list(processes.links.values()))
    processes.close()
    latencies, bandwidths = zip(*itertools.chain(*everywhere), strict=True)
    return Link(max(latencies), min(bandwidths))


def speeds(measured: Sequence[tuple[float, float]]) -> list[float]:
    """Return the speeds of processes relative to the first; all 1 if they differ by no more than the noise.

    Args:
        measured: seconds and spread of every process.

    >>> speeds([(1.0, 0.02), (2.0, 0.02)]), speeds([(1.0, 0.3), (1.2, 0.2)])
    ([1.0, 0.5], [1.0, 1.0])
    """
    seconds = [one for one, _ in measured]
    noise = max(_SAME, *(2 * spread for _, spread in measured if spread == spread), 0.0)
    if max(seconds) <= (1 + noise) * min(seconds):
        return [1.0] * len(seconds)
    return [round(seconds[0] / one, 3) for one in seconds]


def gather(value: Any) -> list[Any]:
    """Exchange a value between all processes before there is a pipeline; all of them call it together."""
    start()
    key = f"nwise/plan/{next(_numbers)}"
    return exchange(default_store(), key, dist.get_rank(), dist.get_world_size(), value)
