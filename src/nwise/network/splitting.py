"""Cut a network into stages without renaming its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

from torch import Tensor, nn

from nwise._torch import is_compiled, uncompiled
from nwise.checks import hint, warn
from nwise.network.chain import Chain, group_pieces, repeated_blocks
from nwise.network.comparison import refuse_difference
from nwise.network.families import family_for, run_model
from nwise.network.huggingface import changes_itself, hf_stages, is_hugging_face
from nwise.network.origin import Origin
from nwise.network.tied import refuse_tied
from nwise.tensors import Input, Tensors, as_tuple, invoke

# Methods by which a forward runs the children: that of a sequence, and that of a module around a list.
_YIELDS = (("__call__", "__iter__"), ("__iter__", "__getitem__", "children", "named_children", "values", "items"))
_LIBRARIES = ("torch.", "transformers.")
_RUNS_CHILDREN = (nn.Sequential.forward, Chain.forward)
_RULE = (
    "The children of `model`, run in the order they were registered, should compute what the model does; otherwise "
    "give the functions between them by `before=`, or write the stages yourself."
)
_HF_RULE = (
    "The stages should compute what the model's own forward does with its configuration; otherwise write them yourself."
)


class Function(nn.Module):
    """A function that a network's forward calls between two modules, on the output of the first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self._function(*inputs, **named)


