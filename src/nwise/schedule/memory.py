"""The memory of every rank along its list: what is always in use, and the activations of micro-batches in flight.

Stage k keeps a micro-batch's activations from its forward to its last pass. With recomputation it keeps its output instead, and
the others from the second forward to the pass that it is for::

    F ....... H ....... first pass ....... last pass
    |--------------- activations ------------------|

    F ....... H .... R, first pass .... R, last pass
    |------------------- output -------------------|
                     |-- others -|      |- others -|
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from nwise.schedule.actions import PASSES, Kind
from nwise.schedule.schedule import Schedule

__all__ = ["fixed_bytes", "peak_bytes"]


def peak_bytes(schedule: Schedule) -> tuple[float, ...]:
    """Return the peak memory of every rank in the steady state.

    Args:
        schedule: the schedule, whose costs have the sizes.
    """
    late = schedule.graph.late
    activation, output = (
        schedule.costs.per_stage(f"{name}_bytes", schedule.num_stages) for name in ("activation", "message")
    )
    live = list(fixed_bytes(schedule))
    begins = defaultdict[int, float](float)
    ends = defaultdict[int, float](float)
    for (k, *_), work in schedule.microbatches.items():
        again = any(schedule.graph.tasks[task].kind is Kind.RECOMPUTE for task in work)
        kept = min(output[k], activation[k]) if again else 0.0
        spans = [(first, last, activation[k] - kept) for first, last in _graphs(schedule, work)]
        spans.append((work[0], work[-1], kept))
        for first, last, num_bytes in spans:
            # In the steady state, what ends n cycles later is there n times when the list begins.
            live[schedule.placement[k]] += num_bytes * (late[last] - late[first])
            begins[first] += num_bytes
            ends[last] += num_bytes
    return tuple(_most(*each, begins, ends) for each in zip(schedule.by_rank, live, strict=True))


def fixed_bytes(schedule: Schedule) -> tuple[float, ...]:
    """Return every rank's memory that is always in use: parameters, their older versions, gradients and optimizer state.

    Args:
        schedule: the schedule, whose costs have the sizes.
    """
    size = schedule.num_stages
    costs = schedule.costs
    fixed, weights = (costs.per_stage(f"{name}_bytes", size) for name in ("fixed", "weight"))
    sums = [0.0] * schedule.num_ranks
    for k, rank in enumerate(schedule.placement):
        age = schedule.ages.weights[k]
        versions = age + 1 if schedule.ages.stashes and age else 0
        sums[rank] += fixed[k] + weights[k] * versions
    return tuple(sums)


def _most(numbers: Sequence[int], live: float, begins: dict[int, float], ends: dict[int, float]) -> float:
    most = live
    for task in numbers:
        live += begins[task]
        most = max(most, live)
        live -= ends[task]
    return most


def _graphs(schedule: Schedule, work: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Iterate over the graphs of a micro-batch of a stage, by their first and last task, in the order of time."""
    tasks = schedule.graph.tasks
    last = next((task for task in reversed(work) if tasks[task].kind in PASSES), None)
    begun = None
    for task in work if last is not None else ():
        ends = task in schedule.frees or task == last
        if tasks[task].kind in (Kind.FORWARD, Kind.RECOMPUTE):
            begun = None if ends else task
        elif begun is not None and ends:
            yield begun, task
            begun = None
