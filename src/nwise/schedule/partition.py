"""Partition: pieces of a network, each with its measured costs, put into stages of equal work, heads counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from nwise.flow import Flow, StageFlow
from nwise.schedule.costs import Costs


@dataclass(frozen=True, slots=True)
class Piece:
    """Costs of one piece of the network for one micro-batch; times in one unit, sizes in bytes.

    Args:
        name: of the piece.
        forward: F.
        input_grad: gradient to its input alone.
        weight_grad: what the gradient to its weights adds to that.
        chain: what the gradient to its weights costs alone, less `weight_grad`; at most `input_grad`.
        head: forward, loss and backward of a head behind it; behind the last piece of the loss alone.
        update: of its parameters.
        message_bytes: of its output.
        activation_bytes: what it keeps from its forward to its last pass.
        fixed_bytes: parameters, their gradients and optimizer state.
        head_bytes: the same of a head behind it.
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
    fixed_bytes: float = 0.0
    head_bytes: float = 0.0


def partition(pieces: Sequence[Piece], flows: Sequence[Flow]) -> list[int]:
    """Where stages begin so that the largest work of a stage is as small as can be.

    Args:
        pieces: in order, at least as many as stages.
        flows: what each stage has to do; of several (turns of a rotating strategy) the most.

    Returns:
        The index of the first piece of every stage.

    >>> from nwise import NWise, flow_of
    >>> pieces = [Piece(str(i), 1, 1, 1, 0, 1) for i in range(7)]
    >>> partition(pieces, [flow_of(NWise(2).credit(3))])
    [0, 3, 5]
    """
    num_stages = len(flows[0].stages)
    if len(pieces) < num_stages:
        raise ValueError(
            f"The network should have at least one piece for each of the {num_stages} stages. Found {len(pieces)}; "
            "use fewer devices, or a deeper network."
        )

    @cache
    def best(k: int, first: int) -> tuple[float, tuple[int, ...]]:
        """The least largest work of stages k, k + 1, ... on the pieces from `first` on."""
        left = num_stages - k
        if left == 1:
            return work(pieces[first:], [f.stages[k] for f in flows]), (first,)
        options: list[tuple[float, tuple[int, ...]]] = []
        for end in range(first + 1, len(pieces) - left + 2):
            stages = [f.stages[k] for f in flows]
            here = work(pieces[first:end], stages)
            if options and here - pieces[end - 1].head > min(options)[0]:
                break  # more pieces only add to it, but for the head, which is that of the last one
            later, starts = best(k + 1, end)
            options.append((max(here, later), (first, *starts)))
        return min(options)

    return list(best(0, 0)[1])


def work(pieces: Sequence[Piece], stages: Sequence[StageFlow]) -> float:
    """Time that a stage of these pieces works for one micro-batch: F + h + r I + (rho - r) chain + W."""
    forward = sum(piece.forward for piece in pieces)
    through = sum(piece.input_grad for piece in pieces)
    weights = sum(piece.weight_grad for piece in pieces)
    return max(
        forward
        + stage.head * pieces[-1].head
        + len(stage.messages) * through
        + (stage.weights is not None) * (weights + (stage.fused is None) * _chain(pieces))
        for stage in stages
    )


def costs_of(pieces: Sequence[Piece], starts: Sequence[int], flows: Sequence[Flow], **links: float) -> Costs:
    """The costs of the stages that begin at `starts`.

    Args:
        pieces: in order.
        starts: from `partition`.
        flows: which heads there are.
        links: ``latency``, ``bandwidth`` or ``overhead`` of `Costs`.
    """
    ends = [*starts[1:], len(pieces)]
    stages = [pieces[a:b] for a, b in zip(starts, ends, strict=True)]
    through = [sum(p.input_grad for p in stage) for stage in stages]
    heads = [any(flow.stages[k].head for flow in flows) for k in range(len(stages))]
    return Costs(
        forward=[sum(p.forward for p in stage) for stage in stages],
        head=[stage[-1].head for stage in stages],
        input_grad=through,
        weight_grad=[sum(p.weight_grad for p in stage) for stage in stages],
        chain_share=[min(1.0, _chain(stage) / t) if t else 0.0 for stage, t in zip(stages, through, strict=True)],
        update=[sum(p.update for p in stage) for stage in stages],
        message_bytes=[stage[-1].message_bytes for stage in stages],
        activation_bytes=[sum(p.activation_bytes for p in stage) for stage in stages],
        fixed_bytes=[
            sum(p.fixed_bytes for p in stage) + head * stage[-1].head_bytes
            for stage, head in zip(stages, heads, strict=True)
        ],
        **links,
    )


def _chain(pieces: Sequence[Piece]) -> float:
    """From the output to the first piece's weights: through all others, and through part of the first."""
    return pieces[0].chain + sum(piece.input_grad for piece in pieces[1:])
