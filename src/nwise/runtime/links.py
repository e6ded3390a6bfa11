"""Links: what a message to a neighbouring rank takes, measured when the two connect.

Messages of several sizes go there, and an empty one comes back for each::

    empty                2 latencies
    several bytes        2 latencies and the time of the bytes

So about a second tells both. It also opens TCP's windows, which begin with a few packets, before training begins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import torch

from nwise.runtime.channel import Channel, Name

__all__ = ["Link"]

_TASK = -1  # of these messages
_LAST = "last"
_SMALL, _LARGE = 2**18, 2**24  # bytes of the first message that is not empty, and of the largest
_TIMES = 3  # of each size; the first ones open the window
_LONG = 1.5  # times an empty message, of one whose bytes tell the bandwidth


class Link(NamedTuple):
    """What a message from this rank to another takes.

    Args:
        latency: seconds of an empty message.
        bandwidth: bytes per second.
    """

    latency: float
    bandwidth: float


def measured(channels: Mapping[int, Channel], here: int) -> dict[int, Link]:
    """Measure the links to the other ends of some channels; these ranks do so, too.

    Args:
        channels: the channels, by pipeline place of the other end.
        here: pipeline place of this end.

    Returns:
        The links, by rank of the other end.
    """
    with ThreadPoolExecutor(len(channels)) as pool:
        found = pool.map(lambda place: _measured(channels[place], leads=here < place), channels)
        return dict(zip([one.peer for one in channels.values()], found, strict=True))


def _measured(channel: Channel, *, leads: bool) -> Link:
    """Measure one link, before or after the other end does: an answer would wait behind this end's messages."""
    if not leads:
        _answer(channel)
    found = _ask(channel)
    if leads:
        _answer(channel)
    return found


def _ask(channel: Channel) -> Link:
    numbers = count()

    def there_and_back(size: int, label: str = "") -> float:
        begin = time.perf_counter()
        name = Name(0, next(numbers), _TASK)
        message = (torch.zeros(size, dtype=torch.uint8),)
        channel.send(name, message, message, label)
        channel.take(name)
        return time.perf_counter() - begin

    there_and_back(0)  # waits for the connection
    empty = min(there_and_back(0) for _ in range(_TIMES))
    size = _SMALL
    while (whole := min(there_and_back(size) for _ in range(_TIMES))) < _LONG * empty and size < _LARGE:
        size *= 4
    there_and_back(0, _LAST)
    return Link(empty / 2, size / max(whole - empty, 1e-9))


def _answer(channel: Channel) -> None:
    for number in count():
        name = Name(0, number, _TASK)
        label = channel.take(name).label
        channel.send(name, (), ())
        if label == _LAST:
            return
