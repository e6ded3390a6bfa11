"""Schedules: complete, near the bound, with the flow's work; their exact periods against slow definitions."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import nwise
from nwise.app.report.grid import KIND_COLOURS
from nwise.flow import find_flow, flows_for
from nwise.planning.partitions import Piece, stage_costs
from nwise.schedule import (
    PAPER,
    Costs,
    Kind,
    Schedule,
    baseline,
    best,
    simulate,
    validate,
)
from nwise.schedule.actions import SENDS
from nwise.schedule.ages import message_ages, strategy_ages
from nwise.schedule.bounds import lower_bound
from nwise.schedule.clock import Clock, make_clock
from nwise.schedule.memory import peak_bytes
from nwise.schedule.named import ORDERS, RULES, NamedOrder, choose, named_schedule
from nwise.schedule.orders import depth_first, make_schedule, paced, phase, skewed
from nwise.schedule.period import period
from nwise.schedule.sweep import merge
from timelines import in_flight

REAL = Costs(forward=1, head=0.5, input_grad=1, weight_grad=1)


def of(strategy: str | nwise.Strategy, a: int, m: int, costs: Costs = REAL) -> Schedule:
    return best(strategy, num_stages=a, num_microbatches=m, costs=costs)


# Random credit -----------------------------------------------------------------------------------


@st.composite
def credits(draw: st.DrawFn) -> NDArray[np.float64]:
    size = draw(st.integers(1, 6))
    values = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, -1]), min_size=size**2, max_size=size**2))
    matrix = np.tril(np.array(values, dtype=np.float64).reshape(size, size))
    assume(matrix.any())
    return matrix


@settings(max_examples=75, deadline=None)
@given(
    credits(), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.6]), st.sampled_from([float("inf"), 0.8]), st.sampled_from([0.0, 0.4]),
)  # fmt: skip
def test_random_credit_gives_valid_schedules_of_minimal_work(
    matrix: NDArray[np.float64], m: int, share: float, overhead: float, update: float, bandwidth: float, latency: float
) -> None:
    """Every kind of cost takes part, and messages up and down differ in size."""
    a = len(matrix)
    forward, sizes = [1 + 0.3 * k for k in range(a)], [(1 + k % 3) / 4 for k in range(a)]
    costs = Costs(forward=forward, head=0.3, input_grad=1.2, weight_grad=0.7, chain_share=share, overhead=overhead,
                  update=update, bandwidth=bandwidth, message_bytes=sizes, latency=latency)  # fmt: skip
    found = of(nwise.Credit(matrix), a, m, costs)
    validate(found)
    assert found.period >= found.lower_bound * (1 - 1e-9)
    for rule in (partial(phase, fuse=True), partial(skewed, fuse=False, stride=2)):
        other = make_schedule("?", found.flows, rule).with_costs(costs)
        assert other.period >= max(found.lower_bound, found.period) * (1 - 1e-9)
    flow = find_flow(torch.from_numpy(matrix))
    for k in range(a):
        # F + r I + (rho - r) lambda I + W + h: r messages, and rho chains, one more where W shares none
        r, rho = len(flow.stages[k].messages), flow.stages[k].passes
        trained, lost = bool(matrix[:, k].any()), bool(matrix[k].any())
        expected = forward[k] + r * 1.2 + (rho - r) * share * 1.2 + 0.7 * trained + 0.3 * lost
        work = m * expected + update
        assert found.busy[k] >= work - 1e-9 if overhead else found.busy[k] == pytest.approx(work)
        assert sum(x.kind is Kind.SEND_GRADIENT for x in found.actions[k]) == m * r
    line = simulate(found, cycles=61)
    assert in_flight(line) == found.in_flight
    ends = [max(run.end) for run in line.runs]
    assert (ends[60] - ends[30]) / 30 == pytest.approx(found.period, rel=0.03)
    for sender, receiver in itertools.permutations(range(a), 2):
        messages = [x for x in line.messages if (x.sender, x.receiver) == (sender, receiver)]
        # A gradient is as large as the activation that it belongs to: that of the stage below. A link takes one at a time.
        takes, arrivals = sizes[min(sender, receiver)] / bandwidth, sorted(x.arrives for x in messages)
        assert all(x.sent + takes + latency - 1e-9 <= x.arrives <= x.used for x in messages)
        assert all(later - earlier >= takes - 1e-9 for earlier, later in itertools.pairwise(arrivals))


# Exact periods -----------------------------------------------------------------------------------


def cycle_ratio(net: Clock) -> float:
    """The largest ratio of time to calls over all cycles of waits, by definition: no cycle gains at this rate, some do below."""
    arcs = [(u, v, net.duration[v] + lag, calls) for v, waits in enumerate(net.waits) for u, lag, calls in waits]
    for nodes in net.lists:
        pairs = zip(nodes, (*nodes[1:], nodes[0]), strict=True) if nodes else ()
        arcs += [(u, v, net.duration[v], int(v == nodes[0])) for u, v in pairs]
    origin, target, weight, calls = map(np.array, zip(*arcs, strict=True))

    def gains(rate: float) -> bool:
        """Bellman and Ford: after as many rounds as there are nodes, distances grow only around a cycle that gains."""
        far = np.zeros(len(net.duration))
        for _ in range(len(far) + 1):
            longer = far.copy()
            np.maximum.at(longer, target, far[origin] + weight - rate * calls)
            if np.allclose(longer, far, rtol=0, atol=1e-11):
                return False
            far = longer
        return True

    low, high = 0.0, sum(net.duration) + 10 * len(arcs)
    while high - low > 1e-8 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gains(middle) else (low, middle)
    return high


def drawn(numbers: random.Random, bases: Sequence[str], delays: Sequence[str]) -> tuple[Any, Any, Costs, Any]:
    """The flows of a strategy, its ages, costs, and a placement."""
    a, m = numbers.randint(2, 6), numbers.randint(1, 4)
    strategy = nwise.strategy(numbers.choice(bases) + numbers.choice(delays))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more stages in a window than there are
        flows = flows_for(strategy, a, m)
    factors = [numbers.uniform(0.2, 2) for _ in range(a)]
    latency, bandwidth = numbers.choice([0, 0.3, 3]), numbers.choice([float("inf"), 0.9])
    costs = Costs(factors, 0.5, factors, 1, update=0.3, latency=latency, message_bytes=0.5, bandwidth=bandwidth)
    placement = tuple(numbers.choice([range(a), [k // 2 for k in range(a)], [0] * a, [k % 2 for k in range(a)]]))
    return flows, strategy_ages(strategy, flows), costs, placement


BASES = ["2-wise", "3-wise", "end-to-end", "blocks-2", "deep-supervision", "2-wise-mean", "local", "rotating-2"]
BASES += ["rotating-2-microbatch"]


@pytest.mark.parametrize("seed", range(50))
def test_period_matches_eigenvalue_and_long_simulation(seed: int) -> None:
    """Regression: the bound counted an update for every flow, and messages of several ages were paired with wrong calls."""
    numbers = random.Random(seed)
    flows, ages, costs, placement = drawn(numbers, BASES, ["", "-delay-1", "-delay-2", "-hogwild"])
    ages = message_ages(flows, ages.weights, numbers.choice(["early", "late"]))
    rule: Any = numbers.choice([partial(phase, fuse=True), partial(skewed, fuse=False, stride=2), depth_first])
    schedule = make_schedule("?", flows, rule, placement, ages)
    validate(schedule)
    result = schedule.with_costs(costs)
    net = make_clock(result)
    found = period(net)
    assert found == pytest.approx(cycle_ratio(net), rel=1e-6)
    assert result.lower_bound * len(flows) <= found * (1 + 1e-9)
    line = simulate(result, cycles=121)
    ends = [max(run.end) for run in line.runs]
    assert (ends[120] - ends[60]) / 60 == pytest.approx(found, rel=0.02)
    assert in_flight(line) == result.in_flight
    assert all(one.sent <= one.arrives <= one.used for one in line.messages)


def test_paced_schedules_are_valid_and_no_shorter_than_the_bound() -> None:
    """Without the check of a neighbour's call, some results were older than their use."""
    numbers, count = random.Random(0), 0
    for _ in range(40):
        flows, ages, costs, placement = drawn(numbers, BASES, ["-delay-1", "-delay-3", "-hogwild"])
        bound = lower_bound(flows, costs, placement, ages)
        pace = numbers.choice([0, 1, 1.1, 1.5]) * bound / len(flows)
        made = paced(flows, placement, message_ages(flows, ages.weights), costs)
        for schedule in made(pace, numbers.choice([1, len(flows[0])])):
            validate(schedule)
            assert schedule.with_costs(costs).period * len(flows) >= bound * (1 - 1e-9)
            count += 1
    assert count > 100


