"""What makes the training of several processes go apart in silence; each process sees the gradients of its stages only.

- Torch's `clip_grad_norm_` sees the stages of one process, so each process scales its gradients by another factor.
- A scheduler that follows a loss gets nan where the loss is not computed, so the rates go apart. A loop that skips an update if
  the loss is not finite never trains the stages there.
- An optimizer with a norm over all parameters has that of its process.

The class of an optimizer does not tell. So it is tried on small stand-ins of its parameters, twice, with other gradients of every
second one::

    stand-in                0     1     2     3
    gradients, first        g     g     g     g
    gradients, second       g    cg     g    cg        c = 10,000, 1, 1/10,000, ... by step
    compared                x           x              equal, unless the optimizer mixes parameters
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from nwise._torch import TorchDispatchMode
from nwise.checks import warn
from nwise.dtensor import is_dtensor
from nwise.held import random_states_kept
from nwise.randomness import preserved
from nwise.runtime.processes import Processes
from nwise.stage.hooks import around_updates
from nwise.stage.stage import Stage, learning
from nwise.tensors import sample

_LAST_LOSS = "the last loss of `pipe.processes.table({k: losses[k:k + 1] for k in pipe.processes.here})`"
_ALIKE, _APART = [1.0] * 6, [1e4, 1.0, 1e-4] * 2  # an update may not depend on a scale that stays
_SIDE = 4  # the longest side of a stand-in


class Apart:
    """Compares how the processes use their gradients.

    Args:
        processes: the processes, at least two.
        stages: the stages of this one.
    """

    def __init__(self, processes: Processes, stages: Sequence[Stage]) -> None:
        self._processes, self._stages = processes, stages
        self._gradient: tuple[Tensor, Tensor, Tensor] | None = None  # a parameter, its gradient, and some of its values
        self._factor: float | None = None  # by which the gradient had been scaled at the last update
        self._rate = self._first_rate = 0.0  # of the parameter
        self._updated = False  # whether an optimizer has updated any parameter since the last look
        self._posted: list[int] = []  # the numbers of steps whose factors this process has posted
        self._warned = False
        self._tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        around_updates(self._at_update)
        processes.before_close(self.look)

    def note(self) -> None:
        """Note a gradient that a step leaves."""
        self._gradient = None if self._warned else _sample(learning(self._stages))

    def post(self, step: int) -> None:
        """Tell the other processes what this one has done with the gradient of a step."""
        rate = self._rate / self._first_rate if self._first_rate else None
        if self._factor is None and self._gradient is not None:  # an update by hand
            self._factor = _factor(*self._gradient[1:])
        updated = None if self._gradient is None else self._updated
        self._processes.post(f"factor/{step}", [self._factor, rate, updated])
        self._posted.append(step)
        self._gradient, self._factor, self._updated = None, None, False

    def look(self) -> None:
        """Warn if the processes have said different things of a step, once all have spoken; wait for none."""
        while self._posted and (factors := self._processes.posted(f"factor/{self._posted[0]}")) is not None:
            step = self._posted.pop(0)
            *numbers, updated = zip(*factors, strict=True)
            scaled, rates = map(_apart, numbers)
            said = ""
            if scaled:
                said = (
                    f"All processes should scale their gradients alike. Found a factor of {scaled} after step {step}, because "
                    "torch's `clip_grad_norm_` sees the stages of one process only; use `nwise.clip_grad_norm_(pipe, max_norm)`."
                )
            elif rates:
                said = (
                    f"All processes should change their learning rates alike. Found a factor of {rates} between the first rate "
                    f"and that of step {step}, as of a scheduler that follows a loss, which is nan in other processes; give it "
                    f"{_LAST_LOSS}."
                )
            elif True in updated and False in updated:
                said = (
                    f"All processes should update their parameters after the same steps. Found an update after step {step} on "
                    f"rank {updated.index(True)}, but none on rank {updated.index(False)}, as of a loop that skips it if a loss "
                    f"is not finite, which is nan in other processes; look at {_LAST_LOSS}."
                )
            if said and not self._warned:
                self._warned = True
                warn(f"{said} This warning appears once.")

    def _at_update(self, optimizer: Optimizer, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Note the factor and the rate, just before an update; before its first one, try the optimizer."""
        if optimizer not in self._tried:
            self._tried.add(optimizer)
            self._try(optimizer, closure=len(args) > 1 or "closure" in named)
        if self._gradient is None:
            return
        parameter, *gradient = self._gradient
        learns = set(learning(self._stages))
        for group in optimizer.param_groups:
            self._updated = self._updated or not learns.isdisjoint(group["params"])
            if any(p is parameter for p in group["params"]):
                self._factor, self._rate = _factor(*gradient), float(group["lr"]) if "lr" in group else 0.0
                self._first_rate = self._first_rate or self._rate

    def _try(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Warn of an optimizer that mixes parameters, of which this process has a part."""
        updates = {p for group in optimizer.param_groups for p in group["params"]}
        apart = self._processes.num_ranks > 1 and updates.intersection(learning(self._stages))
        if apart and mixes(optimizer, closure=closure):
            warn(
                "An optimizer should update each parameter by its own gradient alone under several processes, because each "
                f"process has the parameters of its stages only. Found {type(optimizer).__name__}, whose updates depend on the "
                "gradients of other parameters, as by a norm over all of them, and differ from those of one process; train in "
                "one process, or use an optimizer without such a norm after `nwise.clip_grad_norm_(pipe, max_norm)`. This "
                "warning appears once."
            )


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


def _sample(parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the last parameter whose gradient has values, the gradient, and some of the values."""
    found = None
    for p in parameters:
        if p.grad is not None and p.grad.layout is torch.strided and p.grad.numel() > 1:
            found = p, p.grad
    return None if found is None else (*found, sample(found[1]))


def _apart(numbers: Sequence[float | None]) -> str:
    """Say which ranks have the least and the largest number, if these differ; None does not count."""
    known = [(number, rank) for rank, number in enumerate(numbers) if number is not None]
    (low, first), (high, second) = (min(known), max(known)) if known else ((1.0, 0), (1.0, 0))
    apart = high - low > 1e-3 * max(abs(high), abs(low))
    return f"{low:.3g} on rank {first} and of {high:.3g} on rank {second}" if apart else ""


def _factor(gradient: Tensor, before: Tensor) -> float | None:
    """Return the factor by which a gradient has been scaled; None if it was set to zero or changed otherwise."""
    now, before = sample(gradient).double(), before.double()
    square = before.square().sum()
    factor = (now * before).sum() / square
    same = bool(((now - factor * before).abs() <= 1e-2 * factor.abs() * before.abs()).all())
    return float(factor) if square and factor and same else None
