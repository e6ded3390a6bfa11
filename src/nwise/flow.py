"""Turn a credit matrix into the messages that cross each boundary and the passes that each stage makes.

Let ``g_j`` be the gradient of loss ``j`` at a boundary. At the boundary below stage ``k``, an earlier stage ``i`` needs the
sum ``sum_j C[j, i] g_j`` over the losses from ``k`` on: column ``i`` of the block ``C[k:, :k]``. The messages are vectors from
which all these columns can be combined, as few as possible under one rule:

    A stage uses only messages of losses that it learns from.

Without the rule the rank of the block would always be enough. But a stage might then have to subtract the gradient of a loss
that it does not learn from, and if that gradient is infinite or rounded, the difference is not zero. The rule also keeps a
stage from waiting for a loss that it does not need. For N-wise the messages are ``g_j`` with ``max(k, n-1) <= j`` and
``j <= min(k+n-2, A-1)``. The picture has a row for each stage, which is a column of ``C``:

    losses     0  1  2  3                      boundary below stage 2
    stage 0    .  1  .  .   )  the block
    stage 1    .  .  1  .   )  C[2:, :2]  ->   one message, g_2, for stage 1; stage 0 is done
    stage 2    .  .  .  1
    stage 3    .  .  .  1

Weight gradients are linear in the cotangent, so one pass (W) per stage and micro-batch is enough for every strategy.
If its cotangent can replace a message, a single backward pass (B) gives both gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nwise.strategies import Strategy

__all__ = ["Cotangent", "Flow", "Flows", "StageFlow", "counted", "find_flow", "flows_for", "single_passes"]

# Credits like 0.9 ** (j - k) in float64 are proportional only up to rounding. A difference that is smaller than this share of
# its two terms counts as rounding; a credit that is small by itself does not. The rounding of float32 is part of the credit.
_TOLERANCE = 1e-12
# Multiplying a message by more than this would lose digits; a separate message loses none.
_LARGEST = 1e3

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cotangent:
    """A gradient at a stage's output: ``own * d + sum_p received[p] * u_p``.

    Args:
        own: weight of ``d``, the gradient of the stage's own loss.
        received: weight of each message ``u_p`` received from the next stage.
        farthest_loss: index of the farthest loss in the sum; the cotangent cannot exist before that loss does.
        total: sum of the weights of all losses in it; an auxiliary loss inside the stage counts with this weight.
        shared: whether it is a gradient that another pass of the stage reads too.
    """

    own: float
    received: tuple[float, ...]
    farthest_loss: int
    total: float
    shared: bool = False

    @property
    def needed(self) -> list[int]:
        """Indices of the received messages with a weight other than 0."""
        return [p for p, weight in enumerate(self.received) if weight]

    @property
    def reads(self) -> tuple[bool, ...]:
        """Whether ``d`` and each received message are in the sum."""
        return tuple(weight != 0.0 for weight in (self.own, *self.received))

    @property
    def is_sum(self) -> bool:
        """Whether the sum is a separate tensor; a single gradient of weight 1 is that gradient."""
        return [weight for weight in (self.own, *self.received) if weight] != [1]


@dataclass(frozen=True, slots=True)
class StageFlow:
    """The work of one stage for one micro-batch.

    Args:
        head: whether its head runs.
        own: whether the gradient of its own loss with respect to its output is needed.
        messages: one input-gradient pass (I) for each message to the previous stage, nearest first.
        weights: the cotangent of the weight-gradient pass (W); None if the stage has nothing to train.
        fused: index of the message whose cotangent W shares, so one pass (B) does both; None if there is none.
    """

    head: bool
    own: bool
    messages: tuple[Cotangent, ...]
    weights: Cotangent | None
    fused: int | None

    @property
    def passes(self) -> int:
        """Number of backward passes through the stage."""
        return len(self.messages) + (self.weights is not None and self.fused is None)

    def cotangent(self, message: int | None) -> Cotangent:
        """Return the cotangent from which the I or B pass of a message starts, or for None the W pass."""
        start = self.weights if message is None else self.messages[message]
        assert start is not None
        return start


@dataclass(frozen=True)
class Flow:
    """The work of every stage for one micro-batch; ``stages[k]`` is that of stage ``k``."""

    stages: tuple[StageFlow, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.stages)

    def __hash__(self) -> int:
        return self._hash  # planners look flows up often, and hashing all stages takes long

    @property
    def messages(self) -> tuple[int, ...]:
        """Number of gradient messages over each of the boundaries 1 .. A-1 (boundary ``k`` is below stage ``k``)."""
        return tuple(len(stage.messages) for stage in self.stages[1:])

    @property
    def heads(self) -> tuple[int, ...]:
        """Indices of the losses that are computed."""
        return tuple(k for k, stage in enumerate(self.stages) if stage.head)


Flows = tuple[tuple[Flow, ...], ...]  # of every micro-batch in a cycle of mini-batches, [cycle][M]


def find_flow(credit: Tensor, *, trainable: Sequence[bool] | None = None, probes: Sequence[bool] = ()) -> Flow:
    """Find the cheapest flow that gives every stage its credit.

    Args:
        credit: credit matrix ``[A, A]`` of any real dtype, as from `Strategy.credit`; its numbers are taken as they are.
        trainable: for each stage, whether it has a parameter to train (default: all). Gradients that
            would only reach stages without any are not computed; the heads of these stages still run and learn.
        probes: for each stage, whether its head runs even if no stage needs its loss (default: none).

    Returns:
        The flow. Boundary ``k`` carries at least ``rank C[k:, :k]`` messages. It carries exactly that many if the stages
        before it learn from the same losses or from one loss each, as in every strategy of nwise but `nwise.Credit`.

    Raises:
        ValueError: the matrix is not square, has a number that is not finite or one above the diagonal, or stages and probes are
            not as many as its rows.

    >>> import nwise
    >>> find_flow(nwise.NWise(3).credit(6)).messages
    (1, 2, 2, 2, 1)
    """
    size = len(credit) if credit.dim() else 0
    learns = (True,) * size if trainable is None else tuple(map(bool, trainable))
    probed = tuple(map(bool, probes)) or (False,) * size
    if credit.shape != (size, size) or {len(learns), len(probed)} != {size}:
        raise ValueError(
            "`credit` should be a square matrix, and `trainable` and `probes` should have one entry for each of its rows. Found "
            f"shape {list(credit.shape)}, {len(learns)} and {len(probed)} entries."
        )
    return _cheapest(credit.detach().double().cpu().numpy().tobytes(), learns, probed)


def flows_for(
    strategy: Strategy,
    num_stages: int,
    num_microbatches: int,
    *,
    trainable: Sequence[bool] | None = None,
    heads: Sequence[bool] | None = None,
) -> Flows:
    """Find the flow of every micro-batch in one cycle of mini-batches.

    Args:
        strategy: a strategy with one credit matrix or a cycle of them.
        num_stages: number of stages, A.
        num_microbatches: number of micro-batches, M.
        trainable: for each stage, whether it has a parameter to train (default: all); see `find_flow`.
        heads: for each stage, whether it has a head (default: all), which a strategy with ``heads="all"`` runs.

    Returns:
        The flows, ``[cycle][M]``.
    """
    probes = (heads or [True] * num_stages) if strategy.heads == "all" else ()
    flows = list[Flow]()
    for matrix in (strategy.credit(num_stages, turn) for turn in range(strategy.turns)):
        given = isinstance(matrix, Tensor)
        if not given or matrix.shape != (num_stages, num_stages) or matrix.is_meta or matrix.is_complex():
            kind = f"shape {list(matrix.shape)} on {matrix.device}, {matrix.dtype}" if given else type(matrix).__name__
            raise ValueError(
                f"`credit` of {strategy.name!r} should be real numbers in a tensor of shape [{num_stages}, {num_stages}] with "
                f"values. Found {kind}."
            )
        flows.append(find_flow(matrix, trainable=trainable, probes=probes))
    steps = range(strategy.turns)
    microbatches = range(num_microbatches)
    return tuple(tuple(flows[strategy.turn(step, m)] for m in microbatches) for step in steps)


def single_passes(flow: StageFlow) -> Iterator[tuple[int | None, StageFlow]]:
    """Iterate over the gradients that arrive at a stage, each with a pass of its own, which adds up to the stage's work.

    Yields:
        The index of the message that the pass computes, None for weights alone; and the work with this one gradient.
    """

    def apart(cotangent: Cotangent) -> Iterator[Cotangent]:
        weights = (cotangent.own, *cotangent.received)
        total = cotangent.total
        for place in [i for i, weight in enumerate(weights) if weight]:
            own, *received = (weight * (i == place) for i, weight in enumerate(weights))
            yield replace(cotangent, own=own, received=tuple(received), total=total, shared=True)
            total = 0.0  # auxiliary losses count once, with the first

    for q, message in enumerate(flow.messages):
        both = q == flow.fused
        for one in apart(message):
            yield q, replace(flow, messages=(one,), weights=one if both else None, fused=0 if both else None)
    for one in () if flow.weights is None or flow.fused is not None else apart(flow.weights):
        yield None, replace(flow, weights=one)


def counted(flows: Flows) -> dict[Flow, int]:
    """Return the different flows, each with its number of micro-batches."""
    return Counter(flow for batch in flows for flow in batch)


@lru_cache(maxsize=256)
def _cheapest(credit: bytes, trainable: tuple[bool, ...], probes: tuple[bool, ...]) -> Flow:
    """Compute `find_flow` from hashable values, so every step finds its flow in the cache."""
    matrix = np.frombuffer(credit).reshape(len(trainable), -1).copy()
    wrong = np.argwhere(~np.isfinite(matrix) | (np.triu(matrix, 1) != 0))
    if len(wrong):
        j, k = wrong[0]
        raise ValueError(
            "A credit matrix should have finite numbers, and zeros above the diagonal, because loss j does not depend on later "
            f"stages. Found C[{j}, {k}] = {matrix[j, k]}."
        )
    runs = matrix.any(axis=1) | np.asarray(probes)
    matrix[:, ~np.asarray(trainable)] = 0.0
    with np.errstate(all="ignore"):  # `_is_exact` refuses what has left the range of float64
        return _flow(matrix, runs.tolist())


def _flow(matrix: Vector, runs: list[bool]) -> Flow:
    """Choose the messages and combine the cotangents; the columns of stages without anything to train are zero."""
    # The flow of 2-wise; d is the gradient of the own loss at the stage's output, u the message from above:
    #
    #     stage 3    message d    weights d    passes B        one pass for both
    #     stage 2    message d    weights u    passes I, W     u is the gradient of loss 3
    #     stage 1    message d    weights u    passes I, W
    #     stage 0    -            weights u    passes W        loss 0 is not computed
    size = len(matrix)
    wanted = [_from_row(matrix[:, k], k) for k in range(size)]
    # Upwards, because what stage k sends decides what it needs from stage k + 1. Stage k can mix messages that come from above,
    # but it cannot take a mixture apart, so above single losses there are only single losses:
    #
    #     boundary    1   2   3 | 4   5
    #     messages    mixtures  | single losses      <-- gradients travel to the left
    messages: list[list[Vector]] = [[]]
    fused = [_share(messages[0], wanted[0], [])]
    for k in range(1, size):
        # All vectors that stage k - 1 combines from the messages of stage k.
        needed = [part for u in (wanted[k - 1], *messages[k - 1]) if (part := _from_row(u, k)).any()]
        losses = [unit for j, unit in enumerate(np.eye(size)) if j >= k and matrix[j, :k].any()]
        messages.append(min(_basis(needed), losses, key=len))
        fused.append(_share(messages[k], wanted[k], needed))
    stages = []
    for k, above in enumerate([*messages[1:], []]):
        sent = [_combine(message, above, k) for message in messages[k]]
        weights = _combine(wanted[k], above, k) if wanted[k].any() else None
        passes = [*sent, *([] if weights is None or fused[k] is not None else [weights])]
        sent = [_marked(cotangent, passes) for cotangent in sent]
        weights = None if weights is None else _marked(weights, passes)
        own = any(cotangent.own for cotangent in sent) or (weights is not None and weights.own != 0.0)
        stages.append(StageFlow(runs[k], own, tuple(sent), weights, fused[k]))
    return Flow(tuple(stages))


def _basis(vectors: Sequence[Vector]) -> list[Vector]:
    """Return messages from which all the vectors can be combined, the nearest farthest loss first."""
    # A stage that learns from few losses can use only messages of few losses, so those come first. In credit that is nearly
    # dependent, such as that of float32, one message more may change what others can make without losing digits, so all are
    # tried again. It ends, because a vector that is a message needs no others.
    kept: list[Vector] = []
    while missing := [vector for vector in vectors if _express(vector, kept) is None]:
        vector = min(missing, key=np.count_nonzero)
        scaled = vector / np.abs(vector).max()  # its receivers have the factors as weights
        kept.append(vector if _express(vector, [scaled]) is None else scaled)  # 1e-300 / 1e300 is 0
        kept.sort(key=lambda message: (_far(message), int(np.flatnonzero(message)[0])))
    return kept


def _share(messages: list[Vector], wanted: Vector, needed: Sequence[Vector]) -> int | None:
    """Replace a message by the weights' cotangent if the stage below can use it instead, and return its index."""
    # One cotangent for both gradients is one pass (B) instead of two:
    #
    #     end-to-end   u -> B -> message          2-wise   d -> I -> message       u: message from above
    #                       `--> .grad                     u -> W -> .grad         d: gradient of the own loss
    #
    # The farthest message is tried first.
    if not wanted.any():
        return None
    for place in reversed(range(len(messages))):
        replaced = [*messages[:place], wanted, *messages[place + 1 :]]
        if all(_express(vector, replaced) is not None for vector in needed):
            messages[place] = wanted
            return place
    return None


