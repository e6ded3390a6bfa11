"""A schedule as a network of timed nodes, and one self-timed mini-batch of it.

Machines are the stages and, where bandwidth is finite, the links, which pass messages on in the order
they are sent. Each machine works through its word of nodes; a node starts once its machine is free and all that
it needs has arrived. From one mini-batch to the next two things are carried: a machine starts again when it has
finished its word (so a stage's forward comes after its own update, and nothing else synchronises stages), and
where not every micro-batch has a gradient that flows back, a stage starts a forward only after its activation of the mini-batch
before has been taken, so that no more than a mini-batch of them ever waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Chains, Costs, check_chains, prices
from nwise.schedule.lists import Product, Schedule, held_back, needs, product, stuck_message


@dataclass(slots=True)
class Network:
    """Nodes by number.

    Args:
        num_stages: the first machines are the stages, others are links.
        words: per machine its nodes in order.
        duration: of each node.
        needs: per node those that it waits for and how long their result travels.
        taken: for a forward whose boundary lets nothing back, the forward that takes its activation.
        actions: what each node stands for; a link's nodes stand for the send.
    """

    num_stages: int
    words: list[list[int]]
    duration: list[float]
    needs: list[list[tuple[int, float]]]
    taken: dict[int, int]
    actions: list[Action]


def network(schedule: Schedule, costs: Costs, chains: Chains = "stored") -> Network:
    """The network of a schedule."""
    check_chains(chains)
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
            duration.append(price[k].of(action, flows[action.turn][action.microbatch].stages[k], chains))
        actions += word
        words.append(list(range(first, len(actions))))
    wanted = [[(made[key], costs.latency if key[1] != a.stage else 0.0) for key in needs(a, flows)] for a in actions]
    found = Network(num_stages, words, duration, wanted, {}, actions)
    for k in held_back(flows):
        forwards = ((node, actions[node]) for node in words[k])
        found.taken.update(
            {node: made["F", k + 1, a.microbatch, a.turn] for node, a in forwards if a.kind is Kind.FORWARD}
        )
    if not math.isinf(costs.bandwidth):
        _add_links(found, [size / costs.bandwidth for size in costs.of("message_bytes", num_stages)])
    return found


def _add_links(found: Network, times: Sequence[float]) -> None:
    """Put a node on a link between every send and those who wait for it."""
    sending: dict[tuple[int, int], int] = {}  # (sender, receiving stage) to the link's node
    stages = list(enumerate(found.words))
    for k, word in stages:
        for down in (True, False):
            to = k + 1 if down else k - 1
            if not 0 <= to < found.num_stages:
                continue
            link = []
            for node in word:
                kind, _, m, q, turn = found.actions[node]
                if (kind is Kind.FORWARD) if down else (q is not None):
                    send = Action(Kind.SEND_ACTIVATION if down else Kind.SEND_GRADIENT, k, m, q, turn)
                    sending[node, to] = len(found.actions)
                    link.append(len(found.actions))
                    found.actions.append(send)
                    found.duration.append(times[k if down else to])
                    found.needs.append([(node, 0.0)])
            found.words.append(link)
    for _, word in stages:
        for node in word:
            k = found.actions[node].stage
            found.needs[node] = [
                (sending.get((u, k), u) if found.actions[u].stage != k else u, lag) for u, lag in found.needs[node]
            ]


@dataclass(slots=True)
class Run:
    """One self-timed mini-batch: when each node starts and ends."""

    start: list[float]
    end: list[float]


def run(net: Network, free: Sequence[float], taken: dict[int, float], duration: Sequence[float] | None = None) -> Run:
    """Let every machine work as early as it can.

    Args:
        net: the network.
        free: when each machine may start.
        taken: when the nodes of `Network.taken` may start at the earliest.
        duration: other times than the network's.

    Raises:
        ValueError: the lists wait for each other; it names the actions that are stuck.
    """
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
    return Run(start, end)  # type: ignore[arg-type]  # all have ended
