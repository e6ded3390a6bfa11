"""Cutting one network into stages without renaming its parameters."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nwise._compiled import is_compiled
from nwise._errors import hint
from nwise._modes import evaluating
from nwise.microbatch import Tensors, as_tuple
from nwise.models.chain import Chain


def cut(pieces: Mapping[str, nn.Module], at: Sequence[str]) -> list[Chain]:
    """Stages from pieces: a new one begins at every name of `at`."""
    return [Chain(group) for group in groups_of(pieces, at)]


def groups_of(pieces: Mapping[str, nn.Module], at: Sequence[str]) -> list[dict[str, nn.Module]]:
    """The pieces of every stage."""
    names = list(pieces)
    for name in at:
        if name not in pieces:
            alike = [other for other in names if other.endswith("." + name)]
            meant = f" Did you mean {alike[0]!r}?" if alike else hint(name, names)
            raise ValueError(f"`at` should name pieces of the network: {', '.join(names)}. Found {name!r}.{meant}")
    starts = [0, *(names.index(name) for name in at)]
    if sorted(set(starts)) != starts:
        raise ValueError(
            "`at` should name pieces in the order they run, each once and not the first, where the first stage begins "
            f"anyway. Found {list(at)}."
        )
    ends = [*starts[1:], len(names)]
    return [{name: pieces[name] for name in names[a:b]} for a, b in zip(starts, ends, strict=True)]


def blocks_of(pieces: Mapping[str, nn.Module]) -> list[str]:
    """Names of the pieces of the commonest class, which are what a deep network is deep of."""
    [(kind, _)] = Counter(map(type, pieces.values())).most_common(1)
    return [name for name, piece in pieces.items() if type(piece) is kind]


def split(model: nn.Module, at: Sequence[str] | int, *, example: Tensor | Tensors | None = None) -> list[Chain]:
    """Stages of an `nn.Sequential`, of a module whose children run in order, or of a network of Hugging Face.

    Nothing is traced. Of a plain module the children, lists of blocks unrolled, are run in the order they were
    registered; of a network of Hugging Face (GPT-2, Llama and its like, BERT, ViT, ResNet; `nwise.models.huggingface.FAMILIES`)
    as its own forward runs them, attention masks and position ids travelling along.

    Args:
        model: the network; its modules are used, not copied.
        at: names of the modules at which a new stage begins, such as ``["3", "6"]`` or ``["transformer.h.4"]``; or how
            many stages, with as equal numbers of blocks as possible, the blocks being the pieces of the commonest class.
        example: an input, or a tuple of them, on which the stages are run once, without gradient and in evaluation mode,
            and compared with the model; give it for a module with a ``forward`` of its own. Without it such a module is
            split with a warning.

    Returns:
        Stages whose parameters keep the names they have in `model`: ``len(at) + 1``, or `at` of them.

    Raises:
        ValueError: unknown or unordered names, parameters of the model outside its children, or in two stages (tied),
            or stages that do not compute what the model does.

    >>> [list(stage.pieces()) for stage in split(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), at=["2"])]
    [['0', '1'], ['2']]
    >>> len(split(nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))), at=4))
    4
    """
    named = isinstance(at, Sequence) and not isinstance(at, str) and all(isinstance(name, str) for name in at)
    counted = isinstance(at, int) and not isinstance(at, bool)
    if not named and not counted:
        raise TypeError(
            f"`at` should be a list of module names, such as ['2', 'blocks.4'], or a number of stages. Found {at!r}."
        )
    compiled = is_compiled(model)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if compiled:
        warnings.warn(
            "`model` is compiled, and its stages are not, since its own call is not used. Compile their parts by "
            "`nwise.compile_module`, or modules inside the model before it is split.",
            stacklevel=2,
        )
    names = [] if isinstance(at, int) else at
    pieces = _pieces(model, names)
    groups = groups_of(pieces, _evenly(pieces, at) if isinstance(at, int) else at)
    stages = _hub().passages(model, groups) if _of_hub(model) else [Chain(group) for group in groups]
    kept = {name for stage in stages for name in stage.state_dict()}
    lost = sorted(set(model.state_dict()) - kept)
    if lost:
        raise ValueError(
            f"`model` should keep its parameters and buffers in its child modules. Found {lost[0]!r} outside of them; "
            "move it into a module of its own."
        )
    _refuse_tied(stages)
    if example is not None:
        _compare(model, stages, as_tuple(example, "`example`"))
    elif not _of_hub(model):
        _warn_of_own_forward(model, names)
    return stages


def untie(model: nn.Module) -> list[str]:
    """Give every parameter that is in two places, such as GPT-2's embedding and output, a copy for each; in place.

    With losses on several stages a tied value would have several credits, and on two devices two values. A network of
    Hugging Face is told so in its configuration too, so that it is saved and loaded untied.

    Args:
        model: the network.

    Returns:
        Names of the parameters that are new.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> b.weight = a.weight
    >>> untie(nn.Sequential(a, b))
    ['1.weight']
    """
    new: list[str] = []
    _copy_second_places(model, "", set(), new)
    for part in model.modules():
        if new and _of_hub(part):
            part.config.tie_word_embeddings = False  # type: ignore[union-attr]
            setattr(part, "all_tied_weights_keys", {})  # noqa: B010 - what save_pretrained leaves out
    return new


def _copy_second_places(module: nn.Module, path: str, seen: set[int], new: list[str]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) in seen:
            parameter = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(module, name, parameter)
            new.append(path + name)
        seen.add(id(parameter))
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if id(child) in seen and child.state_dict():
            child = copy.deepcopy(child)
            module._modules[name] = child
            new.extend(f"{path}{name}.{inner}" for inner in child.state_dict())
        seen.add(id(child))
        _copy_second_places(child, f"{path}{name}.", seen, new)


def _hub() -> Any:
    from nwise.models import huggingface

    return huggingface


def _of_hub(model: nn.Module) -> bool:
    """Whether the network is one of transformers, without importing what only such a network needs."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _pieces(model: nn.Module, at: Sequence[str]) -> dict[str, nn.Module]:
    if _of_hub(model):
        return _hub().family_of(model).pieces_of(model)
    pieces = _unrolled(model, {name.rpartition(".")[0] for name in at})
    if not pieces:
        raise ValueError(
            "`model` should be an nn.Sequential or have child modules that run in order. Found no children."
        )
    return pieces


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


