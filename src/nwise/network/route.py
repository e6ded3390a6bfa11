"""Which modules a network calls on an example, in which order, and what each reads: all that a cut needs to know.

The network runs once, and every output of a module becomes the leaf of a new graph. So the graph of a later module's arguments
ends at what it reads::

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
from torch.autograd.graph import Node

from nwise._torch import pytree
from nwise.modes import evaluating
from nwise.network.outline import StandIn, has_memory, outline
from nwise.randomness import preserved, random_states, restoring
from nwise.tensors import HIDDEN, values_of

# The network's outputs that its stages return, out of all that its forward returns.
Select = Callable[[Any], Any]


@dataclass
class ModuleCall:
    """A call of a module on the example.

    Args:
        module: the module's name; "" for the end of the network's forward.
        reads: inputs of the network, and outputs of earlier calls, on which its arguments depend.
        uses: what has memory in one stage: the module itself unless it has none, and parameters of outer modules or of other
            modules that the network's own code reads for the arguments.
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
    """

    inputs: dict[str, Any]
    outer: frozenset[str]
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

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
        starts: numbers of the calls with which the later stages begin.
        stages: the stage of each call, by key.
        homes: the stage of each module with memory, and of each parameter of an outer module.
        received: what of the inputs and outputs each stage receives, by the name under which it travels. The output that was made
            last is the one at which heads look, so its name is ``hidden``.
    """

    route: Route
    starts: Sequence[int]
    stages: dict[str, int]
    homes: dict[str, int]
    received: list[dict[str, str]]


def cut_route(route: Route, starts: Sequence[int]) -> CutRoute:
    """Cut a route into stages that begin with these calls.

    Raises:
        ValueError: a module or parameter would belong to two stages, or a stage would receive nothing.
    """
    stages = {key: bisect_right(starts, i) for i, key in enumerate(route.calls)}
    homes: dict[str, int] = {}
    for key, call in route.calls.items():
        for name in sorted(call.uses):
            first = homes.setdefault(name, stages[key])
            if first != stages[key]:
                raise ValueError(
                    f"A module or parameter should be used in one stage. Found {name!r} in stages {first} and {stages[key]}; cut "
                    "elsewhere, or give each place its own (`nwise.untie`)."
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
        given = [name for name in route.tensors if not route.inputs[name].is_floating_point() or name in read]
        received.append({name if i or not made else HIDDEN: name for i, name in enumerate([*made, *given])})
        if not received[-1]:
            raise ValueError(
                f"A stage should read something that was made before it. Found that stage {k} reads nothing, or only "
                "detached values."
            )
    return CutRoute(route, starts, stages, homes, received)


def follow(
    model: nn.Module, outer: frozenset[str], example: Mapping[str, Any], select: Select = lambda output: output
) -> Route:
    """Run a network on an example in evaluation mode, and return its route."""
    recorder = _Recorder(outer, example)
    network = outline(model, outer, recorder.stand_in)
    for path in outer:
        recorder.begin_at_parameters(network.get_submodule(path), path)
    inputs = {name: recorder.begin(name, x) for name, x in example.items()}
    with quiet(model, network), torch.enable_grad():
        output = select(network(**inputs))
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(output)):
            raise ValueError(
                "The network should return tensors, in tuples, lists or dictionaries. Found none in its "
                f"{type(output).__name__}; write the stages yourself."
            )
        recorder.route.calls[""] = recorder.made_call("", (output,))
    return recorder.route


@contextmanager
def quiet(*modules: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode without gradients, then restore modes, buffers and generators."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    with preserved(), restoring([*random_states(), *values_of(buffers)]), evaluating(*modules):
        yield


class _Recorder:
    """Runs modules in the place of stand-ins, and notes the calls."""

    def __init__(self, outer: frozenset[str], example: Mapping[str, Any]) -> None:
        self.route = Route({name: _on_meta(x) for name, x in example.items()}, outer)
        self._names: dict[nn.Module, str] = {}  # a module in two places has the name of the first
        self._counts: Counter[str] = Counter()
        # Where graphs end: at values, by their name, and at parameters, by the module that holds them.
        self._values: dict[Tensor, str] = {}
        self._owners: dict[Tensor, str] = {}

    def stand_in(self, name: str, module: nn.Module) -> StandIn:
        """Return what the network's code calls instead of a module."""
        first = self._names.setdefault(module, name)
        if first != name:
            self.route.first[name] = first
        for parameter in module.parameters():
            self._owners.setdefault(parameter, first)
        return StandIn(name, {name: module}, name, self._run)

    def begin_at_parameters(self, module: nn.Module, path: str) -> None:
        """Let an outer module have leaves for parameters, frozen ones too."""
        for key, parameter in module._parameters.items():
            if parameter is not None:
                leaf = parameter.detach().requires_grad_(parameter.is_floating_point())
                self._owners[leaf] = f"{path}.{key}".lstrip(".")
                module._parameters[key] = leaf  # type: ignore[assignment]

    def begin(self, name: str, x: Any) -> Any:
        """Begin a graph at a value."""
        if not isinstance(x, Tensor):
            return x
        self.route.shapes[name] = x.shape
        if not x.is_floating_point():
            return x
        leaf = x.detach().requires_grad_()
        self._values[leaf] = name
        return leaf.clone()  # which the network's code may change in place

    def made_call(self, name: str, arguments: Any) -> ModuleCall:
        """Return a call with what its arguments depend on."""
        ends = list(_ends(arguments))
        reads = {self._values[x] for x in ends if x in self._values}
        uses = {self._owners[x] for x in ends if x in self._owners}
        return ModuleCall(name, reads, uses, shapes_of(arguments))

    def _run(self, name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        name = self._names[module]
        call = self.made_call(name, (inputs, named))
        output = module(*inputs, **named)
        depends = any(x in self._values or x in self._owners for x in _ends(output))
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


def shapes_of(arguments: Any) -> list[torch.Size]:
    """Return the shapes of all tensors among the arguments of a call."""
    return [x.shape for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]


def _on_meta(x: Any) -> Any:
    """Return a tensor on the device meta, a plain value as it is, and None for anything else, such as a cache."""
    if isinstance(x, Tensor):
        return x.detach().to("meta")
    return x if isinstance(x, bool | int | float | str) else None


def _ends(values: Any) -> Iterable[Tensor]:
    """Iterate over the tensors at which the graphs of values end."""
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]
    yield from (x for x in tensors if x.is_leaf)
    nodes = [x.grad_fn for x in tensors]
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):  # where a gradient is added to a leaf
                yield node.variable
            nodes += [before for before, _ in node.next_functions]
