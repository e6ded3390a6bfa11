"""Schedules: for every call and rank the numbers of its tasks in order. One value is validated, timed, bounded, drawn and run."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain, groupby, pairwise

from nwise.flow import Flows
from nwise.schedule.actions import PASSES, Action, Kind, transfer
from nwise.schedule.ages import Ages
from nwise.schedule.costs import CLOSE, TYPICAL, Costs
from nwise.schedule.graph import TaskGraph, task_graph
from nwise.schedule.placement import Placement


@dataclass(frozen=True)
class Schedule:
    """The work of every rank in one call of `Pipeline.step`, or in one cycle of calls for a rotating strategy.

    Args:
        order: name of the rule that made it.
        graph: the tasks, and what each needs.
        lists: numbers of the tasks in order, ``[calls][ranks][tasks]``: for every call of the cycle a list for each rank, which
            ends with the updates of its stages.
        costs: costs of one micro-batch, by which it is timed; default: `TYPICAL`.

    >>> from nwise.schedule import PAPER, best
    >>> schedule = best("2-wise", num_stages=4, num_microbatches=2, costs=PAPER)
    >>> schedule.period, schedule.lower_bound, schedule.with_costs(replace(PAPER, latency=1)).period
    (6.0, 6.0, 8.0)
    """

    order: str
    graph: TaskGraph
    lists: tuple[tuple[tuple[int, ...], ...], ...]
    costs: Costs = TYPICAL

    @cached_property
    def flows(self) -> Flows:
        """Flow of every micro-batch, ``[cycle][M]``."""
        return self.graph.flows

    @cached_property
    def placement(self) -> Placement:
        """Rank of every stage."""
        return self.graph.placement

    @cached_property
    def ages(self) -> Ages:
        """Age of every pass under the strategy."""
        return self.graph.ages

    @property
    def num_stages(self) -> int:
        """Number of stages, A."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return 1 + max(self.placement)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per mini-batch, M."""
        return len(self.flows[0])

    @cached_property
    def oldest(self) -> int:
        """Age of the oldest gradients."""
        return self.ages.oldest

    @cached_property
    def by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of every rank's tasks in the whole cycle, in order."""
        return tuple(tuple(chain(*lists)) for lists in zip(*self.lists, strict=True))

    @cached_property
    def work(self) -> tuple[tuple[Action, ...], ...]:
        """The computations and updates of every rank in the whole cycle, in order."""
        return tuple(tuple(self.graph.tasks[task] for task in tasks) for tasks in self.by_rank)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The same with messages, as a rank runs them: a send right after its task, a receive right before its first use."""
        receives = defaultdict[int, list[Action]](list)
        sends = dict[int, list[Action]]()
        for (task, user), (send, receive) in zip(self.messages, self.transfers, strict=True):
            sends[task] = [send]
            receives[user].append(receive)
        return tuple(
            tuple(chain(*((*receives[task], self.graph.tasks[task], *sends.get(task, ())) for task in tasks)))
            for tasks in self.by_rank
        )

    @cached_property
    def late_stages(self) -> frozenset[int]:
        """Stages with passes of earlier mini-batches than the newest, whose parameters have changed since their forward."""
        return frozenset(a.stage for a in self.graph.tasks if a.age)

    @cached_property
    def passes(self) -> tuple[Counter[tuple[int, int]], ...]:
        """Number of backward passes by (stage, micro-batch), for every mini-batch in the cycle."""
        counts = [Counter[tuple[int, int]]() for _ in self.flows]
        for action in self.graph.tasks:
            if action.kind in PASSES:
                counts[action.minibatch][action.stage, action.microbatch] += 1
        return tuple(counts)

    @cached_property
    def continued(self) -> frozenset[int]:
        """The tasks that are followed by a pass of the same stage and micro-batch, with no other work of the rank in between."""
        tasks = self.graph.tasks
        result = set[int]()

        def work(task: int) -> tuple[int, int, int, int, bool]:
            a = tasks[task]
            return a.stage, a.microbatch, a.minibatch, a.age, a.kind is Kind.UPDATE

        for numbers in self.by_rank:
            for _, run in groupby(numbers, key=work):
                together = list(run)
                last = max((i for i, task in enumerate(together) if tasks[task].kind in PASSES), default=0)
                result.update(together[:last])
        return frozenset(result)

    @cached_property
    def microbatches(self) -> dict[tuple[int, int, int], list[int]]:
        """The computations of every stage and micro-batch in the order of time, by (stage, micro-batch, mini-batch)."""
        tasks = self.graph.tasks
        late = self.graph.late
        found: dict[tuple[int, int, int], list[int]] = {}
        for task in sorted(self.place, key=lambda task: (late[task], self.place[task])):
            if tasks[task].kind is not Kind.UPDATE:
                found.setdefault(_microbatch(tasks[task]), []).append(task)
        return found

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int, int]]:
        """The (stage, micro-batch, mini-batch) whose forwards run again (`nwise.schedule.recompute`)."""
        return frozenset(_microbatch(a) for a in self.graph.tasks if a.kind is Kind.RECOMPUTE)

    @cached_property
    def frees(self) -> frozenset[int]:
        """The forwards and passes after which a stage lets its graph go, because a second forward makes it again."""
        tasks = self.graph.tasks
        found = set[int]()
        for key in self.recomputed:
            work = [n for n in self.microbatches[key] if tasks[n].kind is not Kind.HEAD]
            found.update(one for one, after in pairwise(work) if tasks[after].kind is Kind.RECOMPUTE)
        return frozenset(found)

    @cached_property
    def place(self) -> dict[int, int]:
        """Place of every task in the list of its rank, over the whole cycle."""
        return {task: place for tasks in self.by_rank for place, task in enumerate(tasks)}

    @cached_property
    def messages(self) -> tuple[tuple[int, int], ...]:
        """Every task whose result travels to another rank, with the task that receives it: the first in time to need it."""
        # A later one finds it on its rank. What is older comes in a later call.
        tasks = self.graph.tasks
        place = self.place
        first: dict[int, tuple[int, int, int]] = {}
        for user, needs in enumerate(self.graph.needs):
            for need in needs:
                if need.link:
                    use = tasks[user].age, place[user], user
                    first[need.task] = min(use, first.get(need.task, use))
        return tuple(sorted((task, user) for task, (_, _, user) in first.items()))

    @cached_property
    def transfers(self) -> tuple[tuple[Action, Action], ...]:
        """The send and the receive of every message."""
        tasks = self.graph.tasks
        return tuple(transfer(tasks[task], tasks[user]) for task, user in self.messages)

    # Its times and bytes ----------------------------------------------------------------------------
    #
    # Most pipelines of one process ask for none of them, so what computes them is imported here.

    def with_costs(self, costs: Costs) -> Schedule:
        """Return the same lists with other costs."""
        return replace(self, costs=costs)

    @cached_property
    def period(self) -> float:
        """Exact time per mini-batch in the steady state; the mean over the cycle for a rotating strategy."""
        return self.period_within(math.inf)

    def period_within(self, limit: float) -> float:
        """Return the period if it is at most `limit`; else some time above `limit`, which takes less time to find."""
        from nwise.schedule.clock import make_clock
        from nwise.schedule.period import period

        cycle = len(self.flows)
        return period(make_clock(self), limit * cycle) / cycle

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound on the time per mini-batch, for any order of these actions on these ranks."""
        from nwise.schedule.bounds import lower_bound

        return lower_bound(self.flows, self.costs, self.placement, self.ages) / len(self.flows)

    @property
    def optimal(self) -> bool:
        """Whether the period meets the lower bound, up to rounding."""
        return self.period <= self.lower_bound * (1 + CLOSE)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time per mini-batch that every rank computes."""
        from nwise.schedule.clock import durations

        time = durations(self.graph, self.costs)
        return tuple(sum(time[task] for task in tasks) / len(self.flows) for tasks in self.by_rank)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak memory of every rank (`nwise.schedule.memory`)."""
        from nwise.schedule.memory import peak_bytes

        return peak_bytes(self)

    # Its messages -----------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Hash of the tasks, of what they need, and of the lists, the same in every process."""
        graph = self.graph
        return sha256(repr((graph.placement, graph.tasks, graph.needs, self.lists)).encode()).hexdigest()

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Largest number of micro-batches in flight on every stage: forward done, last use still to come."""
        tasks = self.graph.tasks
        late = self.graph.late
        #     F(0) F(1) B(0) F(2) B(1) B(2)      a micro-batch counts from its forward to its last task:
        #      1    2    2    2    2    1        at most two are in flight
        now = [0] * self.num_stages
        most = [0] * self.num_stages
        for numbers in self.by_rank:
            work = [task for task in numbers if tasks[task].kind is not Kind.UPDATE]
            # The last in time: a pass of an earlier mini-batch may stand before the forward in the list.
            last = {_microbatch(tasks[task]): task for task in sorted(work, key=late.__getitem__)}
            # A cycle begins with the micro-batches of earlier ones whose last task comes late.
            for task in last.values():
                now[tasks[task].stage] += late[task]
            for task in work:
                a = tasks[task]
                now[a.stage] += a.kind is Kind.FORWARD
                most[a.stage] = max(most[a.stage], now[a.stage])
                now[a.stage] -= last[_microbatch(a)] == task
        return tuple(most)


def _microbatch(action: Action) -> tuple[int, int, int]:
    return action.stage, action.microbatch, action.minibatch


def arrange(
    order: str,
    flows: Flows,
    lists: Sequence[Iterable[Action]],
    placement: Placement = (),
    ages: Ages | None = None,
    costs: Costs = TYPICAL,
) -> Schedule:
    """Return the schedule of hand-made lists.

    Args:
        order: name of the schedule.
        flows: flow of every micro-batch, ``[cycle][M]``.
        lists: computations of every rank in order; the updates of its stages, which end every call, are added.
        placement: rank of every stage; default: a rank for each.
        ages: age of every pass under the strategy; default: 0.
        costs: costs of one micro-batch; default: `TYPICAL`.

    Raises:
        ValueError: a computation is missing, or unknown.
    """
    ranks = 1 + max(placement or range(len(flows[0][0].stages)))
    if len(lists) != ranks:
        raise ValueError(f"`lists` should have one list for each of the {ranks} ranks. Found {len(lists)}.")
    lists = [[a for a in actions if a.kind is not Kind.UPDATE] for actions in lists]
    graph = task_graph(flows, placement, ages, chain(*lists))
    numbers = [graph.numbers(actions) for actions in lists]
    calls = [[[n for n in rank if graph.call[n] == call] for rank in numbers] for call in range(len(flows))]
    return with_updates(order, graph, calls, costs)


def with_updates(order: str, graph: TaskGraph, calls: Sequence[Sequence[Sequence[int]]], costs: Costs) -> Schedule:
    """Return the schedule of lists of computations, ``[calls][ranks]``, with the updates of every rank at the end of each."""
    # A stage's weights change once for each call, after everything else in it, so no pass sees half of an update.
    ends: list[list[list[int]]] = [[[] for _ in lists] for lists in calls]
    for task, a in enumerate(graph.tasks):
        if a.kind is Kind.UPDATE:
            ends[a.minibatch][graph.placement[a.stage]].append(task)
    lists = [
        tuple((*tasks, *updates) for tasks, updates in zip(*both, strict=True))
        for both in zip(calls, ends, strict=True)
    ]
    return Schedule(order, graph, tuple(lists), costs)


def check_schedule(schedule: object) -> None:
    """Raise TypeError unless `schedule` is a `Schedule`."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"`schedule` should be a Schedule, such as `nwise.schedule.best(...)`. Found {type(schedule).__name__}."
        )