def _warn_of_own_forward(model: nn.Module, at: Sequence[str]) -> None:
    """Warn of modules that do not plainly run their children, and whose children are run all the same."""
    opened = {name.rpartition(".")[0] for name in at}
    parts = {path for name in opened for path in _paths(name)}
    for path in ["", *sorted(parts)]:
        module = model.get_submodule(path)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward not in _RUNS_CHILDREN:
            what = f"{path!r}, a {type(module).__name__}," if path else f"`model`, a {type(module).__name__},"
            warnings.warn(
                f"{what} has a forward of its own, and its children are run in the order they were registered instead: sums, "
                "reshapes and functions of that forward would be lost. Give `example=`, an input, to have the stages compared "
                "with the model, or write the stages as modules of your own.",
                stacklevel=3,
            )
            return


def _paths(name: str) -> list[str]:
    """A dotted name and those of the modules around it."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1) if parts[0]]


def _evenly(pieces: Mapping[str, nn.Module], num_stages: int) -> list[str]:
    """Where stages begin that have as equal numbers of blocks as possible, the later ones one more."""
    blocks = blocks_of(pieces)
    if not 1 <= num_stages <= len(blocks):
        raise ValueError(
            f"`at` should be from 1 to the network's {len(blocks)} {type(pieces[blocks[0]]).__name__} modules, or name the "
            f"modules at which stages begin. Found {num_stages}."
        )
    return [blocks[k * len(blocks) // num_stages] for k in range(1, num_stages)]


def _refuse_tied(stages: Sequence[Chain]) -> None:
    places: dict[int, tuple[int, str]] = {}
    for k, stage in enumerate(stages):
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            first, other = places.setdefault(id(tensor), (k, name))
            if first != k:
                raise ValueError(
                    f"Every parameter and buffer should belong to one stage. Found that {name!r} of stage {k} is {other!r} of "
                    f"stage {first} (tied): with losses on several stages it would have several credits, and on two devices two "
                    "values. `nwise.untie(model)` gives each a copy of its own."
                )


def _compare(model: nn.Module, stages: Sequence[nn.Module], example: Tensors) -> None:
    rule = _AS_THE_MODEL if _of_hub(model) else _ORDER
    try:
        with evaluating(model, *stages):
            given = tuple(x.clone() for x in example)
            output = _hub().outputs_of(model, given) if _of_hub(model) else model(*given)
            expected = as_tuple(output, "The output of `model`")
            found = tuple(x.clone() for x in example)
            for stage in stages:
                found = as_tuple(stage(*found), "The output of a stage")
    except Exception as error:
        raise ValueError(f"{rule} Found that they cannot: {error}") from error
    try:
        torch.testing.assert_close(found, expected)  # by as much as numbers of their type round
    except AssertionError as error:
        raise ValueError(f"{rule} Found another output for `example`: {error}") from error


_RUNS_CHILDREN = (nn.Sequential.forward, Chain.forward)
_ORDER = (
    "The children of `model`, run in the order they were registered, should compute what the model does; otherwise "
    "write the stages as modules of your own."
)
_AS_THE_MODEL = (
    "The stages should compute what the model's own forward does with its configuration; otherwise write them as modules of "
    "your own."
)
