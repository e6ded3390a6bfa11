"""From a credit matrix to what crosses each boundary and which passes each stage makes.

Let ``g_j`` be the gradient of loss ``j`` at a boundary. A stage ``i`` before ``k`` needs, at the boundary below stage ``k``,
the sum ``sum_j C[j, i] g_j`` over the losses from ``k`` on: column ``i`` of the block ``C[k:, :k]``. The messages that cross
are as few vectors as all these columns can be made of, under one rule:

    A stage uses only messages of losses that it learns from.

Without the rule the rank of the block would always do, but a stage could then have to subtract a gradient that was never
its own, and 0 times that gradient is not 0 if it is infinite or rounded. With it no stage waits for a loss that it does not
ask for, either. For N-wise the messages are just ``g_k .. g_{k+n-2}``:

    losses     0  1  2  3                      boundary below stage 2
    stage 0    .  1  .  .   )  the block
    stage 1    .  .  1  .   )  C[2:, :2]  ->   one message, g_2, for stage 1; stage 0 is done
    stage 2    .  .  .  1
    stage 3    .  .  .  1

Weight gradients are linear in the cotangent, so one pass (W) per stage and micro-batch is enough whatever the strategy.
Where its cotangent can take the place of a message, a single backward pass (B) gives both gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nwise.strategies import Strategy

# Credits such as 0.9 ** (j - k) are proportional only up to rounding; what a subtraction leaves that is smaller than
# this next to what was subtracted is taken for rounding. A credit that is small by itself is not.
_TOLERANCE = 1e-12
# A message that has to be multiplied by more than this loses digits, which a message of one's own does not.
_LARGEST = 1e3

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cotangent:
    """A gradient at a stage's output: ``own * d + sum_p received[p] * u_p``.

    Args:
        own: weight of ``d``, the gradient of the stage's own loss.
        received: weight of each message ``u_p`` received from the next stage.
        far: the farthest loss it mixes; it cannot exist before that loss does.
    """

    own: float
    received: tuple[float, ...]
    far: int

    @property
    def needed(self) -> list[int]:
        """The messages that it mixes."""
        return [p for p, weight in enumerate(self.received) if weight]


@dataclass(frozen=True, slots=True)
class StageFlow:
    """What one stage does for one micro-batch.

    Args:
        head: whether its head runs.
        own: whether the gradient of its own loss with respect to its output is needed.
        messages: one input-gradient pass (I) for each message to the previous stage, nearest first.
        weights: the cotangent of the weight-gradient pass (W); None where there is nothing to train.
        fused: the message whose cotangent W shares, so that one pass (B) does both; or None.
    """

    head: bool
    own: bool
    messages: tuple[Cotangent, ...]
    weights: Cotangent | None
    fused: int | None

    @property
    def passes(self) -> int:
        """Backward passes through the stage: chains that have to be walked."""
        return len(self.messages) + (self.weights is not None and self.fused is None)

    def cotangent(self, message: int | None) -> Cotangent:
        """What an I or B pass of a message starts from, or the W pass for None."""
        found = self.weights if message is None else self.messages[message]
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Flow:
    """What every stage does for one micro-batch; ``stages[k]`` for stage ``k``."""

    stages: tuple[StageFlow, ...]

    @property
    def messages(self) -> tuple[int, ...]:
        """Gradient messages over the boundaries 1 .. A-1 (boundary ``k`` is below stage ``k``)."""
        return tuple(len(stage.messages) for stage in self.stages[1:])

    @property
    def heads(self) -> tuple[int, ...]:
        """The losses that are computed."""
        return tuple(k for k, stage in enumerate(self.stages) if stage.head)


def flow_of(credit: Tensor, *, trainable: Sequence[bool] | None = None, probes: Sequence[bool] = ()) -> Flow:
    """Find the cheapest flow that gives every stage its credit.

    Args:
        credit: ``[A, A]``, as from `Strategy.credit`.
        trainable: for each stage, whether it has a parameter to train (default: all). Gradients that
            would only reach stages without any are not computed; their heads still run and learn.
        probes: for each stage, whether its head runs although no stage needs its loss (default: none).

    Returns:
        The flow. Boundary ``k`` carries at least ``rank C[k:, :k]`` messages, and no more wherever the stages before it learn
        from the same losses or from one loss each, as in every strategy of nwise.

    >>> import nwise
    >>> flow_of(nwise.NWise(3).credit(6)).messages
    (1, 2, 2, 2, 1)
    """
    size = len(credit)
    learns = (True,) * size if trainable is None else tuple(map(bool, trainable))
    return _cheapest(credit.double().numpy().tobytes(), learns, tuple(map(bool, probes or [False] * size)))


def flows_for(
    strategy: Strategy,
    num_stages: int,
    num_microbatches: int,
    *,
    trainable: Sequence[bool] | None = None,
    heads: Sequence[bool] | None = None,
) -> tuple[tuple[Flow, ...], ...]:
    """Find the flow of every micro-batch in one cycle of mini-batches.

    Args:
        strategy: of one credit matrix, or of a cycle of them.
        num_stages: A.
        num_microbatches: M.
        trainable: see `flow_of`.
        heads: for each stage, whether there is a head (default: all), which a strategy with ``heads="all"`` runs.

    Returns:
        ``[turns][M]``.
    """
    probes = (heads or [True] * num_stages) if strategy.heads == "all" else ()
    flows = [
        flow_of(strategy.credit(num_stages, turn), trainable=trainable, probes=probes) for turn in range(strategy.turns)
    ]
    return tuple(
        tuple(flows[strategy.turn(step, m)] for m in range(num_microbatches)) for step in range(strategy.turns)
    )


@lru_cache(maxsize=256)
def _cheapest(credit: bytes, trainable: tuple[bool, ...], probes: tuple[bool, ...]) -> Flow:
    """`flow_of`, from values that can be compared: every step asks for its flow."""
    matrix = np.frombuffer(credit).reshape(len(trainable), -1).copy()
    runs = matrix.any(axis=1) | np.asarray(probes)
    matrix[:, ~np.asarray(trainable)] = 0.0
    messages = _messages(matrix)
    wanted = [_from_row(matrix[:, k], k) for k in range(len(matrix))]
    fused = [_share(messages[k], wanted[k], _needed_below(k, messages, wanted)) for k in range(len(matrix))]
    return Flow(
        tuple(_stage(k, bool(runs[k]), messages[k], wanted[k], fused[k], messages[k + 1]) for k in range(len(matrix)))
    )


def _stage(
    k: int, head: bool, messages: Sequence[Vector], wanted: Vector, fused: int | None, above: Sequence[Vector]
) -> StageFlow:
    """What stage ``k`` does to learn and to send its messages, from those of the stage above."""
    kept = tuple(_combine(message, above, k) for message in messages)
    weights = _combine(wanted, above, k) if wanted.any() else None
    own = any(cotangent.own for cotangent in kept) or (weights is not None and weights.own != 0.0)
    return StageFlow(head=head, own=own, messages=kept, weights=weights, fused=fused)


def _messages(matrix: Vector) -> list[list[Vector]]:
    """For each boundary ``0 .. A`` the messages that cross it, nearest loss first, as weights of all losses.

    They are columns of credit, or single losses. A mixture can be made of single losses but not the other way round, so
    single losses cross the boundaries from some stage on, and columns those below it: where makes the sum smallest.
    """
    num_stages = len(matrix)
    columns = [_columns(matrix, k) for k in range(num_stages)]
    losses = [_losses(matrix, k) for k in range(num_stages)]

    def total(first: int) -> int:
        return sum(map(len, columns[:first])) + sum(map(len, losses[first:]))

    first = min(reversed(range(num_stages + 1)), key=total)
    return [*columns[:first], *losses[first:], []]


def _columns(matrix: Vector, k: int) -> list[Vector]:
    """Credits of the stages before ``k`` in the losses from ``k`` on, without those that can be made of others."""
    block = [_from_row(column, k) for column in matrix[:, :k].T]
    scaled = {tuple(column / np.abs(column).max()): None for column in block if column.any()}
    kept: list[Vector] = []
    # What learns from few losses can use only messages of few losses, so those come first.
    for column in sorted(map(np.array, scaled), key=np.count_nonzero):
        if _express(column, kept) is None:
            kept.append(column)
    return sorted(kept, key=lambda column: (_far(column), np.flatnonzero(column)[0]))


def _losses(matrix: Vector, k: int) -> list[Vector]:
    """The losses from ``k`` on that some stage before ``k`` learns from."""
    return [np.eye(len(matrix))[j] for j in range(k, len(matrix)) if matrix[j, :k].any()]


def _needed_below(k: int, messages: Sequence[Sequence[Vector]], wanted: Sequence[Vector]) -> list[Vector]:
    """All that stage ``k - 1`` makes of the messages of stage ``k``."""
    return [part for u in (wanted[k - 1], *messages[k - 1]) if (part := _from_row(u, k)).any()] if k else []


def _share(messages: list[Vector], wanted: Vector, needed: Sequence[Vector]) -> int | None:
    """Put the weights' cotangent in the place of a message, if the stage below can do with it; say which."""
    if not wanted.any():
        return None
    for place in reversed(range(len(messages))):
        replaced = [*messages[:place], wanted, *messages[place + 1 :]]
        if all(_express(vector, replaced) is not None for vector in needed):
            messages[place] = wanted
            return place
    return None


