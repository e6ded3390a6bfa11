"""Local improvement: swap what follows each other on the critical cycle, for stages of unequal speed.

The period is the mean of the longest cycle of waits, and only a change on that cycle can shorten it. So every step tries
each pair of neighbours on the cycle the other way round and takes the best that has not just been undone (tabu search,
as for job shops); where that leads no further, the best schedule so far is shaken by a few random swaps and the search
goes on from there. The random numbers are always the same, so the result is too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from nwise.schedule.actions import Kind
from nwise.schedule.lists import Schedule
from nwise.schedule.network import Network
from nwise.schedule.period import Cycle, critical_cycle

_MEMORY = 12  # moves that are not undone at once
_PATIENCE = 8  # steps without a shorter period before the schedule is shaken
_SHAKES = 6
_CLOSE = 1e-9


def improve(
    schedule: Schedule,
    network_of: Callable[[Schedule], Network],
    bound: float,
    looks: int,
    allowed: Callable[[Schedule], bool] = lambda schedule: True,
) -> Schedule:
    """A schedule of the same actions with a shorter period, if one is found near; else the same one.

    Args:
        schedule: where to start.
        network_of: its network.
        bound: the period at which to stop.
        looks: how many neighbours may be looked at.
        allowed: refuses schedules, as for memory.
    """
    search = _Search(network_of(schedule), looks)
    words, shortest = search.words(), search.cycle.period
    found, idle = schedule, 0
    while search.looks > 0 and shortest > bound * (1 + _CLOSE):
        if idle >= _PATIENCE or not search.step():
            search.shake(words)
            idle = 0
        idle += 1
        if search.cycle.period < shortest * (1 - _CLOSE) and allowed(other := _scheduled(schedule, search.net)):
            words, shortest, found, idle = search.words(), search.cycle.period, other, 0
    return found


def _scheduled(schedule: Schedule, net: Network) -> Schedule:
    words = tuple(tuple(net.actions[node] for node in word) for word in net.words[: net.num_stages])
    return replace(schedule, order="improved", words=words)


class _Search:
    """A walk through neighbouring schedules.

    Args:
        net: changed in place.
        looks: how many schedules may be timed.
    """

    def __init__(self, net: Network, looks: int) -> None:
        self.net = net
        self.looks = looks
        self.cycle = critical_cycle(net)
        self._undone: deque[tuple[int, int]] = deque(maxlen=_MEMORY)
        self._random = random.Random(0)

    def words(self) -> list[list[int]]:
        """A copy of the words."""
        return [list(word) for word in self.net.words]

    def step(self) -> bool:
        """Go to the best neighbour; False if there is none."""
        place = self._places()
        best: tuple[Cycle, int, int] | None = None
        for u, v in dict.fromkeys(self.cycle.paths):
            if u not in place or v not in place or (u, v) in self._undone:
                continue
            machine, i = place[u]
            if place[v] != (machine, i + 1) or not self._may_swap(u, v):
                continue
            cycle = self._swapped(machine, i)
            self._swap(machine, i)
            if cycle is not None and (best is None or cycle.period < best[0].period):
                best = cycle, machine, i
        if best is None:
            return False
        self.cycle, machine, i = best
        self._swap(machine, i)
        self._undone.append((self.net.words[machine][i], self.net.words[machine][i + 1]))
        return True

    def shake(self, words: list[list[int]]) -> None:
        """Go a few random swaps away from the given words."""
        self.net.words = [list(word) for word in words]
        self._undone.clear()
        done = 0
        for _ in range(10 * _SHAKES):
            machine = self._random.randrange(self.net.num_stages)
            i = self._random.randrange(len(self.net.words[machine]))
            word = self.net.words[machine]
            if i + 1 < len(word) and self._may_swap(word[i], word[i + 1]):
                cycle = self._swapped(machine, i)
                if cycle is None:
                    self._swap(machine, i)
                    continue
                self.cycle = cycle
                done += 1
                if done == _SHAKES or self.looks <= 0:
                    return
        self.looks -= 1  # so that a schedule in which nothing may be swapped comes to an end

    def _places(self) -> dict[int, tuple[int, int]]:
        stages = self.net.words[: self.net.num_stages]
        return {node: (machine, i) for machine, word in enumerate(stages) for i, node in enumerate(word)}

    def _swap(self, machine: int, i: int) -> None:
        word = self.net.words[machine]
        word[i], word[i + 1] = word[i + 1], word[i]

    def _swapped(self, machine: int, i: int) -> Cycle | None:
        """Swap two neighbours; the new critical cycle, None if the lists would wait for each other."""
        self._swap(machine, i)
        self.looks -= 1
        try:
            return critical_cycle(self.net)
        except ValueError:
            return None

    def _may_swap(self, u: int, v: int) -> bool:
        a, b = self.net.actions[u], self.net.actions[v]
        if Kind.UPDATE in (a.kind, b.kind) or (a.kind, a.message) == (b.kind, b.message):
            return False  # micro-batches of one kind keep their order
        return all(other != u for other, _ in self.net.needs[v])
