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

from nwise._torch import gradient_hooks, with_hooks

_NOTHING_ELSE = nullcontext()


def once(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let the body run without the hooks of these parameters, then run them on what it has added to each gradient.

    If the body or a hook on a gradient raises, each ``.grad`` is as before.
    """
    found = with_hooks(parameters)
    return _once(list(dict.fromkeys(found))) if found else _NOTHING_ELSE


@contextmanager
def _once(parameters: Sequence[Tensor]) -> Iterator[None]:
    before = [p.grad for p in parameters]
    hooks = [gradient_hooks(p) for p in parameters]
    taken = [(_taken(on_gradient), _taken(on_grad)) for on_gradient, on_grad in hooks]
    for p in parameters:
        p.grad = None
    added: list[Tensor | None] = [None] * len(parameters)
    try:
        yield
        for (on_gradient, _), (first, _) in zip(hooks, taken, strict=True):
            _put_back(on_gradient, first)
        due = {p: p.grad for p in parameters if p.grad is not None}
        for p in due:
            p.grad = None
        if due:  # a backward of these nodes alone, as some hooks ask autograd where they are
            torch.autograd.backward(list(due), list(due.values()))
        added = [p.grad for p in parameters]
    finally:
        for p, gradient, (on_gradient, on_grad), (first, second) in zip(parameters, before, hooks, taken, strict=True):
            p.grad = gradient
            _put_back(on_gradient, first)
            _put_back(on_grad, second)
    for p, gradient in zip(parameters, added, strict=True):
        if gradient is not None:
            add_to_grad(p, gradient)
    with torch.no_grad():
        for p, gradient, (_, on_grad) in zip(parameters, added, hooks, strict=True):
            for hook in list(on_grad.values()) if gradient is not None else ():
                hook(p)


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


def _taken(hooks: dict[int, Any]) -> dict[int, Any]:
    """Empty a dictionary of hooks, and return what it had."""
    taken = dict(hooks)
    hooks.clear()
    return taken


def _put_back(hooks: dict[int, Any], taken: dict[int, Any]) -> None:
    """Fill a dictionary of hooks again; a second call does nothing."""
    hooks.update(taken)
    taken.clear()
