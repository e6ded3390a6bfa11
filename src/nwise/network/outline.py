"""Copies of a network's outer modules, whose code calls stand-ins for all the others.

Of a network that is cut at ``model.layers.2``, the outer modules are the network, ``model`` and the list ``layers``::

    network    model    layers         lm_head            outer modules: copies, which run the network's own code
               embed    layers.0  ...                     all the others: stand-ins

The maker of a stand-in decides what its call does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from nwise.checks import hint

Call = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class StandIn(nn.Module):
    """Stands for a module of a network and has its attributes.

    Args:
        name: the module's name in the network.
        where: the dictionary that holds the module under `key`; a module that replaces it there replaces it here.
        key: its key.
        call: function that is called instead, with the name, the module and the arguments.
    """

    def __init__(self, name: str, where: Mapping[str, nn.Module], key: str, call: Call) -> None:
        super().__init__()
        vars(self).update(name=name, _where=where, _key=key, _call=call)  # beside the registered modules
        del self.training  # that of the module counts

    def forward(self, *inputs: Any, **named: Any) -> Any:
        values = vars(self)
        return values["_call"](values["name"], values["_where"][values["_key"]], inputs, named)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the module and those inside it, so the network's code finds parameters and their device."""
        values = vars(self)
        return values["_where"][values["_key"]].named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        values = vars(self)
        return getattr(values["_where"][values["_key"]], name)


def ancestors(names: Iterable[str]) -> set[str]:
    """Return the names of all modules around those with these names, and "" for the network.

    >>> sorted(ancestors(["a.b.c"]))
    ['', 'a', 'a.b']
    """
    return {"", *(path for name in names for path in accumulate(name.split(".")[:-1], "{}.{}".format))}


def outer_names(model: nn.Module, at: Iterable[str]) -> frozenset[str]:
    """Return the names of the modules around those in `at`, and of the lists that hold modules for them.

    Raises:
        ValueError: an outer module has a forward stored on itself, which would run the whole network.
    """
    around = ancestors(at)
    for name, module in model.named_modules():
        holds = type(module).forward is nn.Module.forward and "forward" not in vars(module)
        if name in around or (holds and name.rpartition(".")[0] in around):
            around.add(name)
            if "forward" in vars(module):
                raise ValueError(
                    f"The forward of {repr(name) if name else 'the network'} should be that of its class. Found one that is "
                    "stored on the module and runs the whole network, as the hooks of accelerate do; remove it before the split."
                )
    return frozenset(around)


def outline(
    module: nn.Module, outer: frozenset[str], stand_in: Callable[[str, nn.Module], nn.Module], path: str = ""
) -> Any:
    """Copy the outer modules; they share their parameters and buffers with the network, in dictionaries of their own."""
    children: dict[str, Any] = {}
    for key, child in module._modules.items():
        name = f"{path}{key}"
        if child is not None and name in outer:
            children[key] = outline(child, outer, stand_in, f"{name}.")
        else:
            children[key] = child if child is None else stand_in(name, child)
    return _shallow(module, dict(module._parameters), dict(module._buffers), children)


def skeleton(module: nn.Module) -> Any:
    """Copy a module with nan instead of its values: the copy has all attributes and takes no memory."""
    tensors = {**module._parameters, **module._buffers}
    absent = {name: x if x is None else nothing(x) for name, x in tensors.items()}
    return _shallow(module, {}, absent, {name: x if x is None else skeleton(x) for name, x in module._modules.items()})


def _shallow(module: nn.Module, parameters: object, buffers: object, children: object) -> Any:
    """Return another module of the same class with the same other attributes; `copy.copy` fails for parametrized modules."""
    made = module.__new__(type(module))
    # Not by assignment, which a compiled module hands on to the one inside it.
    vars(made).update(vars(module))
    vars(made).update(_parameters=parameters, _buffers=buffers, _modules=children)
    return made


def nothing(x: Tensor) -> Tensor:
    """Return one nan, or zero of whole numbers, expanded to the shape of a tensor."""
    return x.detach().new_full((), torch.nan if x.is_floating_point() else 0).expand(x.shape)


def repeated_blocks(model: nn.Module, count: int) -> list[str]:
    """Return the names of a network's repeated blocks, at least as many as there are stages, as far outside as possible.

    Blocks have one class, or are the members of lists of one class each, such as those of an encoder and of a decoder. They have
    at least a hundredth of the parameters.

    Raises:
        ValueError: there are fewer.
    """
    # By the number of modules around: members of lists, and all modules but torch's own layers.
    found: dict[int, dict[str, nn.Module]] = {}
    uniform: set[type] = set()
    for path, module in model.named_modules():
        members = dict(module.named_children())
        one_kind = len(set(map(type, members.values()))) == 1
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) or (one_kind and isinstance(module, nn.ModuleDict))
        if is_list and one_kind and len(members) > 1:
            uniform.update(map(type, members.values()))
        depth = path.count(".") + bool(path)
        for key, child in members.items():
            if is_list or not type(child).__module__.startswith("torch.nn"):
                found.setdefault(depth, {})[f"{path}.{key}".lstrip(".")] = child
    least = size_of(model) / 100
    most = 0
    for _, modules in sorted(found.items()):
        groups = [{kind} for kind in dict.fromkeys(map(type, modules.values()))] + [uniform]
        blocks = [[name for name, child in modules.items() if type(child) in kinds] for kinds in groups]
        large = [names for names in blocks if sum(size_of(modules[name]) for name in names) > least]
        best = max(large, key=len, default=[])
        if len(best) >= count >= 1:
            return best
        most = max(most, len(best))
    raise too_few_blocks(most, count)


def too_few_blocks(blocks: int, count: int) -> ValueError:
    """Return the error of a network with fewer blocks than stages."""
    return ValueError(
        f"`at` should be from 1 to the network's {blocks} repeated blocks, or name the modules at which stages begin. "
        f"Found {count}."
    )


def size_of(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def refuse_unknown(at: Sequence[str], names: Iterable[str]) -> None:
    """Raise ValueError if there is a name that no module of the network has."""
    known = list(names)
    for name in at:
        if name not in known:
            longer = [other for other in known if other.endswith(f".{name}")]
            suggestion = f" Did you mean {min(longer, key=len)!r}?" if longer else hint(name, known)
            raise ValueError(f"`at` should name modules of the network. Found {name!r}.{suggestion}")


def has_memory(module: nn.Module) -> bool:
    """Return whether a module has parameters or buffers."""
    return next(chain(module.parameters(), module.buffers()), None) is not None
