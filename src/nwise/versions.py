"""The parameters of passes that come after an update.

Under a delay the passes of a mini-batch come after later updates. Here the delay is 1, and w[s] are the parameters in step s::

    step                    0        1        2
    forward                 F w[0]   F w[1]   F w[2]
    passes, `Stashed`                W w[0]   W w[1]    with copies of the parameters of their forward
    passes, `InMemory`               W w[1]   W w[2]    with the parameters in memory, and the activations of w[0] and w[1]

Either way the gradient goes to the ``.grad`` of the present parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nwise._dtensor import is_dtensor
from nwise._hooks import add_to_grad
from nwise._torch import version
from nwise.modes import in_modes, modes_in


class Versions(ABC):
    """The parameters that a mini-batch uses in a stage.

    Args:
        module: the stage.
        name: the stage's name, for errors.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._parameters: dict[str, Tensor] = dict(module.named_parameters())

    @abstractmethod
    def computing(self, buffers: Mapping[str, Tensor], *, checked: bool) -> AbstractContextManager[object]:
        """Let the body run the module's forward.

        Args:
            buffers: buffers to use instead of the module's own, by name.
            checked: whether to check what the forward does.
        """

    @abstractmethod
    def passing(self) -> AbstractContextManager[object]:
        """Let the body run a pass."""

    def modes(self) -> AbstractContextManager[object]:
        """Let the body run with the modules in the modes of the forward."""
        return nullcontext()

    @property
    def learns(self) -> list[Tensor]:
        """The trainable parameters at which the graph ends."""
        return [p for p in self._parameters.values() if p.requires_grad]

    def move_gradients(self) -> None:
        """Move the gradients of a pass to the present parameters, where they are late.

        Raises:
            ValueError: the module has other parameters now.
        """
        present = dict(self._module.named_parameters())
        if present.keys() != self._parameters.keys():
            changed = ", ".join(sorted(present.keys() ^ self._parameters.keys()))
            raise ValueError(
                f"{self._name.capitalize()} should keep its parameters while gradients are due. Found other ones ({changed}); "
                "before the change, update while `pipe.drain()` returns True."
            )
        for key, parameter in present.items():
            old = self._parameters[key]
            if old is not parameter and old.grad is not None:
                if parameter.requires_grad:
                    add_to_grad(parameter, old.grad)
                old.grad = None


class Stashed(Versions):
    """Copies of the parameters of the forward."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self._parameters = {
            key: p.detach().clone().requires_grad_(p.requires_grad) for key, p in self._parameters.items()
        }
        self._modes = modes_in(module)

    def computing(self, buffers: Mapping[str, Tensor], *, checked: bool) -> AbstractContextManager[object]:
        return holding(self._module, {**self._parameters, **buffers}, self._name)

    def passing(self) -> AbstractContextManager[object]:
        # A pass may run parts of the module again, as `torch.utils.checkpoint` does, and they must find the old versions.
        return holding(self._module, self._parameters, self._name)

    def modes(self) -> AbstractContextManager[object]:
        return in_modes(self._modes)


class InMemory(Versions):
    """The parameters in memory: passes read what shares memory with one when they need it, and no copy is made.

    The rest, activations and values computed from parameters such as casts, is that of the forward.

    Raises:
        ValueError: a parameter is distributed.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        if any(map(is_dtensor, self._parameters.values())):
            raise self._refused("plain parameters", "a distributed one")
        self._owners = {p.untyped_storage().data_ptr(): p for p in self._parameters.values() if p.numel()}

    @contextmanager
    def computing(self, buffers: Mapping[str, Tensor], *, checked: bool) -> Iterator[None]:
        inner: list[object] = []
        with saved_tensors_hooks(self._pack, self._unpack), _entered(inner) if checked else nullcontext():
            yield
        if inner:
            raise self._refused(
                "no hooks on saved tensors inside", f"`{type(inner[0]).__name__}`, as of `torch.utils.checkpoint`"
            )

    def passing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _refused(self, wanted: str, found: str) -> ValueError:
        return ValueError(
            f"{self._name.capitalize()} should have {wanted} under Hogwild with the weights in memory. Found {found}; use "
            "`nwise.Hogwild(weights='forward')`."
        )

    def _pack(self, x: Tensor) -> _Saved:
        plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
        owner = self._owners.get(x.untyped_storage().data_ptr()) if plain else None
        return _Saved(x, None, version(x)) if owner is None else _Saved(x.data, owner, 0)

    def _unpack(self, saved: _Saved) -> Tensor:
        x, owner, then = saved
        if owner is None:
            if version(x) != then:  # with hooks, autograd does not look
                raise RuntimeError(
                    f"{self._name.capitalize()} should leave what its backward needs as it is. Found a tensor of shape "
                    f"{list(x.shape)} that was modified by an inplace operation; clone it first."
                )
        elif x.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():  # an update by `p.data = ...`
            x.set_(owner.untyped_storage(), x.storage_offset(), x.size(), x.stride())
        return x


class _Saved(NamedTuple):
    """A tensor that autograd has saved: the parameter in whose memory it is, or its version."""

    tensor: Tensor
    owner: Tensor | None
    version: int


@contextmanager
def _entered(found: list[object]) -> Iterator[None]:
    """Append to a list the hooks on saved tensors that the body uses."""
    original = saved_tensors_hooks.__enter__

    def enter(hooks: saved_tensors_hooks) -> None:
        found.append(hooks)
        original(hooks)

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = original  # type: ignore[method-assign]


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> Iterator[None]:
    """Let a module hold these parameters and buffers instead of its own while the body runs.

    A backward pass may run parts of the module again, as `torch.utils.checkpoint` does, and they must find the old versions.

    Args:
        module: the module.
        tensors: the parameters and buffers, by name.
        name: the module's name, for errors.

    Raises:
        ValueError: the module is TorchScript, whose tensors cannot be replaced.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with holding(layer, {"weight": torch.ones(1, 1)}, "the layer"):
    ...     layer(torch.full((1, 1), 3.0)).item()
    3.0
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ValueError(
            f"{name.capitalize()} should not be TorchScript when it runs with replaced parameters or buffers, as under a "
            "delay or with `recompute`. Found a scripted module; pass the original module."
        )
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    others = {own[key]: tensor for key, tensor in tensors.items() if key in own}
    # Every place once. `torch.func.functional_call` goes by names, and a module that is used twice has two: it would keep the
    # replacement of the first as its own.
    stores = [store for part in module.modules() for store in (part._parameters, part._buffers)]
    places = [
        (store, key, held) for store in stores for key, held in store.items() if held is not None and held in others
    ]
    try:
        for store, key, held in places:
            store[key] = others[held]  # type: ignore[assignment]
        yield
    finally:
        for store, key, held in places:
            store[key] = held  # type: ignore[assignment]
