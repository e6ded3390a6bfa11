"""The task graph: what each task needs, against cases worked out by hand and against the definition of a flow."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from functools import partial

import pytest

import nwise
from nwise.flow import flows_for
from nwise.schedule import Kind
from nwise.schedule.ages import message_ages, strategy_ages
from nwise.schedule.graph import Need, task_graph
from nwise.schedule.named import ORDERS, choose
from nwise.schedule.orders import depth_first, make_schedule
from nwise.schedule.schedule import arrange
from nwise.schedule.sweep import Deadlock, merge, sweep


def test_graph_by_hand() -> None:
    """2-wise, 3 stages on 2 ranks, M = 1. Stage 1 learns from loss 2, and sends back the gradient of loss 1.

    ::

        rank 0   F0 0 -> F1 1 -> H1 2 -> I1 7 -> W0 9          a pass needs its forward, too: W0 that of F0
                           |                        W1 8
                           v message                 ^ message
        rank 1           F2 3 -> H2 4 -> I2 5 -------+
                                           `-> W2 6            I2 has kept the cotangents of all layers for it
    """
    graph = task_graph(flows_for(nwise.NWise(2), 3, 1), (0, 0, 1))
    assert " ".join(map(str, graph.tasks)) == "F0(0) F1(0) H1(0) F2(0) H2(0) I2(0.0) W2(0) I1(0.0) W1(0) W0(0) U0 U1 U2"
    assert [[need.task for need in needs] for needs in graph.needs] == [
        [], [0], [1], [1], [3], [3, 4], [3, 4, 5], [1, 2], [1, 5], [0, 7], [], [], [],
    ]  # fmt: skip
    links = [(need.task, task) for task, needs in enumerate(graph.needs) for need in needs if need.link]
    assert links == [(1, 3), (5, 8)]
    assert graph.ranks == (0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1)
    schedule = arrange(
        "by hand", graph.flows, [[graph.tasks[task] for task in (0, 1, 2, 7, 9, 8)], graph.tasks[3:7]], graph.placement
    )
    assert schedule.graph == graph
    assert schedule.lists == (((0, 1, 2, 7, 9, 8, 10, 11), (3, 4, 5, 6, 12)),)
    assert schedule.messages == ((1, 3), (5, 8))
    assert " ".join(map(str, schedule.actions[0])) == "F0(0) F1(0) SX1(0) H1(0) I1(0.0) W0(0) RG1(0.0) W1(0) U0 U1"


def test_graph_of_a_delay_and_of_a_cycle_by_hand() -> None:
    """A W of age 1 needs the forward of the call before."""
    flows = flows_for(nwise.strategy("end-to-end-delay-1"), 2, 1)
    ages = message_ages(flows, (1, 1))
    graph = task_graph(flows, (), ages, [a._replace(age=ages.of(a)) for one in depth_first(flows[0], 0) for a in one])
    assert list(map(str, graph.tasks)) == ["F0(0)", "F1(0)", "H1(0)", "B1(0.0)-1", "W0(0)-1", "U0", "U1"]
    assert graph.needs[3:5] == ((Need(1, 1, False), Need(2, 1, False)), (Need(0, 1, False), Need(3, 0, True)))
    assert (graph.late[3], graph.call[3]) == (1, 0)
    turning = task_graph(flows_for(nwise.strategy("rotating-2"), 3, 1))
    assert turning.call == tuple(a.minibatch for a in turning.tasks) != (0,) * len(turning.tasks)


@pytest.mark.parametrize("seed", range(30))
def test_needs_follow_the_flow(seed: int) -> None:
    """Over strategies, orders, placements and ages: a pass needs exactly what its cotangent sums, of its own micro-batch."""
    numbers = random.Random(seed)
    a, m = numbers.randint(1, 5), numbers.randint(1, 3)
    names = "2-wise 3-wise-mean end-to-end deep-supervision rotating-2 rotating-2-microbatch blocks-2".split()
    strategy = nwise.strategy(numbers.choice(names) + numbers.choice(["", "-delay-1", "-hogwild"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more stages in a window than there are
        flows = flows_for(strategy, a, m, trainable=[numbers.random() < 0.8 for _ in range(a)])
    placement = tuple(numbers.choice([range(a), [0] * a, [k % 2 if a > 1 else 0 for k in range(a)]]))
    try:
        graph = choose(numbers.choice(ORDERS), flows, placement, strategy_ages(strategy, flows)).graph
    except Deadlock:
        return  # a delay puts the lists of several mini-batches together, which not every order allows
    for task, action in enumerate(graph.tasks):
        found = set()
        for need in graph.needs[task]:
            other = graph.tasks[need.task]
            assert need.task < task
            assert (other.microbatch, other.minibatch) == (action.microbatch, action.minibatch)
            assert need.calls == action.age - other.age >= 0
            assert need.link == (placement[other.stage] != placement[action.stage])
            found.add((other.kind.value if other.message is None else other.message, other.stage))
        kind, k, batch, q, turn, _ = action
        expected: set[tuple[str | int, int]] = set()
        if kind is Kind.FORWARD:
            expected = {("F", k - 1)} if k else set()
        elif kind is Kind.HEAD:
            expected = {("F", k)}
        elif kind is not Kind.UPDATE:
            stage = flows[turn][batch].stages[k]
            cotangent = stage.cotangent(q)
            expected = {("F", k), *((p, k + 1) for p, weight in enumerate(cotangent.received) if weight)}
            expected |= {("H", k)} if cotangent.own else set()
            expected |= {(stage.fused, k)} if kind is Kind.WEIGHT_GRAD and stage.fused is not None else set()
        assert found == expected, action


def test_other_ages_are_those_of_the_graph_made_anew() -> None:
    flows = flows_for(nwise.strategy("3-wise-delay-2"), 4, 2)
    rule, ages = partial(depth_first, fuse=False), [message_ages(flows, (2,) * 4, when) for when in ("early", "late")]
    early, late = (make_schedule("?", flows, rule, ages=one).graph for one in ages)
    assert early != late
    assert replace(early, ages=late.ages).aged([a.age for a in late.tasks]) == late


def test_sweep_takes_turns_by_urgency_and_names_the_stuck() -> None:
    """Two lists; 1 waits for 2. With an urgency every task is compared again, without it a list runs until it has to wait."""
    ran: list[int] = []

    def run(_: int, task: int) -> int | None:
        if task == 1 and 2 not in ran:
            return 2
        ran.append(task)
        return None

    sweep([[0, 1], [3, 2]], run, "abcd")
    assert ran == [0, 3, 2, 1]
    ran.clear()
    sweep([[0, 4, 1], [3, 2]], run, "abcde", urgency=lambda task: -task)
    assert ran == [3, 2, 0, 4, 1]
    ran.clear()
    with pytest.raises(Deadlock, match="its own: b. Put"):
        sweep([[0, 1, 2], [3]], run, "abcd")


def test_one_process_alternates_between_stages() -> None:
    """The oldest micro-batch first, its passes before forwards."""
    flows = flows_for(nwise.EndToEnd(), 2, 2)
    schedule = make_schedule(
        "?",
        flows,
        lambda f, t: [tuple(sorted(one, key=lambda a: a.kind is not Kind.FORWARD)) for one in depth_first(f, t)],
    )
    order = " ".join(str(schedule.graph.tasks[task]) for task in merge(schedule.graph, schedule.lists[0]))
    assert order == "F0(0) F1(0) F0(1) F1(1) H1(0) B1(0.0) W0(0) H1(1) B1(1.0) W0(1) U0 U1"
    flows = flows_for(nwise.NWise(2), 3, 1)
    one = make_schedule("?", flows, depth_first, (0, 0, 0)).actions[0]
    assert " ".join(map(str, one)) == "F0(0) F1(0) H1(0) I1(0.0) W0(0) F2(0) H2(0) B2(0.0) W1(0) U0 U1 U2"


def test_message_is_received_before_its_first_use() -> None:
    """I and W of stage 1 start from one message, which a rank keeps for the second of them."""
    flows = flows_for(nwise.EndToEnd(), 3, 1)
    schedule = make_schedule("?", flows, partial(depth_first, fuse=False))
    names = [(str(schedule.graph.tasks[task]), str(schedule.graph.tasks[user])) for task, user in schedule.messages]
    assert names == [("F0(0)", "F1(0)"), ("F1(0)", "F2(0)"), ("I2(0.0)", "I1(0.0)"), ("I1(0.0)", "W0(0)")]
    assert " ".join(map(str, schedule.actions[1])) == "RX1(0) F1(0) SX1(0) RG1(0.0) I1(0.0) SG1(0.0) W1(0) U1"
