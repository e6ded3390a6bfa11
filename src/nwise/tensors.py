"""The tensors that a stage takes and returns: by position, or by name as in a dictionary.

The next module gets the names as keyword arguments, so they travel with the tensors from stage to stage::

    step(input_ids=i, mask=m)   stage 0(input_ids=i, mask=m)   -> {"hidden": h, "mask": m}
                                stage 1(hidden=h, mask=m)      -> logits
                                head 0(hidden=h, mask=m)       -> logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from nwise._torch import counter

__all__ = ["Tensors", "as_tuple", "run_module"]

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
Input = Tensor | Mapping[str, Tensor]
HIDDEN = "hidden"  # the entry of a dictionary at which heads look (`OnFirstOutput`)


class Named(tuple[Tensor, ...]):
    """Tensors with names, in the order of the names; the dictionary of them keeps the order in which it was given.

    >>> import torch
    >>> named = Named({"x": torch.zeros(2), "mask": torch.ones(2)})
    >>> named.names, list(named.by_name())
    (('mask', 'x'), ['x', 'mask'])
    """

    names: tuple[str, ...]
    order: tuple[str, ...]

    def __new__(cls, values: Mapping[str, Tensor]) -> Self:
        # Processes that agree on names agree on the order of the tensors in a message.
        names = sorted(values)
        made = super().__new__(cls, (values[name] for name in names))
        made.names = tuple(names)
        made.order = tuple(values)
        return made

    def __getnewargs__(self) -> tuple[dict[str, Tensor]]:
        return (self.by_name(),)

    def by_name(self) -> dict[str, Tensor]:
        """Return the tensors as a dictionary."""
        values = dict(zip(self.names, self, strict=True))
        return values if self.order == self.names else {name: values[name] for name in self.order}


class Sole(tuple[Tensor, ...]):
    """One tensor that was given in a tuple or list, which a loss gets as it was: its item 0 is the tensor, not a sample."""


def names(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the names of tensors; none if they are given by position."""
    return tensors.names if isinstance(tensors, Named) else ()


def with_names(tensors: Iterable[Tensor], names: Sequence[str]) -> Tensors:
    """Return tensors under these names, or by position without names."""
    return Named(dict(zip(names, tensors, strict=True))) if names else tuple(tensors)


asks = attrgetter("requires_grad")  # whether a tensor asks for a gradient, without a call in Python


def like(tensors: Tensors, made: Iterable[Tensor]) -> Tensors:
    """Return tensors under the names of others, or in a tuple of the same kind."""
    if not isinstance(tensors, Named):
        return type(tensors)(made)
    values = dict(zip(tensors.names, made, strict=True))
    return Named({name: values[name] for name in tensors.order})


def each(tensors: Tensors, function: Callable[[Tensor], Tensor]) -> Tensors:
    """Apply a function to every tensor; the names stay.

    >>> import torch
    >>> each(Named({"x": torch.zeros(2)}), torch.exp).names
    ('x',)
    """
    # Without names, the usual case, in one call: a step comes here several times for each stage and micro-batch.
    return (
        like(tensors, map(function, tensors)) if isinstance(tensors, Named) else type(tensors)(map(function, tensors))
    )


def scatter(tensors: Tensors, num_parts: int) -> list[Tensors]:
    """Cut tensors along dimension 0 into parts whose sizes differ by at most one, larger ones first."""
    parts = zip(*(x.tensor_split(num_parts) for x in tensors), strict=True)
    return [like(tensors, part) for part in parts]


def as_leaves(tensors: Tensors, *, tracked: bool) -> Tensors:
    """Return detached tensors that record a separate graph; with `tracked` they have gradients where they can."""
    leaves = tuple(map(Tensor.detach, tensors)) if type(tensors) is tuple else each(tensors, Tensor.detach)
    for x in leaves if tracked else ():
        x.requires_grad_(x.is_floating_point() or x.is_complex())
    return leaves


def anew(tensors: Tensors) -> Tensors:
    """Return detached tensors that ask for a gradient if those given do."""
    leaves = each(tensors, Tensor.detach)
    for leaf, x in zip(leaves, tensors, strict=True):
        leaf.requires_grad_(x.requires_grad)
    return leaves


def values_of(tensors: Iterable[Tensor]) -> list[tuple[Callable[[Tensor], None], Tensor]]:
    """Return the values of tensors, and what writes them back (`nwise.randomness.kept`)."""
    return [(partial(put, x), x.detach().clone()) for x in tensors]


def put(x: Tensor, value: Tensor) -> None:
    """Give a tensor the values of another one, without a new version for autograd."""
    # An expanded tensor refuses a copy. As it cannot be written to in place either, it has its values already.
    if x.layout is not torch.strided or x.is_meta or not torch.equal(x, value):
        x.data.copy_(value)


