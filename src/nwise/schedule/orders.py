"""Orders: rules that put a stage's computations into a list.

Micro-batches are alike, so every kind of action may take them in order 0, 1, 2, ...; what a rule decides is how the
kinds are interleaved.

    phase     all forwards, then all passes loss by loss, nearest first, then all weight gradients
    skewed    depth first in rounds, the pass of a loss at distance d running `stride * d` rounds behind its forward
    1f1b      some forwards first, fewer the later the stage, then backward and forward in turn
    hogwild   passes before forwards, mini-batches not kept apart

List scheduling is in `nwise.schedule.greedy`. All take the stages that fuse I and W into B where these share a cotangent.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from nwise.flow import Flow
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.schedule.costs import Chains, Costs
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule, Word, counted

Flows = Sequence[Flow]

# Stages that fuse, as many as there may be.
ALL: Collection[int] = range(sys.maxsize)
NONE: Collection[int] = ()


def schedule_of(order: str, flows: Sequence[Sequence[Flow]], words_of: Callable[[Flows, int], list[Word]]) -> Schedule:
    """The schedule of a cycle of mini-batches, each in an order of its own, updates between them.

    Args:
        order: its name.
        flows: of every micro-batch, ``[turns][M]``.
        words_of: the words of one mini-batch, given its flows and its turn.
    """
    by_turn = [words_of(batch, turn) for turn, batch in enumerate(flows)]
    words = []
    for k in range(len(by_turn[0])):
        updates = [Action(Kind.UPDATE, k, 0, None, turn) for turn in range(len(flows))]
        words.append(tuple(a for turn, update in enumerate(updates) for a in (*by_turn[turn][k], update)))
    return Schedule(order, tuple(map(tuple, flows)), tuple(words))


def phase(flows: Flows, turn: int, *, fuse: Collection[int]) -> list[Word]:
    """All forwards, then loss by loss; for one loss GPipe. Needs no asynchronous sends."""
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
    """Rounds r: F(r), H(r), the pass of a loss at distance d for micro-batch r - stride d, W for the largest distance."""
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
    """The largest distance that a gradient travels."""
    return max((s.weights.far - k for k, s in enumerate(flow.stages) if s.weights is not None), default=0)


def depth_first(flows: Flows, turn: int, *, fuse: Collection[int] = ALL) -> list[Word]:
    """One micro-batch at a time: the least memory, and what one process runs."""
    return [
        tuple(
            a
            for m, flow in enumerate(flows)
            for a in (*forwards(flow.stages[k], k, m, turn), *passes(flow.stages[k], k, m, fuse=k in fuse, turn=turn))
        )
        for k in range(len(flows[0].stages))
    ]


def one_forward_one_backward(flows: Flows, turn: int) -> list[Word]:
    """1F1B: stage k begins with A - k forwards (or all there are), then backward and forward take turns."""
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


def hogwild(flows: Sequence[Flows], costs: Costs, chains: Chains, pace: float) -> Schedule:
    """Greedy asynchronous training: nobody waits for an update; the first mini-batches of a run, enough to be steady.

    Every stage takes passes before forwards, and updates with the last weight gradient of a mini-batch, while
    forwards of later ones have already run.

    Args:
        flows: of every micro-batch, ``[turns][M]``.
        costs: times, which decide what is ready when.
        chains: see `nwise.schedule.best`.
        pace: time of a micro-batch at the busiest stage; forwards that come faster would only pile up.
    """
    num_stages, size = len(flows[0][0].stages), len(flows[0])
    batches = -(-3 * num_stages // size) + 2
    batches += -batches % len(flows)
    unrolled = [flow for batch in range(batches) for flow in flows[batch % len(flows)]]
    words = nearest_first(unrolled, 0, fuse=ALL, cap=len(unrolled), costs=costs, chains=chains, pace=pace)
    return Schedule(
        "hogwild",
        tuple(tuple(flows[batch % len(flows)]) for batch in range(batches)),
        tuple(tuple(_with_updates(word, k, size)) for k, word in enumerate(words)),
    )


def _with_updates(word: Word, k: int, size: int) -> Iterator[Action]:
    """Micro-batches numbered within their mini-batch, whose update comes with its last action."""
    left = Counter(action.microbatch // size for action in word)
    for action in word:
        turn, m = divmod(action.microbatch, size)
        yield action._replace(microbatch=m, turn=turn)
        left[turn] -= 1
        if not left[turn]:
            yield Action(Kind.UPDATE, k, 0, None, turn)
