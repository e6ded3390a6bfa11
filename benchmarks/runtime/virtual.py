"""Virtual devices: stages that wait as long as an accelerator would compute, so that many run truly at once on few cores.

Messages are real tensors of a given size, and everything but the stage is the runtime's own code.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nwise.flow import Cotangent, StageFlow
from nwise.microbatch import Tensors
from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Prices
from nwise.stage import Cotangents

_SPIN = 60e-6  # seconds that a sleep is late by at most on a quiet machine, which are spent awake
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

    def start(self) -> None:
        """Be free from now on."""
        self._free = time.perf_counter()


class VirtualStage:
    """A stage whose actions take a given time.

    Args:
        index: the stage's place.
        price: times of its actions, in slots.
        device: where it runs.
    """

    def __init__(self, index: int, price: Prices, device: Device) -> None:
        self.index = index
        self._price = price
        self._device = device
        self._flows: dict[int, tuple[StageFlow, Tensors]] = {}
        self._made: Tensors = ()

    def _work(self, kind: Kind, microbatch: int, *, received: bool = False) -> None:
        # Before looking up the price, which an accelerator would not do.
        moment = time.perf_counter() if received else 0.0
        flow, _ = self._flows[microbatch]
        self._device.work(self._price.time(Action(kind, self.index, microbatch), flow), received=moment)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        flow: StageFlow,
        passes: int,
        seed: int,
        versions: Mapping[str, Tensor] | None = None,
    ) -> Tensors:
        """F: gives its input on."""
        self._flows[microbatch] = flow, inputs
        self._work(Kind.FORWARD, microbatch, received=self.index > 0)
        if self.index:
            return inputs
        # An output of its own, made once: the caller's batch would have to be copied to be sent.
        self._made = self._made or tuple(x.clone() for x in inputs)
        return self._made

    def run_head(self, microbatch: int, target: Tensors | None, flow: StageFlow, weight: float, seed: int) -> Tensor:
        """H: a loss of zero."""
        self._work(Kind.HEAD, microbatch)
        return torch.zeros(())

    def backward(
        self,
        microbatch: int,
        cotangent: Cotangent,
        received: Sequence[Cotangents],
        *,
        inputs: bool,
        weights: bool,
        shared: bool = False,
    ) -> Cotangents:
        """I, W or B: a gradient as large as the input."""
        kind = Kind.BOTH if inputs and weights else Kind.INPUT_GRAD if inputs else Kind.WEIGHT_GRAD
        self._work(kind, microbatch, received=any(cotangent.received))
        return self._flows[microbatch][1] if inputs else ()

    def clear(self) -> None:
        """Forget the mini-batch."""
        self._flows.clear()


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
