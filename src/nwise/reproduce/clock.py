"""How long a mini-batch takes on one accelerator a stage, by the timing model.

``"paper"``    the paper's costs without micro-batches: end-to-end 2A slots, N-wise 2N
``"honest"``   F = I = W, a head of half a stage, a price for every action; every method with its best M and its best order, so
               that end-to-end is zero-bubble, which keeps the cotangents of all layers; nwise's own stages walk the chain again
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from nwise.schedule import PAPER
from nwise.schedule.best import DoesNotFit
from nwise.schedule.costs import TRANSFORMER, prices
from nwise.schedule.rivals import timed_method

Clock = Literal["paper", "honest"]
_SIZES = (1, 2, 4, 8, 16)  # M; more are of use only to longer pipelines than the experiments have


@dataclass(frozen=True, slots=True)
class StepTime:
    """Of a mini-batch.

    Args:
        slots: forwards of a whole mini-batch through one stage.
        num_microbatches: M that it takes.
        peak: most activations kept at once by a stage, in mini-batches' activations of one stage.
    """

    slots: float
    num_microbatches: int
    peak: float


@cache
def step_time(method: str, num_stages: int, clock: Clock, memory: float | None = None) -> StepTime:
    """The fastest way to run a method.

    Args:
        method: a strategy, or a pipeline of `nwise.schedule.rivals`.
        num_stages: A.
        clock: whose costs.
        memory: most activations that a stage may keep, in mini-batches' of one stage; default: any.

    Raises:
        DoesNotFit: no M fits the memory.
    """
    if clock == "paper":
        found = timed_method(method, num_stages=num_stages, num_microbatches=1, costs=PAPER)
        return StepTime(found.period, 1, max(found.in_flight))
    options = []
    name, chains = ("zero-bubble", "stored") if method == "end-to-end" else (method, "walked")
    for m in _SIZES:
        costs = TRANSFORMER.split_in(m)
        with suppress(DoesNotFit):
            found = timed_method(
                name, num_stages=num_stages, num_microbatches=m, costs=costs, chains=chains, memory=memory
            )
            options.append(StepTime(found.period, m, max(found.peak_bytes)))
    if not options:
        raise DoesNotFit(method, 1.0, memory or 0.0)
    return min(options, key=lambda option: (round(option.slots, 9), option.num_microbatches))


def slots_text(method: str, num_stages: int, memory: float | None = None) -> str:
    """Slots a step by the honest clock and M, as text; – if nothing fits."""
    try:
        found = step_time(method, num_stages, "honest", memory)
    except DoesNotFit:
        return "–"
    return f"{found.slots:.2f} ({found.num_microbatches})"


def work(method: str, num_stages: int) -> float:
    """What all stages compute in a step, in forwards of a stage, by the honest costs without micro-batches."""
    costs = replace(TRANSFORMER, overhead=0.0)
    schedule = timed_method(method, num_stages=num_stages, num_microbatches=1, costs=costs).schedule
    total = 0.0
    for k, (word, price) in enumerate(zip(schedule.words, prices(costs, num_stages), strict=True)):
        flows = (schedule.flows[action.turn][action.microbatch].stages[k] for action in word)
        total += sum(price.of(action, flow, "stored") for action, flow in zip(word, flows, strict=True))
    return total / len(schedule.flows)
