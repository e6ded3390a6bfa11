"""Channels: one direction between two neighbours, activations forward or gradients back.

A channel carries, mini-batch after mini-batch, the messages of its plan in the order in which they are sent; so nothing
has to be tagged, which nccl could not. The receiver always has its next receive posted, over the end of a mini-batch too,
so that what is sent travels at once while both sides compute. Posting one takes as long as a small message does, so that
two are posted when nobody waits, right after a send, and what has come is taken without posting another. A sender does not
wait, but for the same message of the cycle of mini-batches before, so that no more than a cycle of them is ever kept.

When the plan changes (another batch size, another strategy), the receives that were posted too early are filled by messages
that nobody looks at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
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

_TAG = 0x6E77  # of gloo's messages, so that others can travel through the same group; nccl has none
_AHEAD = 2  # receives that are posted before anybody asks for them


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


class _End:
    """What both ends keep: where they are in which plan."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._plan = NOTHING
        self._place = 0  # of the next message

    def follows(self, plan: Plan, turn: int) -> bool:
        """Whether a mini-batch is the next one of the plan that this end is at."""
        return (self._plan, self._place) == (plan, plan.first_of(turn))

    def _set(self, plan: Plan, place: int) -> None:
        self._plan, self._place = plan, place

    def _advance(self) -> None:
        self._place = (self._place + 1) % len(self._plan.keys)


class Sender(_End):
    """The end that sends.

    Args:
        link: where to.
        depth: cycles of mini-batches whose messages are kept at most when it does not wait.

    Attributes:
        num_bytes: sent so far.
    """

    def __init__(self, link: Link, depth: int = 1) -> None:
        super().__init__(link)
        self.num_bytes = 0
        self._depth = depth
        self._on_the_way: deque[tuple[Tensors, list[Any]]] = deque()

    def start(self, plan: Plan, turn: int) -> None:
        """Begin a mini-batch."""
        if not self.follows(plan, turn):
            self.flush()
            self._set(plan, plan.first_of(turn))

    def send(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Send the next message of the plan, and wait for the one of `depth` cycles before."""
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
        link = self._link
        kept = tuple(t.contiguous() for t in tensors if t.numel())
        # The group's own call, since `dist.isend` looks up again what is known here.
        works = [_reach(link.peer, link.group.send, [t], link.peer, _TAG) for t in kept]
        self._on_the_way.append((kept, works))
        self._advance()
        # Only now, since the other end may be waiting for this one.
        if len(self._on_the_way) > self._depth * len(self._plan.keys):
            _wait(self._on_the_way.popleft()[1], link.peer)

    def flush(self) -> None:
        """Fill the receives that the other end has posted, and wait until everything has been taken over."""
        for _ in range(_AHEAD if self._plan.keys and self._link.early else 0):
            specs = self._plan.specs[self._place]
            self._send([torch.zeros(s.shape, dtype=s.dtype, device=self._link.device) for s in specs])
        for _, works in self._on_the_way:
            _wait(works, self._link.peer)
        self._on_the_way.clear()
        self._set(NOTHING, 0)


class Receiver(_End):
    """The end that receives."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._posted: deque[tuple[Tensors, list[Any]]] = deque()
        self._arrived: dict[Key, Tensors] = {}

    def start(self, plan: Plan, turn: int) -> None:
        """Begin a mini-batch."""
        if not self.follows(plan, turn):
            self.flush()
            self._set(plan, plan.first_of(turn))
            self.post()

    def post(self, count: int = _AHEAD) -> None:
        """Post the next receives, until so many are."""
        if self._link.early and self._plan.keys:
            while len(self._posted) < count:
                self._posted.append(self._post())

    def _post(self) -> tuple[Tensors, list[Any]]:
        link, specs = self._link, self._plan.specs
        tensors = tuple(spec.empty(link.device) for spec in specs[(self._place + len(self._posted)) % len(specs)])
        return tensors, [_reach(link.peer, link.group.recv, [t], link.peer, _TAG) for t in tensors if t.numel()]

    def take(self, key: Key) -> Tensors:
        """A message, once it is there; others that were sent before it are kept for later."""
        while key not in self._arrived:
            tensors, works = self._posted.popleft() if self._posted else self._post()
            due = self._plan.keys[self._place]
            self._advance()
            self.post(1)
            _wait(works, self._link.peer)
            self._arrived[due] = tensors
        return self._arrived.pop(key)

    def flush(self) -> None:
        """Wait for what is posted, and throw it away."""
        while self._posted:
            _wait(self._posted.popleft()[1], self._link.peer)
        self._arrived.clear()
        self._set(NOTHING, 0)


def start_all(
    outgoing: Iterable[tuple[Sender | None, Plan]], incoming: Sequence[tuple[Receiver | None, Plan]], turn: int
) -> None:
    """Begin a mini-batch on channels. Where plans change, what was asked for too early is filled before anybody waits for it,
    and all of it is asked for before somebody waits for having filled it."""
    for receiver, plan in incoming:
        if receiver is not None and not receiver.follows(plan, turn):
            receiver.post()
    for sender, plan in outgoing:
        if sender is not None:
            sender.start(plan, turn)
    for receiver, plan in incoming:
        if receiver is not None:
            receiver.start(plan, turn)


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
            _reach(peer, _reach(peer, call, [number], peer, _TAG).wait)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait(works: list[Any], peer: int) -> None:
    for work in works:
        _reach(peer, work.wait)


def _reach(peer: int, call: Callable[..., Any], *args: Any) -> Any:
    """A call of the transport, whose errors are those of the other end."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise LostPeer(peer, str(error)) from error
