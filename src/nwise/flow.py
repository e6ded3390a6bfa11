"""From a credit matrix to what crosses each boundary and which passes each stage makes.

Let ``g_j`` be the gradient of loss ``j`` at a boundary. Stages before ``k`` need, at the boundary
below stage ``k``, the combinations ``sum_j C[j, i] g_j`` for ``i < k``: the column space of the block
``C[k:, :k]``. Its rank is the number of messages that must cross, and a basis of it is what nwise
sends. The basis is reduced with the *farthest* loss as pivot, so that no message waits for a loss
that its own receiver does not ask for; for N-wise it is just ``g_k .. g_{k+n-2}``.

Weight gradients are linear in the cotangent, so one pass (W) per stage and micro-batch is enough
whatever the strategy. Where its cotangent lies in the span of the messages, one message is replaced
by it, and a single backward pass then gives both gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Credits such as 0.9 ** (j - k) are proportional only up to rounding; what a subtraction leaves that is smaller than
# this next to what was subtracted is taken for rounding. A credit that is small by itself is not.
_TOLERANCE = 1e-12
# A message that has to be multiplied by more than this loses digits, which a message per loss does not.
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
    """The cheapest flow that gives every stage its credit.

    Args:
        credit: ``[A, A]``, as from `Strategy.credit`.
        trainable: for each stage, whether it has a parameter to train (default: all). Gradients that
            would only reach stages without any are not computed; their heads still run and learn.
        probes: for each stage, whether its head runs although no stage needs its loss (default: none).

    Returns:
        The flow. Boundary ``k`` carries ``rank C[k:, :k]`` messages, which is proven minimal; one for each
        loss where credits of very different size would make that numerically unsafe.

    >>> import nwise
    >>> flow_of(nwise.NWise(3).credit(6)).messages
    (1, 2, 2, 2, 1)
    """
    matrix = credit.numpy().copy()
    runs = matrix.any(axis=1) | np.asarray(probes or [False] * len(matrix), dtype=bool)
    if trainable is not None:
        matrix[:, ~np.asarray(trainable, dtype=bool)] = 0.0
    return _flow(matrix, runs, _basis) or _checked(_flow(matrix, runs, _losses, share=False))


def _flow(
    matrix: Vector, runs: Vector, basis_of: Callable[[Vector, int], list[Vector]], *, share: bool = True
) -> Flow | None:
    """The flow whose messages are a basis; None if the numbers do not allow it."""
    num_stages = len(matrix)
    farthest = _farthest(matrix)
    stages: list[StageFlow] = []
    above: list[Vector] = []  # the messages of boundary k + 1, as weights of all A losses
    for k in reversed(range(num_stages)):
        wanted = _padded(matrix[k:, k], num_stages)
        # Stages before k whose credit ends before k need nothing from here.
        needing = np.flatnonzero(farthest[:k] >= k)
        messages = basis_of(matrix[k:, needing], num_stages) if len(needing) else []
        fused = _share(messages, wanted) if share else None
        passes = [_combine(message, above, k) for message in messages]
        weights = _combine(wanted, above, k) if wanted.any() else None
        if any(p is None for p in passes) or (weights is None and wanted.any()):
            return None
        kept = tuple(p for p in passes if p is not None)
        own = any(p.own for p in kept) or (weights is not None and weights.own != 0.0)
        stages.append(StageFlow(head=bool(runs[k]), own=own, messages=kept, weights=weights, fused=fused))
        above = messages
    return Flow(tuple(reversed(stages)))


def _farthest(matrix: Vector) -> NDArray[np.int64]:
    """For each stage the farthest loss that it learns from; -1 for none."""
    learns = matrix != 0.0
    return np.where(learns.any(axis=0), len(matrix) - 1 - learns[::-1].argmax(axis=0), -1)


def _checked(flow: Flow | None) -> Flow:
    assert flow is not None, "one message for each loss can always be mixed to what is asked for"
    return flow


def _losses(block: Vector, num_stages: int) -> list[Vector]:
    """One message for each loss that is needed: more than the rank, but exact for any numbers."""
    first = num_stages - len(block)
    return [np.eye(num_stages)[first + row] for row in range(len(block)) if block[row].any()]


def _padded(column: Vector, num_stages: int) -> Vector:
    return np.concatenate([np.zeros(num_stages - len(column)), column])


def _far(vector: Vector) -> int:
    return int(np.flatnonzero(vector)[-1])


def _basis(block: Vector, num_stages: int) -> list[Vector]:
    """Basis of the column space, nearest first: reduced row echelon form with far losses first."""
    rows = block[::-1].T[block.any(axis=0)]
    # Neither the size of a stage's credit nor that of a message says anything about the space.
    rows = rows / np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    found = 0
    for pivot in np.flatnonzero(rows.any(axis=0)).tolist():
        if found == len(rows):
            break
        best = found + int(np.abs(rows[found:, pivot]).argmax())
        if rows[best, pivot] == 0.0:
            continue
        rows[[found, best]] = rows[[best, found]]
        for other in range(len(rows)):
            if other != found:
                factor = rows[other, pivot] / rows[found, pivot]
                rows[other] = _minus(rows[other], factor * rows[found])
                rows[other, pivot] = 0.0
        found += 1
    rows = rows[:found] / np.abs(rows[:found]).max(axis=1, keepdims=True, initial=0.0)
    return [_padded(row[::-1], num_stages) for row in reversed(rows)]


def _minus(a: Vector, b: Vector) -> Vector:
    """The difference, rounding errors made zero."""
    difference = a - b
    return np.where(np.abs(difference) <= _TOLERANCE * (np.abs(a) + np.abs(b)), 0.0, difference)


def _express(vector: Vector, basis: Sequence[Vector]) -> tuple[list[float], Vector]:
    """Weights of the basis in the vector, and what is left; each element has a farthest loss of its own."""
    rest = vector.copy()
    weights = [0.0] * len(basis)
    for p in sorted(range(len(basis)), key=lambda p: -_far(basis[p])):
        far = _far(basis[p])
        weights[p] = float(rest[far] / basis[p][far])
        rest = _minus(rest, weights[p] * basis[p])
    return weights, rest


def _share(messages: list[Vector], wanted: Vector) -> int | None:
    """Put the weights' cotangent in the place of a message, if the messages span it; say which."""
    if not wanted.any() or not messages:
        return None
    weights, rest = _express(wanted, messages)
    place = next((p for p in reversed(range(len(messages))) if weights[p]), None)
    # A small part of what is wanted would have to be multiplied again to be the message that it replaces.
    if rest.any() or place is None or _LARGEST * abs(weights[place]) < np.abs(weights).max():
        return None
    messages[place] = wanted
    return place


def _combine(vector: Vector, above: Sequence[Vector], k: int) -> Cotangent | None:
    """Stage ``k``'s own part of a cotangent and its weights of the messages from above; None if they cannot give it."""
    later = vector.copy()
    later[k] = 0.0
    weights, rest = _express(later, above)
    largest = np.abs(vector).max()
    if rest.any() or max(map(abs, weights), default=0.0) > _LARGEST * largest:
        return None
    return Cotangent(own=float(vector[k]), received=tuple(weights), far=_far(vector))
