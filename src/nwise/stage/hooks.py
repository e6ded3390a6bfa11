"""Hooks of parameters, run once in a step, with the gradient of the whole mini-batch.

A step adds to a gradient in several passes, for every micro-batch and on copies of the parameters under a delay. A hook that a
user has put on a parameter expects one `backward`. So its hooks rest during the passes and run at the end of the step:

    pass 1    + part        register_hook                     sees the sum, and may replace it
    pass 2    + part        hooks of the node that accumulates    see `.grad`; they may move it elsewhere
                            register_post_accumulate_grad_hook    sees `.grad`; it may update and set it to None
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nwise._torch import gradient_hooks, with_hooks
from nwise.looks import looks_at
from nwise.tensors import agree

_NOTHING_ELSE = nullcontext()


def count_hooks() -> int:
    """Return how many hooks torch has counted in this process, without those of `node_hooks`."""
    return RemovableHandle.next_id - Hooks.own


class Hooks:
    """Finds the hooks of parameters.

    It looks for those of the nodes that accumulate their gradients in the calls 1, 2, 4, 8, ..., and after any hook was put on
    between two steps.

    Attributes:
        own: how many hooks `node_hooks` has put on: if they counted, two pipelines would make each other look in turn.
        registered: `count_hooks` at the end of the last step or look.
    """

    own: ClassVar = 0

    def __init__(self) -> None:
        self.registered = self._calls = 0
        self._of_nodes: dict[Tensor, list[Any]] = {}

    def once(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Let the body run without the hooks of these parameters, then run them on what it has added to each gradient.

        If the body or a hook on a gradient raises, each ``.grad`` is as before.
        """
        found = self.find(parameters)
        return _once(found, self._of_nodes) if found else _NOTHING_ELSE

    def find(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that have hooks; one call of a step."""
        parameters, self._calls = list(parameters), self._calls + 1
        if looks_at(self._calls) or count_hooks() != self.registered:
            with torch.inference_mode(False), torch.enable_grad():  # or a parameter has no node
                found_at = {p: node_hooks(get_gradient_edge(p).node) for p in parameters if p.requires_grad}
            self._of_nodes = {p: hooks for p, hooks in found_at.items() if any(hooks)}
            self.registered = count_hooks()
        return list(dict.fromkeys([*with_hooks(parameters), *self._of_nodes]))

    def __reduce__(self) -> tuple[type[Hooks], tuple[()]]:
        """Copy and pickle without the hooks, as torch copies parameters."""
        return Hooks, ()


def node_hooks(node: Node) -> list[Any]:
    """Return the dictionaries of the hooks of a node of a graph, which torch gives away with the handle of a new hook."""
    handles = [register(lambda *_: None) for register in (node.register_prehook, node.register_hook)]
    found = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    Hooks.own += len(handles)
    return found


@contextmanager
def _once(parameters: Sequence[Tensor], of_nodes: Mapping[Tensor, list[Any]]) -> Iterator[None]:
    before = [p.grad for p in parameters]
    early = [hooks for p in parameters for hooks in (gradient_hooks(p)[0], *of_nodes.get(p, ()))]
    added: list[Tensor | None] = [None] * len(parameters)
    for p in parameters:
        p.grad = None
    try:
        with resting(after_adding(parameters)):
            with resting(early):
                yield
            due = {p: p.grad for p in parameters if p.grad is not None}
            for p in due:
                p.grad = None
            if due:  # a backward of these nodes alone, as some hooks ask autograd where they are
                torch.autograd.backward(list(due), list(due.values()))
            added = [p.grad for p in parameters]
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
    for p, gradient in zip(parameters, added, strict=True):
        if gradient is not None:
            add_to_grad(p, gradient)
    with torch.no_grad():
        for p, gradient in zip(parameters, added, strict=True):
            for hook in list(gradient_hooks(p)[1].values()) if gradient is not None else ():
                hook(p)


def watched(hidden: Iterable[Tensor], nodes: Iterable[Node], moved: list[object]) -> list[dict[int, Any]]:
    """Return the dictionaries of a graph's hooks, and let each hook tell when it changes a gradient.

    Args:
        hidden: hidden tensors on which the forward has put hooks.
        nodes: nodes of the graph, on which the backward hooks of modules are.
        moved: list to which every hook is appended that changes a gradient.
    """
    hooks = [gradient_hooks(x)[0] for x in dict.fromkeys(hidden)] + [one for node in nodes for one in node_hooks(node)]
    for one in hooks:
        one.update({key: partial(_telling, hook, moved) for key, hook in one.items()})
    return [one for one in hooks if one]


def _telling(hook: Callable[..., Any], moved: list[object], gradients: Any, *others: Any) -> Any:
    """Run a hook; append it to `moved` if the gradients that it returns, or leaves, are not those that it gets."""
    single = not isinstance(gradients, tuple)
    given = (gradients,) if single else gradients
    before = [g if g is None else g.clone() for g in given]
    result = hook(gradients, *others)
    after = given if result is None else (result,) if single else result
    if not all(map(agree, before, after)):
        moved.append(hook)
    return result


def after_adding(tensors: Iterable[Tensor]) -> list[dict[int, Any]]:
    """Return the dictionaries of the hooks that run after an addition to a gradient, those of a sum over replicas among them."""
    return [gradient_hooks(x)[1] for x in tensors]


@contextmanager
def resting(hooks: Sequence[dict[int, Any]]) -> Iterator[None]:
    """Let the body run without the hooks in these dictionaries."""
    taken = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, back in zip(hooks, taken, strict=True):
            one.update(back)


@contextmanager
def noted(method: str, found: Callable[..., object], kind: type = Tensor) -> Iterator[None]:
    """Let a function see every call of a method in the body, such as `register_hook`, as a graph does not tell.

    Args:
        method: name of the method.
        found: the function, called with the same arguments before the method.
        kind: class of the method; default: tensors.
    """
    original = getattr(kind, method)

    def note(*args: Any, **named: Any) -> Any:
        found(*args, **named)
        return original(*args, **named)

    setattr(kind, method, note)
    try:
        yield
    finally:
        setattr(kind, method, original)


def around_updates(before: Callable[..., None], after: Callable[..., None] | None = None) -> list[RemovableHandle]:
    """Call methods of one object before and after every step of every optimizer; return the hooks, which go with the object.

    Args:
        before: the method that is called before a step, with the hook's arguments.
        after: that which is called after it, likewise; default: none.
    """
    hooks = [register_optimizer_step_pre_hook(_weakly(before))]
    if after is not None:
        hooks.append(register_optimizer_step_post_hook(_weakly(after)))
    for hook in hooks:
        weakref.finalize(before.__self__, hook.remove)  # type: ignore[attr-defined]  # a method
    return hooks


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method, but does not keep its object alive."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        if (bound := weak()) is not None:
            bound(*arguments)

    return call


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to ``.grad``, which stays the same tensor where autograd would keep it."""
    old = parameter.grad
    if old is None:
        parameter.grad = gradient
    elif old.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + old  # torch adds a sparse tensor to a dense one only
    else:
        with torch.no_grad():
            old += gradient
