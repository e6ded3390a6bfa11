"""Channels between two ends in one process, over real sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nwise.runtime import channel
from nwise.runtime.channel import Carrier, Channel, LostPeer, Name
from nwise.tensors import Named, Tensors

TOKEN = b"0123456789abcdef"
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int64, torch.bool, torch.complex64]


def ends(**options: Any) -> tuple[Channel, Channel]:
    """Two connected ends, of ranks 0 and 1."""
    zero = Channel(1, "127.0.0.1", TOKEN, options.get("check", lambda: None), options.get("zero"))
    one = Channel(0, "127.0.0.1", TOKEN, options.get("check", lambda: None), options.get("one"))
    zero.connect(one.addresses)
    one.connect(zero.addresses)
    return zero, one


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    zero, one = ends()
    yield zero, one
    zero.close()
    one.close()


def push(end: Channel, name: Name, *tensors: Tensor) -> None:
    end.send(name, tensors, tensors)


@st.composite
def messages(draw: st.DrawFn) -> list[list[Tensor | None]]:
    """Messages of tensors of any shape, dtype and layout, or None."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        tensors: list[Tensor | None] = []
        for _ in range(draw(st.integers(1, 3))):
            shape = draw(st.lists(st.integers(0, 4), max_size=4))
            order = draw(st.permutations(range(len(shape))))
            tensor = (10 * torch.randn(shape)).to(draw(st.sampled_from(DTYPES))).permute(order)
            tensors.append(tensor if draw(st.integers(0, 4)) else None)
        found.append(tensors)
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(messages(), st.randoms())
def test_messages_arrive_whole_in_any_order(pair: tuple[Channel, Channel], sent: list[Any], random: Any) -> None:
    """With their bits, dtypes, layouts, names and gaps, whatever is read first."""
    sender, receiver = pair if random.random() < 0.5 else pair[::-1]
    receiver.drop(epoch := receiver._epoch + 1)  # the messages of an example that failed
    for number, tensors in enumerate(sent):
        named: Any = Named({f"name {i}": t for i, t in enumerate(tensors)})
        sender.send(Name(epoch, number, 7), named, tuple(t for t in tensors if t is not None))
    for number in random.sample(range(len(sent)), len(sent)):
        arrived_specs, parts, _ = receiver.take(Name(epoch, number, 7))
        rest = iter(parts)
        for i, (tensor, spec) in enumerate(zip(sent[number], arrived_specs, strict=True)):
            assert (tensor is None) == (spec is None)
            if tensor is not None:
                arrived = next(rest)
                assert arrived.dtype == tensor.dtype
                assert arrived.equal(tensor)
                assert arrived.is_contiguous() == tensor.is_contiguous()
                assert cast(Any, spec).name == f"name {i}"


def test_large_messages_are_not_the_memory_that_was_sent(pair: tuple[Channel, Channel]) -> None:
    large = torch.randn(2**18)
    push(pair[0], Name(0, 0, 0), large)
    (arrived,) = pair[1].take(Name(0, 0, 0)).parts
    assert arrived.equal(large)
    assert arrived.data_ptr() % 64 == 0, "kernels sum in another order elsewhere"


