"""A second run of a stage's forward, as `recompute` lets it: in the state of the first run, and compared with it.

The second run makes the graph that the first one did not keep. It must compute the same, or the gradients belong to other
activations. Random numbers, buffers, what attributes hold and old versions of parameters are restored; what else a forward
depends on, such as a global variable, is not. So the outputs are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nwise.held import State, held
from nwise.stage.versions import refuse_scripts
from nwise.tensors import Tensors

_States = list[tuple[Callable[[Any], object], Any]]


class FirstRun:
    """The state of a module at the start of its first run on a micro-batch.

    Args:
        module: the module, before the run.
        stage: its name, for errors.

    Attributes:
        outputs: what `keep` has kept; None to compare nothing.
        lent: copies of buffers and other tensors that the last second run had.
    """

    def __init__(self, module: nn.Module, stage: str) -> None:
        self._module, self._stage, self._state = module, stage, State(module)
        self._random = _states(self._state.generators)
        self.outputs: Tensors | None = None
        self.lent: Sequence[Tensor] = ()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the body with the random states, buffers and attributes that the run found, then restore the present ones."""
        with self._state.restored() as self.lent, _kept(_states(self._state.generators)):
            _restore(self._random)
            yield

    def keep(self, outputs: Tensors) -> None:
        """Keep detached outputs to compare those of a second run with; raise ValueError if there can be no second run."""
        if next(self._module.buffers(), None) is not None:
            refuse_scripts(self._module, self._stage)
        if any(y.is_nested for y in outputs):
            raise ValueError(
                f"{self._stage.capitalize()} should return no nested tensor with `recompute`, because a second run gives it "
                "another ragged dimension, which no gradient fits. Found one; return its values and offsets, or set "
                "`recompute=False`."
            )
        self.outputs = outputs

    def compare(self, outputs: Tensors) -> None:
        """Raise ValueError if a second run has other outputs: bitwise under deterministic algorithms, else beyond rounding."""
        if self.outputs is not None and not all(map(_same, self.outputs, outputs)):
            raise ValueError(
                f"{self._stage.capitalize()} should compute the same when it runs again, as `recompute` lets it. Found another "
                "output: its forward depends on something that has changed since the first run, such as a global variable. Keep "
                "such states in buffers or attributes, draw from the global generators of torch, Python or NumPy, or set "
                "`recompute=False`."
            )
        self.outputs = None


def random_states_kept(module: nn.Module | None = None) -> AbstractContextManager[None]:
    """Restore after the body the states of the global random generators, and of what a module holds in plain attributes."""
    found = None if module is None else held(module)
    return _kept(_states(found.generators, found.modules) if found else _states())


@contextmanager
def _kept(states: _States) -> Iterator[None]:
    try:
        yield
    finally:
        _restore(states)


def _restore(states: _States) -> None:
    for restore, state in states:
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


def _states(generators: Iterable[Any] = (), modules: Iterable[nn.Module] = ()) -> _States:
    """Return the states of the global random generators, of others, and of modules, each with the function that restores it."""
    # While a step is captured, the GPU's random numbers come from generators of the graph.
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() and not capturing else ()
    states: _States = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 - users' code draws from it
        *((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)) for device in devices),
        # By `data`, as autograd would take the write for one between a forward and its backward.
        *((buffer.data.copy_, buffer.clone()) for part in modules for buffer in part.buffers(recurse=False)),
    ]
    for value in generators:
        if isinstance(value, torch.Generator | np.random.RandomState):
            states.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            states.append((value.setstate, value.getstate()))
        else:
            states.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
    return states
