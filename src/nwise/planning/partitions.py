"""Partitions: the pieces of a network with their measured costs, and the costs of the stages that they are grouped into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
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
        activation_bytes: memory from its forward to its last pass, its output included; default: 0.
        weight_bytes: size of its parameters; default: 0.
        fixed_bytes, head_bytes: parameters, gradients and optimizer state of the piece, and of a head after it; default: 0.
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
    weight_bytes: float = 0.0
    fixed_bytes: float = 0.0
    head_bytes: float = 0.0
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
    values |= {"chain": tuple(chains)}
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
    costs: dict[str, Any] = {
        "chain_share": [min(1.0, c / t) if t else 0.0 for c, t in zip(chains, through, strict=True)],
    }
    combine: dict[str, Callable[[list[float]], float]] = {"sum": sum, "last": itemgetter(-1)}
    for name, row in ROWS.items():
        if name not in costs and row.pieces != "link":
            costs[name] = [combine[row.pieces]([getattr(piece, name) for piece in stage]) for stage in stages]
    for k, stage in enumerate(stages):
        costs["fixed_bytes"][k] += heads[k] * stage[-1].head_bytes
    return Costs(**costs, **links)
