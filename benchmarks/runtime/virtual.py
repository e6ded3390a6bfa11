"""Virtual devices: stages that wait as long as an accelerator would compute, so that many run truly at once on few cores.

Messages are real tensors of a given size, and everything but the stage is the runtime's own code. Links may be slow, too: a
message is due after a latency and the time of its bytes.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nwise.schedule import Action, Kind
from nwise.schedule.costs import Prices
from nwise.stage import Stage
from nwise.stage.tape import Cotangents, Tape

_SPIN = 60e-6  # seconds that a sleep is late by at most on a quiet machine, which are spent awake
_LARGE = 4096  # numbers of a message that takes existing memory
_TIMER_SLACK = 29  # of Linux's prctl


class Device:
    """An accelerator that computes by letting time pass.

    A computation begins when the device is free, which is the moment the one before it was due to end, as on an accelerator
    whose queue the host keeps filled; but not before the host has what was sent for it, which is when it asks.

    Args:
        slot: seconds of one slot.
    """

    def __init__(self, slot: float) -> None:
        self._slot = slot
        self._free = time.perf_counter()

    def work(self, slots: float, *, received: float = 0.0) -> None:
        """Compute for some slots.

        Args:
            slots: how long.
            received: moment of `time.perf_counter` at which the host had what was sent for it; default: nothing was.
        """
        self._free = max(self._free, received) + self._slot * slots
        _wait_until(self._free)

    @property
    def free(self) -> float:
        """Moment at which the last computation ended."""
        return self._free

    def start(self) -> None:
        """Be free from now on."""
        self._free = time.perf_counter()


class Link:
    """A link that delivers a message after a latency and the time of its bytes, one message after the other.

    The moment at which a message is due travels as its first number; processes of one machine have one clock. The host has the
    message earlier, but the virtual device does not begin before that moment. So slow links are measured on a fast machine.

    Args:
        latency: seconds.
        seconds: seconds of a whole message on the link; messages wait for the one before.
    """

    def __init__(self, latency: float, seconds: float) -> None:
        self._latency, self._seconds = latency, seconds
        self._free = 0.0

    def stamp(self, memory: Tensor, sent: float) -> Tensor:
        """Make a message as large as some memory, which leaves at a moment; a large one takes that memory.

        New memory costs page faults, which an accelerator's allocator avoids. A message may be stamped again before it has
        arrived. That matters only on slow links, where messages are small.
        """
        self._free = max(self._free, sent) + self._seconds
        message = torch.empty_like(memory) if memory.numel() < _LARGE else memory
        message[0] = self._free + self._latency
        return message


class VirtualStage(Stage):
    """A stage whose actions take a given time.

    Args:
        index: the stage's place.
        price: times of its actions, in slots.
        device: where it runs.
        links: to the stages before and after; None for one that takes no time.
    """

    def __init__(self, index: int, price: Prices, device: Device, links: tuple[Link | None, Link | None]) -> None:
        # Its module is the identity, because an output has the shape of the input.
        super().__init__(index, nn.Identity(), None, nn.functional.mse_loss)
        self._price, self._device, self._links = price, device, links
        self._own: Tensor | None = None

    def run(self, action: Action, tape: Tape, given: Mapping[Any, Any], *, frees: bool = False) -> Cotangents:
        """Take the time of an action; make a message as large as the stage's input."""
        flow, due = tape.flow, 0.0
        before, after = self._links
        if action.kind is Kind.FORWARD:
            tape.head_left = flow.head
            if self.index:
                tape.inputs = given[None]
                due = _due(before, tape.inputs)
            else:
                # An output of its own, cloned once: the caller's batch would have to be copied to be sent.
                self._own = given[None][0].clone() if self._own is None else self._own
                tape.inputs = (self._own,)
        elif action.kind is Kind.HEAD:
            tape.head_left = False
            tape.batch.losses[self.index, tape.microbatch] = torch.zeros(())
        else:
            tape.passes_left -= 1
            messages = [given[p][0] for p in flow.cotangent(action.message).needed]
            due = _due(after, [one for one in messages if one is not None]) if messages else 0.0
        self._device.work(self._price.time(Action(action.kind, self.index, 0), flow), received=due)
        output: Cotangents = ()
        if action.kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.BOTH):
            link = after if action.kind is Kind.FORWARD else before
            output = tape.inputs if link is None else (link.stamp(tape.inputs[0], self._device.free),)
        return output


def _due(link: Link | None, messages: Sequence[Tensor]) -> float:
    """Return the moment at which messages of a link are there: now, or when the last of them is due."""
    now = time.perf_counter()
    return now if link is None else max([now, *(float(one[0]) for one in messages)])


def _wait_until(deadline: float) -> None:
    """Sleep until a moment of `time.perf_counter`, the last few microseconds awake."""
    left = deadline - time.perf_counter() - _SPIN
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < deadline:
        pass


def sharpen_timers() -> None:
    """Let this process's sleeps end when they should; Linux rounds them up by 50 microseconds otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
