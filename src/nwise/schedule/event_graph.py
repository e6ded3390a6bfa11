"""A schedule as an event graph: timed nodes, and the self-timed run of one call through it.

The machines are the ranks and, if bandwidth is finite, the links, which transfer messages in the order of their sends.
Each machine works through its word of nodes. A node starts once its machine is free and its inputs have arrived.

Three things connect a call with earlier ones. A machine starts again when it has finished its word: a forward comes after the
updates of its rank, and nothing else synchronises ranks. An action of another age than the action whose result it needs takes
the result of an earlier call. And a stage that is held back (`nwise.schedule.schedule.held_back`) starts a forward only after its
activation of an earlier mini-batch has been taken, so few activations wait at its boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Costs, prices
from nwise.schedule.schedule import Deadlock, Product, Schedule, held_back, needs, product

# A node that another one waits for: its number, the travel time of its result, and the number of calls (cycles, if the
# strategy rotates) between the two.
Need = tuple[int, float, int]
# A node, and by how many calls its result is used later.
Token = tuple[int, int]


# The graph of two ranks with a stage of two actions each, one micro-batch, end-to-end (without the head). A node waits for those
# with an arc to it:
#
#     rank 0      F0 -------------> W0 ===> F0 of the next call
#                  |                ^
#                  | + latency      | + latency
#                  v                |
#     rank 1      F1 -------------> B1 ===> F1 of the next call
#
# Without the arcs ===> the graph has no cycle, so one sweep (`run`) times a call. With them it has cycles, which determine the
# period (`nwise.schedule.period`). Under a delay of one, B1 works on the mini-batch before F1's, and the arc F1 -> B1 goes to
# the next call, too.
@dataclass
class EventGraph:
    """A graph of numbered nodes.

    Args:
        num_ranks: number of machines that are ranks, which come first; the others are links.
        words: nodes of every machine, in order.
        duration: duration of every node.
        needs: for every node the nodes that it waits for.
        actions: action of every node; the nodes of a link have the send.
    """

    num_ranks: int
    words: list[list[int]]
    duration: list[float]
    needs: list[list[Need]]
    actions: list[Action]

    @cached_property
    def previous(self) -> list[Token]:
        """The node before every node on its machine, and how many calls before: 0, or 1 for the first of a word."""
        previous: list[Token] = [(-1, 1)] * len(self.duration)
        for word in self.words:
            for before, node in pairwise(word):
                previous[node] = before, 0
            if word:
                previous[word[0]] = word[-1], 1
        return previous


def event_graph(schedule: Schedule, costs: Costs) -> EventGraph:
    """Return the event graph of a schedule."""
    price = prices(costs, schedule.num_stages)
    flows, placement = schedule.flows, schedule.placement
    actions: list[Action] = []
    duration: list[float] = []
    words: list[list[int]] = []
    made: dict[Product, int] = {}
    for word in schedule.words:
        first = len(actions)
        for node, action in enumerate(word, first):
            key = product(action)
            if key is not None:
                made[key] = node
            duration.append(
                price[action.stage].time(action, flows[action.turn][action.microbatch].stages[action.stage])
            )
        actions += word
        words.append(list(range(first, len(actions))))
    late = [schedule.cycles_late(a) for a in actions]
    lag = costs.latency
    wanted = [
        [
            (made[key], lag if placement[key[1]] != placement[a.stage] else 0.0, late[node] - late[made[key]])
            for key in needs(a, flows)
        ]
        for node, a in enumerate(actions)
    ]
    graph = EventGraph(len(words), words, duration, wanted, actions)
    if not math.isinf(costs.bandwidth):
        _add_links(
            graph, schedule, [size / costs.bandwidth for size in costs.per_stage("message_bytes", schedule.num_stages)]
        )
    kept = 1 + schedule.oldest
    waiting = set(held_back(flows, placement, oldest=schedule.oldest))
    for node, a in enumerate(actions):
        if a.kind is Kind.FORWARD and a.stage in waiting:
            taker = made["F", a.stage + 1, a.microbatch, a.turn]
            # The next stage takes the activation at the start of its forward: at the end minus the duration.
            graph.needs[node].append((taker, -duration[taker], kept))
    return graph


def _add_links(graph: EventGraph, schedule: Schedule, times: Sequence[float]) -> None:
    """Put a node on a link between every sender and the nodes that wait for its message."""
    # A link is a machine too, so its messages queue up like the actions of a rank:
    #
    #     F0(0) ----> SX0(0) --latency--> F1(0)         SX0(0) and SX0(1) are the word of the link 0 -> 1
    #     F0(1) ----> SX0(1) --latency--> F1(1)
    placement, sending = schedule.placement, {}  # (sending node, receiving stage) to the link's node
    links: dict[tuple[int, int], list[int]] = {}
    nodes = [node for word in graph.words for node in word]
    for node in nodes:
        action = graph.actions[node]
        k = action.stage
        forward = action.kind is Kind.FORWARD
        to = k + 1 if forward else k - 1
        if not (forward or action.message is not None) or not 0 <= to < len(placement) or placement[to] == placement[k]:
            continue
        send = action._replace(kind=Kind.SEND_ACTIVATION if forward else Kind.SEND_GRADIENT)
        sending[node, to] = len(graph.actions)
        links.setdefault((placement[k], placement[to]), []).append(len(graph.actions))
        graph.actions.append(send)
        graph.duration.append(times[min(k, to)])
        graph.needs.append([(node, 0.0, 0)])
    graph.words += links.values()
    for node in nodes:
        k = graph.actions[node].stage
        graph.needs[node] = [(sending.get((u, k), u), lag, calls) for u, lag, calls in graph.needs[node]]


@dataclass(slots=True)
class SimulatedRun:
    """The times of one self-timed call: start and end of each node, and the node that it waited for last."""

    start: list[float]
    end: list[float]
    cause: list[Token]


def run(graph: EventGraph, before: Sequence[Sequence[float]], duration: Sequence[float] | None = None) -> SimulatedRun:
    """Run one call with every node as early as possible.

    Args:
        graph: the event graph.
        before: ends of all nodes in the calls before this one, the last call first; results of calls before those are there at
            time 0.
        duration: durations of the nodes; default: the graph's.

    Raises:
        Deadlock: the lists are in a deadlock; the message names the actions that are stuck.
    """
    # Each machine works until a node needs a result that is not there, and is woken up by the node that makes it. Times do
    # not depend on the sequence of machines, because a start is the latest of known ends; so the sweep is linear.
    duration = graph.duration if duration is None else duration
    start = [math.nan] * len(duration)
    end: list[float | None] = [None] * len(duration)
    now = [before[0][word[-1]] if before and word else 0.0 for word in graph.words]
    cause, place = graph.previous.copy(), [0] * len(graph.words)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(graph.words)))
    while ready:
        machine = ready.pop()
        word, i, t = graph.words[machine], place[machine], now[machine]
        while i < len(word):
            node = word[i]
            for other, lag, calls in graph.needs[node]:
                if calls:
                    if calls <= len(before) and before[calls - 1][other] + lag > t:
                        t = before[calls - 1][other] + lag
                        cause[node] = other, calls
                    continue
                arrived = end[other]
                if arrived is None:
                    waiting.setdefault(other, []).append(machine)
                    break
                if arrived + lag > t:
                    t = arrived + lag
                    cause[node] = other, 0
            else:
                start[node] = t
                t += duration[node]
                end[node] = t
                i += 1
                if node in waiting:
                    ready += waiting.pop(node)
                continue
            break
        place[machine], now[machine] = i, t
    stuck = [graph.actions[word[i]] for word, i in zip(graph.words, place, strict=True) if i < len(word)]
    if stuck:
        raise Deadlock(stuck)
    return SimulatedRun(start, end, cause)  # type: ignore[arg-type]  # all have ended
