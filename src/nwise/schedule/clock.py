"""The clock: the self-timed run of a schedule's lists, in which everything starts as early as possible.

Its machines are the ranks and, if bandwidth is finite, the links, which transfer messages in the order of their sends. Each
machine works through its list of nodes. A node is a task, or the transfer of a message. It starts once its machine is free and
its inputs have arrived.

Two things connect a cycle of calls with earlier ones. A machine starts again when it has finished its list: a forward comes
after the updates of its rank, and nothing else synchronises ranks. And a task of another age than the task whose result it needs
takes the result of an earlier call. A rank that waits for nothing runs ahead, as on a link whose window holds enough messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from nwise.schedule.costs import Costs, prices
from nwise.schedule.graph import TaskGraph
from nwise.schedule.schedule import Schedule
from nwise.schedule.sweep import sweep

__all__ = ["durations"]

# A node that another one waits for: its number, the travel time of its result, and the number of cycles between the two.
Wait = tuple[int, float, int]
# A node, and by how many cycles its result is used later.
Token = tuple[int, int]


@dataclass(slots=True)
class Times:
    """The times of one cycle: start and end of each node, and the node that it waited for last."""

    start: list[float]
    end: list[float]
    cause: list[Token]


# Two ranks with a stage of two actions each, one micro-batch, end-to-end (without the head). A node waits for those with an arc
# to it:
#
#     rank 0      F0 -------------> W0 ===> F0 of the next call
#                  |                ^
#                  | + latency      | + latency
#                  v                |
#     rank 1      F1 -------------> B1 ===> F1 of the next call
#
# Without the arcs ===> there is no cycle, so one sweep times a call. With them there are cycles, which determine the period
# (`nwise.schedule.period`). Under a delay of one, B1 works on the mini-batch before F1's, and the arc F1 -> B1 goes to the next
# call, too.
@dataclass
class Clock:
    """Timed nodes in lists.

    Args:
        lists: nodes of every machine, in order; the ranks come first, then links.
        duration: duration of every node.
        waits: what every node waits for.
        names: name of every node, for errors; default: none.
        transfers: node of a link for every task whose result travels; default: none, without links.
    """

    lists: Sequence[Sequence[int]]
    duration: list[float]
    waits: list[list[Wait]]
    names: Sequence[object] = ()
    transfers: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def previous(self) -> list[Token]:
        """The node before every node on its machine, and how many cycles before: 0, or 1 for the first of a list."""
        #     list a b c    previous[a] = c, 1: the machine begins again after c      previous[b] = a, 0
        previous: list[Token] = [(-1, 1)] * len(self.duration)
        for nodes in self.lists:
            for before, node in pairwise(nodes):
                previous[node] = before, 0
            if nodes:
                previous[nodes[0]] = nodes[-1], 1
        return previous

    def run(self, before: Sequence[Sequence[float]] = (), duration: Sequence[float] | None = None) -> Times:
        """Run one cycle.

        Args:
            before: ends of all nodes in the cycles before this one, the last first; results of cycles before those are there at
                time 0. Default: none.
            duration: durations of the nodes; default: the clock's.

        Raises:
            Deadlock: the lists are in a deadlock; the message names the actions that are stuck.
        """
        duration = self.duration if duration is None else duration
        waits = self.waits
        start = [math.nan] * len(duration)
        cause = self.previous.copy()
        end: list[float | None] = [None] * len(duration)
        now = [before[0][nodes[-1]] if before and nodes else 0.0 for nodes in self.lists]

        def work(machine: int, node: int) -> int | None:
            # The start is the latest of all times that it waits for; `cause` is what decides it, the arc of a critical path.
            time = now[machine]
            for other, lag, cycles in waits[node]:
                if cycles > len(before):
                    continue
                arrived = before[cycles - 1][other] if cycles else end[other]
                if arrived is None:
                    return other
                if arrived + lag > time:
                    time = arrived + lag
                    cause[node] = (other, cycles)
            start[node] = time
            end[node] = now[machine] = time + duration[node]
            return None

        sweep(self.lists, work, self.names)
        return Times(start, end, cause)  # type: ignore[arg-type]  # all have ended


def durations(graph: TaskGraph, costs: Costs) -> list[float]:
    """Return the time of every task."""
    price = prices(costs, len(graph.placement))
    return [price[a.stage].time(a, graph.stage(task)) for task, a in enumerate(graph.tasks)]


def make_clock(schedule: Schedule) -> Clock:
    """Return the clock of a schedule; its first nodes are the tasks of the graph."""
    graph = schedule.graph
    costs = schedule.costs
    lag = schedule.costs.latency
    late = graph.late
    time = durations(graph, costs)
    waits = [
        [(n, lag if link else 0.0, late[task] - late[n]) for n, _, link in needs]
        for task, needs in enumerate(graph.needs)
    ]
    lists = [*schedule.by_rank]
    names = [*graph.tasks]
    if math.isinf(costs.bandwidth):
        return Clock(lists, time, waits, names)
    # A link is a machine too, so its messages queue up like the tasks of a rank:
    #
    #     F0(0) ----> transfer ----latency--> F1(0)        these two transfers are the list of the link 0 -> 1
    #     F0(1) ----> transfer ----latency--> F1(1)
    sizes = costs.per_stage("message_bytes", schedule.num_stages)
    links: dict[tuple[int, int], list[int]] = {}
    transfers: dict[int, int] = {}
    for task, user in sorted(schedule.messages, key=lambda pair: schedule.place[pair[0]]):
        transfers[task] = node = len(time)
        links.setdefault((graph.ranks[task], graph.ranks[user]), []).append(node)
        time.append(sizes[min(graph.tasks[task].stage, graph.tasks[user].stage)] / costs.bandwidth)
        names.append(graph.tasks[task])
        waits.append([(task, 0.0, 0)])
    for task, needs in enumerate(graph.needs):
        for i, need in enumerate(needs):
            if need.link:
                waits[task][i] = (transfers[need.task], *waits[task][i][1:])
    return Clock([*lists, *links.values()], time, waits, names, transfers)
