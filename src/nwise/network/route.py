"""Which modules a network calls on an example, in which order, and what each reads: all that a cut needs to know.

The network runs once. Every output of a module gets a name, which follows its values through the functions of torch
(`dependence.py`). So the arguments of a later module tell what it reads::

    ids -> embed -> layers.0 -> layers.1 -> head        calls, in order
             |          |           ^
             |          +-----------+                   layers.1 reads the output of layers.0
             +----------------------+                   and that of embed

Cut at ``layers.1``, the second stage receives both, as ``hidden`` and as ``embed#0/0``. Nothing is known about any class.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import pytree, version
from nwise.modes import evaluating
from nwise.network.dependence import Dependence
from nwise.network.outline import StandIn, has_memory, outline
from nwise.randomness import States, preserved, random_states, restoring
from nwise.tensors import HIDDEN, values_of

_MEMORY = "="  # marks names of modules and parameters among names of values
# Picks, from what a network's forward returns, what its last stage returns.
Select = Callable[[Any], Any]


@dataclass
class ModuleCall:
    """A call of a module on the example.

    Args:
        module: the module's name; "" for the end of the network's forward.
        reads: inputs of the network, and outputs of earlier calls, on which its arguments depend.
        uses: what its stage has to hold: the module if it has memory, and parameters of other modules that the network's own
            code reads for the arguments.
        shapes: shapes of its arguments.
        output: what it returned, with tensors on the device meta.
    """

    module: str
    reads: set[str]
    uses: set[str]
    shapes: list[torch.Size]
    output: Any = None

    @property
    def size(self) -> int:
        """Number of values that it returned."""
        return len(pytree.tree_leaves(self.output))


@dataclass
class Route:
    """The calls of a network on an example.

    Args:
        inputs: inputs of the network, tensors on the device meta; values other than tensors are the same in every step.
        outer: names of the outer modules, whose code runs in every stage.
        calls: calls by key, in order; ``layers.2#0`` is the first call of ``layers.2``, and "" the end.
        free: names of modules that run in every stage, because no parameter has an influence on them, such as rotary positions.
        shapes: shapes of the inputs and of the outputs; ``layers.2#0/1`` is a call's second output.
        first: the first name of each module that has several.
        changed: names of outputs that the network changes in place later.
        sized: names of outputs whose sizes the network's own code reads.
    """

    inputs: dict[str, Any]
    outer: frozenset[str]
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    sized: set[str] = field(default_factory=set)

    @property
    def tensors(self) -> list[str]:
        """Names of the inputs that are tensors."""
        return [name for name, x in self.inputs.items() if isinstance(x, Tensor)]

    def order(self) -> list[str]:
        """Return the names of the modules in the order of their first calls."""
        return list(dict.fromkeys(call.module for call in self.calls.values() if call.module))

    def starts(self, at: Sequence[str]) -> list[int]:
        """Return the numbers of the first calls of modules, or of calls inside them.

        Raises:
            ValueError: a module is not called, or not after the one before it in `at`.
        """
        modules = [call.module for call in self.calls.values()]
        found = [0]
        for name in at:
            first = next((i for i, module in enumerate(modules) if f"{module}.".startswith(f"{name}.")), None)
            if first is None:
                raise ValueError(
                    f"`at` should name modules that the network calls on `example`, and that have parameters or depend on them. "
                    f"Found {name!r}."
                )
            found.append(first)
        if sorted(set(found)) != found:
            raise ValueError(
                "`at` should name modules in the order in which the network calls them, each once and not the first, which "
                f"begins a stage anyway. Found {list(at)}; the order is {', '.join(self.order())}."
            )
        return found[1:]


@dataclass
class CutRoute:
    """What the stages of a route call, hold and receive.

    Args:
        route: the route.
        stages: the stage of each call, by key.
        homes: the stage of each module with memory, and of each parameter of an outer module.
        received: the inputs and outputs that each stage receives, by the names under which they travel. The output with the
            longest chain of calls behind it is the one at which heads look, so its name is ``hidden``.
    """

    route: Route
    stages: dict[str, int]
    homes: dict[str, int]
    received: list[dict[str, str]]


def cut_route(route: Route, starts: Sequence[int]) -> CutRoute:
    """Cut a route into stages that begin with these calls.

    Raises:
        ValueError: a module or parameter would belong to two stages, or a stage would receive nothing.
    """
    stages = {key: bisect_right(starts, i) for i, key in enumerate(route.calls)}
    depths: dict[str, int] = {}
    for key, call in route.calls.items():
        depths[key] = 1 + max((depths[call_of(name)] for name in call.reads if "#" in name), default=0)
    homes: dict[str, int] = {}
    for key, call in route.calls.items():
        for name in sorted(call.uses):
            first = homes.setdefault(name, stages[key])
            if first != stages[key]:
                own = (
                    "make a copy for the other place (`nwise.untie` does, of a module with two names)"
                    if name == call.module
                    else "give this code its own parameter"
                )
                raise ValueError(
                    f"A module or parameter should be used in one stage. Found {name!r} in stage {first}, and in stage "
                    f"{stages[key]} for the call of {call.module or 'the end'!r}; cut elsewhere, or {own}."
                )
    if HIDDEN in route.inputs:
        raise ValueError(
            f"The network should have no input of the name {HIDDEN!r}, under which its stages send their outputs."
        )
    received = [{name: name for name in route.tensors}]
    # Sent are the outputs made before a boundary and read behind it. Of the inputs, whole numbers always travel, because the
    # network's own code looks at their values.
    for k in range(1, len(starts) + 1):
        read = set().union(*(call.reads for key, call in route.calls.items() if stages[key] >= k))
        earlier = [(key, call) for key, call in reversed(route.calls.items()) if stages[key] < k]
        made = [f"{key}/{i}" for key, call in earlier for i in range(call.size) if f"{key}/{i}" in read]
        made.sort(key=lambda name: -depths[call_of(name)])
        given = [name for name in route.tensors if not route.inputs[name].is_floating_point() or name in read]
        received.append({name if i or not made else HIDDEN: name for i, name in enumerate([*made, *given])})
        if not received[-1]:
            raise ValueError(
                f"A stage should read something that was made before it. Found that stage {k} reads nothing, or only "
                "detached values."
            )
    return CutRoute(route, stages, homes, received)


def follow(
    model: nn.Module, outer: frozenset[str], example: Mapping[str, Any], select: Select = lambda output: output
) -> Route:
    """Run a network on an example in evaluation mode, and return its route."""
    recorder = _Recorder(outer, example)
    network = outline(model, outer, recorder.stand_in)
    for path in outer:
        for key, parameter in network.get_submodule(path)._parameters.items():
            if parameter is not None:
                recorder.dependence.name(parameter, _MEMORY + f"{path}.{key}".lstrip("."))
    inputs = {name: recorder.begin(name, x) for name, x in example.items()}
    with quiet(model, network), torch.enable_grad(), recorder.dependence:
        output = select(network(**inputs))
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(output)):
            raise ValueError(
                "The network should return tensors, in tuples, lists or dictionaries. Found none in its "
                f"{type(output).__name__}; write the stages yourself."
            )
        recorder.route.calls[""] = recorder.made_call("", (output,))
    recorder.route.sized = recorder.dependence.sized
    recorder.route.changed = {name for name, x in recorder.handed.items() if version(x)}
    return recorder.route


@contextmanager
def quiet(*modules: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode without gradients, then restore modes, buffers and generators."""
    with preserved(), restoring([*random_states(), *buffers_of(modules)]), evaluating(*modules):
        yield


