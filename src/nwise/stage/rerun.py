"""A second run of a stage's forward, as `recompute` lets it: in the state of the first run, and compared with it.

The second run makes the graph that the first one did not keep. It must compute the same, or the gradients belong to other
activations. Random numbers, buffers, plain values in attributes and old versions of parameters are restored; what else a forward
depends on, such as a list in an attribute, is not. So the outputs are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nwise.held import held, values_in, with_values
from nwise.tensors import Tensors


class FirstRun:
    """The state of a module at the start of its first run on a micro-batch.

    Args:
        module: the module, before the run.

    Attributes:
        outputs: what `keep` has kept; None to compare nothing.
        lent: the copies that `buffers` has returned last.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._module, self._random, self._values = module, _states(module), values_in(module)
        self.outputs: Tensors | None = None
        self.lent: Sequence[Tensor] = ()

    def buffers(self) -> Mapping[str, Tensor]:
        """Return copies of the buffers that the run found."""
        copies = {name: buffer.clone() for name, buffer in self._buffers.items()}
        self.lent = list(copies.values())
        return copies

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the body with the random states and plain values that the run found, then restore the present ones."""
        with random_states_kept(self._module), with_values(self._values):
            for restore, state in self._random:
                restore(state)
            yield

    def keep(self, outputs: Tensors, stage: str) -> None:
        """Keep detached outputs to compare those of a second run with; raise ValueError for a nested one."""
        if any(y.is_nested for y in outputs):
            raise ValueError(
                f"{stage.capitalize()} should return no nested tensor with `recompute`, because a second run gives it another "
                "ragged dimension, which no gradient fits. Found one; return its values and offsets, or set `recompute=False`."
            )
        self.outputs = outputs

    def compare(self, outputs: Tensors, stage: str) -> None:
        """Raise ValueError if a second run has other outputs: bitwise under deterministic algorithms, else beyond rounding."""
        if self.outputs is not None and not all(map(_same, self.outputs, outputs)):
            raise ValueError(
                f"{stage.capitalize()} should compute the same when it runs again, as `recompute` lets it. Found another output: "
                "its forward depends on something that the first run changed, such as a list or an object in an attribute. "
                "Keep such states in buffers, draw from the global generators of torch, Python or NumPy, or set "
                "`recompute=False`."
            )
        self.outputs = None


@contextmanager
def random_states_kept(module: nn.Module | None = None) -> Iterator[None]:
    """Restore after the body the states of the global random generators, and of what a module holds in plain attributes."""
    present = _states(module)
    try:
        yield
    finally:
        for restore, state in present:
            restore(state)


def _same(first: Tensor, second: Tensor) -> bool:
    if first.is_meta or first.layout is not torch.strided:
        return first.shape == second.shape and (first.is_meta or _same(first.to_dense(), second.to_dense()))
    if first.shape != second.shape or not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    exact = torch.are_deterministic_algorithms_enabled()
    # Sums in another order differ by a few units of the largest value; another dropout mask differs by the value itself.
    share = 0.0 if exact else torch.finfo(first.dtype).eps ** 0.5 / 10
    largest = first.detach().abs().nan_to_num(0.0, 0.0, 0.0).max() if first.numel() else 0.0
    return torch.allclose(first, second, rtol=share, atol=share * float(largest), equal_nan=True)


def _states(module: nn.Module | None) -> list[tuple[Callable[[Any], object], Any]]:
    """Return the states of all random generators that a module may use, and of modules in its plain attributes.

    Each comes with the function that restores it.
    """
    # While a step is captured, the GPU's random numbers come from generators of the graph.
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() and not capturing else ()
    unregistered, generators = ([], []) if module is None else held(module)
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 - users' code draws from it
        *((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)) for device in devices),
        # By `data`, as autograd would take the write for one between a forward and its backward.
        *((buffer.data.copy_, buffer.clone()) for part in unregistered for buffer in part.buffers(recurse=False)),
    ]
    for value in generators:
        if isinstance(value, torch.Generator | np.random.RandomState):
            states.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            states.append((value.setstate, value.getstate()))
        else:
            states.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
    return states
