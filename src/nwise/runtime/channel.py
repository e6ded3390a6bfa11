"""Channels: messages between this rank and another, pushed to the one that reads them.

A message is a header and its bytes. It waits at the receiver until a task reads it, so nothing is posted, told or agreed before,
and a latency is paid once::

    sender      name, number, shapes | bytes ---->  waits here, until a task of this name reads it
                <---- how many have been taken

A sender runs ahead by a window of bytes, and by the messages of its present calls whatever their size, which no list waits for in
vain. So a fast sender fills no memory, and none waits forever.

On CPUs zmq carries the bytes (https://zeromq.org); on GPUs nccl does, and zmq the headers. Each job has a token, with which every
header begins: what a stranger sends is dropped. With ``NWISE_SECRET`` set, messages are encrypted by keys that follow from it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
import zmq
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store
from zmq.utils import z85

from nwise.checks import warn
from nwise.runtime.shapes import Spec, Specs, from_json, make_spec, make_specs, to_json, with_layout
from nwise.stage.tape import Cotangents
from nwise.tensors import Tensors, names

__all__ = ["Channel", "Content", "LostPeer", "Name", "host_of"]

T = TypeVar("T")

_HEADER = struct.Struct("<16sQqqqI12x")  # token, number of the message, name, length of its form; 64 bytes
_TAKEN = -(2**62)  # stands for the task in a message that tells how many have been taken
_WINDOW = 2**26  # bytes that a sender is ahead
_MANY = 256  # messages after which the other end hears that they were taken, however small they are
_LARGE = 2**15  # bytes from which tensors travel in frames of their own
_GRAIN = 16  # bytes at whose multiples tensors begin in a frame
_MOST_HEADER = 2**20  # bytes
_MOST_FORMS = 2**12  # headers that an end remembers
_MOST = 2**36  # bytes of a tensor
_PULSE = 100  # milliseconds after which a rank that waits looks around, and between two signs of life on a connection
_SILENT = 3_600_000  # milliseconds; `nwise.runtime.watch` ends a wait for a silent rank before


class Name(NamedTuple):
    """The name of a message.

    Args:
        epoch: number of times that messages on their way were dropped.
        number: number of the mini-batch.
        task: number of the task that makes it.
    """

    epoch: int
    number: int
    task: int


class Content(NamedTuple):
    """What a message brings.

    Args:
        specs: shapes, dtypes and names of the tensors that it is about; None where there is none.
        parts: the tensors that travel, which are those themselves without compression.
        label: what both ends should have alike, such as the schedule.
    """

    specs: Sequence[Spec | None]
    parts: Tensors
    label: str


class Form(NamedTuple):
    """What messages of one kind look like.

    Args:
        text: the part of the header that says it.
        layouts: of what travels.
        num_bytes: size of what travels.
    """

    text: bytes
    layouts: Specs
    num_bytes: int


class LostPeer(RuntimeError):
    """The other end of a channel, on rank `peer`, cannot be reached any more."""

    def __init__(self, peer: int, why: str) -> None:
        self.peer = peer
        super().__init__(f"lost rank {peer}: {why}")


@dataclass(frozen=True)
class Carrier:
    """What carries the bytes instead of zmq: groups of `torch.distributed` for each direction, on a device."""

    ahead: ProcessGroup
    back: ProcessGroup
    device: torch.device


class Channel:
    """The messages between this rank and another, both ways. `connect` makes it ready.

    Args:
        peer: global rank of the other end.
        host: address of this machine at which the other rank finds it.
        token: token of the job, 16 bytes.
        check: function that raises if another rank has failed.
        carrier: what carries the bytes instead of zmq. Default: none.

    Attributes:
        addresses: those for the other rank's `connect`: that of this machine, and those of the port, on the machine and beyond.
        allowance: number of messages that may be on their way whatever their size.
    """

    def __init__(
        self, peer: int, host: str, token: bytes, check: Callable[[], None], carrier: Carrier | None = None
    ) -> None:
        self.peer = peer
        self.allowance = 2
        self._token = token
        self._check = check
        self._carrier = carrier
        self._inbox = _socket(zmq.PULL, token)
        self._outbox = _socket(zmq.PUSH, token)
        self._inbox.rcvtimeo = _PULSE
        self._inbox.maxmsgsize = _MOST
        brackets = f"[{host}]" if ":" in host else host
        port = self._inbox.bind_to_random_port(f"tcp://{brackets}")
        # An abstract socket of Linux, which processes of one network see, takes half of the time.
        near = f"ipc://@nwise-{secrets.token_hex(16)}"
        self._inbox.bind(near)
        self._host = host
        self.addresses = (host, near, f"tcp://{brackets}:{port}")
        self._broken = self._outbox.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sent = self._received = 0  # numbers of messages
        self._taken = 0  # messages that a task has read
        self._owed = 0  # their bytes, since the other end was told
        # Messages known to be taken; the bytes of each that is not, with what has to live until then.
        self._known = 0
        self._ahead = deque[tuple[int, Any]]()
        self._bytes_ahead = 0
        self._epoch = 0
        self._arrived: dict[Name, tuple[Content, list[Any], int]] = {}
        self._made: dict[object, Form] = {}  # those of messages sent, by what they follow from
        self._forms: dict[bytes, tuple[Sequence[Spec | None], Specs, str]] = {}  # those of messages received
        self._warned = False

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to the other end."""
        host, near, far = addresses
        self._outbox.connect(near if host == self._host else far)

    def send(self, name: Name, made: Cotangents, parts: Tensors, label: str = "") -> int:
        """Send a copy of a message; wait if the other end is far behind. Return the bytes of what travels.

        Args:
            name: its name.
            made: the tensors that it is about, of which some may be None.
            parts: the tensors that travel.
            label: what both ends should have alike, such as the schedule; default: nothing.
        """
        known = names(cast(Tensors, made))
        of = [None if t is None else (t.shape, t.dtype) for t in made]
        key = (label, known, *of, *[(t.shape, t.stride(), t.dtype) for t in parts])
        form = self._made.get(key)
        if form is None:
            form = _remember(self._made, key, _form_of(made, known, parts, label))
        while self._bytes_ahead + form.num_bytes > _WINDOW and len(self._ahead) >= self.allowance:
            self._read()
        memory = [spec.in_memory(_plain(t)).contiguous() for spec, t in zip(form.layouts, parts, strict=True)]
        held = None
        if self._carrier is None:
            self._push(name, form.text, memory, form.num_bytes)
        else:
            self._push(name, form.text, ())
            own = [t.clone() for t in memory if t.numel()]
            held = [(t, self._carrier.ahead.send([t], self.peer, 0)) for t in own]
        self._ahead.append((form.num_bytes, held))
        self._bytes_ahead += form.num_bytes
        return form.num_bytes

    def take(self, name: Name) -> Content:
        """Wait for a message, and return what it brings; others that arrive stay."""
        while name not in self._arrived:
            self._read()
        content, works, size = self._arrived.pop(name)
        for work in works:
            work.wait()
        self._count(size)
        return content

    def drop(self, epoch: int) -> None:
        """Drop the messages of earlier epochs, also those that are still to come."""
        self._epoch = epoch
        for name in [name for name in self._arrived if name.epoch < epoch]:
            self._count(self._arrived.pop(name)[2])

    def close(self) -> None:
        """End the connection, once neither end waits for a message."""
        self._outbox.disable_monitor()
        for one in (self._broken, self._outbox, self._inbox):
            one.close(linger=0)

    def _count(self, size: int) -> None:
        self._taken += 1
        self._owed += size
        if self._owed > _WINDOW // 2 or self._taken % _MANY == 0:
            self._tell()

    def _tell(self) -> None:
        """Tell the other end how many messages have been taken."""
        self._owed = 0
        self._push(Name(0, self._taken, _TAKEN), b"", ())

    def _push(self, name: Name, form: bytes, memory: Sequence[Tensor], size: int = 0) -> None:
        # One frame costs less than several:
        #
        #     small    header, form, tensor, tensor
        #     large    header, form | tensor | tensor
        head = _HEADER.pack(self._token, self._sent, *name, len(form)) + form
        if size < _LARGE:
            self._outbox.send(b"".join([head, *map(_padded, memory)]))
        else:
            self._outbox.send_multipart([head, *map(_bytes, memory)])
        self._sent += 1

    def _read(self) -> None:
        """Wait for a message, and put it where `take` finds it."""
        try:
            frames = self._inbox.recv_multipart(copy=False)
        except zmq.Again:
            self._look()
            return
        head = frames[0].buffer
        token, number, *name, length = _HEADER.unpack_from(head) if len(head) >= _HEADER.size else (b"", 0, 0, 0, 0, 0)
        if not hmac.compare_digest(token, self._token) or length > _MOST_HEADER:
            if not self._warned:
                warn(f"Something that is not this job sent a message to the port for rank {self.peer}. It is dropped.")
            self._warned = True
            return
        if number != self._received:
            raise LostPeer(self.peer, f"{number - self._received} messages are missing; the connection was lost")
        self._received += 1
        if name[2] == _TAKEN:
            while self._known < name[1]:
                self._bytes_ahead -= self._ahead.popleft()[0]
                self._known += 1
            return
        end = _HEADER.size + length
        specs, layouts, label = self._form(bytes(head[_HEADER.size : end]))
        tensors, works = self._arriving(layouts, frames, end)
        size = sum([spec.num_bytes for spec in layouts])
        if name[0] < self._epoch:
            self._count(size)
        else:
            self._arrived[Name(*name)] = Content(specs, tensors, label), works, size

    def _form(self, text: bytes) -> tuple[Sequence[Spec | None], Specs, str]:
        """Return what a header says of the tensors that a message is about, of those that travel, and its label."""
        known = self._forms.get(text)
        if known is None:
            about, parts, label = json.loads(text)
            layouts = tuple(spec for spec in from_json(parts) if spec is not None)
            known = _remember(self._forms, text, (from_json(about), layouts, label))
        return known

    def _arriving(self, layouts: Specs, frames: Sequence[zmq.Frame], place: int) -> tuple[Tensors, list[Any]]:
        """Return the tensors of a message whose header ends at a place, and what to wait for before they are read."""
        if self._carrier is not None:
            tensors = tuple(spec.empty(self._carrier.device) for spec in layouts)
            memory = [spec.in_memory(t) for spec, t in zip(layouts, tensors, strict=True) if t.numel()]
            return tensors, [self._carrier.back.recv([t], self.peer, 0) for t in memory]
        made = []
        for i, spec in enumerate(layouts):
            alone = len(frames) > 1
            made.append(_read_from(frames[i + 1 if alone else 0].buffer, 0 if alone else place, spec))
            place += spec.num_bytes + _gap(spec.num_bytes)
        return tuple(made), []

    def _look(self) -> None:
        """Look around in a long wait: whether another rank has failed, and whether the other end waits for this one."""
        self._check()
        if self._owed:
            self._tell()
        if self._broken.poll(0):
            time.sleep(0.2)  # a rank that ends after an error has told it before
            self._check()
            raise LostPeer(self.peer, "the connection was closed")


