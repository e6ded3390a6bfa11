"""The memory of every rank along its list: what stays, what a micro-batch keeps, and what an action needs for a moment.

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
from collections.abc import Iterator

from nwise.schedule.actions import PASSES, Kind
from nwise.schedule.costs import Costs
from nwise.schedule.schedule import Schedule, Word

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
        recompute: whether a stage keeps only its input and its output, and runs its forward once more before its first pass.
    """
    size = schedule.num_stages
    extra = {kind: costs.per_stage(name, size) for kind, name in _PEAKS.items()}
    kept, output = costs.per_stage("activation_bytes", size), costs.per_stage("output_bytes", size)
    peaks = []
    for word, live in zip(schedule.words, fixed_bytes(schedule, costs), strict=True):
        # The optimizer updates all stages of a rank at once.
        update = sum(extra[Kind.UPDATE][k] for k in {action.stage for action in word})
        begins, ends = defaultdict[int, float](float), defaultdict[int, float](float)
        reruns = _first_passes(schedule, word) if recompute else frozenset[int]()
        replaced = _replaced(schedule, word, reruns)
        for first, last, cycles, num_bytes in _spans(schedule, word, costs, reruns):
            live += num_bytes * cycles
            begins[first] += num_bytes
            ends[last] += num_bytes
        most = live
        for i, action in enumerate(word):
            k = action.stage
            peak = update if action.kind is Kind.UPDATE else extra[action.kind][k]
            if recompute and action.kind is Kind.FORWARD:
                peak -= kept[k]  # freed piece by piece
            if action.kind in PASSES:
                cotangent = schedule.flows[action.turn][action.microbatch].stages[k].cotangent(action.message)
                if cotangent.own + len(cotangent.needed) > 1:
                    peak += output[k]  # their sum
            if i in reruns:
                # The new output takes the place of the old one, unless the next stage still has that.
                peak = max(extra[Kind.FORWARD][k], kept[k] + output[k] * (i not in replaced) + peak)
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


def _first_passes(schedule: Schedule, word: Word) -> frozenset[int]:
    """Return the places of the first pass of every stage and micro-batch."""
    first: dict[tuple[int, int, int], tuple[int, int]] = {}
    for i, a in enumerate(word):
        if a.kind in PASSES:
            key, order = (a.stage, a.microbatch, a.turn), (schedule.cycles_late(a), i)
            first[key] = min(first.get(key, order), order)
    return frozenset(i for _, i in first.values())


def _replaced(schedule: Schedule, word: Word, reruns: frozenset[int]) -> frozenset[int]:
    """Return the reruns after the last use of the old output by the next stage."""
    last = {(a.stage, a.microbatch, a.turn): i for i, a in enumerate(word) if a.kind is not Kind.UPDATE}
    keys = {i: (word[i].stage + 1, word[i].microbatch, word[i].turn) for i in reruns}
    return frozenset(i for i, key in keys.items() if last.get(key, -1) < i)


def _spans(schedule: Schedule, word: Word, costs: Costs, reruns: frozenset[int]) -> Iterator[_Span]:
    """Iterate over everything that is live for a while; activations begin at the forward, or at its rerun."""
    activation, output, cotangent, gradient, head_gradient = (
        costs.per_stage(f"{name}_bytes", schedule.num_stages) for name in _NAMES
    )
    late = [schedule.cycles_late(action) for action in word]

    def span(first: int, last: int, num_bytes: float) -> _Span:
        return first, last, late[last] - late[first], num_bytes

    def order(i: int) -> tuple[int, int]:
        return late[i], i

    places: dict[tuple[int, int, int], list[int]] = {}
    for i, a in enumerate(word):
        if a.kind is not Kind.UPDATE:
            places.setdefault((a.stage, a.microbatch, a.turn), []).append(i)
    for (k, m, turn), found in places.items():
        used: set[int] = set()
        found.sort(key=order)
        flow = schedule.flows[turn][m].stages[k]
        above = sorted(places.get((k + 1, m, turn), []), key=order)
        first, last = found[0], found[-1]
        rerun = next((i for i in found if i in reruns), None)
        yield span(first if rerun is None else rerun, last, activation[k])
        yield span(first, max([last if rerun is None else rerun, *above[-1:]], key=order), output[k])
        if rerun is not None:
            yield span(rerun, last, output[k])
        if k and (k - 1, m, turn) not in places:
            yield span(first, last, output[k - 1])  # received
        for i in found:
            kind, message = word[i].kind, word[i].message
            if kind is Kind.HEAD and flow.own:
                yield span(i, last, output[k])
            elif kind is Kind.WEIGHT_GRAD and flow.fused is not None:
                begin = next(j for j in found if word[j].kind is Kind.INPUT_GRAD and word[j].message == flow.fused)
                yield span(begin, i, cotangent[k])
            if kind in PASSES and not above:
                received = set(flow.cotangent(message).needed) - used
                used |= received
                yield span(i, last, output[k] * len(received))
        yield from (span(i, last, output[k]) for i in above if word[i].message is not None)
    yield from _gradients(schedule, word, gradient, head_gradient)


def _gradients(
    schedule: Schedule, word: Word, gradient: tuple[float, ...], head_gradient: tuple[float, ...]
) -> Iterator[_Span]:
    """Iterate over the gradients of stages and heads: each is made once in a call, and freed after its update."""
    updates = {(a.stage, a.turn): i for i, a in enumerate(word) if a.kind is Kind.UPDATE}
    begun: set[tuple[bool, int, int]] = set()
    for i, a in enumerate(word):
        head, call = a.kind is Kind.HEAD, schedule.call(a)
        if (head or a.kind in (Kind.WEIGHT_GRAD, Kind.BOTH)) and (head, a.stage, call) not in begun:
            begun.add((head, a.stage, call))
            yield i, updates.get((a.stage, call), len(word) - 1), 0, (head_gradient if head else gradient)[a.stage]
