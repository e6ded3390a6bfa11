"""Lower bounds on the period of any schedule.

There are three::

    resource        the busiest rank (or link) must do all its work
    dependency      messages need the time of their path, however free the stages are
    head-work-tail  between the start of rank a's list and its end must fit all work of a rank s that depends on a and feeds
                    a again, plus the paths to it and from it (Jackson's preemptive bound):

                    start of a --- head ---> [ work of s ] --- tail ---> end of a

The third contains the first two. Gradients of age d have d + 1 calls for such a path. The bound holds for every order, with or
without fusion of W and I.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from nwise.flow import Flow, Flows, counted
from nwise.schedule.actions import Action, Kind, forwards, passes
from nwise.schedule.ages import Ages
from nwise.schedule.costs import Costs, Prices, prices
from nwise.schedule.graph import TaskGraph, task_graph
from nwise.schedule.placement import Placement

__all__ = ["stage_work"]

Matrix = NDArray[np.float64]
Numbers = NDArray[np.int64]

# Largest number of comparisons; larger schedules get only the cheaper bounds.
_MOST_EFFORT = 2e8


def stage_work(flows: Flows, costs: Costs) -> list[float]:
    """Return the least work of every stage, per cycle of mini-batches."""
    work = []
    for k, price in enumerate(prices(costs, len(flows[0][0].stages))):
        work.append(len(flows) * price.times[Kind.UPDATE])
        for flow, count in counted(flows).items():
            kinds = [*forwards(flow.stages[k], k, 0), *passes(flow.stages[k], k, 0, fuse=False)]
            work[k] += count * sum(_least(price, action, flow) for action in kinds)
    return work


def resource_bound(flows: Flows, costs: Costs, placement: Placement) -> float:
    """Return the work of the busiest rank or the time of the busiest link, per cycle of mini-batches."""
    num_stages = len(flows[0][0].stages)
    ranks_and_links: dict[int | tuple[int, int], float] = defaultdict(float)
    for rank, time in zip(placement, stage_work(flows, costs), strict=True):
        ranks_and_links[rank] += time
    times = [size / costs.bandwidth for size in costs.per_stage("message_bytes", num_stages)]
    for k in range(1, num_stages):
        below = placement[k - 1]
        here = placement[k]
        for flow, count in counted(flows).items() if below != here else ():
            ranks_and_links[below, here] += count * times[k - 1]
            ranks_and_links[here, below] += count * times[k - 1] * len(flow.stages[k].messages)
    return max(ranks_and_links.values())


@lru_cache(maxsize=256)  # end-to-end pipelines share their bound
def lower_bound(flows: Flows, costs: Costs, placement: Placement, ages: Ages) -> float:
    """Return a lower bound on the time of one cycle of mini-batches, for any order.

    Large schedules get a cheaper, less sharp bound.
    """
    num_ranks = 1 + max(placement)
    num_stages = len(placement)
    known = resource_bound(flows, costs, placement)
    # `_jackson` compares all pairs of a rank's actions, for every rank whose list begins and ends around them.
    per_microbatch = max(2 + len(stage.messages) + stage.head for flow in flows[0] for stage in flow.stages)
    if num_ranks**2 * (len(flows[0]) * per_microbatch * num_stages / num_ranks) ** 2 > _MOST_EFFORT:
        return known
    # From the start of rank a's list to its end takes at least least[a], and its next list starts after that: a cycle, whose mean
    # no order can beat. A path that ends at a rank may take as many calls as the oldest gradients of the rank.
    calls = np.ones(num_ranks)
    np.maximum.at(calls, list(placement), 1.0 + np.array(ages.weights))
    least = {batch: _least_times(batch, costs, placement, ages) for batch in set(flows)}
    return max(known, _largest_mean([least[batch] for batch in flows], calls))


def _least(price: Prices, action: Action, flow: Flow) -> float:
    """Return the least time of an action; a W that can be fused has no overhead and no chain."""
    stage = flow.stages[action.stage]
    time = price.time(action, stage)
    shared = action.kind is Kind.WEIGHT_GRAD and stage.fused is not None
    return time - price.overhead if shared else time


def _least_times(batch: tuple[Flow, ...], costs: Costs, placement: Placement, ages: Ages) -> Matrix:
    """Return the least time from the start of every rank's list to its end, ``[rank]``."""
    # By its number every task comes after all that it needs. The updates come on top.
    graph = task_graph((batch,), placement)
    actions = [a for a in graph.tasks if a.kind is not Kind.UPDATE]
    price = prices(costs, len(placement))
    num_ranks = 1 + max(placement)
    work = np.array([_least(price[a.stage], a, batch[a.microbatch]) for a in actions])
    ranks = np.array(graph.ranks[: len(actions)])
    after, before, lags = _arcs(graph, actions, costs)
    # Longest paths if a rank could run any number of actions at once: from the start of rank a's list to the start of every
    # action, and from the end of every action to the end of rank b's list.
    heads, tails = (np.full((len(actions), num_ranks), -np.inf) for _ in range(2))
    heads[range(len(actions)), ranks] = 0.0
    updates = np.zeros(num_ranks)  # a rank updates its stages one after another
    np.add.at(updates, list(placement), [one.times[Kind.UPDATE] for one in price])
    for i, action in enumerate(actions):
        # The update that ends a path comes after the weight gradients, but a message may be older than those of its stage.
        if action.kind is not Kind.INPUT_GRAD or ages.weights[action.stage] == ages.oldest:
            tails[i, ranks[i]] = updates[ranks[i]]
    _lengthen(heads, after, before, work[before] + lags)
    last = len(actions) - 1  # the first of those that are counted from the end
    _lengthen(tails[::-1], last - before, last - after, work[after] + lags)
    least = np.full(num_ranks, -np.inf)
    for s in range(num_ranks):
        here = ranks == s
        least = np.maximum(least, _jackson(heads[here], work[here], tails[here]))
    return least


