"""Partitions: the pieces of a network with their measured costs, and the costs of the stages that they are grouped into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import add, itemgetter
from typing import Any

import numpy as np

from nwise.flow import Flow, StageFlow
from nwise.planning.assign import Matrix
from nwise.schedule.costs import ROWS, Costs

__all__ = ["Piece", "check_enough", "pieces_of", "stage_costs", "sums", "work"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Costs of one piece of the network for one micro-batch; times in one unit, sizes in bytes.

    Args:
        name: name of the piece.
        forward: time of F.
        input_grad: time of the gradient to its input alone.
        weight_grad: additional time of the gradient to its weights.
        chain: time of the gradient to its weights alone, minus `weight_grad`; at most `input_grad`.
        head: time of forward, loss and backward of a head after the piece; for the last piece, of the loss.
        update: time of the update of its parameters; default: 0.
        message_bytes: size of its output; default: 0.
        activation_bytes: memory from its forward to its last pass, without its output; default: 0.
        held_bytes: the part of its output that its own last pass needs, as that of a ReLU does; default: 0.
        released_bytes: the part of its input that none of its passes needs; default: 0.
        cotangent_bytes: memory of the cotangents that an I keeps for its W; default: 0.
        gradient_bytes, head_gradient_bytes: gradients of its parameters, and of those of a head after it; default: 0.
        weight_bytes: size of parameters; default: 0.
        fixed_bytes, head_bytes: parameters and optimizer state of the piece, and of a head after it; default: 0.
        scratch_bytes, head_peak_bytes, update_peak_bytes: peak memory as in `Costs`; default: 0.
        peak_bytes: peak memory of the pass to its weights, or to its input if it has none; default: 0.
        learns: whether it has parameters to train; default: True.
    """

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    chain: float
    head: float
    update: float = 0.0
    message_bytes: float = 0.0
    activation_bytes: float = 0.0
    held_bytes: float = 0.0
    released_bytes: float = 0.0
    cotangent_bytes: float = 0.0
    gradient_bytes: float = 0.0
    head_gradient_bytes: float = 0.0
    weight_bytes: float = 0.0
    fixed_bytes: float = 0.0
    head_bytes: float = 0.0
    scratch_bytes: float = 0.0
    peak_bytes: float = 0.0
    head_peak_bytes: float = 0.0
    update_peak_bytes: float = 0.0
    learns: bool = True


def pieces_of(costs: Costs, num_stages: int, parts: int = 1) -> list[Piece]:
    """Return a network with given costs in pieces, each named by the share of the network before it.

    Args:
        costs: costs of a micro-batch in every stage.
        num_stages: number of stages.
        parts: number of equal pieces of a stage; a head may follow each.

    >>> [(piece.name, piece.forward) for piece in pieces_of(Costs(1, 0.5, 1, 1), 2, parts=2)]
    [('0 %', 0.5), ('25 %', 0.5), ('50 %', 0.5), ('75 %', 0.5)]
    """
    size = num_stages * parts
    costs = costs.cut_in(parts)
    values: dict[str, Any] = {name: costs.per_stage(name, size) for name in ROWS}
    chains = [share * time for share, time in zip(values["chain_share"], values["input_grad"], strict=True)]
    values |= {"chain": tuple(chains), "peak_bytes": values["weight_grad_peak_bytes"]}
    known = [field.name for field in fields(Piece) if field.name in values]
    return [
        Piece(f"{i / size:.0%}".replace("%", " %"), **{name: values[name][i] for name in known}) for i in range(size)
    ]


def check_enough(pieces: Sequence[object], num_stages: int) -> None:
    """Raise ValueError if there are fewer pieces than stages."""
    if len(pieces) < num_stages:
        raise ValueError(
            f"The network should have at least one piece for each of the {num_stages} stages. Found {len(pieces)}; "
            "use fewer devices or stages, or a deeper network."
        )


def work(pieces: Sequence[Piece], stages: Sequence[StageFlow]) -> Matrix:
    """Return the work of a stage for one micro-batch, F + h + r I + (rho - r) chain + W, for every range of pieces.

    Args:
        pieces: all pieces.
        stages: work of the stage in every flow, of which the largest counts.

    Returns:
        Times ``[P + 1, P + 1]``: row a and column b for the pieces a, ..., b - 1; infinite for empty ranges.
    """
    # r is the number of messages, rho that of all passes (`StageFlow.passes`): one more than r if W is not fused, and then
    # W walks the chain itself: through all pieces but the first, and through part of that.
    forward, through, weights = (sums(pieces, name) for name in ("forward", "input_grad", "weight_grad"))
    head = np.array([0.0, *(piece.head for piece in pieces)])[None, :]
    rest = np.array([*(piece.chain - piece.input_grad for piece in pieces), 0.0])[:, None]
    times = [
        forward
        + stage.head * head
        + len(stage.messages) * through
        + (stage.weights is not None) * (weights + (stage.fused is None) * (through + rest))
        for stage in stages
    ]
    size = len(pieces) + 1
    return np.where(np.triu(np.ones((size, size), bool), 1), np.max(times, axis=0), np.inf)


