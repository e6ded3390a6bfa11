"""Costs: the time of each action, in any unit (a *slot* is one forward of the paper's model)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from nwise.checks import check_at_least
from nwise.flow import StageFlow
from nwise.schedule.actions import Action, Kind

__all__ = ["CLOSE", "PAPER", "TRANSFORMER", "TYPICAL", "Costs", "Prices", "prices"]

Scalars = float | Sequence[float]

CLOSE = 1e-9  # times that differ by less than this share are equal
_LARGEST = 1e30  # keeps sums finite


class Row(NamedTuple):
    """How a field of `Costs` follows from other costs.

    Args:
        unit: its unit; devices of another speed change a ``"time"`` alone.
        each: of what it is the cost: of a ``"microbatch"``, so M micro-batches share that of a mini-batch, or of something else.
        pieces: how a stage has it from its pieces: their ``"sum"``, that of the ``"last"``, which ends the stage, or from the
            ``"path"`` through them (`nwise.planning.partitions`); ``"link"`` if all stages share it.
    """

    unit: Literal["time", "bytes", "share", "rate"]
    each: Literal["microbatch", "action", "update", "always"]
    pieces: Literal["sum", "last", "path", "link"]


def _cost(*row: str) -> dict[str, Row]:
    return {"row": Row(*row)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch, each a number or one per stage.

    Args:
        forward: time of F.
        head: time of H: forward, loss and backward of the head.
        input_grad: time of I: the gradient to a stage's input, through all of its layers.
        weight_grad: time of W: the gradient to the weights, given the cotangent at every layer.
        chain_share: additional cost of a W, as a share of an I (lambda), if no I has kept its cotangent at every layer.
            The W then walks the chain of layers itself: (L - 1) / L for L equal layers, because it ends at the first
            layer. Default: 1, the conservative value for stages of several layers.
        update: time of U, once per mini-batch; default: 0.
        latency: latency of every message, which occupies no stage; default: 0.
        overhead: time added to every F, I, W and B (the paper's c0 per slot), not to H, which follows its F; default: 0.
        bandwidth: bytes per unit of time of each link and direction, on which messages queue up; default: no limit.
        message_bytes: size of the activation that a stage sends, and of each gradient that comes back for it;
            with the default 1, `bandwidth` counts messages.
        activation_bytes: memory of one micro-batch from its forward to its last pass; default: 1.
        weight_bytes: size of a stage's parameters, of which a delay of d keeps d + 1 more versions (`Hogwild` with weights in
            memory keeps none without `recompute`); default: 0.
        fixed_bytes: memory that is always in use (parameters, gradients, optimizer state); default: 0.

    Raises:
        ValueError: a cost is negative or not a number.

    >>> Costs(forward=1, head=0.5, input_grad=1, weight_grad=[1, 2]).per_stage("weight_grad", 2)
    (1.0, 2.0)
    """

    forward: Scalars = field(metadata=_cost("time", "microbatch", "sum"))
    head: Scalars = field(metadata=_cost("time", "microbatch", "last"))
    input_grad: Scalars = field(metadata=_cost("time", "microbatch", "sum"))
    weight_grad: Scalars = field(metadata=_cost("time", "microbatch", "sum"))
    chain_share: Scalars = field(default=1.0, metadata=_cost("share", "action", "path"))
    update: Scalars = field(default=0.0, metadata=_cost("time", "update", "sum"))
    latency: float = field(default=0.0, metadata=_cost("time", "action", "link"))
    overhead: float = field(default=0.0, metadata=_cost("time", "action", "link"))
    bandwidth: float = field(default=math.inf, metadata=_cost("rate", "always", "link"))
    message_bytes: Scalars = field(default=1.0, metadata=_cost("bytes", "microbatch", "last"))
    activation_bytes: Scalars = field(default=1.0, metadata=_cost("bytes", "microbatch", "sum"))
    weight_bytes: Scalars = field(default=0.0, metadata=_cost("bytes", "always", "sum"))
    fixed_bytes: Scalars = field(default=0.0, metadata=_cost("bytes", "always", "sum"))

    def __post_init__(self) -> None:
        for name, row in ROWS.items():
            value = getattr(self, name)
            if hasattr(value, "tolist"):  # numpy's and torch's numbers and arrays
                value = value.tolist()
            many = isinstance(value, Sequence) and not isinstance(value, str)
            if many and not value:
                raise ValueError(f"`{name}` should be a number, or one per stage. Found none.")
            for number in value if many else [value]:
                _check(name, number)
            if many and row.pieces == "link":
                raise ValueError(f"`{name}` should be one number. Found {value!r}.")
            object.__setattr__(self, name, tuple(value) if many else value)

    def per_stage(self, name: str, num_stages: int) -> tuple[float, ...]:
        """Return one value per stage."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (float(value),) * num_stages
        if len(value) != num_stages:
            raise ValueError(f"`{name}` should have one value for each of the {num_stages} stages. Found {len(value)}.")
        return tuple(map(float, value))

    def split_in(self, num_microbatches: int) -> Costs:
        """Return the costs of a micro-batch, given the costs of a whole mini-batch.

        Costs per action (`overhead`, `latency`), per update (`update`) and of fixed memory are not divided.
        """
        check_at_least(1, num_microbatches=num_microbatches)
        names = [name for name, row in ROWS.items() if row.each == "microbatch"]
        changes: dict[str, Any] = {name: _divide(getattr(self, name), num_microbatches) for name in names}
        return replace(self, **changes)

    def cut_in(self, parts: int) -> Costs:
        """Return the costs of the parts if every stage is cut into equal parts; a head costs as much as before.

        Args:
            parts: number of equal parts of a stage.
        """
        check_at_least(1, parts=parts)
        changes: dict[str, Any] = {}
        for name, row in ROWS.items():
            if row.pieces == "link":
                continue
            part = _divide(getattr(self, name), 1 if row.pieces == "last" or row.unit == "share" else parts)
            changes[name] = tuple(x for x in part for _ in range(parts)) if isinstance(part, tuple) else part
        return replace(self, **changes)


# How every field follows from other costs: a field without this does not load.
ROWS: dict[str, Row] = {cost.name: cost.metadata["row"] for cost in fields(Costs)}


def _check(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError(f"`{name}` should be a number, or one per stage. Found {number!r}.")
    most = 1 if name == "chain_share" else _LARGEST
    if not (number > 0 if name == "bandwidth" else 0 <= number <= most):
        wanted = "above 0 (inf for links without cost)" if name == "bandwidth" else f"from 0 to {most:g}"
        raise ValueError(f"`{name}` should be {wanted}. Found {'more' if number > _LARGEST else number}.")


def _divide(value: Scalars, by: int) -> Scalars:
    return tuple(x / by for x in value) if isinstance(value, Sequence) else value / by


PAPER = Costs(forward=1, head=0, input_grad=1, weight_grad=0)
"""The paper's costs: one slot for a forward and for each loss's pass through a stage; heads and messages are free."""


# A head of half a stage, messages and passes that are short but not free.
TYPICAL = Costs(forward=1, head=0.5, input_grad=1, weight_grad=1, latency=0.05, overhead=0.02)
"""Costs for the choice of an order without measurements."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Times of every action of one stage.

    Args:
        times: time of every kind of computation, and of the update; of a W that shares its cotangent with an I.
        separate: time of any other W.
        overhead: the part of the time of every F, I, W and B that `Costs` calls so.
    """

    times: dict[Kind, float]
    separate: float
    overhead: float

    def time(self, action: Action, stage: StageFlow) -> float:
        """Return the time of a computation or an update."""
        #     I               output --> layer 3 --> layer 2 --> layer 1 --> input
        #     W after its I                |           |           |                `weight_grad` alone
        #     separate W      output --> layer 3 --> layer 2 --> layer 1            and the arrows, `chain_share`
        return self.separate if action.kind is Kind.WEIGHT_GRAD and stage.fused is None else self.times[action.kind]


def prices(costs: Costs, num_stages: int) -> list[Prices]:
    """Return the prices of every stage."""
    names = [*dict.fromkeys(name for kind in Kind for name in kind.costs), "chain_share"]
    result = []
    for column in zip(*(costs.per_stage(name, num_stages) for name in names), strict=True):
        one = dict(zip(names, column, strict=True))
        times = {kind: sum(one[name] for name in kind.costs) for kind in Kind if kind.costs}
        separate = one["weight_grad"] + one["chain_share"] * one["input_grad"] + costs.overhead
        result.append(Prices(times, separate, costs.overhead))
    return result


TRANSFORMER = Costs(forward=1, head=0.5, input_grad=1, weight_grad=1, overhead=0.02)
"""Costs of a whole mini-batch of a Transformer: I and W as long as F, a head of half a stage (the paper's are larger), and
the paper's c0 / c1 = 0.02."""
