"""The schedule that a pipeline runs: a custom one, a named order, or the best of the orders for typical costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from nwise._errors import current_name, hint
from nwise.flow import Flow
from nwise.schedule import orders
from nwise.schedule.best import best_order
from nwise.schedule.costs import Costs
from nwise.schedule.greedy import nearest_first
from nwise.schedule.lists import Schedule, Word
from nwise.schedule.timed import Timed
from nwise.schedule.validate import validate

Order: TypeAlias = "str | Schedule | Timed"

# Costs for the choice of an order without measurements: a head of half a stage, messages and passes that are short but not
# free.
TYPICAL = Costs(forward=1, head=0.5, input_grad=1, weight_grad=1, latency=0.05, overhead=0.02)


def _zero_bubble(flows: orders.Flows, turn: int, *, share: float) -> list[Word]:
    # With F and I of one slot, stage 0 receives its first gradient after 2 A - 1 slots, which as many forwards fill.
    cap = min(int(share * len(flows[0].stages)), len(flows))
    return nearest_first(flows, turn, fuse=orders.NONE, cap=max(1, cap), costs=TYPICAL)


# The rule of every named order: from the flow of each micro-batch and the mini-batch's place in the cycle to the order of each
# stage. An order that is added here is checked, run and offered on the command line under its name.
RULES: dict[str, Callable[[orders.Flows, int], list[Word]]] = {
    "depth-first": orders.depth_first,
    "phase": partial(orders.phase, fuse=orders.ALL),
    "skewed": partial(orders.skewed, fuse=orders.ALL, stride=1),
    "gpipe": partial(orders.phase, fuse=orders.ALL),
    "1f1b": orders.one_forward_one_backward,
    "zb-h1": partial(_zero_bubble, share=1),
    "zero-bubble": partial(_zero_bubble, share=2),
}
ORDERS = ("best", *RULES)


def check_order(order: Order) -> Order:
    """Return `order`, under its present name; raise ValueError or TypeError unless it is a schedule or one of `ORDERS`."""
    order = current_name(order)
    if isinstance(order, Schedule | Timed) or order in ORDERS:
        return order
    if isinstance(order, str):
        raise ValueError(f"`schedule` should be one of {', '.join(ORDERS)}. Found {order!r}.{hint(order, ORDERS)}")
    raise TypeError(f"`schedule` should be a Schedule or one of {', '.join(ORDERS)}. Found {type(order).__name__}.")


def choose(order: Order, flows: Sequence[Sequence[Flow]]) -> Schedule:
    """Return a schedule for the flows.

    Args:
        order: a schedule for these flows (`nwise.schedule.best` with measured costs gives the best one), or one of `ORDERS`.
            ``gpipe`` (the same as ``phase``), ``1f1b``, ``zb-h1`` and ``zero-bubble`` are made for end-to-end training and
            run any strategy.
        flows: flow of every micro-batch, ``[turns][M]``.

    Raises:
        ValueError: the order is unknown, or the schedule is for other flows or cannot run.
    """
    order = check_order(order)
    if isinstance(order, Timed):
        order = order.schedule
    if isinstance(order, Schedule):
        if order.flows != tuple(map(tuple, flows)):
            raise ValueError(
                "`schedule` should be made for the pipeline's strategy, number of stages and micro-batches. Found one for "
                f"{order.num_stages} stages and {order.num_microbatches} micro-batches whose heads or messages differ."
            )
        validate(order)
        return order
    if order == "best":
        return best_order(flows, TYPICAL).schedule
    return orders.make_schedule(order, flows, RULES[order])
