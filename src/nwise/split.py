"""Cutting one network into stages without renaming its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nwise.microbatch import Tensors, as_tuple


class Chain(nn.Module):
    """Named pieces run one after the other; a dotted name becomes nested modules.

    So ``Chain({"blocks.3": block})`` has the parameters ``blocks.3.<...>``, those of the network the
    block was taken from, and the state dicts of all stages add up to the network's own.

    A piece that returns a tuple gives the next one its items as arguments, as stages do.

    Args:
        pieces: modules by name, in the order they run.

    >>> list(Chain({"blocks.3": nn.Linear(2, 2, bias=False)}).state_dict())
    ['blocks.3.weight']
    """

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not pieces:
            raise ValueError("`pieces` should name at least one module. Found none.")
        self._names = tuple(pieces)
        for name, piece in pieces.items():
            if hasattr(self, name.split(".")[0]) and name.split(".")[0] not in self._modules:
                raise ValueError(f"A piece should not have the name of a method. Found {name!r}; rename it.")
            *path, last = name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(last, piece)

    def pieces(self) -> dict[str, nn.Module]:
        """The pieces by name, in order."""
        return {name: self.get_submodule(name) for name in self._names}

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        output: Tensor | Tensors = inputs
        for name in self._names:
            output = self.get_submodule(name)(*inputs)
            inputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        return output


def cut(pieces: Mapping[str, nn.Module], at: Sequence[str]) -> list[Chain]:
    """Stages from pieces: a new one begins at every name of `at`."""
    names = list(pieces)
    for name in at:
        if name not in pieces:
            raise ValueError(f"`at` should name pieces of the network: {', '.join(names)}. Found {name!r}.")
    starts = [0, *(names.index(name) for name in at)]
    if sorted(set(starts)) != starts:
        raise ValueError(
            "`at` should name pieces in the order they run, each once and not the first, where the first stage begins "
            f"anyway. Found {list(at)}."
        )
    ends = [*starts[1:], len(names)]
    return [Chain({name: pieces[name] for name in names[a:b]}) for a, b in zip(starts, ends, strict=True)]


def split(model: nn.Module, at: Sequence[str], *, example: Tensor | Tensors | None = None) -> list[Chain]:
    """Stages of an `nn.Sequential`, or of a module whose children, lists of blocks unrolled, run in order.

    Args:
        model: the network; its modules are used, not copied.
        at: names of the modules at which a new stage begins, such as ``["3", "6"]`` or ``["blocks.4"]``.
        example: an input on which the stages are run once, without gradient and in evaluation mode,
            and compared with the model; give it for a module whose ``forward`` is not plainly its
            children in order.

    Returns:
        ``len(at) + 1`` stages whose parameters keep the names they have in `model`.

    Raises:
        ValueError: unknown or unordered names, parameters of the model outside its children, or
            stages that do not compute what the model does.

    >>> [list(stage.pieces()) for stage in split(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), at=["2"])]
    [['0', '1'], ['2']]
    """
    if isinstance(at, str) or not isinstance(at, Sequence) or not all(isinstance(name, str) for name in at):
        raise TypeError(f"`at` should be a list of module names, such as ['2', 'blocks.4']. Found {at!r}.")
    pieces = _unrolled(model, {name.rpartition(".")[0] for name in at})
    if not pieces:
        raise ValueError(
            "`model` should be an nn.Sequential or have child modules that run in order. Found no children."
        )
    stages = cut(pieces, at)
    kept = {name for stage in stages for name in stage.state_dict()}
    lost = sorted(set(model.state_dict()) - kept)
    if lost:
        raise ValueError(
            f"`model` should keep its parameters and buffers in its child modules. Found {lost[0]!r} outside of them; "
            "move it into a module of its own."
        )
    if example is not None:
        _compare(model, stages, as_tuple(example, "`example`"))
    return stages


def _unrolled(model: nn.Module, opened: set[str], prefix: str = "") -> dict[str, nn.Module]:
    """Children in order; lists, and the sequences that a cut goes through, are replaced by theirs."""
    pieces: dict[str, nn.Module] = {}
    for name, child in model._modules.items():  # named_children() leaves out a module's second place
        if child is None:
            continue
        path = prefix + name
        inside = any(path == parent or parent.startswith(path + ".") for parent in opened)
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or (isinstance(child, nn.Sequential | Chain) and inside):
            pieces.update(_unrolled(child, opened, path + "."))
        else:
            pieces[path] = child
    return pieces


def _compare(model: nn.Module, stages: Sequence[nn.Module], example: Tensors) -> None:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            expected = as_tuple(model(*(x.clone() for x in example)), "The output of `model`")
            found = tuple(x.clone() for x in example)
            for stage in stages:
                found = as_tuple(stage(*found), "The output of a stage")
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{_ORDER} Found that they cannot: {error}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if len(expected) != len(found) or not all(
        a.shape == b.shape and torch.allclose(a, b) for a, b in zip(expected, found, strict=True)
    ):
        raise ValueError(f"{_ORDER} Found another output for `example`.")


_ORDER = (
    "The children of `model`, run in the order they were registered, should compute what the model does; otherwise "
    "write the stages as modules of your own."
)
