"""The modules of a process: the stages and heads that it holds, and placeholders for those of other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from torch import Tensor, nn

from nwise.randomness import derive, seeded
from nwise.runtime.processes import Processes


class RemoteModule(nn.Module):
    """Stands for a stage or head, named `what`, that the process of another rank holds."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what = what
        self.rank = rank

    def forward(self, *inputs: Tensor, **named: Tensor) -> NoReturn:
        """Raise RuntimeError: only the process that holds the module can call it."""
        raise RuntimeError(f"{self.what} should be called on rank {self.rank}, which holds it. Found a call elsewhere.")

    def extra_repr(self) -> str:
        return f"{self.what}, on rank {self.rank}"


def build_modules(
    given: Sequence[nn.Module | Callable[[], nn.Module] | None], what: str, processes: Processes, seed: int
) -> list[nn.Module | None]:
    """Build the modules that this process holds, and put a `RemoteModule` in every other place.

    Each function draws from its own seed, so it builds the same module in every process.

    Args:
        given: one module for each stage, a function that makes it, or None.
        what: kind of the modules, for their names and seeds, such as ``"stage"``.
        processes: the processes.
        seed: seed of the run.
    """
    modules: list[nn.Module | None] = []
    for k, item in enumerate(given):
        if item is not None and k not in processes.here:
            modules.append(RemoteModule(f"{what} {k}", processes.stage_rank(k)))
        else:
            with seeded(derive(seed, what, k)):
                modules.append(item if item is None or isinstance(item, nn.Module) else item())
    return modules
