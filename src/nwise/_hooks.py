"""Hooks of parameters, run once in a step, with the gradient of the whole mini-batch.

A step adds to a gradient in several passes, for every micro-batch and on copies of the parameters under a delay. A hook that a
user has put on a parameter expects one `backward`. So its hooks rest during the passes and run at the end of the step:

    pass 1    + part        register_hook                     sees the sum, and may replace it
    pass 2    + part        register_post_accumulate_grad_hook    sees `.grad`; it may update and set it to None
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING_ELSE = nullcontext()


def once(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let the body run without the hooks of these parameters, then run them on what it has added to each gradient.

    If the body or a hook on a gradient raises, each ``.grad`` is as before.
    """
    # Torch has no public way to ask. A list, because a step asks each time and a generator costs more.
    found = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
    return _once(list(dict.fromkeys(found))) if found else _NOTHING_ELSE


@contextmanager
def _once(parameters: Sequence[Tensor]) -> Iterator[None]:
    before = [p.grad for p in parameters]
    hooks = [(_taken(p._backward_hooks), _taken(p._post_accumulate_grad_hooks)) for p in parameters]
    for p in parameters:
        p.grad = None
    added: list[Tensor | None] = [None] * len(parameters)
    try:
        yield
        added = [p.grad for p in parameters]
    finally:
        for p, gradient, taken in zip(parameters, before, hooks, strict=True):
            p.grad = gradient
            _put_back(p._backward_hooks, taken[0])
            _put_back(p._post_accumulate_grad_hooks, taken[1])
    with torch.no_grad():
        changed = [_changed(gradient, taken[0]) for gradient, taken in zip(added, hooks, strict=True)]
        for p, gradient in zip(parameters, changed, strict=True):
            if gradient is not None:
                add_to_grad(p, gradient)
        for p, gradient, (_, after) in zip(parameters, changed, hooks, strict=True):
            for hook in after.values() if gradient is not None else ():
                hook(p)


def _changed(gradient: Tensor | None, hooks: dict[int, Any]) -> Tensor | None:
    """Return what hooks make of a gradient."""
    for hook in hooks.values() if gradient is not None else ():
        made = hook(gradient)
        gradient = gradient if made is None else made
    return gradient


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to ``.grad``, which stays the same tensor where autograd would keep it."""
    old = parameter.grad
    if old is None:
        parameter.grad = gradient
    elif old.is_sparse and not gradient.is_sparse:
        parameter.grad = old + gradient
    else:
        with torch.no_grad():
            old += gradient


def _taken(hooks: Any) -> dict[int, Any]:
    """Empty a dictionary of hooks, and return what it had."""
    taken = dict(hooks or {})
    if hooks:
        hooks.clear()
    return taken


def _put_back(hooks: Any, taken: dict[int, Any]) -> None:
    if taken:
        hooks.update(taken)