def test_bound_under_a_delay_by_hand() -> None:
    """Two stages, two micro-batches, a delay of one: a gradient has two calls.

    Between the first forward of stage 0 and its update lie the forward (1), a message (10), both forwards and input gradients of
    stage 1 (4), a message (10), and a weight gradient that goes through all layers for itself (2). The path of one micro-batch,
    which was the bound once, takes 2 less.
    """
    found = of("end-to-end-delay-1", 2, 2, Costs(1, 0, 1, 1, latency=10))
    assert found.period == found.lower_bound == (1 + 10 + 4 + 10 + 2) / 2


NEAR = [
    # Under a delay, with one age for all micro-batches of a message the distance was up to 46 %.
    ("end-to-end-delay-1", 8, 4, 4, 0.08, 0.002),
    ("end-to-end-delay-1", 4, 2, 0, 0.04, 0.012),
    ("end-to-end-delay-2", 8, 4, 4, 0.08, 0.03),
    ("end-to-end-delay-2", 16, 2, 2, 0.04, 0.02),
    ("rotating-2-delay-1", 8, 2, 2, 0.04, 0.007),
    # A message takes as long as the forward of a mini-batch, or three. Strides of 1 and 2 alone were up to 7 % slower.
    *(
        (name, a, m, times * m, 0.08, 1e-9)
        for name, (a, m), times in itertools.product(("2-wise", "3-wise-mean", "4-wise"), ((5, 8), (8, 4)), (1, 3))
    ),
]


