"""Channels: one direction between two neighbours, activations forward or gradients back.

In every mini-batch a channel carries the messages of its plan in the order of their sends. So messages need no tags, which
nccl does not have. The receiver always has its next receive posted, across mini-batches too, so a message travels at once
while both sides compute. Posting takes as long as a small message. Two receives are therefore posted right after a send,
when no rank waits, and a message that has arrived is taken without another post:

    receiver              posted receives
    start                 0  1
    take message 0           1
    own send, `post`         1  2
    take message 1              2
    take message 2                 3       posted before the wait, because none was left

A sender waits only for its same message of the previous cycle of mini-batches, so it never keeps more than one cycle of them.

When the plan changes (another batch size, another strategy), the receives already posted for the old plan are completed with
dummy messages and discarded:

    receiver    posts up to 2 (old plan)                     takes 2, discards them, posts 2 (new plan)
    sender                                 sends 2 zeros, waits for all sends
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

# The name of a message: micro-batch, message (None for an activation), turn.
Key = tuple[int, int | None, int]

_TAG = 0x6E77  # separates these messages from others of the same gloo group; nccl has no tags
_AHEAD = 2  # receives posted in advance


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the values, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Allocate the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def make_spec(tensor: Tensor) -> Spec:
    """Return the spec of a tensor."""
    return Spec(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True)
class MessagePlan:
    """The messages of a channel in one pass through the lists, in the order of their sends."""

    keys: tuple[Key, ...] = ()
    specs: tuple[tuple[Spec, ...], ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of every message, in bytes."""
        return tuple(sum(spec.num_bytes for spec in specs) for specs in self.specs)

    def num_bytes(self, turn: int) -> int:
        """Return the bytes that are sent in a mini-batch."""
        return sum(size for key, size in zip(self.keys, self.sizes, strict=True) if key[2] == turn)

    def first_place(self, turn: int) -> int:
        """Return the place of the first message of a turn."""
        return next((i for i, key in enumerate(self.keys) if key[2] >= turn), 0)


NOTHING = MessagePlan()


@dataclass(frozen=True, slots=True)
class Link:
    """One end of a channel.

    Args:
        group: process group of one direction.
        peer: rank of the other end.
        device: device of the tensors.
    """

    group: ProcessGroup
    peer: int
    device: torch.device

    @property
    def early(self) -> bool:
        """Whether receives are posted in advance: on CPUs only."""
        # A receive of nccl is a kernel that waits on the device. Synchronising the device would wait for a message whose
        # sender may in turn need this process.
        return self.device.type == "cpu"


class LostPeer(RuntimeError):
    """The other end of a channel cannot be reached any more.

    Args:
        peer: rank of the other end.
        why: error message of the transport.
    """

    def __init__(self, peer: int, why: str) -> None:
        self.peer = peer
        super().__init__(f"lost rank {peer}: {why}")


