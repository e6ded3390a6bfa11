"""Virtual stages: they wait as long as an accelerator would compute.

Messages are real tensors of a given size, and everything but the stage is the runtime's own code.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.runtime.device import Device
from nwise.schedule import Action, Kind
from nwise.schedule.costs import Prices
from nwise.stage import Stage
from nwise.stage.tape import Cotangents, Tape


class VirtualStage(Stage):
    """A stage whose actions take a given time.

    Args:
        index: the stage's place.
        price: times of its actions, in slots.
        device: where it runs.
    """

    def __init__(self, index: int, price: Prices, device: Device) -> None:
        # Its module is the identity, because an output has the shape of the input.
        super().__init__(index, nn.Identity(), None, nn.functional.mse_loss)
        self._price, self._device = price, device
        self._own: Tensor | None = None

    def run(self, action: Action, tape: Tape, given: Mapping[Any, Any], *, frees: bool = False) -> Cotangents:
        """Take the time of an action; make a message as large as the stage's input."""
        flow, due = tape.flow, 0.0
        if action.kind is Kind.FORWARD:
            tape.head_left = flow.head
            if self.index:
                tape.inputs = given[None]
                due = time.perf_counter()
            else:
                # An output of its own, cloned once: the caller's batch would have to be copied to be sent.
                self._own = given[None][0].clone() if self._own is None else self._own
                tape.inputs = (self._own,)
        elif action.kind is Kind.HEAD:
            tape.head_left = False
            tape.batch.losses[self.index, tape.microbatch] = torch.zeros(())
        else:
            tape.passes_left -= 1
            due = time.perf_counter() if flow.cotangent(action.message).needed else 0.0
        self._device.work(self._price.time(Action(action.kind, self.index, 0), flow), received=due)
        output: Cotangents = ()
        if action.kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.BOTH):
            output = tape.inputs
        return output
