"""Devices of different speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any

from nwise.checks import check_at_least

__all__ = ["Device", "as_devices", "limits"]

MOST_ORDERS = 120  # of devices that are tried
_EXTREME = 1e6  # keeps times finite


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator that takes stages.

    Args:
        speed: relative to the device on which the network is measured; default 1.
        memory: bytes that it may use; default: no limit.

    Raises:
        ValueError: a number is not above 0, or the speed is extreme.

    >>> Device(speed=2, memory=8e9)
    Device(speed=2.0, memory=8000000000.0)
    """

    speed: float = 1.0
    memory: float = inf

    def __post_init__(self) -> None:
        for name in ("speed", "memory"):
            value: Any = getattr(self, name)
            try:
                number = 0.0 if isinstance(value, bool) or not isinstance(value, Real) else float(value)
            except OverflowError:  # an integer beyond all floats
                number = 0.0
            if not number > 0:
                raise ValueError(f"`{name}` of a device should be a float above 0. Found {value!r:.50}.")
            object.__setattr__(self, name, number)  # numbers of numpy become Python's
        if not 1 / _EXTREME <= self.speed <= _EXTREME:
            raise ValueError(
                f"`speed` of a device should be from {1 / _EXTREME:g} to {_EXTREME:g}. Found {self.speed:.3g}."
            )


def as_devices(devices: int | Sequence[Any]) -> tuple[Device, ...]:
    """Return devices from their number, their speeds or themselves.

    Raises:
        ValueError, TypeError: there is none, or a speed is not above 0.

    >>> [device.speed for device in as_devices([1, 2.5])]
    [1.0, 2.5]
    """
    if isinstance(devices, int | Integral):
        check_at_least(1, devices=devices)
        return (Device(),) * int(devices)
    if isinstance(devices, str) or not hasattr(devices, "__iter__"):
        raise TypeError(f"`devices` should be a number, or a list of speeds or `nwise.Device`s. Found {devices!r}.")
    result = tuple(one if isinstance(one, Device) else Device(speed=one) for one in devices)
    if not result:
        raise ValueError("`devices` should contain at least one device. Found none.")
    return result


def limits(devices: Sequence[Device]) -> tuple[float, ...] | None:
    """Return the memory of every device; None if none is limited."""
    memory = tuple(device.memory for device in devices)
    return memory if any(map(isfinite, memory)) else None


def orders(devices: Sequence[Device]) -> list[tuple[int, ...]]:
    """Return orders of the devices along the network, without those that only exchange equal ones; the given one first."""
    # Speeds a, b, b have three orders, since the two b are alike: a b b, b a b, b b a. Sorted orders come first,
    # because stages at one end keep the most activations, so a large device often belongs there.
    given = tuple(range(len(devices)))
    keys: list[Callable[[int], float]] = [lambda i: devices[i].speed, lambda i: devices[i].memory]
    likely = (tuple(sorted(given, key=key, reverse=down)) for key in keys for down in (False, True))
    found = dict.fromkeys(islice(chain([given], likely, _distinct(given, devices)), MOST_ORDERS + 5))
    return list(found)[:MOST_ORDERS]


def _distinct(left: tuple[int, ...], devices: Sequence[Device]) -> Iterator[tuple[int, ...]]:
    if not left:
        yield ()
    for first in {devices[i]: i for i in reversed(left)}.values():  # of equal devices the one with the smallest index
        for rest in _distinct(tuple(i for i in left if i != first), devices):
            yield (first, *rest)
