"""The memory of every rank along its list: fixed memory, that of micro-batches, and the peak of every action.

Each kind lives from one action to another::

    stage k, micro-batch m        F ....... H ....... first pass ....... last pass ....... update
    activations and output        |------------------------------------------|
    gradient of its own loss                |--------------------------------|
    message of stage k + 1                         |------- last read
    kept cotangents                                   I -------------- W
    gradients of the parameters                       |----------------------------------------|

The peak of an action comes on top of everything that is live before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from nwise.schedule.actions import INPUT_GRADS, PASSES, WEIGHT_GRADS, Kind
from nwise.schedule.schedule import Schedule

__all__ = ["fixed_bytes", "peak_bytes"]

# By stage, micro-batch and mini-batch.
_Places = dict[tuple[int, int, int], list[int]]
# The first and the last task, by their places in a rank's list; the number of cycles between them; and bytes.
_Span = tuple[int, int, int, float]

_NAMES = ("activation", "output", "cotangent", "gradient", "head_gradient")


def peak_bytes(schedule: Schedule) -> tuple[float, ...]:
    """Return the peak memory of every rank in the steady state.

    Args:
        schedule: the schedule, whose costs have the sizes.
    """
    size = schedule.num_stages
    costs = schedule.costs
    kept, output, scratch = (costs.per_stage(f"{name}_bytes", size) for name in ("activation", "output", "scratch"))
    # The peak of every kind of action, by stage, beyond the memory in use before.
    forward = tuple(map(sum, zip(kept, output, scratch, strict=True)))
    extra = {
        kind: forward
        if kind in (Kind.FORWARD, Kind.RECOMPUTE)
        else costs.per_stage(f"{kind.name.lower()}_peak_bytes", size)
        for kind in Kind
        if kind.costs
    }
    peaks = []
    for numbers, live in zip(schedule.by_rank, fixed_bytes(schedule), strict=True):
        work = _Work(schedule, numbers)
        # The optimizer updates all stages of a rank at once.
        update = sum(extra[Kind.UPDATE][k] for k in {action.stage for action in work.actions})
        begins = defaultdict[int, float](float)
        ends = defaultdict[int, float](float)
        graphs = {first for spans in work.graphs.values() for first, _ in spans}
        # In the steady state, a span that ends n cycles later is live n times when the list begins.
        for first, last, cycles, num_bytes in work.spans():
            live += num_bytes * cycles
            begins[first] += num_bytes
            ends[last] += num_bytes
        most = live
        for i, (task, action) in enumerate(zip(numbers, work.actions, strict=True)):
            k = action.stage
            peak = update if action.kind is Kind.UPDATE else extra[action.kind][k]
            if action.kind is Kind.FORWARD and i not in graphs:
                peak -= kept[k]  # freed piece by piece
            cotangent = schedule.graph.stage(task).cotangent(action.message) if action.kind in PASSES else None
            if cotangent is not None and (cotangent.is_sum or cotangent.shared):
                peak += output[k]
            most = max(most, live + peak)
            live += begins[i]
            most = max(most, live)
            live -= ends[i]
        peaks.append(most)
    return tuple(peaks)


def fixed_bytes(schedule: Schedule) -> tuple[float, ...]:
    """Return every rank's memory that is always in use: parameters, their older versions and optimizer state.

    Args:
        schedule: the schedule, whose costs have the sizes.
    """
    size = schedule.num_stages
    costs = schedule.costs
    fixed, weights = (costs.per_stage(f"{name}_bytes", size) for name in ("fixed", "weight"))
    sums = [0.0] * schedule.num_ranks
    for k, rank in enumerate(schedule.placement):
        age = schedule.ages.weights[k]
        versions = age + 1 if schedule.ages.stashes and age else 0
        sums[rank] += fixed[k] + weights[k] * versions
    return tuple(sums)


class _Work:
    """The tasks of a rank in a cycle, and what they keep in memory."""

    def __init__(self, schedule: Schedule, numbers: Sequence[int]) -> None:
        graph = schedule.graph
        self._schedule = schedule
        self._numbers = numbers
        self.actions = [graph.tasks[task] for task in numbers]
        self._times = [(graph.late[task], i) for i, task in enumerate(numbers)]  # cycles later, and place in the list
        # The places of every stage's and micro-batch's tasks, in the order of time.
        self._places: _Places = {}
        for _, i in sorted(self._times):
            a = self.actions[i]
            if a.kind is not Kind.UPDATE:
                self._places.setdefault((a.stage, a.microbatch, a.minibatch), []).append(i)
        self.graphs = {key: self._graphs(places) for key, places in self._places.items()}

    def _graphs(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the spans in which a micro-batch of a stage has its graph: the places of its first and last task."""
        spans = []
        begun = None
        last = next((i for i in reversed(places) if self.actions[i].kind in PASSES), None)
        for i in places if last is not None else ():
            frees = self._numbers[i] in self._schedule.frees
            if self.actions[i].kind in (Kind.FORWARD, Kind.RECOMPUTE) and not frees:
                begun = i
            elif begun is not None and (frees or i == last):
                spans.append((begun, i))
                begun = None
        return spans

    def spans(self) -> Iterator[_Span]:
        """Iterate over everything that is live for a while."""
        graph = self._schedule.graph
        actions = self.actions
        times = self._times
        activation, output, cotangent, gradient, head_gradient = (
            self._schedule.costs.per_stage(f"{name}_bytes", self._schedule.num_stages) for name in _NAMES
        )

        def span(first: int, last: int, num_bytes: float) -> _Span:
            return first, last, times[last][0] - times[first][0], num_bytes

        for (k, m, minibatch), places in self._places.items():
            # The last task of the stage that reads a result of another one.
            readers = {need.task: i for i in places for need in graph.needs[self._numbers[i]]}
            received: set[int] = set()
            above = self._places.get((k + 1, m, minibatch), [])
            first = places[0]
            last = places[-1]
            # The output of F lives until its graph is freed and the head has run, and while the next stage needs it as
            # input. A second forward makes a second output.
            uses = [i for i in places if actions[i].kind is Kind.HEAD]
            for begin, end in self.graphs[k, m, minibatch]:
                yield span(begin, end, activation[k])
                if actions[begin].kind is Kind.RECOMPUTE:
                    yield span(begin, end, output[k])
                else:
                    uses.append(end)
            yield span(first, max([first, *uses, *above[-1:]], key=times.__getitem__), output[k])
            for i in places:
                kind = actions[i].kind
                needs = graph.needs[self._numbers[i]]
                links = {need.task for need in needs if need.link} - received
                received |= links
                if kind is Kind.FORWARD:
                    yield span(i, last, output[k - 1] * len(links))
                else:
                    yield from (span(i, readers[task], output[k]) for task in links)
                if kind is Kind.HEAD and graph.stage(self._numbers[i]).own:
                    yield span(i, last, output[k])
                elif kind is Kind.WEIGHT_GRAD:  # since the I of its cotangent, if it needs one
                    made = {need.task for need in needs}
                    passes = (j for j in places if actions[j].kind is Kind.INPUT_GRAD and self._numbers[j] in made)
                    yield from (span(j, i, cotangent[k]) for j in passes)
            messages = [i for i in above if actions[i].kind in INPUT_GRADS]
            yield from (span(i, readers[self._numbers[i]], output[k]) for i in messages)
        # The first task of a call that makes gradients of a stage or a head, until their update.
        updates = {(a.stage, a.minibatch): i for i, a in enumerate(actions) if a.kind is Kind.UPDATE}
        begins: dict[tuple[bool, int, int], int] = {}
        for i, a in enumerate(actions):
            if a.kind in (Kind.HEAD, *WEIGHT_GRADS):
                begins.setdefault((a.kind is Kind.HEAD, a.stage, graph.call[self._numbers[i]]), i)
        for (head, k, call), i in begins.items():
            yield i, updates[k, call], 0, (head_gradient if head else gradient)[k]
