"""Devices of different speed and memory, and the search for the cut and placement with the shortest step.

The work of the busiest device decides first (`nwise.schedule.assign`). The exact period of the best schedule decides between
numbers of micro-batches, and between cuts that differ from the first by a few pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, permutations
from math import factorial, inf, isfinite
from typing import Any

import numpy as np

from nwise._errors import check_at_least
from nwise.flow import flows_for
from nwise.schedule.ages import weight_ages
from nwise.schedule.assign import Assignment, Matrix, assign
from nwise.schedule.best import DoesNotFit, best_order
from nwise.schedule.bounds import resource_bound
from nwise.schedule.costs import Costs
from nwise.schedule.memory import peak_bytes
from nwise.schedule.partition import Piece, check_enough, stage_costs, work
from nwise.schedule.placement import Placement
from nwise.schedule.schedule import Schedule
from nwise.schedule.timed import CLOSE, Timed, excess, timed
from nwise.strategies import Strategy

_MOST_ORDERS = 120  # of devices that are tried
_STARTS = 6  # first cuts that are improved
_FINALISTS = 3  # cuts whose best schedules are compared
_TIMES = ("forward", "head", "input_grad", "weight_grad", "update")


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator that takes stages.

    Args:
        speed: relative to the device on which the network is measured; default 1.
        memory: bytes that it may use; default: no limit.

    Raises:
        ValueError: a number is not above 0.

    >>> Device(speed=2, memory=8e9).speed
    2
    """

    speed: float = 1.0
    memory: float = inf

    def __post_init__(self) -> None:
        for name in ("speed", "memory"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"`{name}` of a device should be a number above 0. Found {value!r}.")
        if not isfinite(self.speed):
            raise ValueError(f"`speed` of a device should be finite. Found {self.speed!r}.")


def as_devices(devices: int | Sequence[Any]) -> tuple[Device, ...]:
    """Return devices from their number, their speeds or themselves.

    Raises:
        ValueError, TypeError: there is none, or a speed is not above 0.

    >>> [device.speed for device in as_devices([1, 2.5])]
    [1, 2.5]
    """
    if isinstance(devices, int):
        check_at_least(1, devices=devices)
        return (Device(),) * devices
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"`devices` should be a number, or a list of speeds or `nwise.Device`s. Found {devices!r}.")
    if not devices:
        raise ValueError("`devices` should contain at least one device. Found none.")
    return tuple(one if isinstance(one, Device) else Device(speed=one) for one in devices)


