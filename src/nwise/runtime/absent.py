"""Copies of stages that another process trains: to use or to save one after training has begun is an error or a warning.

Under ``torchrun`` every process may build the whole network, but trains only its own stages. In the user's ``model`` the other
stages keep their first values, so its outputs and its state dict would be those of a mostly untrained network.

A copy of ``model`` made before training is a network of then, until something writes into it. `AveragedModel` does, and what it
writes for these stages are their first values again, but for rounding. So a write counts as new only if it changes the values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import versions
from nwise.runtime.processes import Progress
from nwise.tensors import sample

_REMEDY = (
    "on all processes, gather the weights by `weights = nwise.checkpoint.gather_weights(pipe)`, and in rank 0 load them, "
    "`model.load_state_dict(nwise.checkpoint.weights.under(weights, 'model.'))` (for an average, average `pipe` instead of the "
    "network, and load the average into `pipe` before)"
)


class Absent:
    """Hooks of a module with parameters that another process trains.

    Args:
        what: its stage or head, for messages.
        rank: rank of the process that trains it.
        progress: steps of this process.
        module: the module.
    """

    def __init__(self, what: str, rank: int, progress: Progress, module: nn.Module) -> None:
        self._what, self._rank, self._progress, self._warned = what, rank, progress, progress.warned
        self._apart = False  # whether this is a copy, not written since
        self._refresh(_learning(module))
        module.register_forward_pre_hook(self.use)
        module.register_state_dict_pre_hook(self.save)
        module.register_load_state_dict_post_hook(self.load)

    def use(self, module: nn.Module, _: object) -> None:
        """Raise RuntimeError if the module is called with old values."""
        if self._is_old(_learning(module)):
            raise RuntimeError(f"{self._sentence} to use the network, {_REMEDY}.")

    def save(self, module: nn.Module, *_: object) -> None:
        """Warn if old values are saved."""
        if self._is_old(_learning(module)):
            self._warn()

    def load(self, module: nn.Module, _: object) -> None:
        """Note that the module has new values."""
        self._refresh(_learning(module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        copies, twin = [copy.deepcopy(p, memo) for p in self._seen], Absent.__new__(Absent)
        apart = not self._is_old(list(self._seen))
        warned = copy.deepcopy(self._warned, memo)
        twin.__dict__.update(self.__dict__, _apart=apart, _warned=warned)
        twin._seen = dict(zip(copies, versions(copies), strict=True))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle; warn, because a pickled module is a saved one."""
        if self._is_old(list(self._seen)):
            self._warn()
        return {**self.__dict__, "_seen": {}}

    def _warn(self) -> None:
        if not self._warned:
            self._warned.append(self._what)
            warnings.warn(f"{self._sentence} before you save the network, {_REMEDY}.", stacklevel=3)

    @property
    def _sentence(self) -> str:
        return (
            f"A network under torchrun should have the trained weights of all its stages. Found {self._what} with its first "
            f"values, because rank {self._rank} trains it;"
        )

    def _refresh(self, parameters: Sequence[Tensor]) -> None:
        """Note that the present values are up to date."""
        self._current = self._progress.steps  # the number of steps at which they were
        self._seen = dict(zip(parameters, versions(parameters), strict=True))
        self._values = [sample(p) for p in parameters]

    def _is_old(self, parameters: Sequence[Tensor]) -> bool:
        now = dict(zip(parameters, versions(parameters), strict=True))
        if self._seen and now != self._seen:
            self._apart = False
            if len(now) != len(self._values) or not all(map(_near, parameters, self._values)):
                self._refresh(parameters)
        self._seen = now
        return bool(now) and not self._apart and self._progress.steps > self._current


def watch_absent(module: nn.Module, what: str, rank: int, progress: Progress) -> None:
    """Attach hooks to all modules with parameters inside a stage or head that another process trains."""
    for inner in module.modules():
        if _learning(inner):
            Absent(what, rank, progress, inner)


def _learning(module: nn.Module) -> list[Tensor]:
    """Return the trainable parameters of a module itself."""
    return [p for p in module.parameters(recurse=False) if p.requires_grad]


def _near(parameter: Tensor, values: Tensor) -> bool:
    """Return whether a parameter has these values, but for the rounding of an average taken of them many times."""
    now = sample(parameter)
    if now.shape != values.shape or now.is_meta or values.is_meta:
        return False
    return torch.allclose(now, values.to(now), rtol=torch.finfo(now.dtype).eps ** 0.5, atol=0.0)