class _End:
    """The state of both kinds of ends: the plan and the place in it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._plan = NOTHING
        self._place = 0  # place of the next message in the plan

    def follows(self, plan: MessagePlan, turn: int) -> bool:
        """Tell whether this end is at the beginning of a turn of a plan."""
        return (self._plan, self._place) == (plan, plan.first_place(turn))

    def _set(self, plan: MessagePlan, place: int) -> None:
        self._plan, self._place = plan, place

    def _advance(self) -> None:
        self._place = (self._place + 1) % len(self._plan.keys)


class Sender(_End):
    """The end that sends.

    Args:
        link: the end's group, peer and device.
        depth: largest number of cycles of mini-batches whose messages are kept without waiting; default: 1.

    Attributes:
        num_bytes: number of bytes sent so far.
    """

    def __init__(self, link: Link, depth: int = 1) -> None:
        super().__init__(link)
        self.num_bytes = 0
        self._depth = depth
        self._on_the_way: deque[tuple[Tensors, list[Any]]] = deque()

    def start(self, plan: MessagePlan, turn: int) -> None:
        """Begin a mini-batch."""
        if not self.follows(plan, turn):
            self.flush()
            self._set(plan, plan.first_place(turn))

    def send(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Send the next message of the plan, and wait for the same one of `depth` cycles before."""
        place = self._place
        expected, specs = self._plan.keys[place], self._plan.specs[place]
        # Compare without making specs of the tensors: the other end is waiting.
        fits = len(tensors) == len(specs) and all(
            t.shape == s.shape and t.dtype is s.dtype for t, s in zip(tensors, specs, strict=True)
        )
        if expected != key or not fits:
            raise RuntimeError(
                f"A channel should send {expected} of {specs} next. Found {key} of {tuple(map(make_spec, tensors))}; does the "
                "stage's output depend on more than the shapes of its input?"
            )
        self._send(tensors)
        self.num_bytes += sum(t.nbytes for t in tensors)

    def _send(self, tensors: Sequence[Tensor]) -> None:
        link = self._link
        kept = tuple(t.contiguous() for t in tensors if t.numel())
        # The group's own call, because `dist.isend` would look up the group and the peer again.
        works = [_transport(link.peer, link.group.send, [t], link.peer, _TAG) for t in kept]
        self._on_the_way.append((kept, works))
        self._advance()
        # Wait for an old message only after the new one is sent, because the other end may be waiting for the new one.
        if len(self._on_the_way) > self._depth * len(self._plan.keys):
            _wait(self._on_the_way.popleft()[1], link.peer)

    def flush(self) -> None:
        """Fill the receives that the other end has posted, and wait until the transport has taken all messages."""
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

    def start(self, plan: MessagePlan, turn: int) -> None:
        """Begin a mini-batch."""
        if not self.follows(plan, turn):
            self.flush()
            self._set(plan, plan.first_place(turn))
            self.post()

    def post(self, count: int = _AHEAD) -> None:
        """Post the next receives until `count` are posted."""
        if self._link.early and self._plan.keys:
            while len(self._posted) < count:
                self._posted.append(self._post())

    def _post(self) -> tuple[Tensors, list[Any]]:
        link, specs = self._link, self._plan.specs
        tensors = tuple(spec.empty(link.device) for spec in specs[(self._place + len(self._posted)) % len(specs)])
        return tensors, [_transport(link.peer, link.group.recv, [t], link.peer, _TAG) for t in tensors if t.numel()]

    def take(self, key: Key) -> Tensors:
        """Wait for a message and return it; those that were sent before it are kept for later."""
        while key not in self._arrived:
            tensors, works = self._posted.popleft() if self._posted else self._post()
            due = self._plan.keys[self._place]
            self._advance()
            self.post(1)
            _wait(works, self._link.peer)
            self._arrived[due] = tensors
        return self._arrived.pop(key)

    def flush(self) -> None:
        """Wait for the posted receives and discard them."""
        while self._posted:
            _wait(self._posted.popleft()[1], self._link.peer)
        self._arrived.clear()
        self._set(NOTHING, 0)


def start_all(
    outgoing: Iterable[tuple[Sender | None, MessagePlan]],
    incoming: Sequence[tuple[Receiver | None, MessagePlan]],
    turn: int,
) -> None:
    """Begin a mini-batch on all channels of a rank."""
    # If plans change, every rank posts its receives, then fills its peers' receives, then waits for its own. So every receive
    # is posted before any rank waits.
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
    """Connect all ranks of one direction by a number that each passes on to the next.

    Args:
        group: process group of the direction.
        before, after: ranks from which this one receives and to which it sends; None without a neighbour.
        device: device of the tensors that will be sent.
    """
    # nccl connects at the first use and waits for the other end. Two neighbours that first use different directions would
    # wait for each other forever.
    number = torch.zeros(1, device=device)
    for peer, call in ((before, group.recv), (after, group.send)):
        if peer is not None:
            _transport(peer, _transport(peer, call, [number], peer, _TAG).wait)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait(works: list[Any], peer: int) -> None:
    for work in works:
        _transport(peer, work.wait)


def _transport(peer: int, call: Callable[..., Any], *args: Any) -> Any:
    """Call the transport, and turn its errors into a lost peer."""
    try:
        return call(*args)
    except RuntimeError as error:
        raise LostPeer(peer, str(error)) from error
