"""Orders by name: the schedule that a pipeline runs, and end-to-end pipelines for comparison.

    gpipe             all forwards, then all backwards; the same as phase
    1f1b              at most A - k micro-batches in flight on stage k, the period of GPipe
    zb-h1             backward split into I and W, at most A micro-batches in flight
    zero-bubble       the same with 2 A - 1 in flight: no bubble if there are enough micro-batches
    interleaved-1f1b  1f1b with several stages on a rank, one after every round of the ranks
    zb-v              zero-bubble with two stages on a rank, down and up again in the shape of a V

The split keeps the cotangents of all layers between I and W (`nwise.stage.kept`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from nwise.checks import hint, warn
from nwise.flow import Flows
from nwise.schedule import orders
from nwise.schedule.actions import Kind
from nwise.schedule.ages import Ages, message_ages
from nwise.schedule.costs import TYPICAL, Costs
from nwise.schedule.graph import task_graph
from nwise.schedule.orders import RankRule, StageRule, make_schedule, schedule_by_rank
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Schedule
from nwise.schedule.sweep import merge

if TYPE_CHECKING:
    from nwise.schedule.find import Limit

__all__ = [
    "BASELINES",
    "ORDERS",
    "RULES",
    "SEVERAL_STAGES",
    "NamedOrder",
    "check_order",
    "choose",
    "named_schedule",
    "one_process",
    "stages_on",
]

Order: TypeAlias = "str | Schedule"


@dataclass(frozen=True)
class NamedOrder:
    """A rule that puts a stage's actions in order, for `ORDERS`.

    Args:
        rule: function from the flows and the index of a mini-batch to a list for every stage.
        cap: function from the number of stages to the largest number of micro-batches in flight, if list scheduling may reorder
            the lists; None if it may not.
        placement: name of the placement that the pipeline is made for; default: contiguous.
        by_rank: function that also takes the placement and returns a list for every rank, or None for `rule`; default: none.
        baseline: whether it is an end-to-end pipeline that planners compare strategies with (`nwise.schedule.baseline`);
            default: False.
        strides: strides of skewed orders that the pipeline, as a baseline, may take if they are faster; default: none.
        any_cap: whether as a baseline it may have all micro-batches in flight if that is faster; default: False.
    """

    rule: StageRule
    cap: Callable[[int], int] | None = None
    placement: str = "contiguous"
    by_rank: RankRule | None = None
    baseline: bool = False
    strides: tuple[int, ...] = ()
    any_cap: bool = False


_SPLIT: StageRule = partial(orders.depth_first, fuse=False)

# An order that is added here is checked, run and offered on the command line under its name.
RULES: dict[str, NamedOrder] = {
    "depth-first": NamedOrder(orders.depth_first),
    "phase": NamedOrder(orders.phase),
    "skewed": NamedOrder(orders.skewed),
    "gpipe": NamedOrder(orders.phase, baseline=True),
    "1f1b": NamedOrder(orders.one_forward_one_backward, baseline=True),
    "zb-h1": NamedOrder(_SPLIT, lambda stages: stages, baseline=True, strides=(1,)),
    # With F and I of one slot, stage 0 receives its first gradient after 2 A - 1 slots, which as many forwards fill.
    "zero-bubble": NamedOrder(_SPLIT, lambda stages: 2 * stages - 1, baseline=True, strides=(1, 2), any_cap=True),
    "interleaved-1f1b": NamedOrder(
        orders.depth_first, lambda stages: stages, "interleaved", orders.interleaved, baseline=True
    ),
    "zb-v": NamedOrder(_SPLIT, lambda stages: stages, "v", baseline=True),
}
ORDERS = ("best", *RULES)
BASELINES = tuple(name for name, order in RULES.items() if order.baseline)
# Those with two stages on a rank, or more.
SEVERAL_STAGES = tuple(name for name in BASELINES if RULES[name].placement != "contiguous")


def stages_on(devices: int, name: str) -> int:
    """Return the number of stages of a method on a number of devices: two on each if it is made for several.

    >>> stages_on(4, "zb-v"), stages_on(4, "2-wise")
    (8, 4)
    """
    return devices * (2 if name in SEVERAL_STAGES else 1)


def check_order(order: Order) -> str | Schedule:
    """Return `order`; raise ValueError or TypeError unless it is a schedule or one of `ORDERS`."""
    if isinstance(order, str):
        if order in ORDERS:
            return order
        raise ValueError(f"`schedule` should be one of {', '.join(ORDERS)}. Found {order!r}.{hint(order, ORDERS)}")
    if isinstance(order, Schedule):
        return order
    raise TypeError(f"`schedule` should be a Schedule or one of {', '.join(ORDERS)}. Found {type(order).__name__}.")


def choose(
    order: Order,
    flows: Flows,
    placement: Placement = (),
    ages: Ages | None = None,
    costs: Costs = TYPICAL,
    memory: Limit = None,
) -> Schedule:
    """Return a schedule for the flows.

    Args:
        order: a schedule for these flows (`nwise.schedule.best` with measured costs gives the best one), or one of `ORDERS`.
            Those from ``gpipe`` on are made for end-to-end training and run any strategy.
        flows: flow of every micro-batch, ``[cycle][M]``.
        placement: rank of every stage; default: a rank for each.
        ages: age of every pass (`nwise.schedule.ages.strategy_ages`); default: 0.
        costs: costs by which orders are compared and lists are filled; default: typical ones, equal for all stages.
        memory: limit in bytes for the ``"best"`` order, one for all ranks or one for each; default: none. If no order fits, a
            warning says so, and the best of all is returned.

    Raises:
        ValueError: the order is unknown, or the schedule is for other flows, ages or ranks or cannot run.
    """
    order = check_order(order)
    placement = placement or tuple(range(len(flows[0][0].stages)))
    ages = ages or message_ages(flows)
    if isinstance(order, Schedule):
        if order.flows != flows or order.ages.weights != ages.weights:
            raise ValueError(
                "`schedule` should be made for the pipeline's strategy, number of stages and micro-batches. Found one for "
                f"{order.num_stages} stages and {order.num_microbatches} micro-batches whose heads, messages or delays differ."
            )
        if not (ages.stashes or ages.hold_in(order.graph.tasks)):
            raise ValueError(
                "`schedule` should give every message the age that the strategy gives it, because gradients with the weights in "
                "memory depend on it. Found other ages; make the schedule by `nwise.schedule.best`, or use "
                "`nwise.Hogwild(weights='forward')`."
            )
        if order.ages != ages:
            order = replace(order, graph=replace(order.graph, ages=ages))
        if order.placement != placement and max(placement) > 0:
            raise ValueError(
                f"`schedule` should be made for the pipeline's placement {placement}. Found one for {order.placement}."
            )
        from nwise.schedule.validation import validate  # most pipelines run an order by name

        validate(order)
        return order if order.placement == placement else one_process(order)
    if order == "best":
        from nwise.schedule.find import DoesNotFit, best_order  # most pipelines of one process search for nothing

        try:
            return best_order(flows, costs, placement, ages, memory=memory)
        except DoesNotFit as error:
            warn(f"{error} The pipeline runs the fastest order, whatever its memory.")
            return best_order(flows, costs, placement, ages)
    return named_schedule(order, flows, placement, ages, costs)


def named_schedule(name: str, flows: Flows, placement: Placement, ages: Ages | None, costs: Costs) -> Schedule:
    """Return the schedule of one of `RULES`; see `choose`."""
    named = RULES[name]
    if named.by_rank and (by_rank := schedule_by_rank(name, flows, named.by_rank, placement, ages, costs)):
        return by_rank
    # One process keeps the order of every stage's list and merges the lists, whatever the bound on micro-batches in flight.
    cap = None if named.cap is None or max(placement) == 0 else min(named.cap(len(placement)), len(flows[0]))
    return make_schedule(name, flows, named.rule, placement, ages, costs=costs, cap=cap)


def one_process(schedule: Schedule) -> Schedule:
    """Return a schedule of the same actions for one process, which runs them in an order that every list allows.

    Raises:
        Deadlock: no order does.
    """
    # Without second forwards, whose places depend on the other work of a rank.
    tasks = [a for a in schedule.graph.tasks if a.kind is not Kind.RECOMPUTE]
    graph = task_graph(schedule.flows, (0,) * schedule.num_stages, schedule.ages, tasks)
    calls = [[[n for n in rank if n < len(tasks)] for rank in call] for call in schedule.lists]
    lists = tuple((tuple(merge(graph, call)),) for call in calls)
    return Schedule(schedule.order, graph, lists, schedule.costs)
