"""Cut a network into stages, by the names of modules or by a number; its parameters keep their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import has_hooks, is_compiled, uncompiled
from nwise.checks import warn
from nwise.network.chain import Chain, group_pieces
from nwise.network.comparison import refuse_difference
from nwise.network.outline import ancestors, outer_names, refuse_unknown, repeated_blocks, too_few_blocks
from nwise.network.route import Select, cut_route, follow, quiet
from nwise.network.section import Section, StageModule
from nwise.network.tied import refuse_tied
from nwise.tensors import Named, Tensors, as_tuple, invoke

_SEQUENCES = (nn.Sequential, Chain)  # by exact class: a class of their own may have another forward or order


def split(
    model: nn.Module,
    at: Sequence[str] | int,
    example: Any = None,
    *,
    output: str | int | None = None,
    check: bool = True,
) -> list[StageModule]:
    """Cut a network into stages that run its own forward, each calling only its own modules.

    The stages use the network's modules, so it is trained, saved and loaded as before. An `nn.Sequential` becomes chains of its
    modules and needs no example. Of any other network one run on the example shows what a stage must send: masks and positions
    are made by the network's own code, in every stage.

    Args:
        model: the network.
        at: names of the modules at which a new stage begins, e.g. ``["3", "6"]`` or ``["transformer.h.4"]``, in the order in
            which the network calls them; or the number of stages, which get numbers of repeated blocks as equal as possible.
        example: inputs of a small mini-batch, as for `Pipeline.step`: a tensor, or a tuple or dictionary of them. A dictionary
            may have other values, such as ``use_cache=False``, which are the same in every step.
        output: the entry of what the network returns that the last stage returns; default: ``"logits"`` if there is one, else
            the entries that are tensors.
        check: whether to compare outputs and gradients of the stages with the network's on the example. Default: True.

    Returns:
        ``len(at) + 1`` stages, or `at` of them.

    Raises:
        TypeError: `at` is neither names nor a number, or a network with a forward of its own has no example that fits.
        ValueError: unknown or unordered names, a module in two stages, a network on the device meta, or stages that do not
            compute what the network does.

    >>> [list(stage.pieces()) for stage in split(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), at=["2"])]
    [['0', '1'], ['2']]
    >>> layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    >>> [list(stage.pieces()) for stage in split(encoder, at=2, example=torch.zeros(2, 3, 4))]
    [['layers.0', 'layers.1'], ['layers.2', 'layers.3']]
    """
    named = isinstance(at, Sequence) and not isinstance(at, str) and all(isinstance(name, str) for name in at)
    if not named and (not isinstance(at, int) or isinstance(at, bool)):
        raise TypeError(
            f"`at` should be a list of module names, such as ['2', 'blocks.4'], or a number of stages. Found {at!r}."
        )
    if is_compiled(model):
        warn(
            "`model` is compiled, and its stages are not: they never call the compiled model. Compile parts of the stages with "
            "`nwise.compile_module`, or compile modules inside the model before you split it."
        )
    model = uncompiled(model)
    device = next((p.device for p in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if _is_sequence(model, at):
        if output is not None:
            raise ValueError(
                f"`output` should be None for a sequence, which returns what its last module does. Found {output!r}."
            )
        stages: Sequence[StageModule] = _chains(model, at)
        inputs: Tensors = () if example is None else as_tuple(example, "`example`")
        whole = partial(invoke, model, inputs)
    else:
        if example is None:
            raise TypeError(
                "`example` should be a small batch of inputs, because the network has a forward of its own: "
                f"`nwise.split(model, at={at!r}, example=x)`. Found none, and a {type(model).__name__}."
            )
        if device.type == "meta":
            raise ValueError(
                "The network should have values, because it runs on `example`. Found it on the device 'meta'; build it on a CPU."
            )
        given = bind(model, example)
        select = partial(selected, output)
        stages = _sections(model, at, given, select)
        inputs = Named({name: x for name, x in given.items() if isinstance(x, Tensor)})
        whole = partial(_run, model, given, select)
    refuse_tied(stages)
    if check and example is not None:
        refuse_difference(model, whole, stages, inputs, device)
    return list(stages)


def cut_points(model: nn.Module, example: Any) -> list[str]:
    """Return the names of the modules at which `split` can begin a stage, in order; only plain sequences are opened.

    >>> cut_points(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())), None)
    ['1.0', '1.1']
    """
    if _is_sequence(model, 1):
        return list(_unrolled(model, lambda _: True))[1:]
    route = follow(model, outer_names(model, repeated_blocks(model, 2)), bind(model, example))
    used = [name for call in route.calls.values() for name in call.uses]
    once = [call.module for call in route.calls.values() if used.count(call.module) == 1]
    return [name for name in once if name != route.order()[0]]


def bind(model: nn.Module, example: Any) -> dict[str, Any]:
    """Return the arguments of the network's forward by name.

    Raises:
        TypeError: the forward does not take them, or takes them without names.
    """
    signature = inspect.signature(model.forward)
    if isinstance(example, Mapping):
        # In the order of the signature, in which tensors come by position.
        given = {name: example[name] for name in [*signature.parameters, *example] if name in example}
    else:
        values = example if isinstance(example, tuple | list) else (example,)
        try:
            given = dict(signature.bind(*values).arguments)
        except TypeError as error:
            raise TypeError(
                f"`example` should have the inputs of the network's forward, {signature}. Found {error}."
            ) from error
        kinds = {signature.parameters[name].kind for name in given}
        if kinds - {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
            raise TypeError(
                f"`example` should be a dictionary if the network's forward, {signature}, takes inputs without names. Found a "
                f"{type(example).__name__}."
            )
    for name, x in given.items():
        if not isinstance(x, Tensor | str | int | float | bool | None):
            raise TypeError(
                "`example` should have tensors, and plain values that are the same in every step. Found a "
                f"{type(x).__name__} for {name!r}."
            )
    if not any(isinstance(x, Tensor) for x in given.values()):
        raise TypeError("`example` should have at least one tensor. Found none.")
    return given


def _is_sequence(model: nn.Module, at: Sequence[str] | int) -> bool:
    """Return whether a network, and every module that a cut goes through, is a plain sequence of modules."""
    known = dict(model.named_modules(remove_duplicate=False))
    paths = {""} if isinstance(at, int) else ancestors(at) & known.keys()
    return all(_is_plain(known[path]) for path in paths)


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a sequence of torch's or ours, and nothing on the module itself changes what it computes."""
    return type(module) in _SEQUENCES and "forward" not in vars(module) and not has_hooks(module)


