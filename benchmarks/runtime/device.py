"""An accelerator that computes by letting time pass, and modules that compute on it.

So many devices run truly at once on few cores. The modules are plain PyTorch: every library runs the same ones.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any, cast

import torch
from torch import Tensor, nn

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

    @property
    def free(self) -> float:
        """Moment at which the last computation ended."""
        return self._free

    def start(self) -> None:
        """Be free from now on."""
        self._free = time.perf_counter()


class Wait(torch.autograd.Function):
    """Forward and backward of a virtual stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, module: VirtualModule) -> Tensor:
        """F, after what was received unless it is the first stage."""
        ctx.module = module
        module.device.work(module.slots[0], received=0.0 if module.first else time.perf_counter())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """B, after what was received unless it is the last stage."""
        ctx.module.device.work(ctx.module.slots[1], received=0.0 if ctx.module.last else time.perf_counter())
        return gradient, torch.zeros(1), None


class WaitForWeights(torch.autograd.Function):
    """The part of a virtual stage whose backward is its weight gradient alone."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, module: SplitModule) -> Tensor:
        """Nothing."""
        ctx.module = module
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """W, after what was received if it may be."""
        ctx.module.device.work(ctx.module.weight_slots, received=time.perf_counter() if ctx.module.asks else 0.0)
        return torch.zeros(1), None


class Loss(torch.autograd.Function):
    """A loss that costs nothing, whose gradient is as large as the output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """Zero."""
        ctx.save_for_backward(output)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The output."""
        return ctx.saved_tensors[0]


class VirtualModule(nn.Module):
    """A stage that waits, for so many slots in its forward and its backward."""

    def __init__(self, device: Device, slots: tuple[float, float], first: bool, last: bool) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(1))
        self.device, self.slots, self.first, self.last = device, slots, first, last

    def forward(self, x: Tensor) -> Tensor:
        """F."""
        wait: Any = Wait.apply
        return wait(x, self.parameter, self)


class SplitModule(VirtualModule):
    """A stage whose backward can be cut into I and W, as zero-bubble does; `asks` if its W may wait for a message."""

    asks: bool = False

    def __init__(self, device: Device, slots: tuple[float, float, float], first: bool, last: bool) -> None:
        super().__init__(device, slots[:2], first, last)
        self.weight_slots = slots[2]

    def forward(self, x: Tensor) -> Tensor:
        """F; the sum is what I and W have in common."""
        wait, weights = cast(Any, Wait.apply), cast(Any, WaitForWeights.apply)
        unused = torch.zeros(1)  # has no gradient, so that W is not waited for twice
        return cast(Tensor, wait(x, unused, self) + weights(self.parameter, self))


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