def test_a_fast_sender_waits_until_enough_has_been_taken(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ahead by the bytes of the window, or by two messages if these are larger."""
    monkeypatch.setattr(channel, "_WINDOW", 100)
    sender, receiver = pair
    done: list[int] = []

    def send(size: int) -> None:
        for number in range(8):
            push(sender, Name(0, number, size), torch.zeros(size, dtype=torch.uint8))
            done.append(number)

    for size, ahead in ((20, 5), (90, 2)):
        done.clear()
        thread = threading.Thread(target=send, args=[size])
        thread.start()
        time.sleep(0.3)
        assert len(done) == ahead
        for number in range(8):
            receiver.take(Name(0, number, size))
        while thread.is_alive():  # which needs to hear that its last messages were taken
            receiver._look()
            thread.join(0.05)
        assert len(done) == 8
        receiver._tell()
        while sender._ahead:
            sender._read()


def test_a_sender_hears_of_small_messages_too(pair: tuple[Channel, Channel]) -> None:
    """It remembers what is not known to be taken, which must not grow with the training."""
    for number in range(1000):
        push(pair[0], Name(0, number, 0), torch.zeros(2))
        pair[1].take(Name(0, number, 0))
        push(pair[1], Name(0, number, 0), torch.zeros(2))
        pair[0].take(Name(0, number, 0))
    assert max(len(end._ahead) for end in pair) < 600


def test_both_ends_wait_for_room_and_none_for_ever(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads what arrives while it waits, so two ends that send to each other go on."""
    monkeypatch.setattr(channel, "_WINDOW", 10)

    def exchange(end: Channel) -> None:
        for number in range(20):
            push(end, Name(0, number, 0), torch.zeros(8))
            if number >= 1:
                end.take(Name(0, number - 1, 0))
        end.take(Name(0, 19, 0))

    threads = [threading.Thread(target=exchange, args=[end]) for end in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_what_a_stranger_sends_is_dropped_with_one_warning(pair: tuple[Channel, Channel]) -> None:
    """Bytes of any kind, another job's messages, and a header that is too long; then the job's own message arrives."""
    sender, receiver = pair
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(receiver.addresses[2])
        header = channel._HEADER.pack(TOKEN, 0, 0, 0, 0, 2**20 + 1)
        stranger.send(b"GET / HTTP/1.1")
        stranger.send_multipart([channel._HEADER.pack(b"another job's to", 0, 0, 0, 0, 2), b"[]"])
        stranger.send(header + b" " * (2**20 + 1))
        with pytest.warns(UserWarning, match="Something that is not this job.*dropped") as caught:
            deque((receiver._read() for _ in range(3)), maxlen=0)  # type: ignore[func-returns-value]
    push(sender, Name(0, 0, 0), torch.ones(2))
    assert receiver.take(Name(0, 0, 0)).parts[0].equal(torch.ones(2))
    assert len(caught) == 1


def test_a_message_that_is_missing_is_an_error(pair: tuple[Channel, Channel]) -> None:
    sender, receiver = pair
    sender._sent = 3
    push(sender, Name(0, 0, 0), torch.ones(2))
    with pytest.raises(LostPeer, match="lost rank 0: 3 messages are missing"):
        receiver.take(Name(0, 0, 0))


def test_a_lost_peer_ends_the_wait() -> None:
    zero, one = ends()
    push(zero, Name(0, 0, 0), torch.ones(2))
    one.take(Name(0, 0, 0))
    push(one, Name(0, 0, 0), torch.ones(2))
    zero.take(Name(0, 0, 0))
    one.close()
    begin = time.monotonic()
    with pytest.raises(LostPeer, match="lost rank 1: the connection was closed"):
        zero.take(Name(0, 1, 0))
    assert time.monotonic() - begin < 5
    zero.close()


def test_an_error_of_another_rank_ends_the_wait() -> None:
    def check() -> None:
        raise RuntimeError("of another rank")

    zero, one = ends(check=check)
    with pytest.raises(RuntimeError, match="of another rank"):
        zero.take(Name(0, 0, 0))
    zero.close()
    one.close()


def test_messages_of_an_earlier_epoch_are_dropped(pair: tuple[Channel, Channel]) -> None:
    """Those that have arrived, and those that come later."""
    sender, receiver = pair
    push(sender, Name(0, 0, 0), torch.ones(1))
    push(sender, Name(0, 1, 0), torch.ones(1))
    receiver.take(Name(0, 1, 0))
    receiver.drop(1)
    push(sender, Name(0, 2, 0), torch.ones(1))
    push(sender, Name(1, 2, 0), torch.zeros(1))
    assert receiver.take(Name(1, 2, 0)).parts[0].item() == 0
    assert not receiver._arrived
    assert receiver._taken == 4


def test_a_secret_encrypts_and_admits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing arrives from an end with another secret."""
    monkeypatch.setenv("NWISE_SECRET", "of this job")
    zero, one = ends()
    push(zero, Name(0, 0, 0), torch.ones(2))
    assert one.take(Name(0, 0, 0)).parts[0].equal(torch.ones(2))
    monkeypatch.setenv("NWISE_SECRET", "another one")
    other = Channel(0, "127.0.0.1", TOKEN, lambda: None)
    other.connect(one.addresses)
    push(other, Name(0, 1, 0), torch.ones(2))
    one._read()
    assert not one._arrived
    for end in (zero, one, other):
        end.close()


class Group:
    """One direction of a carrier: the n-th send fills the n-th receive."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.sent.append(tensors[0].clone())

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        source = self.sent.popleft()

        class Work:
            def wait(self) -> None:
                tensors[0].copy_(source)

        return Work()


def test_a_carrier_brings_the_bytes_and_zmq_the_headers() -> None:
    """As on GPUs, where nccl is the carrier: messages are received in the order in which they were sent."""
    up, down, cpu = Group(), Group(), torch.device("cpu")
    zero, one = ends(
        zero=Carrier(cast(Any, up), cast(Any, down), cpu), one=Carrier(cast(Any, down), cast(Any, up), cpu)
    )
    sent: list[Tensors] = [(torch.randn(3), torch.randn(0)), (torch.randn(2, 2).T,)]
    for number, tensors in enumerate(sent):
        push(zero, Name(0, number, 0), *tensors)
    for number in (1, 0):
        assert all(map(torch.equal, one.take(Name(0, number, 0)).parts, sent[number]))
    zero.close()
    one.close()