def split(
    model: nn.Module,
    at: Sequence[str] | int,
    *,
    example: Input | Tensors | None = None,
    before: Mapping[str, Callable[..., Any]] | None = None,
    unchecked: bool = False,
) -> list[Chain]:
    """Split an `nn.Sequential`, a module whose children run in order, or a Hugging Face network into stages.

    Nothing is traced. The children of a plain module run in the order they were registered; lists of blocks are unrolled. The
    modules of a Hugging Face network (GPT-2, Llama, BERT, T5, ViT, ...; `nwise.network.families.FAMILIES`) run as in its own
    forward, and attention masks and position ids travel along.

    Args:
        model: the network; the stages use its modules and do not copy them.
        at: names of the modules at which a new stage begins, e.g. ``["3", "6"]`` or ``["transformer.h.4"]``; or the number of
            stages, which get numbers of repeated blocks (pieces of the most common class) as equal as possible. Sequences are
            opened if there are too few blocks outside of them.
        example: an input, or a tuple or dictionary of them, to compare the stages with the model on, without gradients, in eval
            mode and, with one seed, in training mode. A module with a custom ``forward`` needs it.
        before: functions without parameters that a custom ``forward`` calls between its modules, by the name of the module that
            follows, such as ``{"fc": nn.Flatten()}`` for torchvision's networks.
        unchecked: whether to cut a module with a custom ``forward`` without an example. Default: False.

    Returns:
        ``len(at) + 1`` stages, or `at` of them; parameters keep the names that they have in `model`.

    Raises:
        ValueError: unknown or unordered names, parameters of the model outside its children or in two stages (tied),
            a custom ``forward`` without an example, a setting of a Hugging Face model that stages cannot follow, or stages that
            do not compute what the model does.

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
    if hasattr(model, "get_base_model"):
        raise ValueError(
            "`model` should be the network inside a PEFT model, `model.get_base_model()`, which has the adapters, but not what "
            f"PEFT adds around it: the prompts of prompt learning, the loss of AdaLora. Found {type(model).__name__}."
        )
    if is_compiled(model):
        warn(
            "`model` is compiled, and its stages are not: they never call the compiled model. Compile parts of the stages with "
            "`nwise.compile_module`, or compile modules inside the model before you split it."
        )
    model = uncompiled(model)
    names = even_starts(model, at, before) if isinstance(at, int) else at
    pieces = _pieces(model, lambda path, _: any(name.startswith(path + ".") for name in names), before)
    groups = group_pieces(pieces, names)
    stages = (
        hf_stages(model, family_for(model), groups) if is_hugging_face(model) else [Chain(group) for group in groups]
    )
    # Every name of the network should be that of a stage, because no stage trains a parameter beside the children.
    if lost := sorted(set(model.state_dict()) - {name for stage in stages for name in stage.state_dict()}):
        raise ValueError(
            f"`model` should keep its parameters and buffers in its child modules. Found {lost[0]!r} outside of them; "
            "move it into a child module."
        )
    refuse_tied(stages)
    own = dict(model.named_modules(remove_duplicate=False))  # without the functions of `before`
    for stage in stages:
        places = {name: own[name] for name in stage.places() if name in own}
        copied = [name for name, module in places.items() if stage.get_submodule(name) is not module]
        stage.origin = Origin(model, places, [name for name in copied if not changes_itself(own[name])])
        stage.check_origin()
    if example is not None:
        rule, run = (_HF_RULE, run_model) if is_hugging_face(model) else (_RULE, invoke)
        refuse_difference(rule, model, run, stages, as_tuple(example, "`example`"))
    if not unchecked:
        _refuse_custom(model, pieces, compared=example is not None)
    return stages


def cut_points(model: nn.Module, before: Mapping[str, Callable[..., Any]] | None = None) -> list[str]:
    """Return the names of all modules at which `split` can begin a stage.

    >>> cut_points(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh())))
    ['1.0', '1.1']
    """
    return list(_pieces(model, lambda _, child: type(child).forward in _RUNS_CHILDREN, before))[1:]


def even_starts(model: nn.Module, num_stages: int, before: Mapping[str, Callable[..., Any]] | None = None) -> list[str]:
    """Name the first piece of each later stage, for numbers of blocks that differ by at most one."""
    blocks: list[str] = []
    pieces: dict[str, nn.Module] = {}
    # Open sequences, the outer ones first, until there are enough blocks. A stem, blocks a to e, a classifier:
    #
    #     depth 0    stem | features | fc              one block of each class
    #     depth 1    stem | a | b | c | d | e | fc     five of one class
    for depth in count():
        before_that = pieces
        pieces = _pieces(model, partial(_is_sequence_above, depth), before)
        if len(found := repeated_blocks(pieces)) > len(blocks):
            blocks = found
            kind = type(pieces[found[0]]).__name__
        if num_stages <= len(blocks) or pieces.keys() == before_that.keys():
            break
    if not 1 <= num_stages <= len(blocks):
        raise ValueError(
            f"`at` should be from 1 to the network's {len(blocks)} {kind} modules, or name the modules at which stages begin. "
            f"Found {num_stages}."
        )
    # Seven blocks in three stages begin at 0, 2 and 4: of 2, 2 and 3 blocks.
    return [blocks[k * len(blocks) // num_stages] for k in range(1, num_stages)]


def _pieces(
    model: nn.Module, opens: Callable[[str, nn.Module], bool], before: Mapping[str, Callable[..., Any]] | None
) -> dict[str, nn.Module]:
    """Return the pieces of a network; `opens` tells from the name of a sequence and itself whether a cut goes through it."""
    if is_hugging_face(model):
        if before:
            raise ValueError(
                "`before` should be left out for a Hugging Face model, which knows its functions. Found some."
            )
        return family_for(model).ordered_pieces(model)
    pieces = _unroll(model, opens)
    if not pieces:
        raise ValueError(
            "`model` should be an nn.Sequential or have child modules that run in order. Found no children."
        )
    return _with_functions(pieces, before or {})


def _with_functions(
    pieces: Mapping[str, nn.Module], functions: Mapping[str, Callable[..., Any]]
) -> dict[str, nn.Module]:
    """Insert functions as pieces; that of ``head.fc`` is ``head.before_fc``."""
    # A function before a sequence that is cut goes before its first module: of {"head": f} and pieces head.norm, head.fc
    #
    #     ..., before_head, head.norm, head.fc
    inserted: dict[str, dict[str, nn.Module]] = {}
    for owner, function in functions.items():
        inside = [name for name in pieces if f"{name}.".startswith(f"{owner}.")]
        if not inside:
            raise ValueError(
                f"`before` should name pieces of the network: {', '.join(pieces)}. Found {owner!r}.{hint(owner, pieces)}"
            )
        if not callable(function) or (isinstance(function, nn.Module) and list(function.parameters())):
            raise ValueError(
                f"`before` should have functions without parameters. Found {function!r} before {owner!r}; a module with "
                "parameters belongs to the network."
            )
        path, _, last = owner.rpartition(".")
        made = function if isinstance(function, nn.Module) else Function(function)
        inserted.setdefault(inside[0], {})[f"{path}.before_{last}".removeprefix(".")] = made
    return {k: v for name, piece in pieces.items() for k, v in {**inserted.get(name, {}), name: piece}.items()}


def _unroll(model: nn.Module, opens: Callable[[str, nn.Module], bool], prefix: str = "") -> dict[str, nn.Module]:
    """Return the children in order; replace lists, and the sequences that a cut goes through, by their own children."""
    pieces: dict[str, nn.Module] = {}
    for name, child in model._modules.items():  # named_children() omits a module's second place
        if child is None:
            continue
        path = prefix + name
        sequence = isinstance(child, nn.Sequential | Chain | nn.ModuleList | nn.ModuleDict)
        if _is_list(child) or (sequence and opens(path, child)):
            pieces.update(_unroll(child, opens, path + "."))
        else:
            pieces[path] = child
    return pieces


def _is_list(module: nn.Module) -> bool:
    """Return whether a module only holds others: a list or a dictionary without a forward."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _is_sequence_above(depth: int, path: str, module: nn.Module) -> bool:
    """Return whether a module is a sequence with fewer than `depth` modules around it."""
    return path.count(".") < depth and type(module).forward in _RUNS_CHILDREN


