"""Modules by the index of their stage: the heads of a pipeline."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from nwise.tensors import Tensors, invoke, run_unchanged

__all__ = ["HeadDict"]


class HeadDict(nn.ModuleDict):
    """A pipeline's heads, by the index of their stage: ``pipe.heads[2]``."""

    # torch's dictionary has texts as keys, which are parts of the names in a state dict: "heads.2.weight".

    def __getitem__(self, stage: int | str) -> nn.Module:
        return super().__getitem__(str(stage))

    def __setitem__(self, stage: int | str, head: nn.Module | None) -> None:
        """Set a head; None removes it."""
        if head is None:
            self._modules.pop(str(stage), None)
        else:
            super().__setitem__(str(stage), head)

    def __delitem__(self, stage: int | str) -> None:
        super().__delitem__(str(stage))

    def __contains__(self, stage: object) -> bool:
        return super().__contains__(str(stage))

    def by_stage(self, num_stages: int) -> list[nn.Module | None]:
        """Return the head of each stage, None for a stage without one, as the last.

        Raises:
            ValueError: the last stage has a head, or a stage that does not exist.
        """
        if others := self._modules.keys() - set(map(str, range(num_stages - 1))):
            raise ValueError(
                "`heads` should belong to stages before the last, whose output goes to the loss. Found one of stage "
                f"{min(others)} with {num_stages} stages; remove it, or make it a part of the last stage."
            )
        return [self._modules.get(str(k)) for k in range(num_stages)]

    def get(self, stage: int) -> nn.Module | None:
        """Return the head of a stage; None if it has none."""
        return self._modules.get(str(stage))

    def run(self, stage: int, hidden: Tensors) -> Tensor | Tensors | None:
        """Return what the head of a stage makes of the stage's output; None if it has none."""
        head = self.get(stage)
        return None if head is None else run_unchanged(partial(invoke, head), hidden, f"The head of stage {stage}")
