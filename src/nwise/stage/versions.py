"""The parameters of passes that come after an update.

Under a delay the passes of a mini-batch come after later updates. Here the delay is 1, and w[s] are the parameters in step s::

    step                    0        1        2
    forward                 F w[0]   F w[1]   F w[2]
    passes, `Stashed`                W w[0]   W w[1]    with copies of the parameters of their forward
    passes, `InMemory`               W w[1]   W w[2]    with the parameters in memory, and the activations of w[0] and w[1]

`Recomputed` is `InMemory` for a forward that runs again: copies of w[0] and w[1] make the activations, and the passes read w[1]
and w[2]. In each case the gradient goes to the ``.grad`` of the present parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import call

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nwise._torch import version
from nwise.dtensor import is_dtensor
from nwise.held import State, Values, values_in, with_values
from nwise.stage.hooks import add_to_grad, noted


class Versions(ABC):
    """The parameters that a mini-batch uses in a stage.

    Args:
        module: the stage.
        name: the stage's name, for errors.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._parameters: dict[str, Tensor] = dict(module.named_parameters())
        self._values: Values = ()  # those of the forward that passes use

    @abstractmethod
    def computing(self, *, checked: bool) -> AbstractContextManager[object]:
        """Let the body run the module's forward; `checked` says whether to check what this does."""

    def passing(self) -> AbstractContextManager[None]:
        """Let the body run a pass, with the modules in the modes of the forward, and with their other values."""
        return with_values(self._values)

    @contextmanager
    def _with_copies(self, *, checked: bool) -> Iterator[None]:
        """Let the body run the module's forward with copies of its parameters."""
        before = {key: version(p) for key, p in self._parameters.items()} if checked else {}
        with holding(self._module, self._parameters, self._name):
            yield
        changed = [key for key, number in before.items() if version(self._parameters[key]) != number]
        if changed:
            raise ValueError(
                f"{self._name.capitalize()} should leave its parameters as they are under a delay, where its forward has copies "
                f"of them. Found a change of {changed[0]!r} in place, as `max_norm` of an embedding or a momentum encoder makes "
                "it; make it after the update, or keep what the forward changes in buffers."
            )

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
        self._parameters = {key: _learning_like(p, p.detach().clone()) for key, p in self._parameters.items()}
        self._values = values_in(module)
        self._state: State | None = None  # of a forward that a pass may run again in parts

    @contextmanager
    def computing(self, *, checked: bool) -> Iterator[None]:
        with self._with_copies(checked=checked), noted("__enter__", self._note, saved_tensors_hooks):
            yield

    def _note(self, _: saved_tensors_hooks) -> None:
        """Keep the state before the first part that puts hooks on saved tensors, as `torch.utils.checkpoint` does."""
        if self._state is None:
            self._state = State(self._module)

    @contextmanager
    def passing(self) -> Iterator[None]:
        # A part that runs again must find the old versions, too.
        reruns = nullcontext() if self._state is None else _finding(self._state)
        with super().passing(), holding(self._module, self._parameters, self._name), reruns:
            yield


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
        self._owners = _by_memory({key: p.data for key, p in self._parameters.items()}, self._parameters)

    @contextmanager
    def computing(self, *, checked: bool) -> Iterator[None]:
        inner: list[object] = []
        with saved_tensors_hooks(self._pack, call), noted("__enter__", inner.append, saved_tensors_hooks):
            yield
        if inner:
            raise self._refused(
                "no hooks on saved tensors inside", f"`{type(inner[0]).__name__}`, as of `torch.utils.checkpoint`"
            )

    def _refused(self, wanted: str, found: str) -> ValueError:
        return ValueError(
            f"{self._name.capitalize()} should have {wanted} under Hogwild with the weights in memory. Found {found}; use "
            "`nwise.Hogwild(weights='forward')`."
        )

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
                f"{self._name.capitalize()} should leave what its backward needs as it is. Found a tensor of shape "
                f"{list(x.shape)} that was modified by an inplace operation; clone it first."
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
        # A copy's, or replaced by `p.data = ...`.
        if x.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():
            if _layout(used) != _layout(owner):
                raise RuntimeError(
                    f"{self._name.capitalize()} should keep the dtype, device and strides of its parameters while gradients are "
                    f"due. Found {_layout(owner)} instead of {_layout(used)}; before the change, update while `pipe.drain()` "
                    "returns True."
                )
            place = owner.storage_offset() * owner.itemsize + start
            x.set_(owner.untyped_storage(), place // x.itemsize, x.size(), x.stride())
        return x


class Recomputed(InMemory):
    """The parameters in memory, for passes after a second forward with copies of the parameters of the first.

    The second forward makes the activations of the first. Passes read a parameter where autograd has saved its copy.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        present = self._parameters
        self._parameters = {key: _copy(p) for key, p in present.items()}
        self._owners = _by_memory(self._parameters, present)
        self._values = values_in(module)

    @contextmanager
    def computing(self, *, checked: bool) -> Iterator[None]:
        with self._with_copies(checked=checked), super().computing(checked=checked):
            yield


@contextmanager
def _finding(state: State) -> Iterator[None]:
    """Let a module's parts that run again in the body, under hooks on saved tensors, find a state; hooks of gradients do not."""
    inside: list[AbstractContextManager[object]] = []

    def entered(_: saved_tensors_hooks) -> None:
        inside.append(nullcontext() if inside else state.restored())
        inside[-1].__enter__()

    def left(*_: object) -> None:
        inside.pop().__exit__(None, None, None)

    with noted("__enter__", entered, saved_tensors_hooks), noted("__exit__", left, saved_tensors_hooks):
        yield


def _by_memory(used: Mapping[str, Tensor], present: Mapping[str, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return by address what a forward uses, each with the present parameter."""
    return {x.untyped_storage().data_ptr(): (x, present[key]) for key, x in used.items() if x.numel()}


def _layout(x: Tensor) -> str:
    return f"{x.dtype} on {x.device} with strides {x.stride()}"


def _copy(parameter: Tensor) -> Tensor:
    """Copy a parameter to memory of its own in the same layout: each view of the copy has its like of the parameter."""
    size, stride = parameter.size(), parameter.stride()
    memory = torch.empty_strided(size, stride, dtype=parameter.dtype, device=parameter.device).untyped_storage()
    copy = parameter.data.set_(memory, 0, size, stride)  # `data` conjugates as the parameter does
    return _learning_like(parameter, copy.copy_(parameter.detach()))


def _learning_like(parameter: Tensor, copy: Tensor) -> Tensor:
    """Return a copy that gets gradients as its parameter does, and has its class and attributes, which a forward may read."""
    copy.requires_grad_(parameter.requires_grad)
    if type(copy) is Tensor and type(parameter) is not nn.Parameter:
        copy.__class__ = type(parameter)
    vars(copy).update(vars(parameter))
    if copy.requires_grad and getattr(parameter, "grad_dtype", copy.dtype) != copy.dtype:
        copy.grad_dtype = parameter.grad_dtype
    return copy


def refuse_scripts(module: nn.Module, name: str) -> None:
    """Raise ValueError if a module is TorchScript, whose tensors cannot be replaced."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise ValueError(
            f"{name.capitalize()} should not be TorchScript when it runs with replaced parameters or buffers, as under a "
            "delay or with `recompute`. Found a scripted module; pass the original module."
        )


@contextmanager
def holding(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> Iterator[None]:
    """Let a module hold these parameters instead of its own while the body runs.

    Args:
        module: the module.
        tensors: the parameters, by name.
        name: the module's name, for errors.

    Raises:
        ValueError: as `refuse_scripts` does.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> with holding(layer, {"weight": torch.ones(1, 1)}, "the layer"):
    ...     layer(torch.full((1, 1), 3.0)).item()
    3.0
    """
    refuse_scripts(module, name)
    own = dict(module.named_parameters())
    others = {own[key]: tensor for key, tensor in tensors.items() if key in own}
    # Every place once. `torch.func.functional_call` goes by names, and a module that is used twice has two: it would keep the
    # replacement of the first as its own.
    stores = [part._parameters for part in module.modules()]
    places = [
        (store, key, held) for store in stores for key, held in store.items() if held is not None and held in others
    ]
    try:
        for store, key, held in places:
            store[key] = others[held]  # type: ignore[assignment]
        yield
    finally:
        for store, key, held in places:
            store[key] = held
