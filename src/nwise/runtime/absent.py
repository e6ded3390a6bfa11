"""Copies of stages that another process trains: to use or to save one after training has begun is an error or a warning.

Under ``torchrun`` every process may build the whole network, but trains only its own stages. In the user's ``model`` the other
stages keep their first values, so its outputs and its state dict would be those of a mostly untrained network.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import Tensor, nn

from nwise._torch import version

_REMEDY = (
    "on all processes, gather the weights by `weights = nwise.training.gather_weights(pipe)`, and in rank 0 load them, "
    "`model.load_state_dict(nwise.training.weights.under(weights, 'model.'))`"
)


class Progress:
    """How many steps this process has made, for the copies that stay behind; a copy of it counts no further."""

    def __init__(self) -> None:
        self.steps = 0
        self.warned = False


class Absent:
    """Hooks of a module with parameters that another process trains.

    Args:
        what: its stage or head, for messages.
        rank: rank of the process that trains it.
        progress: steps of this process.
        module: the module.
    """

    def __init__(self, what: str, rank: int, progress: Progress, module: nn.Module) -> None:
        self._what, self._rank, self._progress = what, rank, progress
        self._current = 0  # the number of steps at which the values were up to date
        self._seen = _versions(module)
        module.register_forward_pre_hook(self.use)
        module.register_state_dict_pre_hook(self.save)
        module.register_load_state_dict_post_hook(self.load)

    def use(self, module: nn.Module, _: object) -> None:
        """Raise RuntimeError if the module is called with old values."""
        if self._is_old(module):
            raise RuntimeError(f"{self._sentence} to use the network, {_REMEDY}.")

    def save(self, module: nn.Module, *_: object) -> None:
        """Warn if old values are saved."""
        if self._is_old(module):
            self._warn()

    def load(self, module: nn.Module, _: object) -> None:
        """Note that the module has new values."""
        self._current, self._seen = self._progress.steps, _versions(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        twin = Absent.__new__(Absent)
        twin.__dict__.update(self.__dict__, _progress=copy.deepcopy(self._progress, memo), _seen={})
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle; warn, because a pickled module is a saved one."""
        if self._progress.steps > self._current:
            self._warn()
        return {**self.__dict__, "_seen": {}}

    def _warn(self) -> None:
        if not self._progress.warned:
            self._progress.warned = True
            warnings.warn(f"{self._sentence} before you save the network, {_REMEDY}.", stacklevel=3)

    @property
    def _sentence(self) -> str:
        return (
            f"A network under torchrun should have the trained weights of all its stages. Found {self._what} with its first "
            f"values, because rank {self._rank} trains it;"
        )

    def _is_old(self, module: nn.Module) -> bool:
        if (now := _versions(module)) != self._seen:  # other values were written
            self._seen, self._current = now, self._progress.steps if self._seen else self._current
        return bool(now) and self._progress.steps > self._current


def watch_absent(module: nn.Module, what: str, rank: int, progress: Progress) -> None:
    """Attach hooks to all modules with parameters inside a stage or head that another process trains."""
    for inner in module.modules():
        if _versions(inner):
            Absent(what, rank, progress, inner)


def _versions(module: nn.Module) -> dict[Tensor, int]:
    """Return the trainable parameters of a module itself, with the number of changes of each."""
    return {p: version(p) for p in module.parameters(recurse=False) if p.requires_grad}
