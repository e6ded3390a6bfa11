"""Orders: rules that put a stage's computations into a list.

Micro-batches are alike, so every kind of action takes them in the order 0, 1, 2, ... A rule decides how the kinds
alternate.

    depth_first  a micro-batch's passes as soon as they can run, before the next forward
    phase        all forwards, then all passes loss by loss, nearest first, then all weight gradients
    skewed       depth first in rounds; the pass of a loss at distance d runs `stride * d` rounds after its forward
    1f1b         some forwards first, fewer on later stages, then backward and forward in turn
    interleaved  the same for ranks that hold every R-th stage (R ranks)

A delay leaves the order as it is and only makes passes older; `paced` chooses order and ages together. List scheduling
(`nwise.schedule.greedy`) orders by urgency, and puts the lists of several stages of one rank together. The argument `fuse` says
whether one B replaces an I and a W of the same cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain, product
from operator import itemgetter

from nwise.flow import Flow, Flows
from nwise.schedule.actions import PASSES, Action, Kind, forwards, passes
from nwise.schedule.ages import Ages, message_ages
from nwise.schedule.costs import TYPICAL, Costs
from nwise.schedule.graph import TaskGraph, task_graph
from nwise.schedule.placement import Placement, make_placement
from nwise.schedule.schedule import Schedule, with_updates
from nwise.schedule.sweep import Deadlock, merge

__all__ = ["depth_first", "make_schedule", "phase", "skewed"]

BatchFlows = Sequence[Flow]  # of every micro-batch in a mini-batch
Actions = tuple[Action, ...]
# A function from the flows of a mini-batch and its index in the cycle to a list for every stage.
StageRule = Callable[[BatchFlows, int], list[Actions]]
# The same with the placement as well, to a list for every rank; None if the rule is not made for these.
RankRule = Callable[[BatchFlows, int, Placement], list[Actions] | None]


def make_schedule(
    order: str,
    flows: Flows,
    rule: StageRule,
    placement: Placement = (),
    ages: Ages | None = None,
    *,
    costs: Costs = TYPICAL,
    cap: int | None = None,
    graph: TaskGraph | None = None,
) -> Schedule:
    """Return the schedule of a cycle of calls, with the updates after each.

    Args:
        order: name of the order.
        flows: flow of every micro-batch, ``[cycle][M]``.
        rule: function from the flows of a mini-batch and its index in the cycle to a list for every stage.
        placement: rank of every stage; default: a rank for each.
        ages: age of every pass; default: 0.
        costs: costs of one micro-batch, which decide how a rank alternates between several stages; default: `TYPICAL`.
        cap: largest number of micro-batches in flight per stage, besides the mini-batches that wait for their delay, if list
            scheduling may reorder the lists; default: None, the order of the rule.
        graph: the task graph, if another schedule of the same computations has it; default: it is made.

    Raises:
        Deadlock: lists of several stages of one rank wait for each other, or `cap` is too small.
    """
    ages = ages or message_ages(flows)
    graph, lists = _numbered([rule(batch, i) for i, batch in enumerate(flows)], flows, placement, ages, graph)
    placement = graph.placement
    num_ranks = 1 + max(placement)
    if num_ranks == len(placement) and cap is None:
        calls = [[call[placement.index(rank)] for rank in range(num_ranks)] for call in lists]
    elif num_ranks == 1 and cap is None:
        calls = [[merge(graph, call)] for call in lists]
    else:
        from nwise.schedule.greedy import ListScheduler  # few pipelines of one process need it

        [(_, calls)] = ListScheduler(graph, lists, costs, cap).run()
    return with_updates(order, graph, calls, costs)


def schedule_by_rank(
    order: str, flows: Flows, rule: RankRule, placement: Placement, ages: Ages | None, costs: Costs
) -> Schedule | None:
    """Return the schedule of a rule that makes the list of every rank; None if it is not made for these arguments."""
    lists = [found for i, batch in enumerate(flows) if (found := rule(batch, i, placement)) is not None]
    if len(lists) < len(flows):
        return None
    return with_updates(order, *_numbered(lists, flows, placement, ages or message_ages(flows)), costs)


def paced(flows: Flows, placement: Placement, latest: Ages, costs: Costs) -> Callable[[float, int], Iterator[Schedule]]:
    """Return a function that makes list schedules of delayed gradients, whose messages may differ in age between micro-batches.

    Its arguments are the least time between two calls of a rank, and the largest number of micro-batches in flight per stage,
    besides the mini-batches that wait for their delay. Its result leaves out the schedules that it has given before. It is empty
    if no cycle of calls could be repeated, or if ranks wait for each other because the cap is small.

    Args:
        flows: flow of every micro-batch, ``[cycle][M]``.
        placement: rank of every stage.
        latest: age of every weight gradient, and largest age of every message.
        costs: costs of one micro-batch, which decide when actions are ready.

    Raises:
        ValueError: a weight gradient is younger than the messages that it needs can be.
    """
    from nwise.schedule.greedy import ListScheduler

    lists = [depth_first(batch, i, fuse=False) for i, batch in enumerate(flows)]
    early, calls = _numbered(lists, flows, placement, message_ages(flows, latest.weights, "early"))
    graph = replace(early, ages=latest)
    known = set[object]()
    scheduler = cache(lambda cap: ListScheduler(graph, calls, costs, cap, paced=True))

    def schedules(pace: float, cap: int) -> Iterator[Schedule]:
        with suppress(Deadlock):
            for ages, cycle in scheduler(cap).run(pace):
                made = with_updates("paced", graph.aged(ages), cycle, costs)
                if (key := (tuple(ages), made.lists)) not in known:
                    known.add(key)
                    yield made

    return schedules


def _numbered(
    batches: Sequence[Sequence[Actions]],
    flows: Flows,
    placement: Placement,
    ages: Ages,
    graph: TaskGraph | None = None,
) -> tuple[TaskGraph, list[list[list[int]]]]:
    """Return the task graph of lists, and the numbers of the tasks in every list of every call."""
    calls = _calls(batches, flows, ages)
    graph = graph or task_graph(flows, placement, ages, chain.from_iterable(chain.from_iterable(calls)))
    return graph, [[graph.numbers(actions) for actions in call] for call in calls]


def _calls(batches: Sequence[Sequence[Actions]], flows: Flows, ages: Ages) -> list[list[Sequence[Action]]]:
    """Return the lists of every call of the cycle: actions of its own mini-batch, and older ones of the mini-batches before."""
    # A delay of one, M = 2, the mini-batch after the slash. A list keeps its places, and what is old comes from the call before:
    #
    #     list of mini-batch 1       F(0) B(0) F(1) B(1)
    #     call 1, cycle of one       F(0)/1 B(0)/0 F(1)/1 B(1)/0
    #     call 1, cycle of several   F(0)/1 F(1)/1 B(0)/0 B(1)/0
    if not ages.oldest:
        return [list(lists) for lists in batches]
    cycle = len(batches)
    ranks = range(len(batches[0]))
    placed: list[list[list[tuple[bool, int, Action]]]] = [[[] for _ in ranks] for _ in batches]
    for (minibatch, lists), i in product(enumerate(batches), ranks):
        for place, action in enumerate(lists[i]):
            for a in _aged(action, flows, ages):
                # Lists of different mini-batches do not fit into each other, so of several the forwards come first.
                placed[(minibatch + a.age) % cycle][i].append((cycle > 1 and a.kind in PASSES, place, a))
    return [[[a for *_, a in sorted(one, key=itemgetter(0, 1))] for one in lists] for lists in placed]


def _aged(action: Action, flows: Flows, ages: Ages) -> Iterator[Action]:
    """Give an action its age, in two parts if I and W of a B differ in age."""
    kind, k, m, q, minibatch, _ = action
    if kind is Kind.BOTH and not ages.fuses(k, flows[minibatch][m].stages[k]):
        yield Action(Kind.INPUT_GRAD, k, m, q, minibatch, ages.messages[k][q or 0])
        yield Action(Kind.WEIGHT_GRAD, k, m, None, minibatch, ages.weights[k])
    else:
        yield action._replace(age=ages.of(action))


# A rule sorts the computations of a stage, which are given depth first: by micro-batch, and of one micro-batch F, H, and the
# passes, nearest loss first. Actions with one key stay in that order.


def depth_first(flows: BatchFlows, minibatch: int, *, fuse: bool = True) -> list[Actions]:
    """Run one micro-batch at a time, which needs the least memory; the default with one process."""
    return [
        tuple(
            a
            for m, flow in enumerate(flows)
            for a in (*forwards(flow.stages[k], k, m, minibatch), *passes(flow.stages[k], k, m, minibatch, fuse=fuse))
        )
        for k in range(len(flows[0].stages))
    ]


def phase(flows: BatchFlows, minibatch: int, *, fuse: bool = True) -> list[Actions]:
    """Run all forwards, then the passes loss by loss; for one loss this is GPipe."""

    def key(a: Action) -> tuple[bool, bool, int]:
        return a.kind in PASSES, a.kind is Kind.WEIGHT_GRAD, a.message or 0

    return [tuple(sorted(actions, key=key)) for actions in depth_first(flows, minibatch, fuse=fuse)]


def skewed(flows: BatchFlows, minibatch: int, *, fuse: bool = True, stride: int = 1) -> list[Actions]:
    """Run in round r: F(r), H(r), and the passes of a loss at distance d for micro-batch r - stride d; W like the farthest."""
    # The gradient of a far loss comes back later, so its pass runs in a later round. 3-wise with stride 1, on one stage:
    #
    #     round 0   F(0) H(0) I(0.0)                     I(m.q) makes message q of micro-batch m; the own loss is q = 0
    #     round 1   F(1) H(1) I(1.0) I(0.1)
    #     round 2   F(2) H(2) I(2.0) I(1.1) W(0)
    farthest = max(map(reach, set(flows)))

    def key(a: Action) -> tuple[int, int, int]:  # round, and place in the round
        if a.kind not in PASSES:
            return a.microbatch, -1, 0
        if a.kind is Kind.WEIGHT_GRAD:
            return a.microbatch + stride * farthest, farthest + 1, 0
        distance = flows[a.microbatch].stages[a.stage].messages[a.message or 0].farthest_loss - a.stage
        return a.microbatch + stride * distance, distance, a.message or 0

    return [tuple(sorted(actions, key=key)) for actions in depth_first(flows, minibatch, fuse=fuse)]


def reach(flow: Flow) -> int:
    """Return the largest distance that a gradient travels, in stages."""
    return max((s.weights.farthest_loss - k for k, s in enumerate(flow.stages) if s.weights is not None), default=0)


def one_forward_one_backward(flows: BatchFlows, minibatch: int, *, fuse: bool = True) -> list[Actions]:
    """Run 1F1B: stage k begins with A - k forwards (at most M), then backward and forward take turns."""
    # 3 stages, M = 4, heads left out; stage 0 needs no gradient to its input, so it runs W instead of B:
    #
    #     stage 0   F(0) F(1) F(2) W(0) F(3) W(1) W(2) W(3)
    #     stage 1   F(0) F(1) B(0) F(2) B(1) F(3) B(2) B(3)
    #     stage 2   F(0) B(0) F(1) B(1) F(2) B(2) F(3) B(3)
    #
    # Under a delay of one the backward passes are those of the mini-batch before, so no stage waits for its first one.
    return [
        tuple(sorted(actions, key=lambda a: _in_turn(a, a.microbatch, len(flows[0].stages) - a.stage)))
        for actions in depth_first(flows, minibatch, fuse=fuse)
    ]


def interleaved(flows: BatchFlows, minibatch: int, placement: Placement) -> list[Actions] | None:
    """Run interleaved 1F1B, a list for every rank: each holds every R-th stage, and changes stage after R micro-batches."""
    # If the stages or micro-batches are no multiple of the ranks, R, these may wait for each other.
    num_ranks = 1 + max(placement)
    size = len(placement)
    if placement != make_placement("interleaved", size, num_ranks) or size % num_ranks or len(flows) % num_ranks:
        return None
    # 2 ranks, 4 stages, M = 2 (stage and micro-batch; heads left out). Rank r begins with at most
    # 2 (R - 1 - r) + R (stages of a rank - 1) + 1 forwards:
    #
    #     rank 0   F0(0) F0(1) F2(0) F2(1) B2(0) B2(1) W0(0) W0(1)
    #     rank 1   F1(0) F1(1) F3(0) B3(0) F3(1) B3(1) B1(0) B1(1)
    stages = depth_first(flows, minibatch)

    here = size // num_ranks  # stages of a rank

    def key(a: Action) -> int:
        (visit, rank) = divmod(a.stage, num_ranks)
        (group, m) = divmod(a.microbatch, num_ranks)
        if a.kind in PASSES:  # from the last stage down
            visit = here - 1 - visit
        ahead = 2 * (num_ranks - 1 - rank) + num_ranks * (here - 1) + 1
        return _in_turn(a, (group * here + visit) * num_ranks + m, ahead)

    return [tuple(sorted(chain(*stages[rank::num_ranks]), key=key)) for rank in range(num_ranks)]


def _in_turn(a: Action, i: int, ahead: int) -> int:
    """Return the place of the i-th forward or backward of a list that begins with some forwards, then alternates."""
    #     place   0   1   2   3   4   5   6       ahead = 2
    #             F0  F1  B0  F2  B1  F3  B2
    if a.kind in PASSES:
        return ahead + 2 * i
    return i if i < ahead else 2 * i - ahead + 1
