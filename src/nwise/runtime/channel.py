"""Channels: one direction between two ranks, for activations and gradients.

There is one channel from every rank to every rank that it sends to. In every call it carries the messages of its plan in the
order of their sends. So messages need no tags, which nccl does not have. A message of a mini-batch that does not exist, as in the
first calls under a delay, is zeros. On CPUs the receiver always has its next receive posted, also across calls, so a
message travels at once while both sides compute. Posting takes as long as a small message. Two receives are therefore
posted right after a send, when no rank waits, and a message that has arrived is taken without another post:

    receiver              posted receives
    start                 0  1
    take message 0           1
    own send, `post`         1  2
    take message 1              2
    take message 2                 3       posted before the wait, because none was left

A sender waits only until the same message of the previous cycle of calls has arrived, so it keeps at most one cycle of
messages. Under a delay it keeps one more cycle for every call that may lie between a send and its receive.

When the plan changes (another batch size, another strategy), the receives already posted for the old plan are completed with
dummy messages and discarded:

    receiver    posts up to 2 (old plan)                     takes 2, discards them, posts 2 (new plan)
    sender                                 sends 2 zeros, waits for all sends
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nwise.schedule.actions import SENDS, Action, Kind
from nwise.tensors import Tensors, names

# The name of a message: the action that receives it, without its age.
Key = Action

_TAG = 0x6E77  # separates these messages from others of the same gloo group; nccl has no tags
_AHEAD = 2  # receives posted in advance


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor, and its name if it has one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the values, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def carries(self) -> bool:
        """Whether a gradient can travel through the tensor."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self, device: torch.device) -> Tensor:
        """Allocate the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def make_spec(tensor: Tensor, name: str = "") -> Spec:
    """Return the spec of a tensor."""
    return Spec(tuple(tensor.shape), tensor.dtype, name)


def make_specs(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    """Return the specs of tensors, with their names."""
    return tuple(map(make_spec, tensors, names(tensors) or ("",) * len(tensors)))


def spec_names(specs: Sequence[Spec]) -> tuple[str, ...]:
    """Return the names of tensors with these specs; none if they are given by position."""
    return tuple(spec.name for spec in specs if spec.name)


@dataclass(frozen=True)
class MessagePlan:
    """The messages of a channel in one pass through the lists, in the order of their sends.

    Args:
        keys: name of every message.
        calls: call of the cycle that sends it, in order.
        specs: shapes and dtypes of its tensors.
        travel: largest number of calls between a send and its receive; default: 0.
    """

    keys: tuple[Key, ...] = ()
    calls: tuple[int, ...] = ()
    specs: tuple[tuple[Spec, ...], ...] = ()
    travel: int = 0

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Size of every message, in bytes."""
        return tuple(sum(spec.num_bytes for spec in specs) for specs in self.specs)

    def num_bytes(self, call: int, kind: Kind) -> int:
        """Return the bytes that are sent in a call by messages of one kind of receive."""
        messages = zip(self.keys, self.calls, self.sizes, strict=True)
        return sum(size for key, one, size in messages if one == call and key.kind is kind)

    def first_place(self, call: int) -> int:
        """Return the place of the first message of a call, or of a later one."""
        place = bisect_left(self.calls, call)
        return place if place < len(self.calls) else 0


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
    """The other end of a channel, on rank `peer`, cannot be reached any more."""

    def __init__(self, peer: int, why: str) -> None:
        self.peer = peer
        super().__init__(f"lost rank {peer}: {why}")


class Sender:
    """The end that sends.

    Attributes:
        num_bytes: number of bytes sent so far, by kind of the receive.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._plan, self._place = NOTHING, 0  # the plan, and the place of the next message in it
        self.num_bytes = dict.fromkeys(SENDS.values(), 0)
        self._on_the_way: deque[tuple[Tensors, list[Any]]] = deque()

    def start(self, plan: MessagePlan, call: int) -> None:
        """Begin a call."""
        if (self._plan, self._place) != (plan, plan.first_place(call)):
            self.flush()
            self._plan, self._place = plan, plan.first_place(call)

    def send(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Send the next message of the plan, and wait for the same one of an earlier cycle."""
        place = self._place
        expected, specs = self._plan.keys[place], self._plan.specs[place]
        # Compare without making specs of the tensors: the other end is waiting.
        fits = len(tensors) == len(specs) and all(
            t.shape == s.shape and t.dtype is s.dtype for t, s in zip(tensors, specs, strict=True)
        )
        if expected != key or not fits:
            raise RuntimeError(
                f"A channel should send {expected} of {specs} next. Found {key} of {tuple(map(make_spec, tensors))}; does the "
                "stage's output depend on more than the shapes of its input, or was a stage cast or replaced by one of another "
                "shape? That needs a new pipeline."
            )
        self._send(tensors)
        self.num_bytes[key.kind] += sum(t.nbytes for t in tensors)

    def send_nothing(self) -> None:
        """Send zeros as the next message of the plan, which belongs to no mini-batch."""
        self._send(
            [torch.zeros(s.shape, dtype=s.dtype, device=self._link.device) for s in self._plan.specs[self._place]]
        )

    def _send(self, tensors: Sequence[Tensor]) -> None:
        link = self._link
        kept = tuple(t.contiguous() for t in tensors if t.numel())
        # The group's own call, because `dist.isend` would look up the group and the peer again.
        works = [_transport(link.peer, link.group.send, [t], link.peer, _TAG) for t in kept]
        self._on_the_way.append((kept, works))
        self._place = (self._place + 1) % len(self._plan.keys)
        # Wait for an old message only after the new one is sent, because the other end may be waiting for the new one.
        if len(self._on_the_way) > (1 + self._plan.travel) * len(self._plan.keys):
            _wait(self._on_the_way.popleft()[1], link.peer)

    def flush(self) -> None:
        """Fill the receives that the other end has posted, and wait until the transport has taken all messages."""
        for _ in range(_AHEAD if self._plan.keys and self._link.early else 0):
            self.send_nothing()
        for _, works in self._on_the_way:
            _wait(works, self._link.peer)
        self._on_the_way.clear()
        self._plan, self._place = NOTHING, 0


