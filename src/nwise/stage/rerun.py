"""A second run of a stage's forward, as `recompute` lets it: in the state of the first run, and compared with it.

The second run makes the graph that the first one did not keep. It must compute the same, or the gradients belong to other
activations. Random numbers, buffers, what attributes hold and old versions of parameters are restored; what else a forward
depends on, such as a global variable, is not. So the outputs are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nwise.held import State, kept, random_states, restore
from nwise.stage.versions import refuse_scripts
from nwise.tensors import Tensors, agree


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
        self._random = random_states(self._state.generators)
        self.outputs: Tensors | None = None
        self._buffers: Sequence[Tensor] = ()  # after the first run, if there is something to compare
        self.lent: Sequence[Tensor] = ()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the body with the random states, buffers and attributes that the run found, then restore the present ones."""
        with self._state.restored() as self.lent, kept(random_states(self._state.generators)):
            restore(self._random)
            yield
            if self.outputs is not None:
                self._compare_buffers()

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
        self._buffers = [buffer.clone() for buffer in self._module.buffers()]

    def _compare_buffers(self) -> None:
        """Raise ValueError if a second run leaves other buffers, since only the first run's stay."""
        present = list(self._module.buffers())
        if len(present) != len(self._buffers) or not all(map(_same, self._buffers, present)):
            raise ValueError(
                f"{self._stage.capitalize()} should change its buffers alike when it runs again, as `recompute` lets it, because "
                "only the changes of the first run stay. Found other buffers after the second: its forward may ask "
                "`torch.is_grad_enabled()`, which is False in the first run; ask `self.training`, or set `recompute=False`."
            )

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


def _same(first: Tensor, second: Tensor) -> bool:
    if not (first.is_floating_point() or first.is_complex()) or torch.are_deterministic_algorithms_enabled():
        return agree(first, second)
    # Sums in another order differ by a few units of the largest value; another dropout mask differs by the value itself.
    share = torch.finfo(first.dtype).eps ** 0.5 / 10
    values = first.detach().to_dense().abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(values.max()) if values.numel() and not first.is_meta else 0.0
    return agree(first, second, share, share * largest)
