"""How long a mini-batch takes on A accelerators: the paper's formula, and the same costs simulated.

The costs are the paper's: one slot for a forward and one for each loss's pass through a stage, heads
and messages free. A slot is the work of one micro-batch, ``c(M) = c0 + c1 / M`` seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from nwise.credit import Strategy
from nwise.flow import Flow, flow_of
from nwise.schedule.actions import Action, Kind, passes


def paper_time(num_stages: int, num_microbatches: int, n: int) -> int:
    """T(A, M, N), slots per mini-batch of N-wise training in the steady state (section T of the paper).

    Args:
        num_stages: A.
        num_microbatches: M.
        n: the window N; more than A is read as A.

    >>> paper_time(4, 1, 2), paper_time(4, 2, 2), paper_time(4, 4, 4)
    (4, 6, 14)
    """
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches), ("n", n)):
        if value < 1:
            raise ValueError(f"`{name}` should be at least 1. Found {value}.")
    n = min(n, num_stages)
    if num_microbatches == 1:
        return 2 * n
    if num_stages >= 2 * n - 1:
        return (n + 1) * num_microbatches
    return (2 + num_stages - n) * num_microbatches + 2 * (2 * n - num_stages - 1)


def modelled_time(strategy: Strategy, num_stages: int, num_microbatches: int) -> float:
    """Slots per mini-batch of any strategy, in the steady state under the paper's costs.

    Synchronous strategies run the order that is optimal for the paper's formula: all forwards, then
    loss by loss, nearest first; stages wait only for messages and for their own update. Hogwild waits
    for nothing, so that its busiest stage decides. A cycle of matrices is averaged.

    >>> import nwise
    >>> modelled_time(nwise.NWise(2), 8, 1), modelled_time(nwise.Hogwild(), 8, 1)
    (4.0, 2.0)
    """
    flows = [flow_of(strategy.credit(num_stages, turn)) for turn in range(strategy.turns)]
    by_batch = [
        [flows[strategy.turn(step, m) % len(flows)] for m in range(num_microbatches)] for step in range(len(flows))
    ]
    if strategy.asynchronous:
        work = [[sum(1 + f.stages[k].passes for f in batch) for k in range(num_stages)] for batch in by_batch]
        return max(map(sum, zip(*work, strict=True))) / len(work)
    # The fill takes at most A mini-batches; after it whole cycles repeat.
    settled = (num_stages // len(by_batch) + 1) * len(by_batch)
    ends = _self_timed(by_batch, settled + 4 * len(by_batch))
    return (ends[-1] - ends[settled - 1]) / (len(ends) - settled)


def _phase(flows: Sequence[Flow], stage: int) -> list[Action]:
    """All forwards, then the passes loss by loss, nearest first."""
    order = [Action(Kind.FORWARD, stage, m) for m in range(len(flows))]
    later = [
        (rank, action) for m, f in enumerate(flows) for rank, action in enumerate(passes(f.stages[stage], stage, m))
    ]
    return order + [action for _, action in sorted(later, key=lambda pair: pair[0])]


def _self_timed(by_batch: Sequence[Sequence[Flow]], num_batches: int) -> list[int]:
    """End of each mini-batch at the stage that finishes last, if every stage works as soon as it can."""
    num_stages = len(by_batch[0][0].stages)
    free = [0] * num_stages
    ends = []
    for batch in range(num_batches):
        flows = by_batch[batch % len(by_batch)]
        queues = [_phase(flows, k) for k in range(num_stages)]
        done: dict[tuple[str, int, int, int], int] = {}
        while any(queues):
            for k, queue in enumerate(queues):
                while queue and (start := _ready_at(flows, queue[0], done)) is not None:
                    action = queue.pop(0)
                    free[k] = max(free[k], start) + 1
                    done[_key(action)] = free[k]
        ends.append(max(free))
    return ends


def _key(action: Action) -> tuple[str, int, int, int]:
    return ("F" if action.kind is Kind.FORWARD else "G", action.stage, action.microbatch, action.message or 0)


def _ready_at(flows: Sequence[Flow], action: Action, done: dict[tuple[str, int, int, int], int]) -> int | None:
    """When everything that an action needs has arrived; None if some of it has not been worked out yet."""
    k, m = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return done.get(("F", k - 1, m, 0)) if k else 0
    cotangent = flows[m].stages[k].cotangent(action.message)
    times = [done.get(("G", k + 1, m, p)) for p, weight in enumerate(cotangent.received) if weight]
    if None in times:
        return None
    return max((time for time in times if time is not None), default=0)
