"""Channels: one direction between two ranks, for activations and gradients.

There is one channel from every rank to every rank that it sends to. In every call it carries the messages of its plan in the
order of their sends, so nothing has to name a message; nccl has no tags. The first message of a shape follows a header
(`nwise.runtime.ledger`). On CPUs the receiver has its next receive posted, so a message travels at once while both sides compute.
Posting takes as long as a small message. Two receives are therefore posted right after a send, when no rank waits, and a message
that has arrived is taken without another post:

    receiver              posted receives
    start                 0  1
    take message 0           1
    own send, `post`         1  2
    take message 1              2
    take message 2                 3       posted before the wait, because none was left

After the receive of a header none is posted until the header has been read. From the second call with the same plan and shapes
on, receives are also posted beyond the call, as if the next one was equal. If it is not, they are completed with dummy messages
and discarded:

    receiver    posts up to 2 (old shapes)                     takes 2, discards them, posts 2 (new shapes)
    sender                                   sends 2 zeros, waits for all sends

A sender waits only until the transport has taken the same message of the previous cycle of calls, so it keeps at most one
cycle of messages. Under a delay it keeps one more cycle for every call that may lie between a send and its receive.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nwise._torch import versions
from nwise.randomness import derive
from nwise.runtime.ledger import Expected, Key, Label, Ledger, MessagePlan, Window
from nwise.runtime.shapes import HEADER, Form, Spec, Specs, describe, make_specs, read_header, with_layout, write_header
from nwise.schedule.actions import SENDS, Kind
from nwise.tensors import Tensors

# Tags of messages that follow a header, and of those of forwards alone. A message of a known label has a tag of that label: if
# one rank trains and another only infers, or has a mini-batch of another shape, a message must not land in memory of another
# size, which ends a process without a word. Both wait until the watch has compared their calls. nccl has no tags.
_TAG, _FORWARD_TAG = 0x6E77, 0x6E78
_AHEAD = 2  # receives posted in advance


@dataclass(frozen=True, slots=True)
class Link:
    """One end of a channel."""

    group: ProcessGroup  # of one direction
    peer: int  # global rank of the other end
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
    """The end that sends; `num_bytes` counts the bytes of the present call without headers, by kind of the receive."""

    def __init__(self, link: Link) -> None:
        self._link, self._ledger = link, Ledger()
        self._next: Iterator[Expected] = iter(())
        self.num_bytes: dict[Kind, int] = {}
        self._on_the_way: deque[tuple[Tensors, list[Any]]] = deque()
        self._last: tuple[Key, Tensors, list[int]] | None = None  # the message before, with the version of each tensor

    def start(self, plan: MessagePlan, window: Window, call: int) -> None:
        """Begin a call."""
        if self._ledger.breaks(plan, window, call):
            self.flush()
        self._next = iter(self._ledger.begin(plan, window, call))
        self.num_bytes = dict.fromkeys(SENDS.values(), 0)

    def send(self, key: Key, tensors: Sequence[Tensor], parts: Tensors) -> Form:
        """Send the next message of the plan, and wait for the same one of an earlier cycle; return its form.

        What travels are `parts`, which are the `tensors` themselves without compression.

        Raises:
            ValueError: the tensors have another form than those of an earlier message for equal shapes, or something has changed
                the message before, which may still be read.
        """
        if self._last is not None:
            _check_unchanged(*self._last)
        message = next(self._next, None)
        if message is None or message.key != key:
            raise RuntimeError(f"A channel should send {message and message.key} next. Found {key}.")
        # `enter` gives the message its form, so its tag, which tells the other end that a header comes first, is taken before.
        form = message.form or self._ledger.form(message)
        tag, header = _tag(message), cast(Tensors, ())
        if form is None:
            form = self._ledger.enter(message, tuple(map(with_layout, make_specs(tensors), tensors)))
            header = self._header(message, form.specs)
        _check(key, form, tensors, parts)
        self._send((*header, *map(Spec.in_memory, form.parts, parts)), tag)
        self.num_bytes[key.kind] += form.num_bytes
        self._last = key, parts, versions(parts)
        return form

    def send_nothing(self) -> None:
        """Send the next message of the plan, which belongs to no mini-batch."""
        message = next(self._next)
        self._send(self._header(message, ()), _tag(message))

    def _header(self, message: Expected, specs: Specs) -> Tensors:
        return tuple(t.to(self._link.device) for t in write_header(self._ledger.header(message, specs)))

    def _send(self, tensors: Tensors, tag: int) -> None:
        link, plan = self._link, self._ledger.plan
        # What travels is memory, so a conjugation or negation that torch has put off is made now.
        kept = tuple(t.resolve_conj().resolve_neg().contiguous() for t in tensors if t.numel())
        # The group's own call, because `dist.isend` would look up the group and the peer again.
        works = [_transport(link.peer, link.group.send, [t], link.peer, tag) for t in kept]
        self._on_the_way.append((kept, works))
        # Wait for an old message only after the new one is sent, because the other end may be waiting for the new one. With
        # 3 messages a cycle and a travel of 1 call, 6 may be on their way; the 7th waits for the first.
        if len(self._on_the_way) > (1 + plan.travel) * plan.size:
            _wait(self._on_the_way.popleft()[1], link.peer)

    def flush(self) -> None:
        """Fill the receives that the other end has posted, and wait until the transport has taken all messages."""
        # The receiver has posted the same: both know from their ledgers alone what lies beyond the call.
        if self._ledger.steady and self._link.early:
            for message in itertools.islice(self._ledger.ahead(), _AHEAD):
                form = self._ledger.form(message)
                specs = (HEADER,) if form is None else form.parts
                self._send(tuple(s.zeros(self._link.device) for s in specs), _tag(message))
                if form is None:
                    break
        for _, works in self._on_the_way:
            _wait(works, self._link.peer)
        self._on_the_way.clear()
        self._last = None


class Posted(NamedTuple):
    """A receive that the transport knows of."""

    message: Expected
    tensors: Tensors  # memory for what travels; for the header if its form is not known
    works: list[Any]


class Receiver:
    """The end that receives."""

    def __init__(self, link: Link) -> None:
        self._link, self._ledger = link, Ledger()
        self._due: deque[Expected] = deque()  # messages of the calls so far that are not posted
        self._ahead: Iterator[Expected] = iter(())  # those of the calls to come, if these are foreseen
        self._posted: deque[Posted] = deque()
        self._arrived: defaultdict[Key, deque[tuple[Tensors, Form]]] = defaultdict(deque)
        self._missing = 0  # number of messages of the calls so far that are still to be taken from the transport

    def breaks(self, plan: MessagePlan, window: Window, call: int) -> bool:
        """Tell whether all messages up to a call must have been taken before it."""
        return self._ledger.breaks(plan, window, call)

    def start(self, plan: MessagePlan, window: Window, call: int) -> None:
        """Begin a call."""
        if self.breaks(plan, window, call):
            self.flush()
        foreseen = self._ledger.steady
        messages = self._ledger.begin(plan, window, call)
        self._missing += len(messages)
        if foreseen and self._ledger.steady:
            return  # `_ahead` has these messages
        self._due += messages
        if self._ledger.steady:
            self._ahead = self._ledger.ahead()
        self.post()

    def post(self, count: int = _AHEAD) -> None:
        """Post the next receives until `count` are posted."""
        posted = self._posted
        while len(posted) < count and self._link.early and not (posted and posted[-1].message.form is None):
            if not self._post():
                break

    def _post(self) -> bool:
        """Post the receive of the next message; return whether there is one."""
        message = self._due.popleft() if self._due else next(self._ahead, None)
        if message is not None:
            form = self._ledger.form(message)
            works = self._receive((HEADER,) if form is None else form.parts, _tag(message))
            self._posted.append(Posted(message, *works))
        return message is not None

    def _receive(self, specs: Specs, tag: int) -> tuple[Tensors, list[Any]]:
        link = self._link
        tensors = tuple(spec.empty(link.device) for spec in specs)
        memory = [t for t in map(Spec.in_memory, specs, tensors) if t.numel()]
        return tensors, [_transport(link.peer, link.group.recv, [t], link.peer, tag) for t in memory]

    def take(self, key: Key) -> tuple[Tensors, Form]:
        """Wait for a message and return it with its form; those that were sent before it are kept for later."""
        while not self._arrived[key]:
            self._take_next()
        return self._arrived[key].popleft()

    def _take_next(self) -> None:
        """Wait for the next message of the plan and keep it."""
        if not self._posted:
            posted = self._post()
            assert posted, "a message is taken in the call that sends it, or later"
        message, tensors, works = self._posted.popleft()
        form = message.form
        if form is None:
            tag = _tag(message)
            form = self._ledger.enter(message, self._read(message, tensors, works))
            tensors, works = self._receive(form.parts, tag)
        self._missing -= 1
        # Before the wait: if this rank is the slower one, its peer's next message finds memory to land in.
        self.post(1)
        _wait(works, self._link.peer)
        self._arrived[message.key].append((tensors, form))

    def _read(self, message: Expected, header: Tensors, works: list[Any]) -> Specs:
        """Wait for the header of a message; return the specs in it, none for no mini-batch."""
        _wait(works, self._link.peer)
        content = read_header(header[0])
        if isinstance(content, int):  # the length of a header that does not fit into 1024 bytes, which follows
            rest, works = self._receive((Spec((content,), HEADER.dtype),), _tag(message))
            _wait(works, self._link.peer)
            content = read_header(rest[0])
        return self._ledger.specs(message, content, self._link.peer)

    def form(self, key: Key, label: Label) -> Form:
        """Return the form of a message, of which there has been one for a micro-batch with this label."""
        return self._ledger.known(key, label)

    def forget(self) -> None:
        """Take all messages that were sent for a schedule that is over, and drop them."""
        self.catch_up()
        self._arrived.clear()

    def catch_up(self) -> None:
        """Take all messages that were sent, and post the next receives."""
        while self._missing:
            self._take_next()
        self.post()

    def flush(self) -> None:
        """Wait for the posted receives, which the other end fills with zeros, and discard them."""
        self.catch_up()
        while self._posted:
            _wait(self._posted.popleft().works, self._link.peer)
        self._ahead = iter(())


def start_all(
    outgoing: Iterable[tuple[Sender, MessagePlan]],
    incoming: Sequence[tuple[Receiver, MessagePlan]],
    window: Window,
    call: int,
) -> None:
    """Begin a call on all channels of a rank."""
    # If plans change, every rank takes the messages sent so far and posts its receives, then fills its peers' receives, then
    # waits for its own. So every receive is posted before any rank waits.
    for receiver, plan in incoming:
        if receiver.breaks(plan, window, call):
            receiver.catch_up()
    for sender, plan in outgoing:
        sender.start(plan, window, call)
    for receiver, plan in incoming:
        receiver.start(plan, window, call)


def _tag(message: Expected) -> int:
    if message.label is None:
        return _FORWARD_TAG
    return _TAG if message.form is None else _label_tag(message.label[2])


@lru_cache(maxsize=1024)
def _label_tag(label: Label) -> int:
    return derive(repr(label)) & 0x7FFF_FFFF  # a tag has 31 bits


def _what(key: Key) -> str:
    forward = key.kind is Kind.RECEIVE_ACTIVATION
    return f"output of stage {key.stage - 1}" if forward else f"gradient that stage {key.stage + 1} returns"


def _check_unchanged(key: Key, tensors: Tensors, before: list[int]) -> None:
    """Raise ValueError if a message has been changed in place since it was sent."""
    if versions(tensors) != before:
        raise ValueError(
            f"The {_what(key)} should stay as it is, because another process reads it. Found that it was changed in place after "
            "the call that made it; let the stage return a clone of memory that it writes again."
        )


def _check(key: Key, form: Form, tensors: Sequence[Tensor], parts: Tensors) -> None:
    """Raise ValueError unless a message has its form."""
    if not form.fits(tensors):
        raise ValueError(
            f"The {_what(key)} should have the same shapes, dtypes and names in every step whose micro-batch has the same "
            f"shapes, because another process relies on them. Found {describe(make_specs(tensors))}, after "
            f"{describe(form.specs)} earlier; pad an output whose size depends on values, and make a new pipeline if you cast or "
            "replaced the stage, or switched its mode."
        )
    if not form.carries(parts):
        raise ValueError(
            f"`compress` should return tensors like those that its `specs` names. Found {describe(make_specs(parts))} instead of "
            f"{describe(form.parts)}."
        )


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
