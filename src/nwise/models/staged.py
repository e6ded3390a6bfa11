"""A network as a list of stages with fitting heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from nwise.models.chain import Chain
from nwise.models.split import cut
from nwise.randomness import derive, seeded


@dataclass(frozen=True, slots=True)
class StagedModel:
    """What every builder of `nwise.models` returns.

    Args:
        stages: the main network; parameter names are those of the unsplit network, whatever the cut.
        heads: one for every stage but the last.
        head_of: a new head that fits behind the piece of that name, for other cuts.
    """

    stages: list[Chain]
    heads: list[nn.Module]
    head_of: Callable[[str], nn.Module]

    def whole(self) -> Chain:
        """The main network as one module, under the names that `nwise export` writes.

        >>> from nwise.models import mlp
        >>> sorted(mlp(2).whole().state_dict())[0]
        'blocks.0.1.bias'
        """
        return Chain({name: piece for stage in self.stages for name, piece in stage.pieces().items()})


def build(
    pieces: Mapping[str, nn.Module], at: Sequence[str], head_of: Callable[[str], nn.Module], seed: int
) -> StagedModel:
    """Cut the pieces, give every stage but the last its head, and set all initial values."""
    stages = cut(pieces, at)
    heads = [head_of(list(stage.pieces())[-1]) for stage in stages[:-1]]
    for name, piece in pieces.items():
        initialize(piece, seed, name)
    for k, head in enumerate(heads):
        initialize(head, seed, f"heads.{k}")
    return StagedModel(stages, heads, head_of)


def merged(model: StagedModel, counts: Sequence[int], seed: int) -> StagedModel:
    """The same network in fewer stages, each of which is several of the model's own; its head is that of the last of them.

    Args:
        model: the network.
        counts: how many of its stages are in each new one.
        seed: of the heads' initial values, which are named after their new stages.

    >>> from nwise.models import mlp
    >>> [list(stage.pieces()) for stage in merged(mlp(3), [2, 1], 0).stages]
    [['blocks.0', 'blocks.1'], ['blocks.2', 'output']]
    """
    if sum(counts) != len(model.stages) or min(counts) < 1:
        raise ValueError(
            f"`cut` should have numbers of at least 1 whose sum is the network's {len(model.stages)} stages. Found "
            f"{tuple(counts)}."
        )
    ends = list(itertools.accumulate(counts))
    groups = [model.stages[end - count : end] for end, count in zip(ends, counts, strict=True)]
    stages = [Chain({name: piece for stage in group for name, piece in stage.pieces().items()}) for group in groups]
    heads = [model.heads[end - 1] for end in ends[:-1]]
    for k, head in enumerate(heads):
        initialize(head, seed, f"heads.{k}")
    return StagedModel(stages, heads, model.head_of)


def materialize(module: nn.Module, seed: int, prefix: str = "") -> nn.Module:
    """Give memory and initial values to a part of a network that was built without, under ``torch.device("meta")``.

    Args:
        module: a stage (a `Chain`, whose pieces have their own names) or a head.
        seed: of the model.
        prefix: name of the module in the unsplit network.
    """
    module.to_empty(device="cpu")
    for name, piece in module.pieces().items() if isinstance(module, Chain) else {prefix: module}.items():
        initialize(piece, seed, name)
    return module


def initialize(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Draw every module's values anew, from nothing but the seed and the module's name.

    So they are equal for every cut, and on every rank.

    Args:
        module: whose submodules' ``reset_parameters`` are called.
        seed: of the model.
        prefix: name of the module in the unsplit network.

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


def check_at_least(minimum: int, **values: int) -> None:
    """Refuse sizes that no network has."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"`{name}` should be an integer of at least {minimum}. Found {value!r}.")


def named(blocks: Iterable[nn.Module], name: str = "blocks") -> dict[str, nn.Module]:
    """``{"<name>.0": ..., "<name>.1": ...}``."""
    return {f"{name}.{i}": block for i, block in enumerate(blocks)}