def sums(pieces: Sequence[Piece], name: str) -> Matrix:
    """Return the sum of a cost over every range of pieces, ``[P + 1, P + 1]``: row a and column b for a, ..., b - 1."""
    before = np.concatenate([[0.0], np.cumsum([getattr(piece, name) for piece in pieces])])
    return np.asarray(before[None, :] - before[:, None])


def stage_costs(pieces: Sequence[Piece], starts: Sequence[int], flows: Sequence[Flow], **links: float) -> Costs:
    """Return the costs of the stages that begin at `starts`.

    Args:
        pieces: pieces in order.
        starts: index of the first piece of every stage.
        flows: flows that determine which heads run.
        links: ``latency``, ``bandwidth`` or ``overhead`` of `Costs`.
    """
    ends = [*starts[1:], len(pieces)]
    stages = [pieces[a:b] for a, b in zip(starts, ends, strict=True)]
    heads = [any(flow.stages[k].head for flow in flows) for k in range(len(stages))]
    # The chain from the output to the first piece's weights goes through all other pieces and a part of the first.
    chains = [stage[0].chain + sum(piece.input_grad for piece in stage[1:]) for stage in stages]
    through = [sum(piece.input_grad for piece in stage) for stage in stages]
    given = [pieces[start - 1].message_bytes if start else 0.0 for start in starts]
    costs: dict[str, Any] = {
        "chain_share": [min(1.0, c / t) if t else 0.0 for c, t in zip(chains, through, strict=True)],
        "output_bytes": [stage[-1].message_bytes for stage in stages],
        "weight_grad_peak_bytes": list(map(_peak, stages)),
        "both_peak_bytes": list(map(_peak, stages, given)),
        "input_grad_peak_bytes": [_input_grad_peak(pieces, a, b) for a, b in zip(starts, ends, strict=True)],
    }
    combine: dict[str, Callable[[list[float]], float]] = {"sum": sum, "largest": max, "last": itemgetter(-1)}
    for name, row in ROWS.items():
        if name not in costs and row.pieces != "link":
            costs[name] = [combine[row.pieces]([getattr(piece, name) for piece in stage]) for stage in stages]
    for k, stage in enumerate(stages):
        costs["activation_bytes"][k] += sum(_kept_inside(stage))
        costs["fixed_bytes"][k] += heads[k] * stage[-1].head_bytes
    return Costs(**costs, **links)


def _kept_inside(pieces: Sequence[Piece]) -> list[float]:
    """Return, for every piece but the last, the bytes of its output that it or the next piece keeps for its passes."""
    return [
        piece.message_bytes - min(after.released_bytes, piece.message_bytes - piece.held_bytes)
        for piece, after in pairwise(pieces)
    ]


def _peak(pieces: Sequence[Piece], given: float = 0.0) -> float:
    """Return the peak memory of a W, or of a B that makes a gradient to the stage's input of `given` bytes, too."""
    # The pass goes from the last piece to the first. `change` is the memory in use compared with the start of the pass: each
    # piece frees its activations, and leaves gradients of its parameters.
    #
    #     piece 0           piece 1           piece 2  <-- the pass begins
    #              stays[0]          stays[1]              an output between two pieces, freed with the later piece
    change = peak = 0.0
    stays = _kept_inside(pieces)
    for i in reversed(range(len(pieces))):
        # The gradient to its output, and later that to its input.
        above = pieces[i].message_bytes
        below = pieces[i - 1].message_bytes if i else given
        own = pieces[i].peak_bytes + (max(above, below) if i < len(stays) else below)
        if i < len(stays):
            change -= stays[i]
            own += pieces[i].held_bytes
        peak = max(peak, change + own)
        change += pieces[i].gradient_bytes - pieces[i].activation_bytes
    return peak


def _input_grad_peak(pieces: Sequence[Piece], start: int, end: int) -> float:
    """Return the peak memory of an I, which frees nothing, because another pass follows: a piece's cotangents at every layer."""
    given = [0.0, *(piece.message_bytes for piece in pieces)]
    made = [*given[start + 1 : end], 0.0]  # the cotangent of a piece's output, inside the stage
    own = (piece.cotangent_bytes + given[i] for i, piece in enumerate(pieces[start:end], start))
    return max(map(add, made, own)) if start else 0.0
