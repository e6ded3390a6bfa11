"""Skips past a stage: pieces read tensors by name, and tensors for a later stage travel through the stages between.

A U-Net in three stages; ``half`` passes through the middle one::

    x -> down -> hidden ----> middle -> hidden ----> up -> output
            `--> half ------------------- half ------^
         stage 0              stage 1                stage 2

A tensor that crosses a boundary is a message, and its gradient comes back as the strategy says: the gradient of loss 2 reaches
`down` through ``half`` only if loss 2 trains stage 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from nwise._torch import inner_module
from nwise.network.chain import Chain, group_pieces
from nwise.tensors import HIDDEN

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_FIRST = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Reads(NamedTuple):
    """Names that a piece reads (`_reads`)."""

    by_position: bool  # the output of the piece before is its first argument, not the one named `hidden`
    names: frozenset[str] | None  # None: it takes any name
    required: tuple[str, ...]  # those without a default


class Carrier(Chain):
    """A stage whose pieces read by name.

    Later stages read the names `later`, or all if it is None. The first stage's first piece takes the inputs of the network; the
    last stage returns the result of its last piece.
    """

    def __init__(
        self, pieces: Mapping[str, nn.Module], later: frozenset[str] | None, *, begins: bool, ends: bool
    ) -> None:
        super().__init__(pieces)
        self._begins, self._ends = begins, ends
        self._reads = [_reads(name, piece) for name, piece in pieces.items()]
        # The names that are still read before each piece and behind the last, by pieces and later stages. The rest is freed.
        self.needed = [later]
        for reads in reversed(self._reads):
            later = None if later is None or reads.names is None else later | reads.names
            self.needed.insert(0, later)

    def like(self, pieces: Mapping[str, nn.Module]) -> Carrier:
        """Make a head of other pieces, which ends where the network does."""
        return Carrier(pieces, frozenset(), begins=False, ends=True)

    def entry_module(self, *, by_name: bool) -> nn.Module:
        return self if by_name else next(iter(self.pieces().values()))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        known: dict[str, Any] = dict(named)
        if not self._begins and inputs:
            known[HIDDEN] = inputs[0]
        for i, (name, piece) in enumerate(self.pieces().items()):
            if i == 0 and self._begins:
                known, output = self._first(name, piece, inputs, named)
            else:
                output = _call(name, piece, self._reads[i], known)
            if self._ends and i + 1 == len(self._reads):
                return output
            needed = self.needed[i + 1]
            known |= _by_name(name, output)
            known = {key: x for key, x in known.items() if key == HIDDEN or needed is None or key in needed}
        # A hidden state that travels alone needs no name, so a plain head fits, and a plain stage may come next.
        return known if len(known) > 1 else known[HIDDEN]

    def _first(
        self, name: str, piece: nn.Module, inputs: Sequence[Tensor], named: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], Any]:
        """Run the network's first piece on the inputs that its forward takes; return all inputs by name, and its output."""
        # Inputs travel on under the names of the first forward's arguments, also those given by position:
        #
        #     forward(self, x, mask)      step(image, m)      known afterwards: x, mask, and what the piece returns
        later, signature = self.needed[1], inspect.signature(_unwrapped(piece).forward)
        own = {key: x for key, x in named.items() if self._reads[0].names is None or key in signature.parameters}
        if unknown := [key for key in named if key not in own and later is not None and key not in later]:
            raise TypeError(
                f"The network's inputs should be read by a piece. Found {', '.join(unknown)}, which none reads."
            )
        try:
            bound = signature.bind(*inputs, **own).arguments
        except TypeError as error:
            raise TypeError(
                f"{name!r} should get the inputs that its forward takes. Found otherwise: {error}."
            ) from error
        given = {key: x for key, x in bound.items() if signature.parameters[key].kind in (*_NAMED, *_FIRST)}
        return {**given, **named}, piece(*inputs, **own)