@pytest.mark.parametrize(("name", "a", "m", "latency", "overhead", "most"), NEAR)
def test_schedules_are_near_the_bound(name: str, a: int, m: int, latency: float, overhead: float, most: float) -> None:
    found = of(name, a, m, Costs(1, 0.5, 1, 1, latency=latency, overhead=overhead))
    assert found.lower_bound * (1 - 1e-9) <= found.period <= found.lower_bound * (1 + most)


def test_best_order_of_two_stages_is_optimal() -> None:
    """Try all interleavings of A = 2, M = 2 end-to-end, on stages of unequal speed."""
    numbers = random.Random(3)
    flow = find_flow(nwise.EndToEnd().credit(2))
    kinds = [depth_first([flow, flow], 0, fuse=False)[k] for k in range(2)]
    for _ in range(2):
        costs = Costs(
            forward=[numbers.uniform(0.5, 2) for _ in range(2)], head=numbers.uniform(0, 1),
            input_grad=numbers.uniform(0.5, 2), weight_grad=numbers.uniform(0.5, 2), latency=0.2,
        )  # fmt: skip
        shortest = float("inf")
        for words in itertools.product(*(interleavings(k, kind) for k, kind in enumerate(kinds))):
            try:
                other = make_schedule("any", ((flow, flow),), lambda *_: list(words)).with_costs(costs).period  # noqa: B023
            except ValueError as error:
                assert "deadlock" in str(error)  # noqa: PT017 - some of them are
                continue
            shortest = min(shortest, other)
        found = of("end-to-end", 2, 2, costs)
        assert found.lower_bound <= shortest + 1e-9
        assert found.period == pytest.approx(shortest)


def interleavings(k: int, actions: tuple[nwise.schedule.Action, ...]) -> list[tuple[nwise.schedule.Action, ...]]:
    """Orders in which each kind takes micro-batch 0 before 1 and a micro-batch its actions in their order."""
    first, second = ([x for x in actions if x.microbatch == m] for m in range(2))
    found = []
    for places in itertools.combinations(range(len(actions)), len(first)):
        one, two = iter(first), iter(second)
        word = tuple(next(one) if i in places else next(two) for i in range(len(actions)))
        if all(word.index(x) < word.index(x._replace(microbatch=1)) for x in first):
            found.append(word)
    return found


# How good the orders are ---------------------------------------------------------------------------


_MANY = (1, 2, 3, 4, 6, 8, 16)