def _combine(vector: Vector, above: Sequence[Vector], k: int) -> Cotangent:
    """Stage ``k``'s own part of a cotangent, and its weights of the messages from above."""
    weights = _express(_from_row(vector, k + 1), above)
    assert weights is not None, "messages are chosen so that the stage below can make what it needs of them"
    return Cotangent(own=float(vector[k]), received=tuple(weights), far=_far(vector))


def _express(vector: Vector, messages: Sequence[Vector]) -> list[float] | None:
    """Weights of the messages that sum up to a vector and mix no loss that it lacks; None if there are none.

    Elimination with an equation for each loss and an unknown for each message, exact where the numbers are small integers.
    """
    usable = [p for p, message in enumerate(messages) if not message[vector == 0.0].any()]
    rows = np.column_stack([*(messages[p] for p in usable), vector])
    pivots: list[int] = []  # of each row that is done, the message that it gives the weight of
    for column in range(len(usable)):
        top = len(pivots)
        best = top + int(np.abs(rows[top:, column]).argmax()) if top < len(rows) else top
        if top == len(rows) or rows[best, column] == 0.0:
            continue  # made of the messages before
        rows[[top, best]] = rows[[best, top]]
        for other in np.flatnonzero(rows[:, column]).tolist():
            if other != top:
                rows[other] = _minus(rows[other], rows[other, column] / rows[top, column] * rows[top])
                rows[other, column] = 0.0
        pivots.append(column)
    if rows[len(pivots) :, -1].any():
        return None
    weights = np.zeros(len(messages))
    for row, column in enumerate(pivots):
        weights[usable[column]] = rows[row, -1] / rows[row, column]
    return weights.tolist() if _is_safe(weights, messages, vector) else None


def _is_safe(weights: Vector, messages: Sequence[Vector], vector: Vector) -> bool:
    """Whether the weighted messages sum up to the vector without losing digits."""
    parts = [weight * message for weight, message in zip(weights, messages, strict=True)]
    largest = np.abs(vector).max()
    missed = np.abs(sum(parts, start=-vector)).max()
    return bool(missed <= _TOLERANCE * largest and all(np.abs(part).max() <= _LARGEST * largest for part in parts))


def _minus(a: Vector, b: Vector) -> Vector:
    """The difference, rounding errors made zero."""
    difference = a - b
    return np.where(np.abs(difference) <= _TOLERANCE * (np.abs(a) + np.abs(b)), 0.0, difference)


def _from_row(vector: Vector, k: int) -> Vector:
    """The part of the losses from ``k`` on."""
    return np.where(np.arange(len(vector)) >= k, vector, 0.0)


def _far(vector: Vector) -> int:
    return int(np.flatnonzero(vector)[-1])