@dataclass(frozen=True)
class Cut:
    """A network cut into stages on devices.

    Args:
        starts: index of the first piece of every stage.
        placement: index of every stage's device.
        timed: the best schedule, with costs of one micro-batch in seconds on these devices.
    """

    starts: tuple[int, ...]
    placement: Placement
    timed: Timed

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches, M."""
        return self.timed.schedule.num_microbatches


class Search:
    """The search for a cut, with a number of micro-batches.

    Args:
        pieces: pieces of the network, with the costs of one micro-batch.
        strategy: the strategy.
        num_microbatches: number of micro-batches, M.
        devices: the devices.
        num_stages: number of stages, at least one for each device.
        links: ``latency`` and ``bandwidth`` of `Costs`.

    Raises:
        ValueError: there are fewer pieces than stages, or fewer stages than devices.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        strategy: Strategy,
        num_microbatches: int,
        devices: Sequence[Device],
        num_stages: int,
        links: Mapping[str, float],
    ) -> None:
        check_enough(pieces, num_stages)
        self._pieces, self._devices, self._links = pieces, devices, links
        self._flows = flows_for(strategy, num_stages, num_microbatches)
        self._ages = weight_ages(strategy, self._flows)
        self._turns = [batch[0] for batch in self._flows]
        self._num_stages = num_stages
        limited = any(isfinite(device.memory) for device in devices)
        self._memory = [device.memory for device in devices] if limited else None
        self._schedules: dict[Placement, Schedule] = {}
        self._scores: dict[Assignment, tuple[float, float]] = {}

    def assignments(self) -> list[Assignment]:
        """Return the best assignment for every order of the devices along the network, the least busy one first."""
        # If nothing fits the memory, the search still needs cuts to start from.
        return self._assignments(limited=True) or self._assignments(limited=False)

    def _assignments(self, *, limited: bool) -> list[Assignment]:
        tables = {device: self._tables(device, limited=limited) for device in set(self._devices)}
        results: list[tuple[float, Assignment]] = []
        for order in self._orders():
            by_rank = [tables[self._devices[i]] for i in order]
            found = assign(lambda rank, k, by_rank=by_rank: by_rank[rank][k], self._num_stages, len(order))  # type: ignore[misc]
            if found is not None:
                starts, ranks = found
                placement = tuple(order[rank] for rank in ranks)
                results.append((self.bound(starts, placement), (starts, placement)))
        return [assignment for _, assignment in sorted(results, key=lambda pair: pair[0])]

    def bound(self, starts: Sequence[int], placement: Placement) -> float:
        """Return the work of the busiest device or link per mini-batch."""
        return resource_bound(self._flows, self.costs(starts, placement), placement) / len(self._flows)

    def costs(self, starts: Sequence[int], placement: Placement) -> Costs:
        """Return the costs of stages on their devices."""
        costs = stage_costs(self._pieces, starts, self._turns, **self._links)
        speeds = [self._devices[rank].speed for rank in placement]
        slower = {
            name: [time / v for time, v in zip(costs.per_stage(name, len(speeds)), speeds, strict=True)]
            for name in _TIMES
        }
        return replace(costs, **slower)  # type: ignore[arg-type]

    def cut(self, starts: Sequence[int], placement: Placement) -> Cut:
        """Return a cut with its best schedule.

        Raises:
            DoesNotFit: no order fits the devices' memory.
        """
        costs = self.costs(starts, placement)
        result = best_order(self._flows, costs, placement, self._ages, memory=self._memory)
        return Cut(tuple(starts), placement, result)

    def improved(self) -> Cut:
        """Move pieces and stages to their neighbours, from several first cuts, as long as that makes a step shorter.

        Raises:
            DoesNotFit: no cut on the way fits the devices' memory.
        """
        ends = sorted(dict.fromkeys(map(self._climbed, self._first())), key=self._score)
        cuts = list(filter(None, map(self._fitting, ends[:_FINALISTS])))
        if not cuts:
            return self.cut(*ends[0])  # raises
        return min(map(self._polished, cuts), key=lambda cut: cut.timed.rank)

    def _fitting(self, assignment: Assignment) -> Cut | None:
        try:
            return self.cut(*assignment)
        except DoesNotFit:
            return None

    def _polished(self, cut: Cut) -> Cut:
        """Climb with the best schedule of every neighbour that may be better, where `_climbed` knows one order only."""
        while True:
            limit = cut.timed.period * (1 - CLOSE)
            near = [one for one in self._neighbours((cut.starts, cut.placement)) if self.bound(*one) < limit]
            options = [one for one in map(self._fitting, near) if one is not None and one.timed.period < limit]
            if not options:
                return cut
            cut = min(options, key=lambda one: one.timed.rank)

    def _first(self) -> list[Assignment]:
        """Return cuts to start from: balanced ones, and those that give a fast device all that others need not have."""
        balanced = self.assignments()[:_STARTS]
        speeds = [device.speed for device in self._devices]
        if min(speeds) == max(speeds):
            return balanced
        # With few micro-batches a step is a chain of messages, and one fast device is better than three that wait.
        size, stages = len(self._pieces), self._num_stages
        lopsided = []
        for _, placement in balanced:
            k = max(range(stages), key=lambda k: speeds[placement[k]])
            lopsided.append(((*range(k + 1), *range(size - stages + k + 1, size)), placement))
        return balanced + lopsided

    def _climbed(self, assignment: Assignment) -> Assignment:
        known, best = self._score(assignment), assignment
        while True:
            options = [(self._score(option), option) for option in self._neighbours(best)]
            score, option = min(options, default=(known, best))
            if score >= (known[0], known[1] * (1 - CLOSE)):
                return best
            known, best = score, option

    def _score(self, assignment: Assignment) -> tuple[float, float]:
        """Return how far a cut exceeds the memory (1 or less: not at all), and its period with an order that is known."""
        if assignment not in self._scores:
            placement, costs = assignment[1], self.costs(*assignment)
            if placement not in self._schedules:
                self._schedules[placement] = best_order(self._flows, costs, placement, self._ages).schedule
            schedule = self._schedules[placement]
            size = excess(peak_bytes(schedule, costs), self._memory)[0]
            self._scores[assignment] = max(1.0, size), timed(schedule, costs).period
        return self._scores[assignment]

    def _neighbours(self, assignment: Assignment) -> Iterator[Assignment]:
        starts, placement = assignment
        for k in range(1, len(starts)):
            for step in (-2, -1, 1, 2):
                moved = (*starts[:k], starts[k] + step, *starts[k + 1 :])
                if all(a < b for a, b in pairwise((*moved, len(self._pieces)))):
                    yield moved, placement
        for k, (below, above) in enumerate(pairwise(placement), 1):
            for ranks in ((*placement[:k], below, *placement[k + 1 :]), (*placement[: k - 1], above, *placement[k:])):
                if below != above and set(ranks) == set(placement):
                    yield starts, ranks

    def _tables(self, device: Device, *, limited: bool) -> list[Matrix]:
        """Return the work of every stage on a device for every range of pieces; infinite for those that cannot fit."""
        needed = np.maximum(self._bytes("gradient_bytes"), self._bytes("activation_bytes")) + self._bytes("fixed_bytes")
        fits = needed <= device.memory if limited else True
        updates = self._bytes("update") / len(self._flows[0])
        tables = [work(self._pieces, [turn.stages[k] for turn in self._turns]) for k in range(self._num_stages)]
        return [np.where(fits, (table + updates) / device.speed, np.inf) for table in tables]

    def _bytes(self, name: str) -> Matrix:
        sums = np.concatenate([[0.0], np.cumsum([getattr(piece, name) for piece in self._pieces])])
        return np.asarray(sums[None, :] - sums[:, None])

    def _orders(self) -> list[tuple[int, ...]]:
        """Return the orders of the devices along the network, without those that only exchange equal devices."""
        size = len(self._devices)
        given = tuple(range(size))
        if len(set(self._devices)) == 1 or factorial(size) > _MOST_ORDERS:
            return [given]
        orders = chain([given], permutations(given))
        return list({tuple(self._devices[i] for i in order): order for order in reversed(list(orders))}.values())[::-1]


