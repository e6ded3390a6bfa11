"""Simulation: the start and end of every action of some mini-batches, and numbers that follow from them.

Stages run their lists as early as possible. Messages take a latency and, on links of finite bandwidth, queue up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product

from nwise.checks import check_at_least
from nwise.schedule.actions import Action
from nwise.schedule.clock import Clock, Times, make_clock
from nwise.schedule.schedule import Schedule, check_schedule

__all__ = ["Event", "Message", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class Event:
    """A computation or an update with its times.

    Args:
        action: the computation or update.
        cycle: index of the pass through the lists, from 0.
        start, end: times in the unit of the costs.
        batch: index of the mini-batch, from 0.
    """

    action: Action
    cycle: int
    start: float
    end: float
    batch: int


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor on its way from one stage to the next or the previous.

    Args:
        sender, receiver: indices of the stages.
        sent: time at which the action that makes it ends.
        arrives: time from which it can be used.
        used: start of the first action that needs it.
    """

    sender: int
    receiver: int
    sent: float
    arrives: float
    used: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Args:
        schedule: the schedule that was run.
        clock: the clock of the schedule.
        runs: times of its nodes, for each pass through the lists.
    """

    schedule: Schedule
    clock: Clock
    runs: list[Times]

    @property
    def cycles(self) -> int:
        """Number of passes through the lists."""
        return len(self.runs)

    @cached_property
    def events(self) -> list[Event]:
        """Computations and updates, in order of their start."""
        tasks = self.schedule.graph.tasks
        events = [
            Event(tasks[task], cycle, times.start[task], times.end[task], batch)
            for cycle, times in enumerate(self.runs)
            for task in chain(*self.schedule.by_rank)
            if (batch := _batch(self.schedule, task, cycle)) >= 0
        ]
        return sorted(events, key=lambda e: (e.start, e.end, e.action.stage))

    @cached_property
    def messages(self) -> list[Message]:
        """All messages between stages, each with the first task that uses it."""
        graph = self.schedule.graph
        transfers = self.clock.transfers
        found = list[Message]()
        for (cycle, times), (task, user) in product(enumerate(self.runs), self.schedule.messages):
            earlier = graph.late[user] - graph.late[task]
            if earlier <= cycle and _batch(self.schedule, user, cycle) >= 0:
                sent = self.runs[cycle - earlier]
                sender = graph.tasks[task].stage
                receiver = graph.tasks[user].stage
                arrives = sent.end[transfers.get(task, task)] + self.schedule.costs.latency
                found.append(Message(sender, receiver, sent.end[task], arrives, times.start[user]))
        return found

    @cached_property
    def period(self) -> float:
        """Time per mini-batch in the second half of the run, at the stage that ends last."""
        # Without the first half, in which the pipeline fills.
        ends = [0.0, *(max(times.end) for times in self.runs)]
        half = len(self.runs) // 2
        return (ends[-1] - ends[half]) / ((len(self.runs) - half) * len(self.schedule.flows))

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the second half of the run in which each rank works."""
        # A rank that ran ahead waits later, when its messages fill the window, so its time is that of the slowest.
        length = self.period * len(self.schedule.flows)
        work = [sum(self.clock.duration[task] for task in tasks) for tasks in self.schedule.by_rank]
        return tuple(one / length if length else 0.0 for one in work)

    @property
    def bubble(self) -> float:
        """Share of the second half of the run in which ranks wait, the mean over ranks."""
        return 1.0 - sum(self.utilisation) / len(self.utilisation)


def _batch(schedule: Schedule, task: int, cycle: int) -> int:
    """Return the index of a task's mini-batch; below 0 for tasks that the first calls leave out."""
    return (cycle - schedule.graph.late[task]) * len(schedule.flows) + schedule.graph.tasks[task].minibatch


def simulate(schedule: Schedule, *, cycles: int = 4) -> Timeline:
    """Simulate some mini-batches of a schedule.

    Args:
        schedule: the schedule, with its costs.
        cycles: number of passes through the lists, each one mini-batch, or the cycle of a rotating strategy;
            default: 4.

    Raises:
        ValueError: `cycles` is out of range, or the lists are in a deadlock.
        TypeError: `schedule` is not a `Schedule`.

    >>> from nwise.schedule import PAPER, best
    >>> schedule = best("2-wise", num_stages=4, num_microbatches=2, costs=PAPER)
    >>> simulate(schedule).period == schedule.period == 6
    True
    """
    check_at_least(1, cycles=cycles)
    check_schedule(schedule)
    clock = make_clock(schedule)
    size = len(schedule.graph.tasks)
    runs: list[Times] = []
    for cycle in range(cycles):
        # The first calls leave out the passes of mini-batches that do not exist: these take no time and wait for nothing.
        left_out = {task for task in range(size) if _batch(schedule, task, cycle) < 0}
        left_out |= {clock.transfers[task] for task in left_out & clock.transfers.keys()}
        times = [0.0 if node in left_out else time for node, time in enumerate(clock.duration)]
        waits = [[] if node in left_out else waited for node, waited in enumerate(clock.waits)]
        runs.append(replace(clock, waits=waits).run([one.end for one in reversed(runs)], times))
    return Timeline(schedule, clock, runs)