def carry(pieces: Mapping[str, nn.Module], at: Sequence[str]) -> list[Carrier]:
    """Cut pieces that read tensors by name into stages; a tensor crosses a boundary only if a later piece reads it.

    The argument ``hidden`` of a piece, or its first one if none has that name, is the output of the piece before it, as in
    `nn.Sequential`. The other arguments are read by name: inputs of the network, or entries of a dictionary that an earlier piece
    has returned. In such a dictionary ``hidden`` is the output. A piece with ``**others`` reads everything. The first piece
    takes the inputs of the network that it has arguments for; later ones may read the others.

    Args:
        pieces: modules by name, in the order they run.
        at: names of the modules at which a new stage begins.

    Returns:
        ``len(at) + 1`` stages. Their parameters have the names of the pieces.

    Raises:
        ValueError: unknown or unordered names in `at`, or a piece whose arguments have no names.

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
    if not isinstance(pieces, Mapping):
        raise TypeError(f"`pieces` should be a dictionary of modules by name. Found {type(pieces).__name__}.")
    if isinstance(at, str) or not isinstance(at, Sequence):
        raise TypeError(f"`at` should be a list of names of pieces. Found {at!r}.")
    stages: list[Carrier] = []
    # From the end: a stage passes on what any stage behind it reads.
    for k, group in reversed([*enumerate(group_pieces(dict(pieces), at))]):
        later = stages[0].needed[0] if stages else frozenset()
        stages.insert(0, Carrier(group, later, begins=k == 0, ends=not stages))
    return stages


def _unwrapped(piece: nn.Module) -> nn.Module:
    """Return the module whose forward has the arguments: inside compiled and checkpointed ones, and the first of a chain."""
    while True:
        if isinstance(piece, Chain):
            piece = next(iter(piece.pieces().values()))
        elif (inner := inner_module(piece)) is not piece:
            piece = inner
        else:
            return piece


def _reads(name: str, piece: nn.Module) -> _Reads:
    """Return the names that a piece reads, from the signature of its forward, whose arguments must have names."""
    #     forward(self, x)                 x is the hidden state
    #     forward(self, x, mask)           x is the hidden state; mask is read by name
    #     forward(self, mask, hidden)      hidden is given by name, too
    #     forward(self, x, **others)       every name is read
    signature = inspect.signature(_unwrapped(piece).forward)
    parameters = list(signature.parameters.values())
    names = [p.name for p in parameters if p.kind in _NAMED]
    first = parameters[0].name if parameters and parameters[0].kind in _FIRST else ""
    if not first and HIDDEN not in names:
        raise ValueError(
            f"The forward of {name!r} should name its arguments, or at least the first. Found "
            f"{signature}; write it without `*`."
        )
    by_position = first == HIDDEN or HIDDEN not in names
    slot = first if by_position else HIDDEN
    given = (p for p in parameters if p.name != slot and p.kind in (*_NAMED, *_FIRST))
    required = tuple(p.name for p in given if p.default is inspect.Parameter.empty)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return _Reads(by_position, None if takes_all else frozenset(names) - {slot}, required)


def _by_name(name: str, output: Any) -> dict[str, Tensor]:
    """Return the values that a piece writes, by name; an entry that is None is not there."""
    made = {HIDDEN: output} if isinstance(output, Tensor) else output
    if not isinstance(made, Mapping) or HIDDEN not in made:
        kind = f"names {', '.join(made)}" if isinstance(made, Mapping) else type(made).__name__
        raise TypeError(f"{name!r} should return a tensor, or a dictionary with {HIDDEN!r} in it. Found {kind}.")
    return {key: x for key, x in made.items() if x is not None}


def _call(name: str, piece: nn.Module, reads: _Reads, known: Mapping[str, Tensor]) -> Any:
    """Call a piece with the values that it reads."""
    given = {key: x for key, x in known.items() if key != HIDDEN and (reads.names is None or key in reads.names)}
    if missing := [key for key in reads.required if key not in given]:
        raise TypeError(
            f"{name!r} should read names of the network's inputs, or of tensors that earlier pieces return. Found "
            f"{', '.join(known)}: missing a required argument: {missing[0]!r}."
        )
    return piece(known[HIDDEN], **given) if reads.by_position else piece(**given, **{HIDDEN: known[HIDDEN]})
