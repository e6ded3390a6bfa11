"""A stage that runs the network's own forward, of which only its own modules compute.

Of a network cut at ``layers.2`` and ``layers.4``, every stage runs all the code between the modules, so masks and positions are
made as the network makes them. What differs is what happens when that code calls a module::

    stage 1:    embed      layers.0   layers.1  | layers.2   layers.3  |  layers.4 ...
                nothing    nothing    received  | run        run       |  the stage ends

"Nothing" is a nan of the shape that the output would have: if anything read it by mistake, the result would show it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import hide_buffers, pytree
from nwise.network.chain import Chain, inside
from nwise.network.outline import StandIn, has_memory, nothing, outline, skeleton
from nwise.network.route import CutRoute, ModuleCall, Select, call_of, cut_route, shapes_of

Shapes = Sequence[tuple[torch.Size, torch.Size]]
_SAME_CALLS = (
    "The network should call the modules that it called on `example`, as often and in that order: without a cache "
    "(`use_cache=False` in the example) and without layers left out at random."
)


class _NextStage(BaseException):
    """The network has called a module of the next stage. No `except Exception` in its forward catches it."""


@dataclass
class _Run:
    """What one forward of a section has so far.

    Args:
        values: inputs and outputs by name.
        like: the tensor whose device and dtype the others have.
        resized: whether an input that does not travel this far may have another size than the example's.
        counts: numbers of calls, by module.
        reached: keys of the calls that were made.
    """

    values: dict[str, Tensor]
    like: Tensor
    resized: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    reached: set[str] = field(default_factory=set)


class Section(nn.Module):
    """A stage of a network with a forward of its own; parameters have the network's names.

    It takes and returns a tensor, or a dictionary of all that crosses the boundary. The last stage returns what the network does.

    Args:
        model: the network; its modules are used, not copied.
        cut: the cut.
        index: number of the stage.
        select: function from what the network returns to what the last stage returns.
    """

    def __init__(self, model: nn.Module, cut: CutRoute, index: int, select: Select) -> None:
        super().__init__()
        self._route = cut.route
        self._select = select
        self._cut = cut
        self._index = index
        mine = [call.module for key, call in self._route.calls.items() if cut.stages[key] == index]
        self._called = dict.fromkeys(name for name in mine if name)  # in order
        self._run: _Run | None = None
        self._mode: bool | None = None  # the mode of the modules that are not registered
        self._absent: list[nn.Module] = []
        network = outline(model, self._route.outer, self._stand_in)
        self._network = (network,)  # in a tuple, so it is not registered
        self._outer = [network.get_submodule(path) for path in sorted(self._route.outer)]
        for path, module in zip(sorted(self._route.outer), self._outer, strict=True):
            self._adopt(module, path)

    @property
    def input_names(self) -> list[str]:
        """Names of the tensors that the stage takes, in the order in which they come by position."""
        return list(self._cut.received[self._index])

    def pieces(self) -> dict[str, nn.Module]:
        """Return the modules that the stage calls, by name, in order."""
        return {name: self.get_submodule(name) for name in self._called}

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        route = self._route
        given = self._given(inputs, named)
        if self._mode != self.training:
            self._mode = self.training
            for module in self._outer:
                module.training = self.training
            for module in self._absent:
                module.train(self.training)
        like = next(iter(given.values()))
        run = _Run(given, like)
        # An input that does not travel this far is there without a value; one that was left out in this step is left out.
        shapes = [(route.shapes[name], x.shape) for name, x in given.items()]
        run.resized = any(
            _is_unknown(x, shapes) for name, x in route.inputs.items() if name in route.shapes.keys() - given
        )
        expected = self._cut.received[self._index].values()
        arguments = {
            name: given[name] if name in given else _nothing(x, shapes, like)
            for name, x in route.inputs.items()
            if name in given or name not in expected
        }
        self._run = run
        try:
            output = self._network[0](**arguments)
        except _NextStage:
            output = None
        finally:
            self._run = None
        is_last = self._index + 1 == len(self._cut.received)
        left_out = {call_of(name) for name in expected if "#" in name} - run.reached
        if left_out or is_last != (output is not None):
            which = min(left_out, default=next(iter(self._cut.received[-1].values())))
            raise ValueError(f"{_SAME_CALLS} Found that it left out {which.partition('#')[0]!r}.")
        return self._select(output) if is_last else self._sent(run)

    def _sent(self, run: _Run) -> Tensor | dict[str, Tensor]:
        """Return what the next stage receives."""
        wanted = self._cut.received[self._index + 1]
        for name in wanted.values():
            if "#" in name and name not in run.values:
                raise ValueError(f"{_SAME_CALLS} Found that it left out {name.partition('#')[0]!r}.")
        sent = {name: run.values[value] for name, value in wanted.items() if value in run.values}
        return next(iter(sent.values())) if len(sent) == 1 else sent

    def _given(self, inputs: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs by the names of the route."""
        wanted = self._cut.received[self._index]
        values = {**dict(zip(wanted, inputs, strict=False)), **named}
        needed = [name for name, value in wanted.items() if "#" in value]
        # Behind the first stage there may be more: a head takes what it reads of a stage's output.
        unknown = set(values) - set(wanted) if not self._index else set()
        if len(inputs) > len(wanted) or unknown or not set(needed) <= set(values) or not values:
            found = ", ".join(map(str, named)) if named else f"{len(inputs)} inputs"
            raise TypeError(
                f"A stage of the network should get the inputs of `example`, here {', '.join(wanted)}. Found {found}; a target "
                "has its own argument, `pipe.step(x, target=y)`, and for other inputs split the network again."
            )
        return {wanted[name]: x for name, x in values.items() if name in wanted}

    def _stand_in(self, name: str, module: nn.Module) -> StandIn:
        """Place a module in this stage if it belongs there, and return what the network's code calls instead of it."""
        cut = self._cut
        first = self._route.first.get(name, name)
        path, _, key = name.rpartition(".")
        home = cut.homes.get(first, 0) == self._index
        where: Any
        # Each stage has a copy, perhaps on another device. The first stage saves the buffers.
        if first in self._route.free and self._index and has_memory(module):
            module = copy.deepcopy(module)
            hide_buffers(module)
        if first in self._route.free or first in self._called or (home and has_memory(module)):
            node = inside(self, path)
            node.add_module(key, module)
            where = node._modules
        else:
            where = {key: skeleton(module)}
            self._absent += where.values()
        return StandIn(first, where, key, self._call)

    def _adopt(self, module: nn.Module, path: str) -> None:
        """Register the parameters and buffers of an outer module under their names, and let both share them from now on."""
        node = inside(self, path)
        for key, parameter in module._parameters.items():
            if parameter is None or self._cut.homes.get(f"{path}.{key}".lstrip("."), 0) == self._index:
                node.register_parameter(key, parameter)
            else:
                node.register_buffer(key, nothing(parameter), persistent=False)
        saved = module.state_dict()
        for key, buffer in module._buffers.items():
            node.register_buffer(key, buffer, persistent=not self._index and key in saved)
        module._parameters = node._parameters
        module._buffers = node._buffers

    def _call(self, name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Do what a stage does when the network's code calls a module."""
        if name in self._route.free:
            return module(*inputs, **named)
        run = self._run
        if run is None:
            raise RuntimeError(
                f"The network should call {name!r} in its forward. Found a call behind it, as of a checkpoint around the module; "
                "checkpoint inside the module, or use `recompute=True`."
            )
        key = f"{name}#{run.counts[name]}"
        run.counts[name] += 1
        call = self._route.calls.get(key)
        if call is None:
            raise ValueError(f"{_SAME_CALLS} Found one more call of {name!r}.")
        stage = self._cut.stages[key]
        if stage > self._index:
            raise _NextStage
        run.reached.add(key)
        if stage < self._index:
            return self._received(key, call, run, shapes_of((inputs, named)))
        output = module(*inputs, **named)
        made = {f"{key}/{i}": x for i, x in enumerate(pytree.tree_leaves(output))}
        run.values.update(made)
        if self._route.changed.isdisjoint(made):
            return output
        # What the network's code will change in place is sent as it is here.
        names = iter(made)
        return pytree.tree_map(lambda x: x.clone() if next(names) in self._route.changed else x, output)

    def _received(self, key: str, call: ModuleCall, run: _Run, now: Sequence[torch.Size]) -> Any:
        """Return the outputs of an earlier stage's call: those that a later module reads, and nothing instead of the others."""
        shapes = [*zip(call.shapes, now, strict=False)]
        numbers = count()

        def value(x: Any) -> Any:
            name = f"{key}/{next(numbers)}"
            if name not in run.values:
                read = name in self._route.sized or not isinstance(x, Tensor)
                if read and (_is_unknown(x, shapes) or (run.resized and name in self._route.sized)):
                    raise ValueError(
                        "Inputs should have the sizes of `example` beyond the batch, because the network's own code reads sizes "
                        f"of what {call.module!r} returns. Found others; split the network with these, or read them in a module."
                    )
                return _nothing(x, shapes, run.like)
            return run.values[name].clone() if name in self._route.changed else run.values[name]

        return pytree.tree_map(value, call.output)


StageModule = Chain | Section  # what `nwise.split` returns


def tail(stages: Sequence[Section], name: str) -> Section:
    """Make a stage of all that a network does from a module on; the stages hold its modules."""
    first = stages[0]
    route = first._route
    # Every module is registered in one stage at least, and a copy of one comes behind the original.
    places = [dict(stage.named_modules(remove_duplicate=False)) for stage in stages]
    whole = outline(
        first._network[0], route.outer, lambda name, _: next(place[name] for place in places if name in place)
    )
    for path in route.outer:
        module = whole.get_submodule(path)
        for place in places:
            for key, parameter in place[path]._parameters.items() if path in place else ():
                module._parameters[key] = parameter
                module._buffers.pop(key, None)  # what the first stage has in its place
    return Section(whole, cut_route(route, route.starts([name])), 1, first._select)


def _nothing(x: Any, shapes: Shapes, like: Tensor) -> Any:
    """Return nan, or zero of whole numbers, instead of a tensor; other values as they are.

    Args:
        x: a tensor as it was on the example.
        shapes: pairs of shapes of arguments, on the example and now.
        like: a tensor of the same step, for the device and dtype.
    """
    if not isinstance(x, Tensor):
        return x
    shape = [_size(d, size, shapes) for d, size in enumerate(x.shape)]
    dtype = like.dtype if x.is_floating_point() and like.is_floating_point() else x.dtype
    return torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=like.device)


def _size(d: int, size: int, shapes: Shapes) -> int:
    """Return the size of a dimension: that of an argument's same dimension if both had one size on the example."""
    same = [now[d] for then, now in shapes if d < min(len(then), len(now)) and then[d] == size]
    # A table of positions, [T, width], has none of its own; its T is a dimension behind the batch.
    later = [b for then, now in shapes for a, b in zip(then[1:], now[1:], strict=False) if a == size and not d]
    return [*same, *later, size][0]


def _is_unknown(x: Any, shapes: Shapes) -> bool:
    """Return whether an output may have another size now, which no argument tells: a number that depends on a size, too."""
    changed = {d for then, now in shapes for d in range(1, min(len(then), len(now))) if then[d] != now[d]}
    if not isinstance(x, Tensor):
        return bool(changed) and isinstance(x, int) and not isinstance(x, bool)
    known = {d for then, _ in shapes for d in range(min(len(then), x.dim())) if then[d] == x.shape[d]}
    return any(d in changed - known for d in range(x.dim()))
