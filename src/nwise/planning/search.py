"""The search for the cut and placement with the shortest step, with a number of micro-batches.

first cuts      the work of the busiest device is smallest, for every order of the devices (`nwise.planning.assign`)
climbing        pieces and stages move to their neighbours while the period of one order of actions becomes shorter
finalists       the best schedule of each

A strategy runs in its best order. A pipeline of `nwise.schedule.BASELINES` has an order of its own, and takes the best of the
first cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import inf

import numpy as np

from nwise.checks import check_at_least
from nwise.flow import Flows, flows_for
from nwise.planning.assign import Assignment, Matrix, assign
from nwise.planning.devices import MOST_ORDERS, Device, limits, orders
from nwise.planning.partitions import Piece, check_enough, stage_costs, sums, work
from nwise.schedule.ages import Ages, strategy_ages
from nwise.schedule.bounds import lower_bound, resource_bound
from nwise.schedule.costs import CLOSE, ROWS, Costs
from nwise.schedule.find import DoesNotFit, Limit, best_order, excess, pipeline_order, preference
from nwise.schedule.named import RULES, choose
from nwise.schedule.placement import Placement, make_placement
from nwise.schedule.schedule import Schedule
from nwise.strategies import EndToEnd, Strategy

__all__ = ["Cut", "Search", "search"]

_STARTS = 6  # first cuts of a kind that are improved
_FINALISTS = 3  # cuts whose best schedules are compared
# How far the starts of a stage and of the next one move together.
_STEPS = [(a, b) for a in (-2, -1, 1, 2) for b in (-2, -1, 0, 1, 2)]
_TIMES = [name for name, row in ROWS.items() if row.unit == "time" and row.pieces != "link"]  # of a device's work


@dataclass(frozen=True)
class Cut:
    """A network cut into stages on devices.

    Args:
        starts: index of the first piece of every stage.
        placement: index of every stage's device.
        schedule: the best schedule, with costs of one micro-batch in seconds on these devices.
    """

    starts: tuple[int, ...]
    placement: Placement
    schedule: Schedule


class Search:
    """The search with a number of micro-batches.

    Args:
        pieces: pieces of the network, with the costs of one micro-batch.
        method: a strategy, or the name of one of `nwise.schedule.BASELINES`.
        num_microbatches: number of micro-batches, M.
        devices: the devices.
        num_stages: number of stages, at least one for each device.
        links: ``latency``, ``bandwidth`` and ``overhead`` of `Costs`.

    Raises:
        ValueError: there are fewer pieces than stages.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        method: Strategy | str,
        num_microbatches: int,
        devices: Sequence[Device],
        num_stages: int,
        links: Mapping[str, float],
    ) -> None:
        check_enough(pieces, num_stages)
        self._pieces = pieces
        self._devices = devices
        self._links = links
        self._pipeline = method if isinstance(method, str) else None
        self._strategy = EndToEnd() if isinstance(method, str) else method
        self._num_microbatches = num_microbatches
        self._num_stages = num_stages
        self._memory = limits(devices)
        self._frozen = next((i for i, piece in enumerate(pieces) if piece.learns), len(pieces))
        self._flows_for: Callable[[tuple[bool, ...]], tuple[Flows, Ages]] = cache(self._flows_if)
        self._schedules: dict[tuple[Placement, tuple[bool, ...]], list[Schedule]] = {}
        self._scores: dict[Assignment, tuple[float, float]] = {}
        self._cuts: dict[Assignment, Cut] = {}
        self._orders = orders(devices)

    def _flows_if(self, trainable: tuple[bool, ...]) -> tuple[Flows, Ages]:
        """Return the flows and ages if these stages are trainable."""
        flows = flows_for(self._strategy, self._num_stages, self._num_microbatches, trainable=trainable)
        return flows, strategy_ages(self._strategy, flows)

    # Cuts with their costs --------------------------------------------------------------------------

    def bound(self, starts: Sequence[int], placement: Placement, *, sharp: bool = False) -> float:
        """Return a lower bound on a step: the work of the busiest device or link, or a sharp bound that takes longer."""
        (flows, ages) = self._flows_for(self._trainable(starts))
        costs = self.costs(starts, placement)
        if not sharp:
            return resource_bound(flows, costs, placement) / len(flows)
        return lower_bound(flows, costs, placement, ages) / len(flows)

    @cached_property
    def least(self) -> float:
        """A lower bound on the time of a step with any cut, sharp if there is only one."""
        # The first assignment is the least busy one, so its work bounds all. Paths through several devices may be shorter with
        # another cut, so they count only where there is no other.
        fixed = self._pipeline is not None or self._num_stages == len(self._devices)
        single = fixed and len(self.assignments) == 1 and len(self._pieces) == self._num_stages
        return self.bound(*self.assignments[0], sharp=single)

    def costs(self, starts: Sequence[int], placement: Placement) -> Costs:
        """Return the costs of stages on their devices."""
        flows, _ = self._flows_for(self._trainable(starts))
        costs = stage_costs(self._pieces, starts, [batch[0] for batch in flows], **self._links)
        speeds = [self._devices[rank].speed for rank in placement]
        slower = {
            name: [time / v for time, v in zip(costs.per_stage(name, len(speeds)), speeds, strict=True)]
            for name in _TIMES
        }
        return replace(costs, **slower)  # type: ignore[arg-type]

    def cut(self, starts: Sequence[int], placement: Placement) -> Cut:
        """Return a cut with its best schedule.

        Raises:
            DoesNotFit: no order that was tried fits the devices' memory.
        """
        assignment = tuple(starts), placement
        if assignment not in self._cuts:
            self._cuts[assignment] = Cut(*assignment, self._timed(assignment, self._memory))
        return self._cuts[assignment]

    def _timed(self, assignment: Assignment, memory: Limit) -> Schedule:
        """Return the best schedule of a cut."""
        starts, placement = assignment
        (flows, ages) = self._flows_for(self._trainable(starts))
        costs = self.costs(starts, placement)
        if self._pipeline is not None:
            return pipeline_order(self._pipeline, flows, costs, placement, memory)
        return best_order(flows, costs, placement, ages, memory=memory)

    def _trainable(self, starts: Sequence[int]) -> tuple[bool, ...]:
        ends = (*starts[1:], len(self._pieces))
        return tuple(any(p.learns for p in self._pieces[a:b]) for a, b in zip(starts, ends, strict=True))

    # First cuts -------------------------------------------------------------------------------------

    @cached_property
    def assignments(self) -> list[Assignment]:
        """Balanced assignments for the orders of the devices along the network, the least busy one first."""
        # Stages of frozen pieces alone pass no gradient on, which changes the work of all: every number of them is a case.
        cases = range(self._num_stages if self._frozen else 1)
        devices = set(self._devices)
        options: list[Assignment] = []
        for frozen in cases:
            options += self._balanced({device: self._times(device, frozen) for device in devices})
        if self._memory is not None:
            options += self._balanced({device: self._sizes(device) for device in devices})
        return sorted(dict.fromkeys(options), key=lambda one: self.bound(*one))

    def _balanced(self, tables: Mapping[Device, list[Matrix]]) -> list[Assignment]:
        fixed = self._placement
        if len(self._pieces) == self._num_stages:  # there is one cut
            fixed = fixed or make_placement("contiguous", self._num_stages, len(self._devices))
            return [(tuple(range(self._num_stages)), tuple(order[rank] for rank in fixed)) for order in self._orders]
        results: list[Assignment] = []
        for order in self._orders:
            ranks = order if fixed is None else [order[rank] for rank in fixed]  # then one for every stage
            cut = assign([tables[self._devices[i]] for i in ranks])
            if cut is not None:
                results.append((cut[0], tuple(ranks[i] for i in cut[1])))
        return results

    @property
    def _placement(self) -> Placement | None:
        """The placement that a pipeline is made for; None if stages are on devices as they come."""
        kind = "contiguous" if self._pipeline is None else RULES[self._pipeline].placement
        return None if kind == "contiguous" else make_placement(kind, self._num_stages, len(self._devices))

    def _times(self, device: Device, frozen: int) -> list[Matrix]:
        """Return the work of every stage on a device for every range of pieces, if the first `frozen` stages train nothing."""
        flows, _ = self._flows_for(tuple(k >= frozen for k in range(self._num_stages)))
        updates = sums(self._pieces, "update") / self._num_microbatches
        ends = np.arange(len(self._pieces) + 1)[None, :]
        tables = []
        for k in range(self._num_stages):
            table = work(self._pieces, [batch[0].stages[k] for batch in flows])
            possible = ends <= self._frozen if k < frozen else True
            tables.append(np.where(possible, (table + updates) / device.speed, np.inf))
        return tables

    def _sizes(self, device: Device) -> list[Matrix]:
        """Return the share of a device's memory that every range of pieces needs at least."""
        needed = sums(self._pieces, "activation_bytes") + sums(self._pieces, "fixed_bytes")
        some = np.triu(np.ones_like(needed), 1) > 0
        return [np.where(some, needed / device.memory, np.inf)] * self._num_stages

    def _first(self) -> list[Assignment]:
        """Return cuts to start from: balanced ones, and under a limit of memory those that exceed it least."""
        fitting = sorted(self.assignments, key=self._score)[:_STARTS] if self._memory is not None else []
        return [*self.assignments[:_STARTS], *fitting]

    # Climbing ---------------------------------------------------------------------------------------

    def improved(self) -> Cut:
        """Move pieces and stages to their neighbours, from several first cuts, as long as that makes a step shorter.

        Raises:
            DoesNotFit: no cut on the way fits the devices' memory.
        """
        if self._pipeline is not None:
            return self._best_of(self.assignments[:_FINALISTS])[0]
        ends = sorted(dict.fromkeys(map(self._climbed, dict.fromkeys(self._first()))), key=self._score)
        return self._best_of(ends[:_FINALISTS])[0]

    def _best_of(self, assignments: Sequence[Assignment]) -> list[Cut]:
        """Return the cuts that fit the memory, the best first."""
        cuts = list[Cut]()
        failures = list[DoesNotFit]()
        for assignment in assignments:
            try:
                cuts.append(self.cut(*assignment))
            except DoesNotFit as error:
                failures.append(error)
        if not cuts:
            least = min(failures, key=lambda error: error.least / error.memory)
            raise DoesNotFit("the smallest cut tried, on its tightest device", least.least, least.memory)
        return sorted(cuts, key=lambda cut: preference(cut.schedule))

    def _climbed(self, assignment: Assignment) -> Assignment:
        # Starts 0, 3, 6 of stages; each move takes one start, or those of two stages in a row, to
        # where the step of the pipeline is shortest:
        #
        #     p0 p1 p2 | p3 p4 p5 | p6 p7       9.0
        #     p0 p1 p2 | p3 p4 | p5 p6 p7       8.2
        #     p0 p1 | p2 p3 | p4 p5 p6 p7       7.9    no neighbour is better
        #
        # One order of actions times every neighbour, because finding the best order of each would take a hundred times as long.
        known = self._score(assignment)
        best = assignment
        while True:
            options = [(self._score(option), option) for option in self._neighbours(best)]
            score, option = min(options, default=(known, best))
            if score >= (known[0], known[1] * (1 - CLOSE)):
                return best
            known = score
            best = option

    def _score(self, assignment: Assignment) -> tuple[float, float]:
        """Return how far a cut exceeds the memory (1: not at all), and its period, with the best known order."""
        if assignment not in self._scores:
            costs = self.costs(*assignment)
            limit = self._memory
            schedules = [schedule.with_costs(costs) for schedule in self._known_schedules(assignment)]
            self._scores[assignment] = min(
                (1.0 if limit is None else max(1.0, excess(one.peak_bytes, limit)[0]), one.period) for one in schedules
            )
        return self._scores[assignment]

    def _known_schedules(self, assignment: Assignment) -> list[Schedule]:
        """Return the best order for the first cut of this placement, and under a limit the one with the least memory."""
        starts, placement = assignment
        key = placement, self._trainable(starts)
        if key not in self._schedules:
            limited = self._memory is not None
            (flows, ages) = self._flows_for(key[1])
            first = self._timed(assignment, None) if limited else self.cut(*assignment).schedule
            self._schedules[key] = [first]
            if limited and self._pipeline is None:
                self._schedules[key].append(choose("depth-first", flows, placement, ages, first.costs))
        return self._schedules[key]

    def _neighbours(self, assignment: Assignment) -> Iterator[Assignment]:
        starts, placement = assignment
        for k in range(1, len(starts)):
            for first, second in _STEPS:
                after = [start + second for start in starts[k + 1 : k + 2]]
                moved = (*starts[:k], starts[k] + first, *after, *starts[k + 2 :])
                if all(a < b for a, b in pairwise((*moved, len(self._pieces)))):
                    yield moved, placement
        for k, (below, above) in enumerate(pairwise(placement), 1):
            for ranks in ((*placement[:k], below, *placement[k + 1 :]), (*placement[: k - 1], above, *placement[k:])):
                if below != above and set(ranks) == set(placement):
                    yield starts, ranks
        if len(self._orders) == MOST_ORDERS:  # not all are known
            for a, b in pairwise(dict.fromkeys(placement)):
                if self._devices[a] != self._devices[b]:
                    yield starts, tuple({a: b, b: a}.get(rank, rank) for rank in placement)