class Receiver:
    """The end that receives."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._plan, self._place = NOTHING, 0  # the plan, and the place of the next message in it
        self._posted: deque[tuple[Tensors, list[Any]]] = deque()
        self._arrived: defaultdict[Key, deque[Tensors]] = defaultdict(deque)
        self._missing = 0  # number of messages of the calls so far that are still to be taken from the transport

    def follows(self, plan: MessagePlan, call: int) -> bool:
        """Tell whether this end is at the beginning of a call of a plan."""
        return self._plan == plan and (not plan.keys or self._sent == plan.first_place(call))

    @property
    def _sent(self) -> int:
        """Place in the plan after everything that the calls so far have sent."""
        # Under a delay a call sends messages that a later call takes:
        #
        #     plan    0   1   2   3   4   5
        #                     |_______|
        #               `_place`     `_sent`      2 messages are `_missing`
        return (self._place + self._missing) % len(self._plan.keys)

    def start(self, plan: MessagePlan, call: int) -> None:
        """Begin a call."""
        if not self.follows(plan, call):
            self.flush()
            self._plan, self._place = plan, plan.first_place(call)
            self.post()
        self._missing += plan.calls.count(call)

    def post(self, count: int = _AHEAD) -> None:
        """Post the next receives until `count` are posted."""
        while len(self._posted) < count and self._plan.keys and self._link.early:
            self._posted.append(self._post())

    def _post(self) -> tuple[Tensors, list[Any]]:
        link, specs = self._link, self._plan.specs
        tensors = tuple(spec.empty(link.device) for spec in specs[(self._place + len(self._posted)) % len(specs)])
        return tensors, [_transport(link.peer, link.group.recv, [t], link.peer, _TAG) for t in tensors if t.numel()]

    def take(self, key: Key) -> Tensors:
        """Wait for a message and return it; those that were sent before it are kept for later."""
        while not self._arrived[key]:
            self._next()
        return self._arrived[key].popleft()

    def _next(self) -> None:
        """Wait for the next message of the plan and keep it."""
        tensors, works = self._posted.popleft() if self._posted else self._post()
        due = self._plan.keys[self._place]
        self._place = (self._place + 1) % len(self._plan.keys)
        self._missing -= 1
        self.post(1)
        _wait(works, self._link.peer)
        self._arrived[due].append(tensors)

    def forget(self) -> None:
        """Take all messages that were sent for a schedule that is over, and drop them."""
        self.catch_up()
        self._arrived.clear()

    def catch_up(self) -> None:
        """Take all messages that were sent, and post the next receives."""
        while self._missing:
            self._next()
        self.post()

    def flush(self) -> None:
        """Wait for the posted receives, which the other end fills with zeros, and discard them."""
        self.catch_up()
        while self._posted:
            _wait(self._posted.popleft()[1], self._link.peer)
        self._plan, self._place = NOTHING, 0


def start_all(
    outgoing: Iterable[tuple[Sender, MessagePlan]], incoming: Sequence[tuple[Receiver, MessagePlan]], call: int
) -> None:
    """Begin a call on all channels of a rank."""
    # If plans change, every rank takes the messages sent so far and posts its receives, then fills its peers' receives, then
    # waits for its own. So every receive is posted before any rank waits.
    for receiver, plan in incoming:
        if not receiver.follows(plan, call):
            receiver.catch_up()
    for sender, plan in outgoing:
        sender.start(plan, call)
    for receiver, plan in incoming:
        receiver.start(plan, call)


def introduce(group: ProcessGroup, links: Iterable[tuple[int, int]], rank: int, device: torch.device) -> None:
    """Connect ranks by a number over each link (sending rank, receiving rank), in the same order on all ranks."""
    # nccl connects at the first use and waits for the other end. Two ranks that first use different links would wait for each
    # other forever.
    number = torch.zeros(1, device=device)
    for sender, receiver in links:
        if rank in (sender, receiver):
            peer, call = (receiver, group.send) if rank == sender else (sender, group.recv)
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
