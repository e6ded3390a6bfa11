"""The memory of every rank along its list: fixed memory, that of micro-batches, and the peak of every action.

Each kind lives from one action to another::

    stage k, micro-batch m        F ....... H ....... first pass ....... last pass ....... update
    activations and output        |------------------------------------------|
    gradient of its own loss                |--------------------------------|
    message of stage k + 1                         |-------------------------|
    kept cotangents                                   I -------------- W
    gradients of the parameters                       |----------------------------------------|

The peak of an action comes on top of everything that is live before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from nwise.schedule.actions import PASSES, Kind
from nwise.schedule.costs import Costs
from nwise.schedule.schedule import Schedule, Word

__all__ = ["fixed_bytes", "peak_bytes"]

# Stage, micro-batch and turn.
_Tape = tuple[int, int, int]
_Places = dict[_Tape, list[int]]
_Graphs = dict[_Tape, list[tuple[int, int]]]
# The first and the last action, by their places in a word; the number of cycles between them; and bytes.
_Span = tuple[int, int, int, float]

_NAMES = ("activation", "output", "cotangent", "gradient", "head_gradient")
_PEAKS = {
    Kind.FORWARD: "forward_peak_bytes",
    Kind.HEAD: "head_peak_bytes",
    Kind.INPUT_GRAD: "input_grad_peak_bytes",
    Kind.WEIGHT_GRAD: "weight_grad_peak_bytes",
    Kind.BOTH: "both_peak_bytes",
    Kind.UPDATE: "update_peak_bytes",
}


def peak_bytes(schedule: Schedule, costs: Costs, *, recompute: bool = False) -> tuple[float, ...]:
    """Return the peak memory of every rank in the steady state.

    Args:
        schedule: the schedule.
        costs: the sizes.
        recompute: whether a stage keeps only its input while its rank works on anything else, and runs its forward once more
            before its next pass.
    """
    size = schedule.num_stages
    extra = {kind: costs.per_stage(name, size) for kind, name in _PEAKS.items()}
    kept, output = costs.per_stage("activation_bytes", size), costs.per_stage("output_bytes", size)
    fresh = costs.per_stage("fresh_gradient_bytes", size)
    peaks = []
    for word, live in zip(schedule.words, fixed_bytes(schedule, costs), strict=True):
        # The optimizer updates all stages of a rank at once.
        update = sum(extra[Kind.UPDATE][k] for k in {action.stage for action in word})
        begins, ends = defaultdict[int, float](float), defaultdict[int, float](float)
        late = [schedule.cycles_late(action) for action in word]
        places = _places(word, late)
        graphs = _graphs(schedule, word, places, recompute)
        reruns = {first for spans in graphs.values() for first, _ in spans if word[first].kind in PASSES}
        news = {i for i, _ in _gradients(schedule, word)}
        # In the steady state, a span that ends n cycles later is live n times when the word begins.
        for first, last, cycles, num_bytes in _spans(schedule, word, costs, late, places, graphs):
            live += num_bytes * cycles
            begins[first] += num_bytes
            ends[last] += num_bytes
        most = live
        for i, action in enumerate(word):
            k = action.stage
            peak = update if action.kind is Kind.UPDATE else extra[action.kind][k]
            if recompute and action.kind is Kind.FORWARD and action not in schedule.continued:
                peak -= kept[k]  # freed piece by piece
            if action.kind in (Kind.WEIGHT_GRAD, Kind.BOTH) and i not in news:
                peak -= fresh[k]
            if action.kind in PASSES:
                cotangent = schedule.flows[action.turn][action.microbatch].stages[k].cotangent(action.message)
                if cotangent.is_new:
                    peak += output[k]
            if i in reruns:
                peak = max(extra[Kind.FORWARD][k], kept[k] + output[k] + peak)
            most = max(most, live + peak)
            live += begins[i]
            most = max(most, live)
            live -= ends[i]
        peaks.append(most)
    return tuple(peaks)


def fixed_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return every rank's memory that is always in use: parameters, their older versions and optimizer state."""
    size = schedule.num_stages
    fixed, weights = (costs.per_stage(f"{name}_bytes", size) for name in ("fixed", "weight"))
    sums = [0.0] * schedule.num_ranks
    for k, rank in enumerate(schedule.placement):
        sums[rank] += fixed[k] + weights[k] * (schedule.ages[k] and schedule.ages[k] + 1)
    return tuple(sums)