def _combine(vector: Vector, above: Sequence[Vector], k: int) -> Cotangent:
    """Split a cotangent of stage ``k`` into its own part and the weights of the messages from above."""
    weights = _express(_from_row(vector, k + 1), above)
    assert weights is not None, "the stage above sends every message that this stage combines"
    return Cotangent(float(vector[k]), tuple(weights), _far(vector), total=float(vector.sum()))


def _marked(cotangent: Cotangent, passes: Sequence[Cotangent]) -> Cotangent:
    """Mark a cotangent that is a single gradient which other passes read too."""
    # A new sum is a tensor of its own, which its pass may use up. `d` or a message may be read by another pass, later.
    together = [sum(reads) for reads in zip(*(other.reads for other in passes), strict=True)]
    alone = cotangent.is_sum or together[cotangent.reads.index(True)] == 1
    return cotangent if alone else replace(cotangent, shared=True)


def _express(vector: Vector, messages: Sequence[Vector]) -> list[float] | None:
    """Return weights with which the messages sum to a vector, or None; those with a loss that the vector lacks are not used."""
    usable = [p for p, message in enumerate(messages) if not message[vector == 0.0].any()]
    # One message is enough if it is the vector, or a multiple. Only this works without arithmetic, for any numbers.
    top = int(np.abs(vector).argmax())
    for p in usable:
        alone = np.zeros(len(messages))
        alone[p] = vector[top] / messages[p][top]
        if _is_exact(alone, messages, vector):
            return alone.tolist()
    # Gauss-Jordan elimination with partial pivoting: one equation per loss, one unknown per message, the vector on the right.
    # It is exact for small integers. Least squares could leave 1e-17 instead of 0, and with it a message to wait for.
    #
    #     messages g2 + g3 and g3, vector g2 - g3:     loss 2    1  0 |  1          1  0 |  1
    #                                                  loss 3    1  1 | -1    ->    0  1 | -2      weights 1 and -2
    rows = np.column_stack([*(messages[p] for p in usable), vector])
    pivots: list[int] = []  # for each finished row, the message whose weight it gives
    for column in range(len(usable)):
        top = len(pivots)
        best = top + int(np.abs(rows[top:, column]).argmax()) if top < len(rows) else top
        if top == len(rows) or rows[best, column] == 0.0:
            continue  # a combination of the messages before
        rows[[top, best]] = rows[[best, top]]
        for other in np.flatnonzero(rows[:, column]).tolist():
            if other != top:
                rows[other] = _minus(rows[other], rows[other, column] / rows[top, column] * rows[top])
                rows[other, column] = 0.0
        pivots.append(column)
    if rows[len(pivots) :, -1].any():  # 0 = something: no combination gives the vector
        return None
    weights = np.zeros(len(messages))
    for row, column in enumerate(pivots):
        weights[usable[column]] = rows[row, -1] / rows[row, column]
    return weights.tolist() if _is_exact(weights, messages, vector) else None


def _is_exact(weights: Vector, messages: Sequence[Vector], vector: Vector) -> bool:
    """Tell whether the weighted messages sum to the vector, each of its numbers, without losing digits."""
    # 1e9 u - 1e9 v, where u and v are nearly equal, is the vector on paper, but in float32 no digit of it is left.
    parts = [weight * message for weight, message in zip(weights, messages, strict=True)]
    missed = np.abs(sum(parts, start=np.zeros(len(vector))) - vector)
    limit = _LARGEST * np.abs(vector).max()
    return bool((missed <= _TOLERANCE * np.abs(vector)).all() and all(np.abs(part).max() <= limit for part in parts))


def _minus(a: Vector, b: Vector) -> Vector:
    """Return the difference, with rounding errors set to zero."""
    difference = a - b
    return np.where(np.abs(difference) <= _TOLERANCE * (np.abs(a) + np.abs(b)), 0.0, difference)


def _from_row(vector: Vector, k: int) -> Vector:
    """Return the vector with the losses before ``k`` set to zero."""
    return np.where(np.arange(len(vector)) >= k, vector, 0.0)


def _far(vector: Vector) -> int:
    return int(np.flatnonzero(vector)[-1])
