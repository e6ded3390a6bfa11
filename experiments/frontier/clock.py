"""How long the steps of an arm take on one accelerator a stage, and how much work they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from experiments.frontier.arms import STEPS, Arm
from experiments.harness import clock
from nwise.app.recipes import spans
from nwise.schedule import TRANSFORMER, Costs, Schedule, best
from nwise.strategies import Strategy

COUNTS = (1, 2, 4, 8, 16)  # M; a mini-batch has 16 sequences
LATENCIES = (0.0, 1.0)  # of a message, in forwards of a stage: none, and a slow link


def costs(one: Arm, latency: float = 0.0, overhead: float = TRANSFORMER.overhead) -> Costs:
    """Return the costs of the arm's network: F = I = W = 1 slot a stage, heads by their multiplications."""
    return replace(clock.network_costs(one.model, one.num_stages), latency=latency, overhead=overhead)


@cache
def _fastest(strategy: Strategy, num_stages: int, microbatches: int | None, price: Costs) -> tuple[Schedule, int]:
    result = fastest(strategy, num_stages, microbatches, price.split_in)
    assert result is not None, "nothing is limited"
    return result


def fastest(
    strategy: Strategy,
    num_stages: int,
    microbatches: int | None,
    costs: Callable[[int], Costs],
    memory: float | None = None,
) -> tuple[Schedule, int] | None:
    """Return the fastest schedule that nwise runs, and its M, the best unless it is given; None if none fits the memory.

    `costs` is a function from M to the costs of a micro-batch, and `memory` the bytes of each accelerator.
    """

    def find(m: int) -> Schedule:
        return best(strategy, num_stages=num_stages, num_microbatches=m, costs=costs(m), memory=memory)

    return clock.fastest(find, [microbatches] if microbatches else COUNTS)


def _phases(one: Arm) -> Iterator[tuple[int, Strategy]]:
    """Yield the steps of every phase of a run, and the strategy in force."""
    return ((len(steps), rule) for steps, rule in spans(one.phases(STEPS), STEPS))


def slots(one: Arm, latency: float = 0.0, overhead: float = TRANSFORMER.overhead) -> list[tuple[int, float, int]]:
    """Return for every phase its steps, the slots of a step of the fastest schedule that nwise runs, and its M."""
    price = costs(one, latency, overhead)
    return [
        (steps, schedule.period, m)
        for steps, strategy in _phases(one)
        for schedule, m in [_fastest(strategy, one.num_stages, one.microbatches, price)]
    ]


def steps_done(one: Arm, time: float, latency: float = 0.0) -> float:
    """Return the steps that an arm has done at a time in slots, at most those of the whole run."""
    done = 0.0
    for steps, each, _ in slots(one, latency):
        done += min(float(steps), time / each)
        time = max(0.0, time - steps * each)
    return done


def total(one: Arm, latency: float = 0.0, overhead: float = TRANSFORMER.overhead) -> float:
    """Return the slots of the whole run."""
    return sum(steps * each for steps, each, _ in slots(one, latency, overhead))


def work(one: Arm) -> float:
    """Return what all stages compute in a mean step, in forwards of a stage; overheads are not counted."""
    price = costs(one, overhead=0.0).split_in(one.microbatches or 1)
    sums = [
        steps * clock.work_in(_fastest(strategy, one.num_stages, one.microbatches or 1, price)[0], price)
        for steps, strategy in _phases(one)
    ]
    return sum(sums) / STEPS