def search(
    pieces: Mapping[int, Sequence[Piece]],
    strategy: Strategy,
    devices: Sequence[Device],
    num_stages: int | None = None,
    **links: float,
) -> Cut:
    """Find the cut, placement and number of micro-batches with the shortest step.

    Args:
        pieces: pieces of the network with the costs of one micro-batch, by the number of micro-batches.
        strategy: the strategy, the same at every step.
        devices: the devices.
        num_stages: number of stages; default: one for each device.
        links: ``latency`` and ``bandwidth`` of `Costs`.

    Raises:
        ValueError: there are fewer pieces than stages, or fewer stages than devices.
        DoesNotFit: no cut that was tried fits the devices' memory; a ValueError too.

    >>> from nwise import NWise
    >>> pieces = [Piece(f"block {i}", 1, 1, 1, 0, 0) for i in range(12)]
    >>> search({4: pieces}, NWise(2), as_devices([1, 2, 4])).starts
    (0, 2, 5)
    """
    size = len(devices) if num_stages is None else num_stages
    check_at_least(len(devices), num_stages=size)
    chosen: tuple[float, Cut] | None = None
    failure: DoesNotFit | None = None
    for m in sorted(pieces):
        one = Search(pieces[m], strategy, m, devices, size, links)
        options = one.assignments()
        if chosen is not None and one.bound(*options[0]) > chosen[0] * (1 + CLOSE):
            continue
        try:
            cut = one.improved()
        except DoesNotFit as error:
            failure = error
            continue
        if chosen is None or cut.timed.period < chosen[0] * (1 - CLOSE):
            chosen = cut.timed.period, cut
    if chosen is None:
        assert failure is not None, "a cut fits, or one does not"
        raise failure
    return chosen[1]