def search(
    pieces: Mapping[int, Sequence[Piece]],
    method: Strategy | str,
    devices: Sequence[Device],
    num_stages: int | None = None,
    progress: Callable[[list[int]], Iterable[int]] = iter,
    **links: float,
) -> Cut:
    """Find the cut, placement and number of micro-batches with the shortest step.

    Args:
        pieces: pieces of the network with the costs of one micro-batch, by the number of micro-batches.
        method: a strategy, the same at every step, or the name of one of `nwise.schedule.BASELINES`.
        devices: the devices.
        num_stages: number of stages; default: one for each device.
        progress: wraps the list of numbers of micro-batches, for a progress bar; default: none.
        links: ``latency``, ``bandwidth`` and ``overhead`` of `Costs`.

    Raises:
        ValueError: there are fewer pieces than stages, or fewer stages than devices.
        DoesNotFit: no cut that was tried fits the devices' memory; a ValueError too.

    >>> from nwise import NWise
    >>> from nwise.planning.devices import as_devices
    >>> pieces = [Piece(f"block {i}", 1, 1, 1, 0, 0) for i in range(12)]
    >>> search({4: pieces}, NWise(2), as_devices([1, 2, 4])).starts
    (0, 2, 5)
    """
    size = len(devices) if num_stages is None else num_stages
    check_at_least(len(devices), num_stages=size)
    searches = {m: Search(pieces[m], method, m, devices, size, links) for m in sorted(pieces)}
    cuts = dict[int, Cut]()
    failures = list[DoesNotFit]()
    shortest = inf
    # What may be the fastest comes first, so the bounds of most others tell that they are not.
    for m in progress(sorted(searches, key=lambda m: searches[m].least)):
        if searches[m].least > shortest * (1 + CLOSE):
            continue
        try:
            cuts[m] = searches[m].improved()
            shortest = min(shortest, cuts[m].schedule.period)
        except DoesNotFit as error:
            failures.append(error)
    if not cuts:
        raise min(failures, key=lambda error: error.least / error.memory)
    return next(cuts[m] for m in sorted(cuts) if cuts[m].schedule.period <= shortest * (1 + CLOSE))