def _remember(forms: dict[Any, T], key: object, form: T) -> T:
    if len(forms) == _MOST_FORMS:
        forms.clear()
    forms[key] = form
    return form


def _form_of(made: Cotangents, known: Sequence[str], parts: Tensors, label: str) -> Form:
    called = known or ("",) * len(made)
    specs = [None if t is None else make_spec(t, name) for t, name in zip(made, called, strict=True)]
    layouts = tuple(map(with_layout, make_specs(parts), parts))
    text = json.dumps([to_json(specs), to_json(layouts), label]).encode()
    text += b" " * _gap(len(text))
    return Form(text, layouts, sum(spec.num_bytes for spec in layouts))


def _plain(tensor: Tensor) -> Tensor:
    """Return the values in memory, without a conjugation or negation that torch has put off."""
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def host_of(store: Store) -> str:
    """Return the address of this machine in the network of the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "localhost")
    port = getattr(store, "port", 1)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, but chooses a route
        return str(probe.getsockname()[0])


@cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context()


def _socket(kind: int, token: bytes) -> zmq.Socket[bytes]:
    """Return a socket without a limit of messages: the window is one of bytes."""
    made = _context().socket(kind)
    made.ipv6 = True
    made.linger = 0
    made.set_hwm(0)
    # TCP begins again with a window of a few packets when a connection was silent for about a round trip and 0.2 s.
    made.heartbeat_ivl = _PULSE
    made.heartbeat_timeout = _SILENT
    if secret := os.environ.get("NWISE_SECRET"):
        # Every rank derives both keys from the secret. A process without the secret has neither.
        key = z85.encode(hashlib.sha256(secret.encode() + token).digest())
        made.curve_secretkey = key
        made.curve_publickey = zmq.curve_public(key)
        if kind == zmq.PULL:
            made.curve_server = True
        else:
            made.curve_serverkey = zmq.curve_public(key)
    return made


def _read_from(buffer: memoryview, place: int, spec: Spec) -> Tensor:
    """Copy a tensor out of a frame: kernels sum in another order if memory begins elsewhere, and zmq's begins anywhere."""
    if not spec.num_bytes:
        return spec.empty(torch.device("cpu"))
    count = spec.num_bytes // spec.dtype.itemsize
    return spec.of_memory(torch.frombuffer(buffer, dtype=spec.dtype, count=count, offset=place).clone())


def _bytes(tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor."""
    # NumPy lacks some dtypes, such as bfloat16.
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def _padded(tensor: Tensor) -> bytes:
    raw = bytes(_bytes(tensor))
    return raw + bytes(_gap(len(raw)))


def _gap(size: int) -> int:
    """Return the bytes from the end of something to where the next tensor begins."""
    return -size % _GRAIN