def _graphs(schedule: Schedule, word: Word, places: _Places, recompute: bool) -> _Graphs:
    """Return the times at which every micro-batch of every stage has its graph: the places of their first and last action."""
    if not recompute:
        return {
            key: [(indices[0], indices[-1])]
            for key, indices in places.items()
            if any(word[i].kind in PASSES for i in indices)
        }
    graphs: _Graphs = {}
    for (k, m, turn), indices in places.items():
        fused = schedule.flows[turn][m].stages[k].fused
        spans, begun, kept = [], None, False
        for i in indices:
            action = word[i]
            if begun is None and (action.kind in PASSES or action in schedule.continued):
                begun = i
            # A kept cotangent keeps the graph until its W.
            if action.kind is Kind.WEIGHT_GRAD:
                kept = False
            elif action.kind is Kind.INPUT_GRAD and action.message == fused:
                kept = True
            if begun is not None and not kept and action not in schedule.continued:
                spans.append((begun, i))
                begun = None
        graphs[k, m, turn] = spans
    return graphs


def _places(word: Word, late: Sequence[int]) -> _Places:
    """Return the places of the actions of every stage and micro-batch, in the order of time."""
    places: _Places = {}
    for i in sorted(range(len(word)), key=lambda i: (late[i], i)):
        if word[i].kind is not Kind.UPDATE:
            places.setdefault((word[i].stage, word[i].microbatch, word[i].turn), []).append(i)
    return places


def _spans(
    schedule: Schedule, word: Word, costs: Costs, late: Sequence[int], places: _Places, graphs: _Graphs
) -> Iterator[_Span]:
    """Iterate over everything that is live for a while."""
    activation, output, cotangent, gradient, head_gradient = (
        costs.per_stage(f"{name}_bytes", schedule.num_stages) for name in _NAMES
    )

    def span(first: int, last: int, num_bytes: float) -> _Span:
        return first, last, late[last] - late[first], num_bytes

    def order(i: int) -> tuple[int, int]:
        return late[i], i

    for (k, m, turn), indices in places.items():
        used: set[int] = set()
        flow = schedule.flows[turn][m].stages[k]
        above = places.get((k + 1, m, turn), [])
        first, last = indices[0], indices[-1]
        # The output of F lives until its graph is freed and the head has run, and while the next stage needs it as
        # input. A second forward makes a second output.
        uses = [i for i in indices if word[i].kind is Kind.HEAD]
        for begin, end in graphs.get((k, m, turn), []):
            yield span(begin, end, activation[k])
            if word[begin].kind in PASSES:
                yield span(begin, end, output[k])
            else:
                uses.append(end)
        yield span(first, max([first, *uses, *above[-1:]], key=order), output[k])
        if k and (k - 1, m, turn) not in places:
            yield span(first, last, output[k - 1])  # received
        for i in indices:
            kind, message = word[i].kind, word[i].message
            if kind is Kind.HEAD and flow.own:
                yield span(i, last, output[k])
            elif kind is Kind.WEIGHT_GRAD and flow.fused is not None:
                begin = next(j for j in indices if word[j].kind is Kind.INPUT_GRAD and word[j].message == flow.fused)
                yield span(begin, i, cotangent[k])
            if kind in PASSES and not above:
                received = set(flow.cotangent(message).needed) - used
                used |= received
                yield span(i, last, output[k] * len(received))
        yield from (span(i, last, output[k]) for i in above if word[i].message is not None)
    for i, last in _gradients(schedule, word):
        yield i, last, 0, (head_gradient if word[i].kind is Kind.HEAD else gradient)[word[i].stage]


def _gradients(schedule: Schedule, word: Word) -> Iterator[tuple[int, int]]:
    """Iterate over the places at which a call makes the gradients of a stage or head, each with that of its update."""
    updates = {(a.stage, a.turn): i for i, a in enumerate(word) if a.kind is Kind.UPDATE}
    begun: set[tuple[bool, int, int]] = set()
    for i, a in enumerate(word):
        head, call = a.kind is Kind.HEAD, schedule.call(a)
        if (head or a.kind in (Kind.WEIGHT_GRAD, Kind.BOTH)) and (head, a.stage, call) not in begun:
            begun.add((head, a.stage, call))
            yield i, updates.get((a.stage, call), len(word) - 1)