def _lengthen(paths: Matrix, nodes: Numbers, others: Numbers, times: Matrix) -> None:
    """Continue paths along arcs, in place, so each node has its longest one.

    Args:
        paths: lengths of the paths that end at every node, ``[node, start]``; -inf without one.
        nodes, others: the node to which every arc leads, and an earlier one from which it comes, ``[arc]``.
        times: time of every arc, ``[arc]``.
    """
    # As in Bellman and Ford's algorithm, but each arc once: by level, every path to a node is known before it is continued.
    # All nodes of a level are done at once. A node's level is the number of arcs on the longest way to it.
    levels = [0] * len(paths)
    for node, other in sorted(zip(nodes.tolist(), others.tolist(), strict=True)):
        levels[node] = max(levels[node], levels[other] + 1)
    level = np.array(levels)[nodes]
    order = np.lexsort((nodes, level))
    nodes = nodes[order]
    others = others[order]
    times = times[order]
    level = level[order]
    for begin, end in pairwise([*np.flatnonzero(np.diff(level, prepend=0)).tolist(), len(level)]):
        first = np.flatnonzero(np.diff(nodes[begin:end], prepend=-1))  # arc of each node
        here = nodes[begin:end][first]
        longest = np.maximum.reduceat(paths[others[begin:end]] + times[begin:end, None], first)
        paths[here] = np.maximum(paths[here], longest)


def _arcs(graph: TaskGraph, actions: Sequence[Action], costs: Costs) -> tuple[Numbers, Numbers, Matrix]:
    """Return tasks, for each of them one that comes before it, and the time that the result of that travels, ``[arc]``."""
    # Swapping two micro-batches of one flow changes no time. So actions of one kind and flow run in their order, without loss of
    # generality, and each also comes after the one before it.
    sizes = [size / costs.bandwidth for size in costs.per_stage("message_bytes", len(graph.placement))]
    which = {flow: i for i, flow in enumerate(counted(graph.flows))}
    flows = [which[flow] for flow in graph.flows[0]]
    last: dict[tuple[Kind, int, int | None, int], int] = {}
    arcs: list[tuple[int, int, float]] = []
    for task, action in enumerate(actions):
        k = action.stage
        for n, _, link in graph.needs[task]:
            arcs.append((task, n, costs.latency + sizes[min(k, actions[n].stage)] if link else 0.0))
        key = (action.kind, k, action.message, flows[action.microbatch])
        if key in last:
            arcs.append((task, last[key], 0.0))
        last[key] = task
    after, before, lags = zip(*arcs, strict=True) if arcs else ((), (), ())
    return np.array(after, int), np.array(before, int), np.array(lags, float)


def _jackson(heads: Matrix, work: Matrix, tails: Matrix) -> Matrix:
    """Return for each column the largest sum (least head + work + least tail) over all sets of one rank's actions.

    Args:
        heads: time before each action, ``[action, column]``; -inf if nothing leads to it.
        work: duration of each action, ``[action]``.
        tails: time after each action, ``[action, column]``.
    """
    # No order is faster: a set starts after its least head, one rank needs the sum of its work, and its last action, whichever
    # that is, still has its tail.
    #
    # Only sets {head >= h, tail >= t} matter: any other set gains work, and loses nothing, by adding the missing actions.
    # Sorted by falling head, such a set is a prefix of the actions without the actions of a smaller tail:
    #
    #     action, by falling head    0    1    2    3    4
    #     tail                       5    2    7    3    6     t = 3, the tail of action 3
    #     inside                     x    .    x    x    x
    #     load                       w0   w0   +w2  +w3  +w4   the work of every prefix, in one cumulative sum
    order = np.argsort(-heads, axis=0, kind="stable")
    heads, tails = (np.take_along_axis(times, order, 0) for times in (heads, tails))
    inside = tails[:, :, None] >= tails.T  # [action, column, threshold]
    load = inside * work[order][:, :, None]
    for before, after in pairwise(load):  # sums along the last axis, or by `cumsum`, take several times as long
        after += before
    load += heads[:, :, None]
    values: Matrix = (load.max(axis=0, where=inside, initial=-np.inf) + tails.T).max(axis=1)
    return values


def _largest_mean(least: Sequence[Matrix], calls: Matrix) -> float:
    """Return the largest time of a call of any rank.

    Args:
        least: least time of every rank's list, ``[cycle][rank]``.
        calls: number of calls over which each rank's list may stretch, ``[rank]``.
    """
    # A cycle of 4 mini-batches whose lists stretch over 2 calls: the list of call 0 is followed by that of call 2, and that of
    # call 1 by that of call 3. Each of the two chains needs the sum of its times.
    means = [
        times[first :: gcd(len(times), int(count))].mean() / count
        for times, count in zip(np.transpose(least), calls, strict=True)
        for first in range(gcd(len(times), int(count)))
    ]
    return float(max(means))
