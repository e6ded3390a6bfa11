"""What a module holds beside its parameters, buffers and children: plain values, random generators, unregistered modules.

`nn.Module.modules` does not list generators and modules in plain attributes, but the forward uses them::

    self.generator = torch.Generator()          an attribute
    self.norms = [nn.BatchNorm1d(4)]            in a list, tuple, set or dictionary: neither registered nor switched by `eval`
    self.noise.generator                        one level down, in an attribute that is a plain object
    self.options = {"temperature": 2.0}         a value, which the training loop may change before a forward runs again
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, filterfalse
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CLOSED = (Tensor, type, ModuleType, FunctionType, MethodType)  # their attributes are no state of the module
_MUTABLE = (dict, list, set, deque)
_CONTAINERS = (*_MUTABLE, tuple, frozenset)
_DEPTH = 4  # containers inside one another; one less around a plain object, whose attributes count as a container
_LEAVES = frozenset((type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device))
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module that no user has set


class Held:  # not closures that call each other, which would keep what they have found until the garbage collector runs
    """What the plain attributes of modules hold, each object once.

    Args:
        registered: the modules, without those that they hold in plain attributes.

    Attributes:
        modules: modules that are not registered, and all modules inside them.
        generators: random generators, without those that have no state.
        contents: what holds values, each with those that it has now: all modules, for their attributes, and in these
            dictionaries, lists, sets and attributes of objects.
    """

    def __init__(self, registered: Sequence[nn.Module]) -> None:
        self.modules: list[nn.Module] = []
        self.generators: dict[Any, None] = {}
        self.contents: list[tuple[Any, Any]] = []
        self._known, self._seen = set(registered), set[int]()
        for part in chain(registered, self.modules):  # which grows
            self.contents.append((part, own := _content(part)))
            if not _LEAVES.issuperset(map(type, own.values())):
                for value in own.values():
                    self._visit(value, _DEPTH)

    def _visit(self, value: Any, depth: int) -> None:
        """Note what a value is or holds, in containers that are inside one another at most this deep."""
        if isinstance(value, nn.Module):
            new = [inner for inner in value.modules() if inner not in self._known]
            self._known.update(new)
            self.modules += new
        elif isinstance(value, _GENERATORS):
            if not isinstance(value, random.SystemRandom):
                self.generators[value] = None
        elif isinstance(value, _CONTAINERS):
            self._look_into(value, depth - 1)
        elif depth > 1 and not isinstance(value, _CLOSED):
            inside = getattr(value, "__dict__", None)
            if isinstance(inside, dict):
                self._look_into(inside, 1, state=type(value).__module__.partition(".")[0] not in ("nwise", "torch"))

    def _look_into(self, container: Any, depth: int, *, state: bool = True) -> None:
        if depth < 0 or id(container) in self._seen:
            return
        self._seen.add(id(container))
        if state and isinstance(container, _MUTABLE):
            self.contents.append((container, _content(container)))
        items = container.values() if isinstance(container, dict) else container
        if not _LEAVES.issuperset(map(type, items)):  # a large vocabulary costs little
            for item in items:
                self._visit(item, depth)


def held(*roots: nn.Module) -> Held:
    """Return what the plain attributes of modules and of all modules inside them hold.

    >>> layer = nn.Linear(2, 2)
    >>> layer.norms = [nn.BatchNorm1d(2)]
    >>> [type(module).__name__ for module in held(layer).modules]
    ['BatchNorm1d']
    """
    return Held(list(dict.fromkeys(inner for root in roots for inner in root.modules())))


States = Iterable[tuple[Callable[[Any], object], Any]]  # what restores a state, and the state


def restore(states: States) -> None:
    """Put states back."""
    for put, state in states:
        put(state)


@contextmanager
def kept(states: States) -> Iterator[None]:
    """Put states back after the body."""
    try:
        yield
    finally:
        restore(states)


def states_of(tensors: Iterable[Tensor]) -> States:
    """Return the values of tensors."""
    # By `data`, as autograd would take the write for one between a forward and its backward. That of a sparse tensor is a copy.
    return [
        (x.data.copy_ if x.layout is torch.strided else partial(setattr, x, "data"), x.detach().clone())
        for x in tensors
    ]


def random_states(generators: Iterable[Any] = ()) -> States:
    """Return the states of the global random generators, but for that of torch on the CPU, and of others."""
    # While a step is captured, the GPU's random numbers come from generators of the graph.
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() and not capturing else ()
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 - users' code draws from it
        *((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)) for device in devices),
    ]
    for value in generators:
        if isinstance(value, torch.Generator | np.random.RandomState):
            states.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            states.append((value.setstate, value.getstate()))
        else:
            states.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
    return states


def random_states_kept(module: nn.Module | None = None) -> AbstractContextManager[None]:
    """Put back `random_states` after the body, and those of generators and buffers that a module holds in plain attributes."""
    if module is None:
        return kept(random_states())
    found = held(module)
    buffers = (buffer for part in found.modules for buffer in part.buffers(recurse=False))
    return kept([*random_states(found.generators), *states_of(buffers)])


Values = Sequence[tuple[dict[str, Any], Mapping[str, object]]]


def values_in(*modules: nn.Module) -> Values:
    """Return the plain values that modules, and all modules inside them, hold in attributes: modes, temperatures, drop rates.

    Those in dictionaries and in plain objects belong to them. Each holder comes with its values.

    >>> values_in(nn.Dropout(0.5))[0][1]
    {'training': True, 'p': 0.5, 'inplace': False}
    """
    found: list[tuple[dict[str, Any], Mapping[str, object]]] = []
    for holder, content in held(*modules).contents:
        if isinstance(content, dict) and (plain := {name: x for name, x in content.items() if type(x) in _LEAVES}):
            found.append((vars(holder) if isinstance(holder, nn.Module) else holder, plain))
    return found


@contextmanager
def with_values(values: Values) -> Iterator[None]:
    """Run the body with these values in their holders, then put the present ones back."""
    with kept([(holder.update, {name: holder.get(name) for name in then}) for holder, then in values]):
        restore((holder.update, then) for holder, then in values)
        yield


class State:
    """What the forward of a module may find beside its parameters, at the moment when this is made.

    That is what its attributes hold, containers and the objects in them included, and its buffers. Tensors and arrays are copied.

    Args:
        module: the module.

    Attributes:
        generators: random generators in plain attributes, whose states are not included.

    >>> layer = nn.BatchNorm1d(1)
    >>> state = State(layer)
    >>> layer.momentum, layer.running_mean[0] = 0.5, 1.0
    >>> with state.restored():
    ...     layer.momentum, layer.running_mean[0].item()
    (0.1, 0.0)
    >>> layer.momentum, layer.running_mean[0].item()
    (0.5, 1.0)
    """

    def __init__(self, module: nn.Module) -> None:
        found = held(module)
        self.generators, contents = found.generators, found.contents
        buffers = [holder._buffers for holder, _ in contents if isinstance(holder, nn.Module)]
        # Those of TorchScript are no dictionary.
        contents += [(store, dict(store)) for store in buffers if store and isinstance(store, dict)]
        copies: dict[int, Any] = {}
        self._contents = [(holder, _copied(content, copies)) for holder, content in contents]

    @contextmanager
    def restored(self) -> Iterator[list[Tensor]]:
        """Let the body find this state again, with other copies of the tensors, which it gets; then restore the present one."""
        copies: dict[int, Any] = {}
        with kept([(partial(_fill, holder), _content(holder)) for holder, _ in self._contents]):
            restore((partial(_fill, holder), _copied(then, copies)) for holder, then in self._contents)
            yield [x for x in copies.values() if isinstance(x, Tensor)]


def _content(holder: Any) -> Any:
    if isinstance(holder, nn.Module):
        attributes = vars(holder)
        return {name: attributes[name] for name in filterfalse(OF_TORCH.__contains__, attributes)}
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _copied(content: Any, copies: dict[int, Any]) -> Any:
    """Return a content with copies of its tensors and arrays, one of each; those with a gradient belong to a graph and stay."""
    values = content.values() if isinstance(content, dict) else content
    if _LEAVES.issuperset(map(type, values)):
        return content
    for value in values:
        if id(value) not in copies:
            if isinstance(value, Tensor) and not (value.requires_grad or isinstance(value, nn.Parameter)):
                copies[id(value)] = value.clone()
            elif type(value) is np.ndarray:  # no memory map
                copies[id(value)] = value.copy()
    copied = [copies.get(id(value), value) for value in values]
    return dict(zip(content, copied, strict=True)) if isinstance(content, dict) else copied


def _fill(holder: Any, content: Any) -> None:
    """Replace the present content of a holder by another one."""
    now = _content(holder)
    same = len(now) == len(content) and all(map(is_, now, content))
    if same and (not isinstance(now, dict) or all(map(is_, now.values(), content.values()))):
        return
    if isinstance(holder, nn.Module):
        for name in now.keys() - content.keys():
            del vars(holder)[name]
        vars(holder).update(content)
    else:
        holder.clear()
        (holder.extend if isinstance(holder, list | deque) else holder.update)(content)


def tensors_in(*modules: nn.Module) -> list[Tensor]:
    """Return the buffers and the tensors in plain attributes of modules, and of all modules inside them."""
    parts = [part for module in modules for part in module.modules()]
    values = [value for part in parts for value in (*part._buffers.values(), *vars(part).values())]
    return [value for value in values if isinstance(value, Tensor)]
