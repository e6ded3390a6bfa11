"""Channels: one direction between two neighbours, activations forward or gradients back.

A channel carries, mini-batch after mini-batch, the messages of its plan in the order in which they are sent; so nothing
has to be tagged, which nccl could not. The receiver always has its next receive posted, over the end of a mini-batch too,
so that what is sent travels at once while both sides compute; a second one would gain nothing (`benchmarks/runtime`). A
sender does not wait, but for the same message of the cycle of mini-batches before, so that no more than a cycle of them is
ever kept.

When the plan changes (another batch size, another strategy), the receive that was posted too early is filled by a message
that nobody looks at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nwise.microbatch import Tensors

# Which message: micro-batch, message (None for an activation), turn.
Key = tuple[int, int | None, int]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def spec_of(tensor: Tensor) -> Spec:
    """The spec of a tensor."""
    return Spec(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class Plan:
    """What travels over a channel in one pass through the lists, in the order it is sent."""

    keys: tuple[Key, ...] = ()
    specs: tuple[tuple[Spec, ...], ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every message."""
        return tuple(sum(spec.num_bytes for spec in specs) for specs in self.specs)

    def num_bytes(self, turn: int) -> int:
        """What is sent in a mini-batch."""
        return sum(size for key, size in zip(self.keys, self.sizes, strict=True) if key[2] == turn)

    def first_of(self, turn: int) -> int:
        """Place of the first message of a turn."""
        return next((i for i, key in enumerate(self.keys) if key[2] >= turn), 0)


NOTHING = Plan()


@dataclass(frozen=True, slots=True)
class Link:
    """One end of a channel.

    Args:
        group: the process group of one direction.
        peer: rank of the other end.
        device: where tensors are.
    """

    group: ProcessGroup
    peer: int
    device: torch.device

    @property
    def early(self) -> bool:
        """Whether a receive is posted before anybody asks for it. With nccl it is a kernel that waits on the device, and whoever
        synchronizes the device would wait for a message that may need this very process."""
        return self.device.type == "cpu"


class LostPeer(RuntimeError):
    """The other end of a channel cannot be reached any more.

    Args:
        peer: its rank.
        why: what the transport says.
    """

    def __init__(self, peer: int, why: str) -> None:
        self.peer = peer
        super().__init__(f"lost rank {peer}: {why}")


class Sender:
    """The end that sends.

    Args:
        link: where to.
        depth: cycles of mini-batches whose messages are kept at most before it waits.

    Attributes:
        num_bytes: sent so far.
    """

    def __init__(self, link: Link, depth: int = 1) -> None:
        self.num_bytes = 0
        self._link, self._depth = link, depth
        self._plan = NOTHING
        self._place = 0
        self._on_the_way: deque[tuple[Tensors, list[Any]]] = deque()

    def start(self, plan: Plan, turn: int) -> None:
        """Begin a mini-batch."""
        first = plan.first_of(turn)
        if (plan, first) != (self._plan, self._place):
            self.flush()
            self._plan, self._place = plan, first

    def send(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Send the next message of the plan; returns at once."""
        place = self._place
        expected, specs = self._plan.keys[place], self._plan.specs[place]
        # No specs are made of the tensors: the other end is waiting.
        fits = len(tensors) == len(specs) and all(
            t.shape == s.shape and t.dtype is s.dtype for t, s in zip(tensors, specs, strict=True)
        )
        if expected != key or not fits:
            raise RuntimeError(
                f"A channel should send {expected} of {specs} next. Found {key} of {tuple(map(spec_of, tensors))}; does the "
                "stage's output depend on more than the shapes of its input?"
            )
        self._send(tensors)
        self.num_bytes += sum(t.nbytes for t in tensors)

    def _send(self, tensors: Sequence[Tensor]) -> None:
        link, size = self._link, len(self._plan.keys)
        if len(self._on_the_way) == self._depth * size:
            _wait(self._on_the_way.popleft()[1], link.peer)
        kept = tuple(t.contiguous() for t in tensors if t.numel())
        with _lost(link.peer):
            # The group's own call, since `dist.isend` looks up again what is known here.
            works = [link.group.send([t], link.peer, 0) for t in kept]
        self._on_the_way.append((kept, works))
        self._place = (self._place + 1) % size

    def flush(self) -> None:
        """Fill the receive that the other end has posted, and wait until everything has been taken over."""
        if self._plan.keys and self._link.early:
            specs = self._plan.specs[self._place]
            self._send([torch.zeros(s.shape, dtype=s.dtype, device=self._link.device) for s in specs])
        for _, works in self._on_the_way:
            _wait(works, self._link.peer)
        self._on_the_way.clear()
        self._plan, self._place = NOTHING, 0


class Receiver:
    """The end that receives."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._plan = NOTHING
        self._place = 0  # of the message that is posted
        self._posted: tuple[Tensors, list[Any]] | None = None
        self._arrived: dict[Key, Tensors] = {}

    def start(self, plan: Plan, turn: int) -> None:
        """Begin a mini-batch."""
        first = plan.first_of(turn)
        if (plan, first) != (self._plan, self._place):
            self.flush()
            self._plan, self._place = plan, first
            if plan.keys and self._link.early:
                self._posted = self._post()

    def _post(self) -> tuple[Tensors, list[Any]]:
        link = self._link
        tensors = tuple(spec.empty(link.device) for spec in self._plan.specs[self._place])
        with _lost(link.peer):
            return tensors, [link.group.recv([t], link.peer, 0) for t in tensors if t.numel()]

    def take(self, key: Key) -> Tensors:
        """A message, once it is there; others that were sent before it are kept for later."""
        while key not in self._arrived:
            tensors, works = self._posted or self._post()
            _wait(works, self._link.peer)
            self._arrived[self._plan.keys[self._place]] = tensors
            self._place = (self._place + 1) % len(self._plan.keys)
            self._posted = self._post() if self._link.early else None
        return self._arrived.pop(key)

    def flush(self) -> None:
        """Wait for what is posted, and throw it away."""
        if self._posted is not None:
            _wait(self._posted[1], self._link.peer)
        self._posted = None
        self._arrived.clear()
        self._plan, self._place = NOTHING, 0


def introduce(group: ProcessGroup, before: int | None, after: int | None, device: torch.device) -> None:
    """Send a number through all ranks of one direction. A connection of nccl is made when it is first used and waits for the
    other end, so that two neighbours whose first uses are of different directions would wait for each other for ever.

    Args:
        group: of the direction.
        before, after: ranks that this one receives from and sends to.
        device: of the tensors that will be sent.
    """
    number = torch.zeros(1, device=device)
    for peer, call in ((before, group.recv), (after, group.send)):
        if peer is not None:
            with _lost(peer):
                call([number], peer, 0).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait(works: list[Any], peer: int) -> None:
    with _lost(peer):
        for work in works:
            work.wait()


@contextmanager
def _lost(peer: int) -> Iterator[None]:
    """An error of the transport is one of the other end."""
    try:
        yield
    except RuntimeError as error:
        raise LostPeer(peer, str(error)) from error