@pytest.mark.parametrize("head", [0, 0.5, 1.3])
@pytest.mark.parametrize(
    ("depths", "sizes"),
    [
        (range(1, 8), (1, 2, 3, 4, 6, 8)),
        ((8, 12), (1, 3, 8)),
        pytest.param(range(1, 13), _MANY, marks=pytest.mark.slow("more of the same, half a minute")),
    ],
)
def test_n_wise_and_end_to_end_schedules_are_optimal(depths: Sequence[int], sizes: Sequence[int], head: float) -> None:
    """The period equals the bound for end-to-end and A >= 2N - 1, with N micro-batches in flight."""
    costs = Costs(1, head, 1, 1)
    for a in depths:
        for m in sizes:
            for n in {*range(1, (a + 1) // 2 + 1), a}:
                found = of(nwise.NWise(n), a, m, costs)
                assert found.period == pytest.approx(found.lower_bound, rel=1e-9), (a, n, m)
                if a >= 2 * n - 1:
                    assert found.order == "skewed"
                    assert max(found.in_flight) == min(m, n)


def test_wide_window_schedules_are_near_the_bound() -> None:
    """N < A < 2N - 1: at most 17.2 % above a bound that is itself not sharp there (A, N, M = 4, 3, 2 has optimum 10)."""
    worst = 0.0
    for a, n, m, head in itertools.product(range(4, 8), range(3, 6), (1, 2, 3, 6), (0, 0.5)):
        if n < a < 2 * n - 1:
            found = of(nwise.NWise(n), a, m, Costs(1, head, 1, 1))
            worst = max(worst, found.period / found.lower_bound - 1)
    assert worst <= 0.172
    assert (of("3-wise", 4, 2, Costs(1, 0, 1, 1)).period, of("3-wise", 4, 2, Costs(1, 0, 1, 1)).lower_bound) == (10, 9)
    assert of("5-wise", 7, 3).period == 20.5  # a search found 19.5, in 24 times the time


def test_unequal_stages_are_near_the_bound() -> None:
    """Each stage 0.6 to 1.6 times as slow, with and without latency."""
    numbers = random.Random(0)
    gaps = []
    for _ in range(80):
        a, m = numbers.randint(2, 8), numbers.choice([1, 2, 3, 4, 6, 8])
        n, head = numbers.randint(1, a), numbers.choice([0, 0.5, 1.3])
        factors = [numbers.uniform(0.6, 1.6) for _ in range(a)]
        latency = numbers.choice([0, 0.3])
        costs = Costs(factors, [head * f for f in factors], factors, factors, latency=latency)
        found = of(nwise.NWise(n), a, m, costs)
        gaps.append(found.period / found.lower_bound - 1)
    assert min(gaps) > -1e-9
    assert np.mean(gaps) <= 0.01
    assert sum(gap < 1e-9 for gap in gaps) >= 64


TABLE = {  # A = 8, h = 0.5, M = 1, 2, 4, 8, 16, 32; every other order is worse or equal
    "gpipe": [24.5, 28, 35, 49, 77, 133],
    "1f1b": [24.5, 28, 35, 49, 77, 133],
    # Walking the chain twice would take 20.5, 38 and 144 with M = 2, 8, 32.
    "zb-h1": [17.5, 20, 25, 35, 63, 119],
    "zero-bubble": [17.5, 20, 25, 35, 56, 112],
    "end-to-end": [17.5, 20, 25, 35, 56, 112],
    "local": [3.5, 7, 14, 28, 56, 112],
    "2-wise": [5.5, 9, 18, 36, 72, 144],
    "2-wise-mean": [5.5, 9, 18, 36, 72, 144],
    "3-wise": [7.5, 11, 22, 44, 88, 176],
}
# At M = 16: micro-batches of which a stage holds activations.
IN_FLIGHT = {"gpipe": (16,) * 8, "1f1b": tuple(range(8, 0, -1)), "zb-h1": (8,) * 8, "zero-bubble": (15, *(8,) * 7)}


def made(name: str, a: int, m: int, costs: Costs = REAL) -> Schedule:
    """The schedule of a strategy or of a baseline."""
    if name in ("gpipe", "1f1b", "zb-h1", "zero-bubble"):
        return baseline(name, num_stages=a, num_microbatches=m, costs=costs)
    return of(name, a, m, costs)


@pytest.mark.parametrize("name", TABLE)
def test_periods_match_hand_worked_table(name: str) -> None:
    for m, expected in zip((1, 2, 4, 8, 16, 32), TABLE[name], strict=True):
        found = made(name, 8, m)
        if name in IN_FLIGHT:
            assert set(found.flows[0]) == {find_flow(nwise.EndToEnd().credit(8))}
            assert m != 16 or found.in_flight[0] == max(found.in_flight) == IN_FLIGHT[name][0]
            assert m != 16 or name == "zero-bubble" or found.in_flight == IN_FLIGHT[name]
        validate(found)
        assert found.period == expected


@pytest.mark.parametrize(
    ("name", "a", "m", "latency", "slots"),
    [
        # Latency slows end-to-end more than N-wise.
        *(("1f1b", 16, 4, 0, 59), ("zero-bubble", 16, 4, 0, 41), ("2-wise", 16, 4, 0, 18), ("3-wise", 16, 4, 0, 22)),
        *(("1f1b", 16, 4, 1, 92), ("zero-bubble", 16, 4, 1, 71), ("2-wise", 16, 4, 1, 18), ("3-wise", 16, 4, 1, 22)),
        *(("2-wise", 16, 2, 1, 10), ("3-wise", 16, 2, 1, 14)),
        # A delay hides it.
        *(("end-to-end-delay-3", 8, 8, 3, 28), ("zero-bubble", 8, 8, 3, 77)),
        # Rotating blocks average over their cycle: here the work of end-to-end.
        ("rotating-2", 8, 8, 0, 28),
        # Where nothing flows back, nothing waits for a message's way.
        ("local", 2, 1, 20, 3.5),
    ],
)
def test_periods_on_slow_links(name: str, a: int, m: int, latency: float, slots: float) -> None:
    found = made(name, a, m, Costs(1, 0.5, 1, 1, latency=latency))
    assert found.period == slots
    assert found.lower_bound <= slots
    assert name != "local" or found.lower_bound == slots


def test_list_scheduling_knows_when_messages_arrive() -> None:
    """3-wise, A = 4, M = 3, latency 1: a list that took messages to be there at once would need 20.5."""
    flows = flows_for(nwise.NWise(3), 4, 3)
    late = Costs(1, 0.5, 1, 1, latency=1)
    periods = []
    for known in (late, REAL):
        rule = partial(depth_first, fuse=False)
        schedule = make_schedule("nearest", flows, rule, costs=known, cap=3)
        periods.append(schedule.with_costs(late).period)
    assert periods == [17.5, 20.5]


@pytest.mark.parametrize(("delay", "num_stages"), [*((1, a) for a in (2, 3, 4, 6, 8, 12, 16)), (2, 4)])
def test_delay_leaves_no_bubble(delay: int, num_stages: int) -> None:
    """End-to-end with M = A takes what the busiest stage computes, the last one with its head.

    It keeps the activations of its mini-batches and one micro-batch: the search once took d + 1 whole mini-batches.
    """
    found = of(f"end-to-end-delay-{delay}", num_stages, num_stages)
    validate(found)
    assert found.period == found.lower_bound == num_stages * 3.5
    assert max(found.in_flight) == delay * num_stages + 1


@pytest.mark.parametrize("num_stages", range(1, 7))
def test_hogwild_never_waits_without_micro_batches(num_stages: int) -> None:
    """Two slots a mini-batch at any depth (section 2 of the paper), with the ages of the greedy rule and with half of them."""
    for name, steps in (("hogwild", 2), ("hogwild-least", 1), ("hogwild-forward-least", 1)):
        found = of(name, num_stages, 1, PAPER)
        assert found.period == 2
        assert found.ages.weights == tuple(steps * k for k in reversed(range(num_stages)))


# Lists ---------------------------------------------------------------------------------------------


def test_action_lists_by_hand() -> None:
    """A = 4, 2-wise, M = 2, skewed; loss 0 trains nothing, so stage 0 has neither head nor I."""
    lists = [" ".join(map(str, actions)) for actions in of("2-wise", 4, 2).actions]
    assert lists[0] == "F0(0) SX0(0) F0(1) SX0(1) RG0(0.0) W0(0) RG0(1.0) W0(1) U0"
    middle = (
        "RX1(0) F1(0) SX1(0) H1(0) I1(0.0) SG1(0.0) RX1(1) F1(1) SX1(1) H1(1) I1(1.0) SG1(1.0) "
        "RG1(0.0) W1(0) RG1(1.0) W1(1) U1"
    )
    assert lists[1] == middle
    assert lists[2] == "".join("2" if c == "1" and middle[i - 1].isalpha() else c for i, c in enumerate(middle))
    end = best("end-to-end", num_stages=4, num_microbatches=1, costs=PAPER)
    assert [x.kind for x in end.work[1]] == [Kind.FORWARD, Kind.BOTH, Kind.UPDATE]
    assert lists[3] == ("RX3(0) F3(0) H3(0) I3(0.0) SG3(0.0) RX3(1) F3(1) H3(1) I3(1.0) SG3(1.0) W3(0) W3(1) U3")


@pytest.mark.parametrize("rule", [partial(phase, fuse=True), partial(skewed, fuse=False, stride=2), depth_first])
def test_one_process_can_run_any_lists(rule: Any) -> None:
    flow = find_flow(nwise.NWise(3).credit(6))
    schedule = make_schedule("?", ((flow,) * 3,), rule)
    order, tasks = merge(schedule.graph, schedule.lists[0]), schedule.graph.tasks
    done = set()
    for task in order:
        assert all(need.task in done for need in schedule.graph.needs[task])
        done.add(task)
    for k, numbers in enumerate(schedule.by_rank):
        assert [task for task in order if tasks[task].stage == k] == list(numbers)


def test_one_process_keeps_the_order_of_the_rule() -> None:
    """One rank never waits, so list scheduling would only hold more micro-batches."""
    flows = flows_for(nwise.EndToEnd(), 4, 3)
    one = choose("zb-h1", flows, (0,) * 4)
    assert one.lists == make_schedule("", flows, partial(depth_first, fuse=False), (0,) * 4).lists
    assert max(one.in_flight) == 1


# Bandwidth, memory, refusals --------------------------------------------------------------------


def test_less_memory_takes_an_order_with_fewer_in_flight() -> None:
    costs = Costs(1, 0.5, 1, 1, activation_bytes=10, fixed_bytes=5)
    size: dict[str, Any] = {"num_stages": 8, "num_microbatches": 16}
    free = best("3-wise", **size, costs=costs)
    assert (free.period, max(free.peak_bytes)) == (88, 35)
    tight = best("3-wise", **size, costs=costs, memory=25)
    assert max(tight.peak_bytes) == 25
    assert 88 < tight.period <= 89
    one = best("2-wise", **size, costs=costs, memory=15)
    assert (one.period, set(one.in_flight)) == (88, {1})
    with pytest.raises(ValueError, match="`memory` should be at least 15 bytes a rank.*Found 14"):
        best("3-wise", **size, costs=costs, memory=14)


def test_period_search_terminates_despite_rounding() -> None:
    """Regression: potentials grew for ever if a cycle exceeded the busiest stage by less than rounding."""
    costs = Costs(
        forward=[0.25, 0.29, 1.08], head=0.5, input_grad=[0.96, 1.52, 0.82], weight_grad=[0.47, 1.84, 1.07], latency=1.0,
        update=[0, 0, 5.349999998893899],
    )  # fmt: skip
    assert of("3-wise", 3, 2, costs).period == pytest.approx(12.25, rel=0.2)


def test_more_memory_is_never_worse() -> None:
    """Regression: orders for little memory were tried only if no other fitted."""
    costs = Costs(0.472, 1.144, (0.428, 1.238), (0.511, 1.514), chain_share=0.5, update=(0.757, 0.853), overhead=0.05,
                  activation_bytes=(1.28, 1.94), fixed_bytes=1.5)  # fmt: skip
    periods = [best("blocks-3", num_stages=2, num_microbatches=3, costs=costs, memory=x).period for x in (4, 4.6, 5.5)]
    assert periods == sorted(periods, reverse=True)


def test_a_stage_that_waits_for_nothing_runs_ahead() -> None:
    """The first stage of local training needs no answer, so only the slowest stage decides how long a step takes."""
    costs = Costs([1, 3, 1], 0, 1, 1, latency=0.1, bandwidth=10.0, message_bytes=1)
    found = of("local", 3, 2, costs)
    line = simulate(found, cycles=30)
    assert line.period == pytest.approx(found.period) == pytest.approx(found.busy[1])
    assert line.utilisation == pytest.approx([busy / found.period for busy in found.busy])
    assert line.bubble == pytest.approx(1 - sum(line.utilisation) / 3)
    assert all(m.arrives - m.sent >= 0.1 + 0.1 - 1e-12 for m in line.messages)
    assert max(e.end for e in line.events if e.action.stage == 0) == pytest.approx(30 * found.busy[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0}, "`num_stages` should be an integer of at least 1. Found 0"),
        ({"strategy": "0-wise"}, "`n`, the number of stages.*at least 1.*Found `n = 0`"),
        ({"strategy": nwise.Credit([[1]])}, "one row and column for each of the 4 stages. Found 1"),
        ({"strategy": "credit-1,1;1,1", "num_stages": 2}, "zero above the diagonal.*set it to 0"),
        ({"memory": float("nan")}, "`memory` should be a number of bytes above 0. Found nan"),
        ({"memory": [9.0, 9.0]}, "`memory` should be one number, or one for each of 4 ranks"),
        ({"costs": Costs([1, 2], 0, 1, 1)}, "`forward` should have one value for each of the 4 stages. Found 2"),
        ({"costs": 3}, "`costs` should be a nwise.schedule.Costs. Found int"),
    ],
)
def test_bad_arguments_of_best(arguments: dict[str, object], message: str) -> None:
    good = {"strategy": "2-wise", "num_stages": 4, "num_microbatches": 2, "costs": REAL}
    with pytest.raises((ValueError, TypeError), match=message):
        best(**{**good, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": [1, -2]}, "`head` should be from 0 to 1e\\+30. Found -2"),
        ({"input_grad": float("nan")}, "`input_grad` should be from 0 to 1e\\+30. Found nan"),
        ({"weight_grad": "1"}, "`weight_grad` should be a number, or one per stage. Found '1'"),
        ({"chain_share": 1.5}, "`chain_share` should be from 0 to 1. Found 1.5"),
        ({"head": []}, "`head` should be a number, or one per stage. Found none"),
        ({"forward": 10**400}, "`forward` should be from 0 to 1e\\+30. Found more"),
        ({"bandwidth": 0}, "`bandwidth` should be above 0"),
        ({"latency": [1, 2]}, "`latency` should be one number. Found"),
    ],
)
def test_bad_costs(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(**{"forward": 1, "head": 0, "input_grad": 1, "weight_grad": 1, **arguments})  # type: ignore[arg-type]


def test_bad_simulations_and_baselines() -> None:
    found = of("local", 2, 1)
    with pytest.raises(ValueError, match="`cycles`.*Found 0"):
        simulate(found, cycles=0)
    with pytest.raises(TypeError, match=r"`schedule` should be a Schedule, such as .*Found str"):
        simulate("1f1b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="A baseline should be one of gpipe.*Found 'gpip'.*gpipe"):
        baseline("gpip", num_stages=2, num_microbatches=1, costs=REAL)


def test_numpy_numbers_are_accepted() -> None:
    costs = Costs(np.array([1, 2]), np.float32(0.5), 1, 1)  # type: ignore[arg-type]
    assert costs == Costs((1, 2), 0.5, 1, 1)
    one: Any = np.int64(1)
    assert of("2-wise", one * 2, one, costs).period == of("2-wise", 2, 1, costs).period


def test_costs_of_a_mini_batch_are_split() -> None:
    split = Costs(1, [0.5, 1], 1, 1, overhead=0.1, latency=0.2, message_bytes=8).split_in(4)
    assert (split.forward, split.head, split.message_bytes) == (0.25, (0.125, 0.25), 2)
    assert (split.overhead, split.latency) == (0.1, 0.2)


def test_schedules_compare_and_hash_by_value() -> None:
    again: Schedule = of("2-wise", 3, 2)
    assert again == of("2-wise", 3, 2)
    assert hash(again) == hash(of("2-wise", 3, 2))


def test_first_calls_do_not_wait_for_missing_mini_batches() -> None:
    """Regression: pictures showed stage 0 waiting for a gradient of the mini-batch before the first one."""
    costs = Costs(1, 0, 1, 1, latency=4)
    line = simulate(best("end-to-end-delay-1", num_stages=2, num_microbatches=1, costs=costs))
    starts = [e.start for e in line.events if e.action.kind is Kind.FORWARD and e.action.stage == 0]
    assert starts[:2] == [0, 1]


def test_interleaved_order_of_uneven_stages() -> None:
    """Five stages on two ranks ended in a deadlock."""
    flows = flows_for(nwise.NWise(2), 5, 2)
    validate(named_schedule("interleaved-1f1b", flows, (0, 1, 0, 1, 0), None, Costs(1, 0, 1, 1)))


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_action_has_a_row(kind: Kind) -> None:
    """A new kind of action was worth nothing wherever its row was forgotten: tables of names, times, peaks and urgency."""
    assert (kind in (*SENDS, *SENDS.values())) != bool(kind.costs)  # a message, or it takes time
    assert (kind in KIND_COLOURS) == bool(kind.costs)
    assert [other for other in Kind if other.words == kind.words] == [kind]
    assert {*kind.costs} <= {field.name for field in fields(Costs)}


@pytest.mark.parametrize("name", [field.name for field in fields(Costs)])
def test_every_cost_counts(name: str) -> None:
    """A new cost was worth nothing where one of the tables by name lacked it: in a schedule, and for the planner's pieces."""
    flows = flows_for(nwise.NWise(2), 3, 2)
    sizes = {field.name: 1.0 for field in fields(Costs) if field.name.endswith("_bytes")}
    costs = Costs(1, 1, 1, 1, chain_share=0.5, bandwidth=10.0, **sizes)

    def found(costs: Costs) -> list[object]:
        made = [choose(order, flows, ages=message_ages(flows, (1, 1, 1)), costs=REAL) for order in ("phase", "1f1b")]
        split = make_schedule("?", flows, partial(depth_first, fuse=False))
        return [(one.with_costs(costs).period, peak_bytes(one.with_costs(costs))) for one in (*made, split)]

    most = {"chain_share": 1.0, "bandwidth": 0.01}.get(name, 1e6)
    assert found(replace(costs, **{name: most})) != found(costs)
    pieces = [Piece("piece", *(1.0,) * 11) for _ in range(4)]
    of_pieces = getattr(stage_costs(pieces, [0, 1, 3], flows[0]), name)
    assert isinstance(of_pieces, tuple) != (name in ("latency", "overhead", "bandwidth"))


def test_order_by_rank_keeps_its_lists_whatever_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 stages on 3 ranks it became a list schedule under its name: the needs of interleaved 1F1B were those of all."""

    def stagewise(batch: Any, minibatch: int, placement: tuple[int, ...]) -> list[Any]:
        stages = depth_first(batch, minibatch)
        return [tuple(a for one in stages for a in one if placement[a.stage] == rank) for rank in range(3)]

    monkeypatch.setitem(RULES, "stagewise", NamedOrder(depth_first, by_rank=stagewise))
    flows = flows_for(nwise.Local(), 4, 5)
    schedule = named_schedule("stagewise", flows, (0, 0, 1, 2), None, Costs(1, 0, 1, 1))
    validate(schedule)
    lists = [tuple(a for a in one if a.kind is not Kind.UPDATE) for one in schedule.work]
    assert lists == stagewise(flows[0], 0, (0, 0, 1, 2))


def test_schedule_is_chosen_by_name() -> None:
    flows = best("2-wise", num_stages=3, num_microbatches=2, costs=Costs(1, 0, 1, 1)).flows
    for order in ORDERS:
        assert choose(order, flows).flows == flows
    with pytest.raises(ValueError, match=r"`schedule` should be one of best, .*Found 'gpip'"):
        choose("gpip", flows)
    with pytest.raises(TypeError, match="`schedule` should be a Schedule or one of .*Found int"):
        choose(3, flows)  # type: ignore[arg-type]
    other = best("end-to-end", num_stages=3, num_microbatches=2, costs=Costs(1, 0, 1, 1))
    with pytest.raises(ValueError, match="should be made for the pipeline's strategy"):
        choose(other, flows)
