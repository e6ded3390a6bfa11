"""Optimizers whose update of one parameter depends on the gradients of others, as by a norm over all of them.

A process has the parameters of its stages only, so such an optimizer makes other updates in several processes than in one. Its
class does not tell. So it is tried on small stand-ins of its parameters, twice, with other gradients of every second one::

    stand-in                0     1     2     3
    gradients, first        g     g     g     g
    gradients, second       g    cg     g    cg        c = 10,000, 1, 1/10,000, ... by step
    compared                x           x              equal, unless the optimizer mixes parameters
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from nwise._torch import TorchDispatchMode
from nwise.dtensor import is_dtensor
from nwise.held import random_states_kept
from nwise.randomness import preserved

_ALIKE, _APART = [1.0] * 6, [1e4, 1.0, 1e-4] * 2  # an update may not depend on a scale that stays
_SIDE = 4  # the longest side of a stand-in


def mixes(optimizer: Optimizer, *, closure: bool = False) -> bool:
    """Return whether an optimizer updates parameters by the gradients of others; False if that cannot be told.

    Neither the optimizer nor the global random generators change.

    Args:
        optimizer: the optimizer.
        closure: whether its step gets a closure.

    >>> mixes(SGD([torch.ones(2), torch.ones(2)], lr=0.1))
    False
    """
    kind = type(optimizer)
    if (kind.__module__.startswith("torch.optim.") and kind is not LBFGS) or hasattr(kind, "__del__"):
        return False  # torch's own take every tensor alone; the end of a copy may end something of the original's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fresh in (True, False):
            try:
                first, second = (
                    _updates(_stand_in(optimizer, fresh), factors, closure) for factors in (_ALIKE, _APART)
                )
            except Exception:
                # It has made its state before, needs more than gradients, or exchanges something between processes.
                continue
            return not all(map(_close, first, second))
    return False


def _updates(twin: Optimizer, factors: Sequence[float], closure: bool) -> list[Tensor]:
    """Return what steps with these factors of every second gradient add to the other parameters."""
    parameters = [p for group in twin.param_groups for p in group["params"] if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    step: Any = type(twin).step
    step = getattr(step, "__wrapped__", step)  # without the hooks of all optimizers
    with random_states_kept(), preserved(), _Alone():  # type: ignore[no-untyped-call]
        for number, factor in enumerate(factors):

            def fill(number: int = number, factor: float = factor) -> Tensor:
                same, other = (torch.Generator().manual_seed(seed) for seed in (0, 1 + number))
                for i, p in enumerate(parameters):  # gradients that agree mostly, as some wait for that, in a bowl
                    gradient = torch.randn(p.shape, generator=same) + torch.randn(p.shape, generator=other) / 2
                    p.grad = (gradient.to(p) + p.detach()) * (factor if i % 2 else 1.0)
                return torch.ones(())

            fill()
            step(twin, fill) if closure else step(twin)
    return [p.detach() - old for p, old in zip(parameters, before, strict=True)][::2]


def _stand_in(optimizer: Optimizer, fresh: bool) -> Optimizer:
    """Return a copy of an optimizer with small parameters, and with small states or, if `fresh`, none."""
    memo: dict[int, Any] = {id(optimizer.state): defaultdict(dict)} if fresh else {}
    entries = [entry for entry in optimizer.state.values() if isinstance(entry, dict)]
    memo.update({id(x): _small(x) for entry in entries for x in entry.values() if isinstance(x, Tensor)})
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        memo[id(p)] = nn.Parameter(_small(p) / 1024, p.requires_grad)  # so rounding hides no update
        vars(memo[id(p)]).update({name: value for name, value in vars(p).items() if not isinstance(value, Tensor)})
    twin = copy.deepcopy(optimizer, memo)
    # Copies of an optimizer lack the attributes that its class adds. Schedulers replace `step`, by one of the original.
    others = vars(optimizer).keys() - vars(SGD([torch.zeros(1)])).keys() - vars(twin).keys() - {"step"}
    vars(twin).update({name: copy.deepcopy(vars(optimizer)[name], memo) for name in others})
    for group in twin.param_groups:
        if "lr" in group and not group["lr"]:  # before a warm-up
            group["lr"] = 1e-3
    parameters = [p for group in twin.param_groups for p in group["params"]]
    if len(parameters) == 1:
        twin.param_groups[0]["params"].append(copy.deepcopy(parameters[0]))
    return twin


def _small(x: Tensor) -> Tensor:
    x = x.to_local() if is_dtensor(x) else x
    return x.detach()[(slice(_SIDE),) * x.dim()].clone()


def _close(first: Tensor, second: Tensor) -> bool:
    largest = float(torch.cat([first.abs().reshape(-1), second.abs().reshape(-1)]).nan_to_num().max())
    return torch.allclose(first, second, rtol=0, atol=1e-3 * largest, equal_nan=True)


class _Alone(TorchDispatchMode):
    """Refuses to exchange anything with other processes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("The optimizer exchanges something with other processes.")
        return func(*args, **(kwargs or {}))
