"""The parameters that a mini-batch uses in a stage: the present ones, copies, or those in memory.

Under a delay the passes of a mini-batch come after later updates. Here the delay is 1, and w[s] are the parameters in step s::

    step                    0        1        2
    forward                 F w[0]   F w[1]   F w[2]
    passes, `Copies`                 W w[0]   W w[1]    with copies of the parameters of their forward
    passes, `InMemory`               W w[1]   W w[2]    with the parameters in memory, and the activations of w[0] and w[1]

A graph ends at the parameters of its forward, so a context surrounds forwards only. After a weight gradient, `hand_over` moves
the gradients of copies to the ``.grad`` of the present parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from nwise._torch import gradient_hooks, version
from nwise.stage.graph import add_to_grad

NO_HOOKS = (
    "should have no hooks on saved tensors under a delay, such as those of `torch.utils.checkpoint`, whose blocks run again "
    "with later parameters. Found some; use `recompute=True`, or a strategy without a delay."
)


class Weights:
    """The present parameters, for passes that come before the next update.

    Args:
        learns: the trainable parameters of the stage.

    Attributes:
        learns: the tensors at which the graphs of the mini-batch end.
        computing: context in which the stage's forward runs with these parameters.
        copied: whether `hand_over` has something to do.
    """

    computing: AbstractContextManager[object] = nullcontext()  # made once: a step enters it for every forward
    copied = False

    def __init__(self, learns: Sequence[Tensor]) -> None:
        self.learns = list(learns)

    def hand_over(self) -> None:
        """Move the gradients of a pass to the present parameters."""


class Copies(Weights):
    """Copies of the parameters of the forward.

    Args:
        learns: the trainable parameters of the stage.
        module: the stage.
        name: the stage's name, for errors.
    """

    def __init__(self, learns: Sequence[Tensor], module: nn.Module, name: str) -> None:
        self._refusal = f"{name} {NO_HOOKS}"
        own = dict.fromkeys(learns)
        super().__init__(list(map(_learning_copy, own)))
        self._used = dict(zip(own, self.learns, strict=True))
        # Every place once. `torch.func.functional_call` goes by names, and a module that is used twice has two: it would keep
        # the copy of the first as its own.
        self._places: list[tuple[dict[str, Any], str, Tensor]] = []
        for part in module.modules():
            for key, p in part._parameters.items():
                if p is not None and p in self._used:
                    self._places.append((part._parameters, key, self._used[p]))

    copied = True

    @property
    def computing(self) -> AbstractContextManager[object]:  # type: ignore[override]
        return self._in_place()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let the copies stand in the places of the parameters."""
        found = []
        try:
            for store, key, copy in self._places:
                found.append(store[key])
                store[key] = copy
            with disable_saved_tensors_hooks(self._refusal):
                yield
        finally:
            for (store, key, _), p in zip(self._places, found, strict=False):
                store[key] = p

    def hand_over(self) -> None:
        for p, copy in self._used.items():
            if copy.grad is not None:
                if p.requires_grad:  # it may be frozen by now
                    add_to_grad(p, copy.grad)
                copy.grad = None


class InMemory(Weights):
    """The parameters in memory: passes read what shares memory with one when they need it, and no copy is made.

    The rest, activations and values computed from parameters such as casts, is that of the forward.

    Args:
        learns: the trainable parameters of the stage.
        module: the stage.
        name: the stage's name, for errors.
    """

    def __init__(self, learns: Sequence[Tensor], module: nn.Module, name: str) -> None:
        super().__init__(learns)
        self._name = name
        parameters = list(module.parameters())
        # What the forward uses, by its address, with the parameter: a later ``p.data = other`` moves the parameter.
        self._owners = {p.untyped_storage().data_ptr(): (p.data, p) for p in parameters if p.numel()}

    @property
    def computing(self) -> AbstractContextManager[object]:  # type: ignore[override]
        return saved_tensors_hooks(self._pack, call)

    def _pack(self, x: Tensor) -> Callable[[], Tensor]:
        """Return what reads a tensor that autograd saves."""
        plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
        found = self._owners.get(x.untyped_storage().data_ptr()) if plain else None
        if found is None:  # without the graph, which would hold itself by its hooks and outlive a step that is dropped
            return partial(self._unchanged, x.detach(), version(x))
        used, owner = found
        return partial(self._present, x.data, used, owner, x.data_ptr() - used.data_ptr())

    def _unchanged(self, x: Tensor, number: int) -> Tensor:
        """Return a tensor that is no parameter's, with the version that it had."""
        if version(x) != number:  # with hooks, autograd does not look
            raise RuntimeError(
                f"{self._name} should leave what its backward needs as it is. Found a tensor of shape {list(x.shape)} that was "
                "modified by an inplace operation; clone it first."
            )
        return x

    def _present(self, x: Tensor, used: Tensor, owner: Tensor, start: int) -> Tensor:
        """Return a tensor with the values of a present parameter.

        Args:
            x: the tensor.
            used: what the forward used, in whose memory it is.
            owner: the parameter.
            start: distance of `x` from the beginning of `used`, in bytes.
        """
        if x.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():  # replaced by `p.data = ...`
            if _layout(used) != _layout(owner):
                raise RuntimeError(
                    f"{self._name} should keep the dtype, device and strides of its parameters while gradients are due. Found "
                    f"{_layout(owner)} instead of {_layout(used)}; before the change, update while `pipe.drain()` returns True."
                )
            place = owner.storage_offset() * owner.itemsize + start
            x.set_(owner.untyped_storage(), place // x.itemsize, x.size(), x.stride())
        return x


def _layout(x: Tensor) -> str:
    return f"{x.dtype} on {x.device} with strides {x.stride()}"


def _learning_copy(parameter: Tensor) -> Tensor:
    """Return a copy that gets gradients as its parameter does, with its hooks, class and attributes, which a forward may read."""
    copy = parameter.detach().clone()
    copy.requires_grad_(parameter.requires_grad)
    for hook in gradient_hooks(parameter)[0].values():
        copy.register_hook(hook)
    if type(copy) is Tensor and type(parameter) is not nn.Parameter:
        copy.__class__ = type(parameter)
    vars(copy).update(vars(parameter))
    if copy.requires_grad and getattr(parameter, "grad_dtype", copy.dtype) != copy.dtype:
        copy.grad_dtype = parameter.grad_dtype
    return copy
