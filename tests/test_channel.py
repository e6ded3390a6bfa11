"""Channels over a wire in memory that raises instead of hanging."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nwise
from nwise.flow import find_flow
from nwise.runtime import ledger
from nwise.runtime.channel import Link, LostPeer, Receiver, Sender, start_all
from nwise.runtime.ledger import NOTHING, Key, Label, MessagePlan, Window
from nwise.runtime.shapes import HEADER, Form, Spec
from nwise.schedule.actions import Action, Kind
from nwise.tensors import Tensors, names, with_names


@dataclass
class Work:
    """A send or a receive."""

    wire: Wire
    name: str
    tensor: Tensor
    done: threading.Event = field(default_factory=threading.Event)
    waited: bool = False

    def wait(self) -> None:
        """Done, or never."""
        self.wire.calls.append(f"wait {self.name}")
        if not self.done.wait(self.wire.patience):
            raise RuntimeError("nobody is left to do it")
        self.waited = True


@dataclass
class Wire:
    """Both ends' process group: the n-th send fills the n-th receive. `patience` is in seconds."""

    patience: float = 0.0
    calls: list[str] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    _open: dict[str, deque[Work]] = field(default_factory=lambda: {"send": deque(), "receive": deque()})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """As `ProcessGroup.send`."""
        return self._put("send", tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """As `ProcessGroup.recv`."""
        return self._put("receive", tensors[0])

    def _put(self, name: str, tensor: Tensor) -> Work:
        work = Work(self, name, tensor)
        with self._lock:
            self.calls.append(name)
            self.works.append(work)
            self._open[name].append(work)
            sends, receives = self._open.values()
            while sends and receives:
                sent, received = sends.popleft(), receives.popleft()
                assert (sent.tensor.shape, sent.tensor.dtype) == (received.tensor.shape, received.tensor.dtype)
                received.tensor.copy_(sent.tensor)
                sent.done.set()
                received.done.set()
        return work

    def sends_not_waited_for(self) -> int:
        """What a sender still keeps."""
        return sum(work.name == "send" and not work.waited for work in self.works)

    def sent(self) -> list[int]:
        """Sizes of what has been sent since the last time, in bytes."""
        sizes = [work.tensor.nbytes for work in self.works if work.name == "send"]
        self.works.clear()
        return sizes


class LateLink(Link):
    """As under nccl, where a posted receive blocks the device."""

    early = False


def channel(kind: type[Link] = Link, patience: float = 0.0) -> tuple[Wire, Sender, Receiver]:
    """A wire with its ends."""
    wire = Wire(patience)
    link = kind(cast(Any, wire), 1, torch.device("cpu"))
    return wire, Sender(link), Receiver(link)


def name(m: int, turn: int = 0) -> Key:
    """The name of an activation."""
    return Action(Kind.RECEIVE_ACTIVATION, 1, m, None, turn)


def plan(*counts: int, travel: int = 0, **options: Any) -> MessagePlan:
    """So many messages in each call of a cycle, each of a micro-batch."""
    calls = tuple(tuple((name(m, turn), 0) for m in range(count)) for turn, count in enumerate(counts))
    return MessagePlan(calls, travel, **options)


def label(size: int, name: str = "") -> Label:
    """What a micro-batch of so many numbers is known by."""
    return (Spec((size,), torch.float64, name),), ""


def window(*sizes: int) -> Window:
    """A mini-batch of micro-batches of so many numbers."""
    return (tuple(map(label, sizes)),)


def row(size: int, value: float = 1.0) -> Tensors:
    """A message of so many numbers."""
    return (torch.full((size,), value, dtype=torch.float64),)


def begin(sender: Sender, receiver: Receiver, on: MessagePlan, labels: Window, turn: int = 0) -> None:
    """A call of both ends."""
    start_all([(sender, on)], [(receiver, on)], labels, turn)


def carry(sender: Sender, receiver: Receiver, on: MessagePlan, labels: Window, *messages: Tensors) -> list[Tensors]:
    """A call of both ends with its messages; None is nothing. Returns what arrives."""
    begin(sender, receiver, on, labels)
    arrived = []
    for m, tensors in enumerate(messages):
        sender.send(name(m), tensors, tensors)
        arrived.append(receiver.take(name(m))[0])
    return arrived


# Any size, also of nothing; odd ones have names, and every fourth has an integer beside it.
def tensors_of(key: Key, size: int, value: float) -> Tensors:
    """What a stage gives for a micro-batch of a size, and the next one gives back."""
    parts: list[Tensor] = [torch.full((size, 2), value, dtype=torch.float64)]
    if key.kind is Kind.RECEIVE_ACTIVATION and size % 4 == 1:
        parts.append(torch.full((3,), int(value)))
    return with_names(parts, ["b", "a"][: len(parts)] if size % 2 else [])


@dataclass
class Call:
    """One call of a random sequence."""

    plan: MessagePlan
    window: Window
    turn: int
    messages: dict[Key, Tensors | None]
    order: list[Key]
    posts: list[bool]
    forget: bool


@st.composite
def sequences(draw: st.DrawFn) -> list[Call]:
    """Calls of changing plans, shapes and ages, some without mini-batch, some of messages whose shape is not known before."""
    plans = []
    for number in range(draw(st.integers(1, 3))):
        kinds = st.sampled_from([Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT])
        calls = []
        for turn in range(draw(st.integers(1, 3))):
            drawn = draw(st.lists(st.tuples(kinds, st.integers(1, 2), st.integers(0, 1)), max_size=3, unique=True))
            calls.append(tuple((Action(k, stage, m, None, turn), m) for k, stage, m in drawn))
        plans.append(MessagePlan(tuple(calls), draw(st.integers(0, 2)), str(number)))
    numbers, result = itertools.count(1), list[Call]()
    for _ in range(draw(st.integers(1, 5))):
        on, turn = draw(st.sampled_from(plans)), draw(st.integers(0, 2))
        sizes = st.lists(st.integers(0, 5), min_size=2, max_size=2)
        drawn_window = draw(st.lists(st.none() | sizes, min_size=2, max_size=2))
        for _ in range(draw(st.integers(1, 5))):
            if draw(st.integers(0, 3)) == 0:
                drawn_window = [draw(st.none() | sizes), drawn_window[0]]
            turn = (turn + (1 if draw(st.integers(0, 9)) else 2)) % len(on.calls)
            messages: dict[Key, Tensors | None] = {}
            for key, age in on.calls[turn]:
                found = drawn_window[age]
                size = draw(st.none() | st.integers(0, 5)) if found is None else found[key.microbatch]
                messages[key] = None if size is None else tensors_of(key, size, float(next(numbers)))
            # Some labels are too long for the first tensor of a header.
            long = ["x" * HEADER.num_bytes * (size == 5) for size in range(6)]
            labels = tuple(
                None if one is None else tuple(label(size, long[size]) for size in one) for one in drawn_window
            )
            posts = draw(st.lists(st.booleans(), min_size=3, max_size=3))
            order = draw(st.permutations(list(messages)))
            result.append(Call(on, labels, turn, messages, order, posts, draw(st.integers(0, 9)) == 0))
    return result


def in_threads(*functions: Callable[[], None]) -> None:
    """Run functions at once; raise the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@settings(max_examples=100, deadline=None)
@given(calls=sequences(), kind=st.sampled_from([Link, LateLink]), most=st.sampled_from([2, 2**16]))
def test_messages_arrive_across_changes(calls: list[Call], kind: type[Link], most: int) -> None:
    """Plans and shapes change between any two calls, in the middle of a cycle too. Messages are taken in any order and some calls
    later, or forgotten, and receives posted at any time. Two ranks send to each other at once, and neither waits for ever."""
    there, back = channel(kind, patience=20.0), channel(kind, patience=20.0)
    last = Call(NOTHING, (), 0, {}, [], [], forget=True)

    def rank(sender: Sender, receiver: Receiver) -> None:
        due: deque[Call] = deque()
        for call in [*calls, last]:
            if call.forget or (due and due[-1].plan != call.plan):
                receiver.forget()
                due.clear()
            start_all([(sender, call.plan)], [(receiver, call.plan)], call.window, call.turn)
            for key, tensors in call.messages.items():
                if tensors is None:
                    sender.send_nothing()
                else:
                    sender.send(key, tensors, tuple(tensors))
            due.append(call)
            while len(due) > call.plan.travel:
                one = due.popleft()
                for key, post in zip(one.order, one.posts, strict=False):
                    (taken, form), expected = receiver.take(key), one.messages[key]
                    assert [t.tolist() for t in taken] == [t.tolist() for t in expected or ()]
                    assert [(t.shape, t.dtype) for t in taken] == [(t.shape, t.dtype) for t in expected or ()]
                    assert form.names == (names(expected) if expected is not None else ())
                    if post:
                        receiver.post()

    before, ledger._MOST_FORMS = ledger._MOST_FORMS, most
    try:
        in_threads(lambda: rank(there[1], back[2]), lambda: rank(back[1], there[2]))
    finally:
        ledger._MOST_FORMS = before
    for wire, sender, receiver in (there, back):
        assert all(work.done.is_set() for work in wire.works)
        assert wire.sends_not_waited_for() == 0
        tables = [end._ledger._forms for end in (sender, receiver)]
        assert list(tables[0].items()) == list(tables[1].items())
        assert len(tables[0]) <= most


HEAD = HEADER.num_bytes


def test_only_the_first_message_of_a_shape_has_a_header() -> None:
    """Three micro-batches, of which the second is like the first; then again, and a shape from before."""
    wire, sender, receiver = channel()
    three = plan(3)
    for sizes, expected in [
        ((2, 2, 1), [HEAD, 16, 16, HEAD, 8]),
        ((2, 2, 1), [16, 16, 8]),
        (
            (4, 4, 4),
            [16, 16, HEAD, 32, 32, 32],
        ),  # the first two fill the receives that were posted for a third such call
        ((1, 2, 4), [8, 16, 32]),
    ]:
        messages = [row(size, i) for i, size in enumerate(sizes)]
        arrived = carry(sender, receiver, three, window(*sizes), *messages)
        assert [t.tolist() for (t,) in arrived] == [t.tolist() for (t,) in messages]
        assert wire.sent() == expected


def test_shapes_that_change_in_every_call_need_no_dummies() -> None:
    """A hundred lengths, then the first again; receives are posted beyond a call only after two equal ones."""
    wire, sender, receiver = channel()
    one = plan(1)
    for size in range(1, 101):
        carry(sender, receiver, one, window(size), row(size))
        assert wire.sent() == [HEAD, 8 * size]
    for size in (1, 100, 50):
        carry(sender, receiver, one, window(size), row(size))
        assert wire.sent() == [8 * size]


def test_message_without_label_always_has_a_header() -> None:
    """Those of `pipe(x)`, whose stages may give what they like, and of mini-batches that do not exist."""
    wire, sender, receiver = channel()
    one = plan(1)
    for size in (3, 3, 2):
        carry(sender, receiver, one, (None,), row(size))
        assert wire.sent() == [HEAD, 8 * size]
    begin(sender, receiver, one, (None,))
    sender.send_nothing()
    assert receiver.take(name(0)) == ((), Form((), ()))
    assert wire.sent() == [HEAD]


def test_header_longer_than_its_tensor_arrives() -> None:
    """Of a dictionary of fifty tensors, in a message and in a dummy."""
    wire, sender, receiver = channel()
    many = with_names(row(1) * 50, [f"number_{i:02}" for i in range(50)])
    wide: Window = (((tuple(Spec((1,), torch.float64, name) for name in names(many)), ""),),)
    gradient = Action(Kind.RECEIVE_GRADIENT, 1, 0, 0, 2)
    three = MessagePlan((((name(0), 0),), ((name(0, 1), 0),), ((gradient, 0),)))
    for turn in range(2):
        begin(sender, receiver, three, wide, turn)
        sender.send(name(0, turn), many, many)
        assert receiver.take(name(0, turn))[1].names == names(many)
    sizes = wire.sent()
    assert sizes[0] == HEAD < sizes[1]
    assert sizes[2:] == [8] * 100
    # Now a receive is posted for the header of the gradient, which does not come.
    begin(sender, receiver, NOTHING, ())
    assert wire.sent() == [HEAD]
    carry(sender, receiver, plan(1), window(2), row(2))


def test_send_posts_before_waiting_for_earlier_send() -> None:
    """Send before waiting: the receiver may be blocked on it. The wait took a quarter of the send."""
    wire, sender, receiver = channel()
    one = plan(1)
    carry(sender, receiver, one, window(1), row(1))
    for _ in range(2):
        begin(sender, receiver, one, window(1))
        wire.calls.clear()
        sender.send(name(0), row(1), row(1))
        said = list(wire.calls)
        receiver.take(name(0))
    assert said == ["send", "wait send"]


def test_take_of_arrived_message_posts_no_receive() -> None:
    """Posting takes as long as the message, so two receives are posted right after a send, when no rank waits."""
    wire, sender, receiver = channel()
    one = plan(1)
    carry(sender, receiver, one, window(1), row(1))
    wire.calls.clear()
    begin(sender, receiver, one, window(1))
    assert wire.calls == ["receive", "receive"]
    for post, expected in [(True, ["wait receive"]), (True, ["wait receive"]), (False, ["receive", "wait receive"])]:
        sender.send(name(0), row(1), row(1))
        if post:
            receiver.post()
        wire.calls.clear()
        receiver.take(name(0))
        assert wire.calls == expected  # one is always posted before it waits
        begin(sender, receiver, one, window(1))


@pytest.mark.parametrize("travel", [0, 1])
def test_sender_keeps_one_cycle_and_under_a_delay_one_more(travel: int) -> None:
    """Nothing is received here: a send waits for the same message of the cycle before, and no earlier one.

    Under a delay a receive may come a call later than its send, so the sender must not wait for it in between.
    """
    wire = Wire()
    sender = Sender(Link(cast(Any, wire), 1, torch.device("cpu")))
    assert not any(sender.num_bytes.values())
    for _ in range(1 + travel):
        sender.start(plan(2, travel=travel), window(1, 3), 0)
        for m, value in enumerate([row(1), row(3)]):
            sender.send(name(m), value, value)
    assert sender.num_bytes == {Kind.RECEIVE_ACTIVATION: 8 * 4, Kind.RECEIVE_GRADIENT: 0}, "a call's, without headers"
    assert wire.calls == ["send"] * (4 + 2 * travel), "a header for each shape"
    sender.start(plan(2, travel=travel), window(1, 3), 0)
    with pytest.raises(LostPeer):  # of this wire, where waiting is in vain
        sender.send(name(0), row(1), row(1))


def test_empty_tensor_travels_with_the_others() -> None:
    """Only its shape does, in the header: a send of nothing would be taken for the next message."""
    _, sender, receiver = channel()
    message = (*row(2, 5.0), torch.empty(0, 3), *row(1, 7.0))
    for _ in range(2):
        for arrived in carry(sender, receiver, plan(2), window(2, 2), message, message):
            assert [t.tolist() for t in arrived] == [[5.0, 5.0], [], [7.0]]
            assert arrived[1].shape == (0, 3)


def test_labels_tell_dtypes_of_autocast_apart() -> None:
    """Outputs have the dtype of autocast, so a message is known by it; without autocast nothing is said of one."""
    alone, half, brain = (
        ledger.make_labels([row(2)], dtype, ledger.Labels()) for dtype in (None, torch.float16, torch.bfloat16)
    )
    assert len({alone, half, brain}) == 3
    assert (str(alone), str(half)) == ("1 of float64 [2]", "1 of float64 [2] under autocast to torch.float16")
    assert ledger.make_labels([row(2)], torch.float16, half) is half


def test_bytes_that_stages_send_follow_from_what_they_exchange() -> None:
    """A stage sends its output up and its messages down; an integer beside the output has no gradient."""
    flow = find_flow(nwise.NWise(3).credit(4))
    exchanged = ledger.Exchanged([flow])
    specs = (Spec((4, 2), torch.float64), Spec((4,), torch.int64))
    exchanged.note(Action(Kind.RECEIVE_ACTIVATION, 2, 0), Form(specs, specs))
    exchanged.note(Action(Kind.RECEIVE_GRADIENT, 2, 0, 0), Form((), ()))
    assert len(flow.stages[2].messages) == 2
    assert exchanged.num_bytes({1}, ledger.same) == [8 * 8 + 4 * 8, 0]
    assert exchanged.num_bytes({2}, ledger.same) == [0, 2 * 8 * 8]


def test_call_without_messages_goes_on_with_the_plan() -> None:
    """It would otherwise be taken for a change of plan, which sends dummy messages."""
    wire, sender, receiver = channel()
    gap = plan(1, 0, 1)
    for turn in (0, 1, 2, 0, 1):
        wire.calls.clear()
        begin(sender, receiver, gap, window(1), turn)
        if turn != 1:
            sender.send(name(0, turn), row(1), row(1))
            receiver.take(name(0, turn))
    assert wire.calls == []


def test_no_receive_posted_ahead_on_non_cpu_device() -> None:
    """A posted receive blocks the device, as under nccl; this holds for every device but the CPU."""
    assert Link(cast(Any, None), 1, torch.device("cpu")).early
    assert not Link(cast(Any, None), 1, torch.device("meta")).early
    wire, sender, receiver = channel(LateLink)
    one = plan(1)
    for _ in range(2):
        begin(sender, receiver, one, window(1))
        wire.calls.clear()
        sender.send(name(0), row(1), row(1))
        receiver.post()
        receiver.take(name(0))
    assert wire.calls == ["send", "wait send", "wait send", "receive", "wait receive"], "the first had a header"
    wire.calls.clear()
    begin(sender, receiver, one, window(2))
    assert wire.calls == ["wait send"]


def test_lost_peer_names_the_rank() -> None:
    """A transport error is reported as the loss of the rank at the other end."""
    _, sender, receiver = channel()
    begin(sender, receiver, plan(1), window(1))
    with pytest.raises(LostPeer, match="lost rank 1: nobody is left"):
        receiver.take(name(0))


def test_message_of_another_form_is_refused_before_it_is_sent() -> None:
    """The number of tensors, the shape, the dtype or the names differ from those of an earlier message for equal inputs."""
    wire, sender, receiver = channel()
    one, right = plan(1), row(2)
    carry(sender, receiver, one, window(4), right)
    for wrong, found in [
        ((), "nothing"),
        ((*right, *right), r"float64 \[2\]; float64 \[2\]"),
        ((right[0][:1],), r"float64 \[1\]"),
        ((right[0].float(),), r"float32 \[2\]"),
        (with_names(right, ["x"]), r"x: float64 \[2\]"),
    ]:
        begin(sender, receiver, one, window(4))
        wire.sent()
        pattern = "The output of stage 0 should have the same shapes, dtypes and names in every step whose micro-batch has the "
        with pytest.raises(
            ValueError, match=pattern + rf"same shapes.*Found {found}, after float64 \[2\] earlier; pad"
        ):
            sender.send(name(0), wrong, wrong)
        assert wire.sent() == []
        wire, sender, receiver = channel()
        carry(sender, receiver, one, window(4), right)


def test_message_changed_in_place_after_it_was_sent_is_refused() -> None:
    """Regression: a stage wrote its next output into the same memory, and the other rank read that in silence."""
    _, sender, receiver = channel()
    begin(sender, receiver, plan(2), window(2, 2))
    workspace = row(2)
    sender.send(name(0), workspace, workspace)
    workspace[0].zero_()
    with pytest.raises(ValueError, match="output of stage 0 should stay as it is.*changed in place.*return a clone"):
        sender.send(name(1), workspace, workspace)


def test_message_out_of_order_raises() -> None:
    """A mistake of the engine."""
    _, sender, receiver = channel()
    begin(sender, receiver, plan(1), window(1))
    with pytest.raises(RuntimeError, match=r"A channel should send RX1\(0\) next. Found RX1\(1\)"):
        sender.send(name(1), row(1), row(1))


def test_parts_that_differ_from_their_specs_are_refused() -> None:
    """A compression of a user's own, in the first message and in later ones."""
    half = plan(1, parts=lambda specs: tuple(Spec(s.shape, torch.float32) for s in specs))
    for good in (0, 1):
        _, sender, receiver = channel()
        for parts in [(row(1)[0].float(),)] * good + [row(1)]:
            begin(sender, receiver, half, window(1))
            if parts[0].dtype is torch.float32:
                sender.send(name(0), row(1), parts)
                receiver.take(name(0))
                continue
            pattern = r"`compress` should return .* its `specs` names. Found float64 \[1\] instead of float32 \[1\]"
            with pytest.raises(ValueError, match=pattern):
                sender.send(name(0), row(1), parts)


def test_ends_that_disagree_are_told_by_the_first_header() -> None:
    """Lists in another order, batches of other sizes, and autocast on one rank only."""
    inputs = (Spec((3, 2), torch.int64),)
    plain: Window = (((inputs, ""),),)
    cast_down: Window = (((inputs, "torch.bfloat16"),),)
    for digest, mine, theirs, expected in [
        ("b", plain, plain, r"same schedule. Found lists that differ from those of rank 1; make"),
        (
            "a",
            plain,
            cast_down,
            r"Found micro-batches of int64 \[3, 2\] here and of int64 \[3, 2\] under autocast to torch.bfloat16 on rank 1",
        ),
        (
            "a",
            (None,),
            plain,
            r"Found micro-batches of nothing here and of int64 \[3, 2\] on rank 1; load the same data",
        ),
    ]:
        _, sender, receiver = channel()
        receiver.start(plan(1, digest="a"), mine, 0)
        sender.start(plan(1, digest=digest), theirs, 0)
        sender.send(name(0), row(1), row(1))
        with pytest.raises(ValueError, match=expected):
            receiver.take(name(0))
