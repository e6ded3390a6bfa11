"""Gradients that a graph adds of its own, whatever cotangent it gets: those of auxiliary losses inside a stage or head.

A user's `torch.autograd.Function` may add them, or the hook of a hidden tensor. A step walks a graph for every micro-batch and
message, so each walk would add them in full. They should count with the weight of the loss that the walk belongs to:

    walk with the cotangent g            J g + a
    walk with the cotangent 0                  a      found here, and
    gradient                             J g + a - (1 - share) a
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from nwise._hooks import resting
from nwise._torch import has_custom, has_foreign
from nwise.graph import add_gradients, surplus
from nwise.tape import Tape


class Added:
    """Finds and weights what the graphs of a stage or head add.

    Args:
        owner: the stage or head, for errors.

    Attributes:
        found: whether a graph has added anything; None until a walk shows it.
    """

    def __init__(self, owner: str) -> None:
        self.found: bool | None = None
        self._owner = owner
        self._functions = False  # whether a graph has had functions that are not torch's plain operations
        self._foreign = False  # whether a graph has had functions of the user's, which may begin to add something

    def meet(self, nodes: Sequence[Node]) -> bool:
        """Note what kinds of nodes a graph has; return whether it has functions that are not torch's plain operations."""
        custom = has_custom(nodes)
        self._functions |= custom
        self._foreign |= has_foreign(nodes)
        return custom

    @property
    def unknown(self) -> bool:
        """Whether the graphs may add something, and no walk has shown yet whether they do."""
        return self._functions and self.found is None

    def expected(self, tape: Tape) -> bool:
        """Return whether the next walk of the micro-batch should be made by `walk`."""
        # A coefficient may grow from zero at any step, so the first micro-batch of each looks. With a share of 1, what a graph
        # adds counts as it is.
        if self.found or not self._foreign or tape.share == 1 or self._owner in tape.batch.looked:
            return bool(self.found)
        tape.batch.looked.add(self._owner)
        return True

    def refuse(self, roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], tape: Tape) -> None:
        """Raise ValueError, before a walk, if a graph whose only code of the user's is hooks adds anything."""
        # A number that is added for each sample counts in full, and the gradient of a mean by its share. A hook does not tell.
        if not leaves or tape.share == 1:
            return
        share, tape.share = tape.share, 0.0  # `nwise.inject` counts already
        with resting(leaves):
            extra = surplus(roots, seeds, leaves)
        tape.share = share
        if any(added is not None for added in extra):
            raise ValueError(
                f"{self._owner} should have no hooks of hidden tensors that add to a gradient, because they would add once for "
                "each micro-batch and pass. Found one; add the loss by `nwise.inject`, change the gradients of parameters by "
                "`Parameter.register_hook`, or use one micro-batch and the strategy 'end-to-end'."
            )

    def walk(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        wanted: Sequence[Tensor],
        leaves: Sequence[Tensor],
        tape: Tape,
        *,
        again: bool,
    ) -> None:
        """Add the gradients of one walk, with the tape's share of what the graph adds.

        Args:
            roots, seeds, wanted: as for `add_gradients`.
            leaves: all leaves of the graph that any walk wants.
            tape: the micro-batch.
            again: whether another walk will follow.
        """
        share, now = tape.share, set(wanted)
        with resting(leaves):  # a sum over replicas has to wait for the correction
            add_gradients(roots, [seed.clone() for seed in seeds], wanted, retain_graph=True)
            tape.share = 0.0  # `nwise.inject` has counted already
            extra = surplus(roots, seeds, leaves, self._owner if again else None)
        tape.share = share
        for tensor, added in zip(leaves, extra, strict=True):
            if added is not None and tensor in now and tensor.grad is not None:
                tensor.grad.sub_(added * (1 - share))
        self.found = bool(self.found) or any(added is not None for added in extra)