def as_tuple(value: Any, what: str) -> Tensors:
    """Return a tensor, a sequence of tensors or a mapping from names to tensors as a tuple.

    Args:
        value: the tensors.
        what: what they are, for the message.

    Raises:
        TypeError: it is something else, or holds something else.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, Named):
        return value
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            if not isinstance(name, str) or not isinstance(item, Tensor):
                raise TypeError(
                    f"{what} should have a tensor under every name. Found {type(item).__name__} under {name!r}; convert it or "
                    "leave it out."
                )
        return Named(value)
    if hasattr(value, "_fields") and isinstance(value, tuple):
        raise TypeError(
            f"{what} should be a tensor, a tuple of tensors or a dictionary of them. Found the named tuple "
            f"{type(value).__name__}, whose names would be lost; use its fields as a plain tuple or as a dictionary."
        )
    if isinstance(value, tuple | list) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(value) if len(value) > 1 else Sole(value)
    kind = type(value).__name__ if not isinstance(value, Mapping) or value else "an empty dictionary"
    if isinstance(value, tuple | list):
        kind += " of " + (", ".join(type(item).__name__ for item in value) or "nothing")
    raise TypeError(
        f"{what} should be a tensor, a tuple of tensors or a dictionary of them. Found {kind}; unpack or convert it."
    )


def as_inputs(inputs: Sequence[Any], named: Mapping[str, Any], what: str) -> Tensors:
    """Return the inputs of a call: by position, by name, or one dictionary.

    Args:
        inputs: the positional arguments.
        named: the keyword arguments.
        what: what they are, for the message.

    Raises:
        TypeError: both kinds are given, or something that is not a tensor.
    """
    if inputs and named:
        raise TypeError(
            f"{what} should be given by position or by name. Found {len(inputs)} by position and {', '.join(named)} by name; "
            "name them all."
        )
    if len(inputs) == 1 and isinstance(inputs[0], Tensor | Mapping):
        return as_tuple(inputs[0], what)
    return as_tuple(named, what) if named else tuple(as_tuple(inputs, what))


def invoke(function: Callable[..., Any], inputs: Tensors) -> Any:
    """Call a module or function with tensors, by name if they have names."""
    return function(**inputs.by_name()) if isinstance(inputs, Named) else function(*inputs)


def run_module(module: Callable[..., Any], inputs: Tensors, what: str) -> Tensors:
    """Call a module with tensors, and return its outputs as a tuple; `what` names them in an error."""
    made = module(**inputs.by_name()) if isinstance(inputs, Named) else module(*inputs)  # `invoke`, in one call less
    return (made,) if isinstance(made, Tensor) else as_tuple(made, what)


def run_unchanged(function: Callable[..., T], inputs: Tensors, who: str, *targets: Tensors | None) -> T:
    """Call a function with tensors whose values are still needed; return what it returns.

    Args:
        function: the function.
        inputs: its first argument.
        who: what changes the tensors if they change, for the error.
        targets: its other arguments.

    Raises:
        ValueError: it has changed a tensor in place.
    """
    tensors = inputs if not targets or targets[0] is None else (*inputs, *targets[0])
    cause = None
    try:
        before = [*map(counter, tensors)]
    except RuntimeError:  # made in inference mode, where torch does not count
        return function(inputs, *targets)
    try:
        made = function(inputs, *targets)
    except RuntimeError as error:
        if "a leaf Variable that requires grad is being used in an in-place" not in str(error):
            raise
        cause = error
    if cause is None and [*map(counter, tensors)] == before:
        return made
    raise ValueError(
        f"{who} should not change its input or target in place, because other passes and losses still need the values. "
        "Found an in-place operation; clone the tensor first, or set `inplace=False` in the first layer."
    ) from cause


def address(tensor: Tensor | None) -> int | None:
    """Return where the memory of a tensor begins; None if there is none, or several parts, as of a sparse or nested one."""
    return tensor.untyped_storage().data_ptr() if type(tensor) is Tensor and tensor.layout is torch.strided else None


def main_tensor(tensors: Tensors) -> Tensor:
    """Return the tensor that a head looks at: the first; of named ones the hidden state, or the first floating-point one."""
    known = dict(zip(names(tensors), tensors, strict=False))
    floating = (x for x in tensors if x.is_floating_point())
    return known.get(HIDDEN, next(floating, tensors[0])) if known else tensors[0]


def as_argument(tensors: Tensors) -> Tensor | Tensors | dict[str, Tensor]:
    """Return tensors as a user sees them: a dictionary if they have names, and a tensor alone unless it came in a tuple."""
    if isinstance(tensors, Named):
        return tensors.by_name()
    return tensors[0] if len(tensors) == 1 and not isinstance(tensors, Sole) else tuple(tensors)
