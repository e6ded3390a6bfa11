"""Skips past a stage: pieces read tensors by name, and what a later stage reads travels through the stages between.

A U-Net in three stages; ``half`` passes through the middle one::

    x -> down -> hidden ----> middle -> hidden ----> up -> output
            `--> half ------------------- half ------^
         stage 0              stage 1                stage 2

What crosses a boundary is a message, and its gradient comes back as the strategy says: the gradient of loss 2 reaches `down`
through ``half`` only if loss 2 trains stage 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nwise.models.chain import Chain
from nwise.models.split import group_pieces

_HIDDEN = "hidden"
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Carrier(Chain):
    """A stage whose pieces read by name.

    Args:
        pieces: modules by name, in the order they run.
        later: names that later stages read; None for all names.
        begins: whether this is the first stage, whose first piece takes the inputs of the network.
        ends: whether this is the last stage, which returns what its last piece returns.
    """

    def __init__(
        self, pieces: Mapping[str, nn.Module], later: Collection[str] | None, *, begins: bool, ends: bool
    ) -> None:
        super().__init__(pieces)
        self.later, self.begins, self.ends = later, begins, ends

    def like(self, pieces: Mapping[str, nn.Module]) -> Carrier:
        """Make a head of other pieces, which ends where the network does."""
        return Carrier(pieces, (), begins=False, ends=True)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        pieces = list(self.pieces().items())
        known = dict(named)
        output: Any = None
        for i, (name, piece) in enumerate(pieces):
            if i == 0 and self.begins:
                known = dict(inspect.signature(piece.forward).bind(*inputs, **named).arguments)
                output = piece(*inputs, **named)
            else:
                output = _call(name, piece, known)
            known.update(output if isinstance(output, Mapping) else {_HIDDEN: output})
        if self.ends:
            return output
        kept = [name for name in known if name != _HIDDEN and (self.later is None or name in self.later)]
        return {name: known[name] for name in (_HIDDEN, *kept)}


def carry(pieces: Mapping[str, nn.Module], at: Sequence[str]) -> list[Carrier]:
    """Cut pieces that read by name into stages, between which everything travels that a later piece reads.

    The argument ``hidden`` of a piece, or its first one if none has that name, is the output of the piece before it, as in
    `nn.Sequential`. The other arguments are read by name: inputs of the network, or entries of a dictionary that an earlier piece
    has returned. In such a dictionary ``hidden`` is the output. A piece with ``**others`` reads everything.

    Args:
        pieces: modules by name, in the order they run.
        at: names of the modules at which a new stage begins.

    Returns:
        ``len(at) + 1`` stages. Their parameters have the names of the pieces.

    Raises:
        ValueError: unknown or unordered names in `at`.

    >>> class Down(nn.Module):
    ...     def forward(self, x):
    ...         return {"hidden": x[..., ::2], "full": x}
    >>> class Up(nn.Module):
    ...     def forward(self, hidden, full):
    ...         return full + hidden.repeat_interleave(2, -1)
    >>> import torch
    >>> stages = carry({"down": Down(), "middle": nn.ReLU(), "up": Up()}, at=["middle", "up"])
    >>> {name: list(x.shape) for name, x in stages[1](**stages[0](torch.ones(1, 4))).items()}
    {'hidden': [1, 2], 'full': [1, 4]}
    """
    groups = group_pieces(dict(pieces), list(at))
    read = [_reads(piece)[1] for piece in pieces.values()]
    counts = [len(group) for group in groups]
    stages = []
    for k, group in enumerate(groups):
        later = read[sum(counts[: k + 1]) :]
        names = None if None in later else {name for piece in later for name in piece or ()}
        stages.append(Carrier(group, names, begins=k == 0, ends=k == len(groups) - 1))
    return stages


def _reads(piece: nn.Module) -> tuple[str | None, tuple[str, ...] | None]:
    """Return the argument of a piece that gets the last output (None: the first), and the names that it reads (None: all)."""
    parameters = inspect.signature(piece.forward).parameters.values()
    kinds = {p.kind for p in parameters}
    names = [p.name for p in parameters if p.kind in _KINDS]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None, ()
    slot = _HIDDEN if _HIDDEN in names or not names else names[0]
    others = tuple(name for name in names if name != slot)
    return slot, None if inspect.Parameter.VAR_KEYWORD in kinds else others


def _call(name: str, piece: nn.Module, known: Mapping[str, Tensor]) -> Any:
    """Call a piece with what it reads.

    Raises:
        TypeError: it reads a name that nothing before it writes.
    """
    slot, names = _reads(piece)
    if slot is None:
        return piece(known[_HIDDEN])
    given = {key: x for key, x in known.items() if key != _HIDDEN and (names is None or key in names)}
    given[slot] = known[_HIDDEN]
    try:
        inspect.signature(piece.forward).bind(**given)
    except TypeError as error:
        raise TypeError(
            f"{name!r} should read names of the network's inputs, or of what pieces before it return. Found {', '.join(known)}: "
            f"{error}."
        ) from error
    return piece(**given)
