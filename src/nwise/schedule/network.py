"""A schedule as a network of timed nodes, and the self-timed run of one mini-batch through it.

The machines are the stages and, if bandwidth is finite, the links, which transfer messages in the order of their sends.
Each machine works through its word of nodes. A node starts once its machine is free and its inputs have arrived.

Two things connect a mini-batch with the next one. A machine starts again when it has finished its word: a stage's forward
comes after its own update, and nothing else synchronises stages. And a stage that does not receive a gradient for every
micro-batch starts a forward only after its activation of the previous mini-batch has been taken, so at most one mini-batch
of activations waits at its boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Costs, prices
from nwise.schedule.lists import Product, Schedule, held_back, needs, product, stuck_message


# The graph of two stages with two actions each, one micro-batch, end-to-end (without the head). A node waits for those with
# an arc to it:
#
#     stage 0     F0 -------------> W0 ===> F0 of the next mini-batch
#                  |                ^
#                  | + latency      | + latency
#                  v                |
#     stage 1     F1 -------------> B1 ===> F1 of the next mini-batch
#
# Without the arcs ===> the graph has no cycle, so one sweep (`run`) times a mini-batch. With them it has cycles, which
# determine the period (`nwise.schedule.period`).
@dataclass(slots=True)
class Network:
    """A graph of numbered nodes.

    Args:
        num_stages: number of machines that are stages, which come first; the others are links.
        words: nodes of every machine, in order.
        duration: duration of every node.
        needs: for every node the nodes that it waits for, each with the travel time of its result.
        taken: for a forward on a held-back stage, the forward that takes its activation.
        actions: action of every node; the nodes of a link have the send.
    """

    num_stages: int
    words: list[list[int]]
    duration: list[float]
    needs: list[list[tuple[int, float]]]
    taken: dict[int, int]
    actions: list[Action]


def network(schedule: Schedule, costs: Costs) -> Network:
    """Return the network of a schedule."""
    num_stages = schedule.num_stages
    price = prices(costs, num_stages)
    flows = schedule.flows
    actions: list[Action] = []
    duration: list[float] = []
    words: list[list[int]] = []
    made: dict[Product, int] = {}
    for k, word in enumerate(schedule.words):
        first = len(actions)
        for node, action in enumerate(word, first):
            key = product(action)
            if key is not None:
                made[key] = node
            duration.append(price[k].time(action, flows[action.turn][action.microbatch].stages[k]))
        actions += word
        words.append(list(range(first, len(actions))))
    wanted = [[(made[key], costs.latency if key[1] != a.stage else 0.0) for key in needs(a, flows)] for a in actions]
    net = Network(num_stages, words, duration, wanted, {}, actions)
    for k in held_back(flows):
        forwards = ((node, actions[node]) for node in words[k])
        net.taken.update(
            {node: made["F", k + 1, a.microbatch, a.turn] for node, a in forwards if a.kind is Kind.FORWARD}
        )
    if not math.isinf(costs.bandwidth):
        _add_links(net, [size / costs.bandwidth for size in costs.per_stage("message_bytes", num_stages)])
    return net


def _add_links(net: Network, times: Sequence[float]) -> None:
    """Put a node on a link between every sender and the nodes that wait for its message."""
    # A link is a machine too, so its messages queue up like the actions of a stage:
    #
    #     F0(0) ----> SX0(0) --latency--> F1(0)         SX0(0) and SX0(1) are the word of the link 0 -> 1
    #     F0(1) ----> SX0(1) --latency--> F1(1)
    sending: dict[tuple[int, int], int] = {}  # (sending node, receiving stage) to the link's node
    stages = list(enumerate(net.words))
    for k, word in stages:
        for down in (True, False):
            to = k + 1 if down else k - 1
            if not 0 <= to < net.num_stages:
                continue
            link = []
            for node in word:
                kind, _, m, q, turn = net.actions[node]
                if (kind is Kind.FORWARD) if down else (q is not None):
                    send = Action(Kind.SEND_ACTIVATION if down else Kind.SEND_GRADIENT, k, m, q, turn)
                    sending[node, to] = len(net.actions)
                    link.append(len(net.actions))
                    net.actions.append(send)
                    net.duration.append(times[k if down else to])
                    net.needs.append([(node, 0.0)])
            net.words.append(link)
    for _, word in stages:
        for node in word:
            k = net.actions[node].stage
            net.needs[node] = [
                (sending.get((u, k), u) if net.actions[u].stage != k else u, lag) for u, lag in net.needs[node]
            ]


@dataclass(slots=True)
class SimulatedRun:
    """The times of one self-timed mini-batch: start and end of each node."""

    start: list[float]
    end: list[float]


def run(
    net: Network, free: Sequence[float], taken: dict[int, float], duration: Sequence[float] | None = None
) -> SimulatedRun:
    """Run one mini-batch with every node as early as possible.

    Args:
        net: the network.
        free: earliest start of each machine.
        taken: earliest start of each node in `Network.taken`.
        duration: durations of the nodes; default: the network's.

    Raises:
        ValueError: the lists are in a deadlock; the message names the actions that are stuck.
    """
    # Each machine works until a node needs a result that is not there, and is woken up by the node that makes it. Times do
    # not depend on the sequence of machines, because a start is the latest of known ends; so the sweep is linear.
    duration = net.duration if duration is None else duration
    start = [math.nan] * len(duration)
    end: list[float | None] = [None] * len(duration)
    now = list(free)
    place = [0] * len(net.words)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(net.words)))
    while ready:
        machine = ready.pop()
        word, i, t = net.words[machine], place[machine], now[machine]
        while i < len(word):
            node = word[i]
            for other, lag in net.needs[node]:
                arrived = end[other]
                if arrived is None:
                    waiting.setdefault(other, []).append(machine)
                    break
                if arrived + lag > t:
                    t = arrived + lag
            else:
                if node in taken and taken[node] > t:
                    t = taken[node]
                start[node] = t
                t += duration[node]
                end[node] = t
                i += 1
                if node in waiting:
                    ready += waiting.pop(node)
                continue
            break
        place[machine], now[machine] = i, t
    stuck = [net.actions[word[i]] for word, i in zip(net.words, place, strict=True) if i < len(word)]
    if stuck:
        raise ValueError(stuck_message(stuck))
    return SimulatedRun(start, end)  # type: ignore[arg-type]  # all have ended
