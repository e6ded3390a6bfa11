"""A second run of a stage's forward, as `recompute` lets it: with the random numbers, buffers and modes of the first run.

The second run makes the graph that the first one did not keep. It must compute the same, or the gradients belong to other
activations. Random numbers, buffers and modes are restored; what else a forward depends on should not change (docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from nwise.randomness import random_states, restore, restoring


class FirstRun:
    """The random states, buffers and modes that the first run of a module on a micro-batch finds.

    Args:
        module: the module, before the run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random = random_states()
        self._modes = {part: part.training for part in module.modules()}
        # By place, because a forward may put another tensor there.
        named = ((part._buffers, name, b) for part in self._modes for name, b in part._buffers.items())
        self._places = [(store, name, b) for store, name, b in named if b is not None]
        self._found = {b: b.clone() for _, _, b in self._places}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the body with what the run found; its graph keeps that, and the module has its present buffers again."""
        found = {b: value.clone() for b, value in self._found.items()}  # a later run needs the values too
        present = [store[name] for store, name, _ in self._places]
        modes = {part: part.training for part in self._modes}
        with restoring(random_states()):
            restore(self._random)
            try:
                _set(self._modes)
                for store, name, b in self._places:
                    store[name] = found[b]
                yield
            finally:
                _set(modes)
                for (store, name, _), now in zip(self._places, present, strict=True):
                    store[name] = now


def _set(modes: Mapping[nn.Module, bool]) -> None:
    for part, mode in modes.items():
        part.training = mode
