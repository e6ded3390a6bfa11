"""Orders: rules that put a stage's computations into a list.

Micro-batches are alike, so every kind of action takes them in the order 0, 1, 2, ... A rule decides how the kinds
alternate.

    phase     all forwards, then all passes loss by loss, nearest first, then all weight gradients
    skewed    depth first in rounds; the pass of a loss at distance d runs `stride * d` rounds after its forward
    1f1b      some forwards first, fewer on later stages, then backward and forward in turn
    hogwild   passes before forwards, across the borders of mini-batches

List scheduling is in `nwise.schedule.greedy`. The argument `fuse` names the stages on which one B replaces an I and a W of
the same cotangent.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.schedule.costs import Costs
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule, Word, counted

Flows = Sequence[Flow]

# All stages fuse, however many there are; or none does.
ALL: Collection[int] = range(sys.maxsize)
NONE: Collection[int] = ()


def make_schedule(order: str, flows: Sequence[Sequence[Flow]], rule: Callable[[Flows, int], list[Word]]) -> Schedule:
    """Return the schedule of a cycle of mini-batches, with an update after each.

    Args:
        order: name of the order.
        flows: flow of every micro-batch, ``[turns][M]``.
        rule: function from the flows and the turn of a mini-batch to its words.
    """
    by_turn = [rule(batch, turn) for turn, batch in enumerate(flows)]
    words = []
    for k in range(len(by_turn[0])):
        updates = [Action(Kind.UPDATE, k, 0, None, turn) for turn in range(len(flows))]
        words.append(tuple(a for turn, update in enumerate(updates) for a in (*by_turn[turn][k], update)))
    return Schedule(order, tuple(map(tuple, flows)), tuple(words))


def phase(flows: Flows, turn: int, *, fuse: Collection[int]) -> list[Word]:
    """Run all forwards, then the passes loss by loss; for one loss this is GPipe."""
    words = []
    for k in range(len(flows[0].stages)):
        word = [a for m, flow in enumerate(flows) for a in forwards(flow.stages[k], k, m, turn)]
        later = [
            p
            for m, flow in enumerate(flows)
            for p in enumerate(passes(flow.stages[k], k, m, fuse=k in fuse, turn=turn))
        ]
        word += [a for _, a in sorted(later, key=lambda p: (p[1].kind is Kind.WEIGHT_GRAD, p[0]))]
        words.append(tuple(word))
    return words


def skewed(flows: Flows, turn: int, *, fuse: Collection[int], stride: int) -> list[Word]:
    """Run in round r: F(r), H(r), and the passes of a loss at distance d for micro-batch r - stride d; W like the farthest."""
    # The gradient of a far loss comes back later, so its pass runs in a later round. 3-wise with stride 1, on one stage:
    #
    #     round 0   F(0) H(0) I(0.0)                     I(m.q) makes message q of micro-batch m; the own loss is q = 0
    #     round 1   F(1) H(1) I(1.0) I(0.1)
    #     round 2   F(2) H(2) I(2.0) I(1.1) W(0)
    farthest = max(reach(flow) for flow, _ in counted([flows]))
    words = []
    for k in range(len(flows[0].stages)):
        placed: list[tuple[int, int, int, Action]] = []  # round, place in the round, and the action
        for m, flow in enumerate(flows):
            placed += [(m, -2 + i, 0, a) for i, a in enumerate(forwards(flow.stages[k], k, m, turn))]
            for action in passes(flow.stages[k], k, m, fuse=k in fuse, turn=turn):
                far = flow.stages[k].cotangent(action.message).far
                last = action.kind is Kind.WEIGHT_GRAD
                distance = farthest if last else far - k
                placed.append((m + stride * distance, distance + last, action.message or 0, action))
        words.append(tuple(a for *_, a in sorted(placed, key=lambda p: p[:3])))
    return words


def reach(flow: Flow) -> int:
    """Return the largest distance that a gradient travels, in stages."""
    return max((s.weights.far - k for k, s in enumerate(flow.stages) if s.weights is not None), default=0)


def depth_first(flows: Flows, turn: int, *, fuse: Collection[int] = ALL) -> list[Word]:
    """Run one micro-batch at a time, which needs the least memory; the default with one process."""
    return [
        tuple(
            a
            for m, flow in enumerate(flows)
            for a in (*forwards(flow.stages[k], k, m, turn), *passes(flow.stages[k], k, m, fuse=k in fuse, turn=turn))
        )
        for k in range(len(flows[0].stages))
    ]


def one_forward_one_backward(flows: Flows, turn: int) -> list[Word]:
    """Run 1F1B: stage k begins with A - k forwards (at most M), then backward and forward take turns."""
    # 3 stages, M = 4, heads left out; stage 0 needs no gradient to its input, so it runs W instead of B:
    #
    #     stage 0   F(0) F(1) F(2) W(0) F(3) W(1) W(2) W(3)
    #     stage 1   F(0) F(1) B(0) F(2) B(1) F(3) B(2) B(3)
    #     stage 2   F(0) B(0) F(1) B(1) F(2) B(2) F(3) B(3)
    num_stages = len(flows[0].stages)
    words = []
    for k in range(num_stages):
        first = [forwards(flow.stages[k], k, m, turn) for m, flow in enumerate(flows)]
        second = [passes(flow.stages[k], k, m, turn=turn) for m, flow in enumerate(flows)]
        ahead = min(len(flows), num_stages - k)
        blocks = first[:ahead]
        for m, block in enumerate(second):
            blocks.append(block)
            blocks += first[ahead + m : ahead + m + 1]
        words.append(tuple(a for block in blocks for a in block))
    return words


def hogwild(flows: Sequence[Flows], costs: Costs, pace: float) -> Schedule:
    """Return the schedule of greedy asynchronous training: the first mini-batches of a run, up to the steady state.

    Every stage runs passes before forwards, and updates with the last weight gradient of a mini-batch, when forwards of
    later mini-batches have already run.

    Args:
        flows: flow of every micro-batch, ``[turns][M]``.
        costs: costs of one micro-batch, which decide when actions are ready.
        pace: time of a micro-batch on the busiest stage; faster forwards would only pile up.
    """
    num_stages, size = len(flows[0][0].stages), len(flows[0])
    batches = -(-3 * num_stages // size) + 2
    batches += -batches % len(flows)
    unrolled = [flow for batch in range(batches) for flow in flows[batch % len(flows)]]
    words = nearest_first(unrolled, 0, fuse=ALL, cap=len(unrolled), costs=costs, pace=pace)
    return Schedule(
        "hogwild",
        tuple(tuple(flows[batch % len(flows)]) for batch in range(batches)),
        tuple(tuple(_with_updates(word, k, size)) for k, word in enumerate(words)),
    )


def _with_updates(word: Word, k: int, size: int) -> Iterator[Action]:
    """Number micro-batches within their mini-batch, and insert its update after its last action."""
    left = Counter(action.microbatch // size for action in word)
    for action in word:
        turn, m = divmod(action.microbatch, size)
        yield action._replace(microbatch=m, turn=turn)
        left[turn] -= 1
        if not left[turn]:
            yield Action(Kind.UPDATE, k, 0, None, turn)
