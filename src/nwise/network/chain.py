"""A chain of modules under the names that they have in a network: a stage of a sequence, or one made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from nwise.network.outline import ancestors, refuse_unknown, size_of


class Chain(nn.Module):
    """Named pieces run one after the other; a dotted name becomes nested modules.

    ``Chain({"blocks.3": block})`` has the parameters ``blocks.3.<...>`` of the network that the block comes from, so the
    state dicts of all stages add up to the network's own. Items of a tuple or dictionary are arguments of the next piece, as
    between stages.

    Args:
        pieces: modules by name, in the order they run.

    >>> list(Chain({"blocks.3": nn.Linear(2, 2, bias=False)}).state_dict())
    ['blocks.3.weight']
    """

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not pieces:
            raise ValueError("`pieces` should name at least one module. Found none.")
        self._paths = {name: name.split(".") for name in pieces}
        for name, piece in pieces.items():
            if hasattr(self, name.split(".")[0]) and name.split(".")[0] not in self._modules:
                raise ValueError(f"A piece should not have the name of a method. Found {name!r}; rename it.")
            path, _, last = name.rpartition(".")
            inside(self, path).add_module(last, piece)

    def pieces(self) -> dict[str, nn.Module]:
        """Return the pieces by name, in order."""
        return {name: self._piece(path) for name, path in self._paths.items()}

    def entry_module(self) -> nn.Module:
        """Return the module whose signature tells which inputs the chain takes: its first piece."""
        return next(iter(self.pieces().values()))

    def _piece(self, path: Sequence[str]) -> nn.Module:
        module: nn.Module = self
        for part in path:  # `get_submodule` takes five times as long
            module = module._modules[part]  # type: ignore[assignment]
        return module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        # What a piece returns are the arguments of the next:
        #
        #     y         piece(y)
        #     (y, z)    piece(y, z)
        #     {"a": y}  piece(a=y)
        output: Any = inputs
        for path in self._paths.values():
            output = self._piece(path)(*inputs, **named)
            by_name = isinstance(output, Mapping)
            inputs = () if by_name else tuple(output) if isinstance(output, tuple | list) else (output,)
            named = dict(output) if by_name else {}
        return output


def inside(owner: nn.Module, path: str) -> nn.Module:
    """Return the module with a dotted name, and make it of empty modules where there is none; "" is the owner."""
    for part in path.split(".") if path else ():
        if part not in owner._modules:
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    return owner


def join(chains: Iterable[Chain]) -> Chain:
    """Make one chain of the pieces of several."""
    return Chain({name: piece for chain in chains for name, piece in chain.pieces().items()})


def most_common(pieces: Mapping[str, nn.Module]) -> list[str]:
    """Return the repeated blocks: the pieces of the most common class that has parameters, of equally many the largest."""
    groups: dict[type, list[str]] = {}
    for name, piece in pieces.items():
        groups.setdefault(type(piece), []).append(name)
    sizes = {kind: sum(size_of(pieces[name]) for name in names) for kind, names in groups.items()}
    kind = max(groups, key=lambda kind: (sizes[kind] > 0, len(groups[kind]), sizes[kind]))
    return groups[kind]


def group_pieces(pieces: Mapping[str, nn.Module], at: Sequence[str]) -> list[dict[str, nn.Module]]:
    """Group the pieces by stage; a stage begins at every name in `at`, or at the first piece inside that module.

    Raises:
        ValueError: unknown or unordered names.
    """
    names = list(pieces)
    refuse_unknown(at, [*names, *ancestors(names)])
    found = [next(i for i, name in enumerate(names) if f"{name}.".startswith(f"{begin}.")) for begin in at]
    starts = [0, *found]
    # The starts rise unless a name comes twice or too early, or is the first.
    if sorted(set(starts)) != starts:
        raise ValueError(
            "`at` should name modules in the order they run, each once and not the first, which always begins a stage. "
            f"Found {list(at)}."
        )
    ends = [*found, len(names)]
    return [{name: pieces[name] for name in names[a:b]} for a, b in zip(starts, ends, strict=True)]
