"""A second run of a stage's forward, as `recompute` lets it: with the random numbers, buffers and modes of the first run.

The second run makes the graph that the first one did not keep. It must compute the same, or the gradients belong to other
activations. Random numbers, buffers and modes are restored; what else a forward depends on should not change (docs/contract.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from nwise.randomness import random_states, restore, restoring
from nwise.tensors import replaced


class FirstRun:
    """The random states, buffers and modes that the first run of a module on a micro-batch finds.

    Args:
        module: the module, before the run.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random = random_states()
        self._modes = {part: part.training for part in module.modules()}
        self._stores = [part._buffers for part in self._modes]
        self._found = {buffer: buffer.clone() for buffer in module.buffers()}

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the body with what the run found; its graph keeps that, and the module has its present buffers again."""
        found = {buffer: value.clone() for buffer, value in self._found.items()}  # a later run needs the values too
        modes = {part: part.training for part in self._modes}
        with restoring(random_states()), replaced(self._stores, found):
            restore(self._random)
            try:
                _set(self._modes)
                yield
            finally:
                _set(modes)


def _set(modes: Mapping[nn.Module, bool]) -> None:
    for part, mode in modes.items():
        part.training = mode