def _refuse_custom(model: nn.Module, pieces: Iterable[str], *, compared: bool) -> None:
    """Refuse a module that the stages open, if a custom forward, order of its children or change of modes would be lost."""
    opened = {path for name in pieces for path in accumulate(name.split(".")[:-1], "{}.{}".format)}  # a.b.c -> a, a.b
    for path in ("", *sorted(opened)):
        who = repr(path) if path else "`model`"
        module = model.get_submodule(path)
        if not compared and (lost := _custom(module, known=is_hugging_face(model))):
            raise ValueError(
                f"{who} should run its children in the order they were registered and do nothing "
                f"else, as its stages will. Found a {type(module).__name__} with a custom {lost}, whose sums, reshapes, order or "
                "functions would be lost. Give `example=`, an input, to compare the stages with the model, and functions by "
                "`before=`; or write the stages yourself; or pass `unchecked=True` if it does nothing else."
            )
        for name in ("train", "eval"):
            # Such as one that keeps its norms frozen.
            if not f"{getattr(module, name).__module__}.".startswith(_LIBRARIES):
                raise ValueError(
                    f"{who} should change modes as `nn.Module` does, because `train` and `eval` of "
                    f"the stages reach its children one by one. Found a {type(module).__name__} with its own `{name}`; move it "
                    "into the child whose mode it changes, or pass `unchecked=True` and set the modes yourself."
                )


def _custom(module: nn.Module, *, known: bool) -> str:
    """Return a method that may run the children otherwise, "" for none; with `known`, transformers' forwards may."""
    kind = type(module)
    is_list = _is_list(module)
    # A list has no forward, so what its own `__iter__` or `items` yields decides; a sequence runs what `__iter__` yields. The
    # classes of Hugging Face are known, but not another class of that name, nor a forward that replaces theirs.
    runs = kind.forward in _RUNS_CHILDREN or is_list or (known and kind.forward.__module__.startswith("transformers."))
    if "forward" in vars(module) or not runs:
        return "forward"
    methods = {name: getattr(kind, name, None) for name in _YIELDS[is_list]}
    own = (name for name, method in methods.items() if method and not f"{method.__module__}.".startswith(_LIBRARIES))
    return next(own, "")
