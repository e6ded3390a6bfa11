"""A chain of a network's pieces, under the names that they have in the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from nwise.batchnorm import DeferredBatchNorm
from nwise.checks import hint

if TYPE_CHECKING:
    from nwise.network.origin import Origin


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

    input_names: Sequence[str] = ()  # of those that come by position, if they have names

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not pieces:
            raise ValueError("`pieces` should name at least one module. Found none.")
        self._paths = {name: name.split(".") for name in pieces}
        self.origin: Origin | None = None  # set by `nwise.split`
        for name, piece in pieces.items():
            if hasattr(self, name.split(".")[0]) and name.split(".")[0] not in self._modules:
                raise ValueError(f"A piece should not have the name of a method. Found {name!r}; rename it.")
            self.place(name, piece)

    def place(self, name: str, module: nn.Module) -> None:
        """Register a module under a dotted name."""
        *path, last = name.split(".")
        parent: nn.Module = self
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, module)

    def pieces(self) -> dict[str, nn.Module]:
        """Return the pieces by name, in order."""
        return {name: self._piece(path) for name, path in self._paths.items()}

    def places(self) -> list[str]:
        """Return the names of all modules that the chain has taken from a network."""
        return list(self._paths)

    def _piece(self, path: Sequence[str]) -> nn.Module:
        module: nn.Module = self
        for part in path:  # `get_submodule` takes five times as long
            module = module._modules[part]  # type: ignore[assignment]
        return module

    def like(self, pieces: Mapping[str, nn.Module]) -> Chain:
        """Make a chain of other pieces that runs them as this one does."""
        return Chain(pieces)

    def entry_module(self, *, by_name: bool) -> nn.Module:
        """Return the module whose signature tells which inputs the chain takes: its first piece, or itself."""
        own = type(self).forward is not Chain.forward
        return self if own else next(iter(self.pieces().values()))

    def check_origin(self) -> None:
        """Raise ValueError if the network that the chain was cut from has changed around its pieces."""
        if self.origin is not None and not torch.compiler.is_compiling():
            self.origin.check()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast everything; see to the buffers that would come out of it with meaningless values."""
        # From "meta" to a device: parameters come from a file later, these buffers from nowhere.
        if emptied := emptied_buffers(self, fn):
            self.restore_later(emptied)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def restore_later(self, buffers: Sequence[str]) -> None:
        """Prepare to compute buffers again that are not in the state dict, or raise ValueError."""
        refuse_buffers(buffers)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without the network: a copy has pieces of its own."""
        return {**super().__getstate__(), "origin": None}  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.check_origin()
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


def join(chains: Iterable[Chain]) -> Chain:
    """Make one chain of the pieces of several."""
    return Chain({name: piece for chain in chains for name, piece in chain.pieces().items()})


def repeated_blocks(pieces: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the repeated blocks: the pieces of the most common class."""
    [(kind, _)] = Counter(map(type, pieces.values())).most_common(1)
    return [name for name, piece in pieces.items() if type(piece) is kind]


def group_pieces(pieces: Mapping[str, nn.Module], at: Sequence[str]) -> list[dict[str, nn.Module]]:
    """Group the pieces by stage; a stage begins at every name in `at`."""
    names = list(pieces)
    for name in at:
        if name not in pieces:
            longer = [other for other in names if other.endswith("." + name)]
            suggestion = f" Did you mean {longer[0]!r}?" if longer else hint(name, names)
            raise ValueError(f"`at` should name pieces of the network: {', '.join(names)}. Found {name!r}.{suggestion}")
    starts = [0, *(names.index(name) for name in at)]
    # The starts rise unless a name comes twice or too early, or is the first.
    if sorted(set(starts)) != starts:
        raise ValueError(
            "`at` should name pieces in the order they run, each once and not the first, which always begins a stage. "
            f"Found {list(at)}."
        )
    ends = [*starts[1:], len(names)]
    return [{name: pieces[name] for name in names[a:b]} for a, b in zip(starts, ends, strict=True)]


# Buffers outside the state dict, such as the frequencies of rotary positions, have values that no file brings back. A network
# built on the device "meta" has no values: `to_empty` gives it memory, and a file its parameters. These buffers would keep what
# happened to be in that memory.


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not in the state dict, by name.

    >>> module = nn.Module()
    >>> module.register_buffer("steps", Tensor(3), persistent=False)
    >>> list(unsaved_buffers(module))
    ['steps']
    """
    # By the state dict, not by torch's list of such buffers: a module may leave out others by a hook.
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name not in saved}


def emptied_buffers(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> list[str]:
    """Return the names of buffers without values that a function, such as that of `to_empty`, would give meaningless ones."""
    return [
        name
        for name, buffer in unsaved_buffers(module).items()
        if buffer.is_meta
        # Every step sets those of a `DeferredBatchNorm` to zero before it reads them.
        and not isinstance(module.get_submodule(name.rpartition(".")[0]), DeferredBatchNorm)
        and not fn(buffer).is_meta
    ]


def refuse_buffers(names: Iterable[str]) -> None:
    """Raise ValueError if there is a buffer that `to_empty` would leave without a meaning."""
    for name in names:
        raise ValueError(
            "Buffers outside the state dict should have values before the network leaves the device 'meta', because no file "
            f"brings them back. Found {name!r} without; build the network on a CPU, or register the buffer as persistent."
        )
