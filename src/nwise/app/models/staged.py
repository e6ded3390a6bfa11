"""Networks as lists of stages with matching heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from nwise.network import Chain, group_pieces, join
from nwise.randomness import derive, seeded


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A network in stages with its heads, as every builder of `nwise.app.models` returns it.

    Args:
        stages: the main network; its parameters keep the names of the unsplit network, whatever the cut.
        heads: a head for every stage but the last.
        make_head: function that makes a new head behind the piece of that name, for other cuts.
    """

    stages: list[Chain]
    heads: list[nn.Module]
    make_head: Callable[[str], nn.Module]

    def whole(self) -> Chain:
        """Join the main network into one module, under the names that `nwise export` writes.

        >>> from nwise.app.models import mlp
        >>> sorted(mlp(2).whole().state_dict())[0]
        'blocks.0.1.bias'
        """
        return join(self.stages)


def build(
    pieces: Mapping[str, nn.Module], at: Sequence[str], make_head: Callable[[str], nn.Module], seed: int
) -> StagedModel:
    """Cut the pieces into stages, give every stage but the last its head, and set all initial values."""
    stages = [Chain(group) for group in group_pieces(pieces, at)]
    heads = [make_head(list(stage.pieces())[-1]) for stage in stages[:-1]]
    for name, piece in pieces.items():
        initialize(piece, seed, name)
    for k, head in enumerate(heads):
        initialize(head, seed, f"heads.{k}")
    return StagedModel(stages, heads, make_head)


def merged(model: StagedModel, counts: Sequence[int], seed: int) -> StagedModel:
    """Merge consecutive stages of a network, some number into each new one; it has the head of the last one merged into it.

    The initial values of the heads depend on the seed and on their new stages' numbers.

    >>> from nwise.app.models import mlp
    >>> [list(stage.pieces()) for stage in merged(mlp(3), [2, 1], 0).stages]
    [['blocks.0', 'blocks.1'], ['blocks.2', 'output']]
    """
    if sum(counts) != len(model.stages) or min(counts) < 1:
        raise ValueError(
            f"`cut` should have numbers of at least 1 whose sum is the network's {len(model.stages)} stages. Found "
            f"{tuple(counts)}."
        )
    ends = list(itertools.accumulate(counts))
    stages = [join(model.stages[start:end]) for start, end in itertools.pairwise([0, *ends])]
    heads = [model.heads[end - 1] for end in ends[:-1]]
    for k, head in enumerate(heads):
        initialize(head, seed, f"heads.{k}")
    return StagedModel(stages, heads, model.make_head)


def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Redraw the values of every submodule that has ``reset_parameters``, from the seed and its name alone.

    They are therefore equal for every cut and on every rank; `prefix` is the module's name in the unsplit network.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> initialize(a, 0, "x"); initialize(b, 0, "x")
    >>> bool((a.weight == b.weight).all())
    True
    """
    for name, child in module.named_modules(prefix=prefix):
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            with seeded(derive(seed, "initial", name)):
                reset()


def name_blocks(blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return ``{"blocks.0": ..., "blocks.1": ...}``."""
    return {f"blocks.{i}": block for i, block in enumerate(blocks)}