def buffers_of(modules: Iterable[nn.Module]) -> States:
    """Return the buffers of modules and their values, also of those that a forward replaces."""
    parts = [part for module in modules for part in module.modules()]
    found = dict.fromkeys(x for part in parts for x in part._buffers.values() if x is not None)
    # No forward can write to an expanded tensor, such as what stands for a parameter of another stage.
    tensors = [x for x in found if x.layout is not torch.strided or 0 not in x.stride()]
    return [*((part._buffers.update, dict(part._buffers)) for part in parts), *values_of(tensors)]


class _Recorder:
    """Runs the modules behind stand-ins, and records the calls."""

    def __init__(self, outer: frozenset[str], example: Mapping[str, Any]) -> None:
        self.route = Route({name: _on_meta(x) for name, x in example.items()}, outer)
        self._names: dict[nn.Module, str] = {}  # a module in two places has the name of the first
        self._counts: Counter[str] = Counter()
        self.dependence = Dependence()
        self.handed: dict[str, Tensor] = {}  # what the network's code got

    def stand_in(self, name: str, module: nn.Module) -> StandIn:
        """Return what the network's code calls instead of a module."""
        first = self._names.setdefault(module, name)
        if first != name:
            self.route.first[name] = first
        else:
            for parameter in module.parameters():
                self.dependence.name(parameter, f"{_MEMORY}{name}")
        return StandIn(name, {name: module}, name, self._run)

    def begin(self, name: str, x: Any) -> Any:
        """Return a value under a name that follows it."""
        if not isinstance(x, Tensor):
            return x
        self.route.shapes[name] = x.shape
        # A copy, which the network's code may change in place. It asks for a gradient, and so does what any function makes of it.
        self.handed[name] = x.detach().requires_grad_(x.is_floating_point()).clone()
        if x.is_floating_point() or "#" in name:  # inputs of whole numbers travel anyway
            self.dependence.name(self.handed[name], name)
        return self.handed[name]

    def made_call(self, name: str, arguments: Any) -> ModuleCall:
        """Return a call with what its arguments depend on."""
        for x in pytree.tree_leaves(arguments):
            if isinstance(x, Tensor) and x.requires_grad and not self.dependence.of(x):
                raise ValueError(
                    "Between modules the network's forward should call functions of torch alone, which show what they read. "
                    f"Found another one before the call of {name or 'the end'!r}; call it inside a module."
                )
        names = self.dependence.of(arguments) | self.dependence.read
        uses = {found for found in names if found.startswith(_MEMORY)}
        return ModuleCall(name, names - uses, {found.removeprefix(_MEMORY) for found in uses}, shapes_of(arguments))

    def _run(self, name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        name = self._names[module]
        call = self.made_call(name, (inputs, named))
        self.dependence.counts = False
        output = module(*inputs, **named)
        self.dependence.counts = True
        made = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
        depends = self.dependence.of(made) or any(x.requires_grad for x in made)
        if not depends and next(module.parameters(), None) is None:
            self.route.free.add(name)
            return output
        if has_memory(module):
            call.uses.add(name)
        key = f"{name}#{self._counts[name]}"
        self._counts[name] += 1
        self.route.calls[key] = call
        call.output = pytree.tree_map(_on_meta, output)
        numbers = count()
        return pytree.tree_map(lambda x: self.begin(f"{key}/{next(numbers)}", x), output)


def call_of(name: str) -> str:
    """Return the key of the call that made an output."""
    return name.rpartition("/")[0]


def shapes_of(arguments: Any) -> list[torch.Size]:
    """Return the shapes of all tensors among the arguments of a call."""
    return [x.shape for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]


def _on_meta(x: Any) -> Any:
    """Return a tensor on the device meta, a plain value as it is, and None for anything else, such as a cache."""
    if isinstance(x, Tensor):
        return x.detach().to("meta")
    return x if isinstance(x, bool | int | float | str) else None
