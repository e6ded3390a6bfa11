"""Channels over a wire in memory that raises instead of hanging."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nwise.runtime.channel import Key, Link, LostPeer, MessagePlan, Receiver, Sender, Spec, start_all
from nwise.schedule.actions import Action, Kind


@dataclass
class Work:
    """A send or a receive."""

    wire: Wire
    name: str
    tensor: Tensor
    done: bool = False
    waited: bool = False

    def wait(self) -> None:
        """Done, or never."""
        self.wire.calls.append(f"wait {self.name}")
        if not self.done:
            raise RuntimeError("nobody is left to do it")
        self.waited = True


@dataclass
class Wire:
    """Both ends' process group: the n-th send fills the n-th receive."""

    calls: list[str] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    _open: dict[str, deque[Work]] = field(default_factory=lambda: {"send": deque(), "receive": deque()})

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """As `ProcessGroup.send`."""
        return self._put("send", tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """As `ProcessGroup.recv`."""
        return self._put("receive", tensors[0])

    def _put(self, name: str, tensor: Tensor) -> Work:
        work = Work(self, name, tensor)
        self.calls.append(name)
        self.works.append(work)
        self._open[name].append(work)
        sends, receives = self._open.values()
        while sends and receives:
            sent, received = sends.popleft(), receives.popleft()
            received.tensor.copy_(sent.tensor)
            sent.done = received.done = True
        return work

    def sends_not_waited_for(self) -> int:
        """What a sender still keeps."""
        return sum(work.name == "send" and not work.waited for work in self.works)


def channel(device: str = "cpu") -> tuple[Wire, Sender, Receiver]:
    """A wire with its ends."""
    wire = Wire()
    link = Link(cast(Any, wire), 1, torch.device(device))
    return wire, Sender(link), Receiver(link)


def name(m: int, turn: int = 0) -> Key:
    """The name of an activation."""
    return Action(Kind.RECEIVE_ACTIVATION, 1, m, None, turn)


def plan(shapes: list[list[tuple[int, ...]]], turns: int = 1, travel: int = 0) -> MessagePlan:
    """A message for each list of shapes, in each of some calls."""
    specs = tuple(tuple(Spec(shape, torch.float64) for shape in one) for one in shapes)
    keys = tuple(name(m, turn) for turn in range(turns) for m in range(len(shapes)))
    return MessagePlan(keys, tuple(key.turn for key in keys), specs * turns, travel)


def begin(sender: Sender, receiver: Receiver, on: MessagePlan, turn: int = 0) -> None:
    """A mini-batch of both ends."""
    start_all([(sender, on)], [(receiver, on)], turn)


SHAPES = st.lists(st.lists(st.sampled_from([(), (0, 2), (3,), (2, 2)]), max_size=3), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    plans=st.lists(st.builds(plan, SHAPES, st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3),
    picks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7)), min_size=1, max_size=5),
    data=st.data(),
)
def test_messages_arrive_across_plan_changes(
    plans: list[MessagePlan], picks: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Plans change between any two calls, in the middle of a cycle too; messages are taken in any order and some calls later, and
    receives posted at any time."""
    wire, sender, receiver = channel()
    number = 0.0
    left: deque[dict[Key, list[Tensor]]] = deque()
    for pick, count in picks:
        now = plans[pick % len(plans)]
        turns = 1 + max(now.calls)
        for step in range(count):
            turn = step % turns
            begin(sender, receiver, now, turn)
            sent: dict[Key, list[Tensor]] = {}
            for key, specs in zip(now.keys, now.specs, strict=True):
                if key.turn == turn:
                    sent[key] = [torch.full(spec.shape, number := number + 1, dtype=spec.dtype) for spec in specs]
                    sender.send(key, sent[key])
                    if data.draw(st.booleans()):
                        receiver.post()
            left.append(sent)
            while len(left) > now.travel:
                due = left.popleft()
                for key in data.draw(st.permutations(list(due))):
                    taken = receiver.take(key)
                    assert [t.tolist() for t in taken] == [t.tolist() for t in due[key]]
                    assert [t.shape for t in taken] == [t.shape for t in due[key]]
            assert wire.sends_not_waited_for() <= (1 + now.travel) * sum(len(specs) for specs in now.specs)
    begin(sender, receiver, MessagePlan())
    assert all(work.done for work in wire.works)
    assert wire.sends_not_waited_for() == 0


def test_send_posts_before_waiting_for_earlier_send() -> None:
    """Send before waiting: the receiver may be blocked on it. The wait took a quarter of the send."""
    wire, sender, receiver = channel()
    one = plan([[(1,)]])
    for _ in range(2):
        begin(sender, receiver, one)
        wire.calls.clear()
        sender.send(name(0), [torch.ones(1, dtype=torch.float64)])
        said = list(wire.calls)
        receiver.take(name(0))
    assert said == ["send", "wait send"]


def test_take_of_arrived_message_posts_no_receive() -> None:
    """Posting takes as long as the message, so two receives are posted right after a send, when no rank waits."""
    wire, sender, receiver = channel()
    one = plan([[(1,)]])
    begin(sender, receiver, one)
    assert wire.calls == ["receive", "receive"]
    value = [torch.ones(1, dtype=torch.float64)]
    for post, expected in [(True, ["wait receive"]), (True, ["wait receive"]), (False, ["receive", "wait receive"])]:
        sender.send(name(0), value)
        if post:
            receiver.post()
        wire.calls.clear()
        receiver.take(name(0))
        assert wire.calls == expected  # one is always posted before it waits
        begin(sender, receiver, one)


def test_sender_by_default_keeps_one_cycle_and_counts_its_bytes() -> None:
    """Nothing is received here: a send waits for the same message of the cycle before, and no earlier one."""
    wire = Wire()
    sender = Sender(Link(cast(Any, wire), 1, torch.device("cpu")))
    two = plan([[(1,)], [(3,)]])
    values = [torch.ones(1, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    assert not any(sender.num_bytes.values())
    sender.start(two, 0)
    for m, value in enumerate(values):
        sender.send(name(m), [value])
    kind = Kind.RECEIVE_ACTIVATION
    assert sender.num_bytes[kind] == two.num_bytes(0, kind) == 8 * 4
    assert wire.calls == ["send", "send"]
    sender.start(two, 0)
    with pytest.raises(LostPeer):  # of this wire, where waiting is in vain
        sender.send(name(0), [values[0]])


def test_call_without_messages_goes_on_with_the_plan() -> None:
    """It would otherwise be taken for a change of plan, which sends dummy messages."""
    wire, sender, receiver = channel()
    one = plan([[(1,)]], turns=3)
    gap = MessagePlan((one.keys[0], one.keys[2]), (0, 2), one.specs[:2])
    begin(sender, receiver, gap, 0)
    sender.send(name(0), [torch.ones(1, dtype=torch.float64)])
    receiver.take(name(0))
    wire.calls.clear()
    begin(sender, receiver, gap, 1)
    assert wire.calls == []


def test_no_receive_posted_ahead_on_non_cpu_device() -> None:
    """A posted receive blocks the device, as under nccl; this holds for every device but the CPU."""
    wire, sender, receiver = channel(device="meta")
    one, key = plan([[(1,)]]), name(0)
    begin(sender, receiver, one)
    assert wire.calls == []
    sender.send(key, [torch.ones(1, dtype=torch.float64, device="meta")])
    receiver.post()
    receiver.take(key)
    assert wire.calls == ["send", "receive", "wait receive"]
    wire.calls.clear()
    begin(sender, receiver, plan([[(2,)]]))
    assert wire.calls == ["wait send"]


def test_lost_peer_names_the_rank() -> None:
    """A transport error is reported as the loss of the rank at the other end."""
    _, sender, receiver = channel()
    begin(sender, receiver, plan([[(1,)]]))
    with pytest.raises(LostPeer, match="lost rank 1: nobody is left"):
        receiver.take(name(0))


def test_send_not_matching_the_plan_raises() -> None:
    """The key, the number of tensors, the shape or the dtype differs from the plan."""
    _, sender, receiver = channel()
    begin(sender, receiver, plan([[(1,)]]))
    right = torch.ones(1, dtype=torch.float64)
    for key, tensors in [
        (name(1), [right]),
        (name(0), []),
        (name(0), [right[:0]]),
        (name(0), [right.float()]),
    ]:
        with pytest.raises(RuntimeError, match=r"should send RX1\(0\) of .* next. Found"):
            sender.send(key, tensors)