def _chains(model: nn.Module, at: Sequence[str] | int) -> list[Chain]:
    """Cut a sequence, and sequences inside it, into chains of its modules."""
    if isinstance(at, int):
        at = _spread(repeated_blocks(model, at), at)
    refuse_unknown(at, dict(model.named_modules(remove_duplicate=False)))
    opened = ancestors(at)
    return [Chain(group) for group in group_pieces(_unrolled(model, lambda path: path in opened), at)]


def _unrolled(module: nn.Module, opens: Callable[[str], bool], prefix: str = "") -> dict[str, nn.Module]:
    """Return the modules of a sequence; `opens` says which plain sequences inside it give way to their own modules."""
    pieces: dict[str, nn.Module] = {}
    for name, child in _children_of(module).items():
        path = f"{prefix}{name}"
        if _is_plain(child) and opens(path):
            pieces.update(_unrolled(child, opens, f"{path}."))
        else:
            pieces[path] = child
    return pieces


def _children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a sequence by name, a module in two places under both."""
    if isinstance(module, Chain):
        return module.pieces()
    return {name: child for name, child in module._modules.items() if child is not None}


def _sections(model: nn.Module, at: Sequence[str] | int, given: Mapping[str, Any], select: Select) -> list[Section]:
    """Cut a network by its route on an example."""
    blocks = repeated_blocks(model, at) if isinstance(at, int) else list(at)
    refuse_unknown(blocks, dict(model.named_modules(remove_duplicate=False)))
    with quiet(model):
        model(**given)  # what the network itself refuses has nothing to do with stages
    try:
        route = follow(model, outer_names(model, blocks), given, select)
        if isinstance(at, int):
            blocks = _spread([name for name in route.order() if name in blocks], at)
        cut = cut_route(route, route.starts(blocks))
        return [Section(model, cut, k, select) for k in range(len(blocks) + 1)]
    except (AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError) as error:
        raise ValueError(
            f"The network's forward should do nothing with its modules but call them. Found {type(error).__name__}: {error}"
        ) from error


def _run(model: nn.Module, given: Mapping[str, Any], select: Select) -> Any:
    return select(model(**given))


def _spread(blocks: Sequence[str], number: int) -> list[str]:
    """Return the first block of each later stage, for numbers of blocks that differ by at most one.

    >>> _spread(["a", "b", "c", "d", "e", "f", "g"], 3)
    ['c', 'e']
    """
    if len(blocks) < number:
        raise too_few_blocks(len(blocks), number)
    return [blocks[k * len(blocks) // number] for k in range(1, number)]


def selected(name: str | int | None, output: Any) -> Any:
    """Return an entry of what a network returns; without a name its logits if it has any, else all its tensors."""
    if name is None and not isinstance(output, Tensor):
        name = "logits" if hasattr(output, "logits") or (isinstance(output, Mapping) and "logits" in output) else None
    if name is not None:
        try:
            entries: Any = output
            return entries[name] if isinstance(output, Mapping | tuple | list) else getattr(output, str(name))
        except (AttributeError, LookupError, TypeError) as error:
            kind = f"{type(output).__name__} of {', '.join(output) if isinstance(output, Mapping) else 'other entries'}"
            raise ValueError(
                f"`output` should be an entry of what the network returns. Found {name!r}, and a {kind}."
            ) from error
    if isinstance(output, Mapping):
        return {key: x for key, x in output.items() if isinstance(x, Tensor)}
    if isinstance(output, tuple | list):
        tensors = tuple(x for x in output if isinstance(x, Tensor))
        return tensors[0] if len(tensors) == 1 else tensors
    return output
