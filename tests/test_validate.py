"""Lists that could not run are refused before anything runs, each with what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import nwise
from nwise.flow import flows_for
from nwise.schedule import Action, Costs, Kind, Schedule, arrange, best, validate
from nwise.schedule.memory import peak_bytes
from nwise.schedule.named import ORDERS, one_process
from nwise.schedule.orders import Actions, depth_first, make_schedule, phase, skewed
from nwise.schedule.sweep import merge
from test_contract import assert_same, gradients

COSTS = Costs(1, 0.5, 1, 1, activation_bytes=10, fixed_bytes=3)


def schedule(name: str = "2-wise", a: int = 4, m: int = 2) -> Schedule:
    return best(name, num_stages=a, num_microbatches=m, costs=COSTS)


def without(actions: Actions, kind: Kind) -> Actions:
    index = next(i for i, action in enumerate(actions) if action.kind is kind)
    return actions[:index] + actions[index + 1 :]


def moved(actions: Actions, kind: Kind, to: int) -> Actions:
    action = next(action for action in actions if action.kind is kind)
    rest = [a for a in actions if a != action]
    return (*rest[:to], action, *rest[to:])


BROKEN: list[tuple[str, int, Callable[[Actions], Actions], str]] = [
    ("a weight gradient forgotten", 1, lambda w: without(w, Kind.WEIGHT_GRAD), r"rank 1.*Found no W1\(0\)\."),
    ("a forward twice", 3, lambda w: (w[0], *w), r"rank 3.*Found F3\(0\) too often or unneeded \(0 missing, 1 too many"),
    ("another stage's action", 0, lambda w: (*w, Action(Kind.FORWARD, 1, 0)), r"rank 0.*Found F1\(0\) too often"),
    ("an action of no stage", 0, lambda w: (*w, Action(Kind.FORWARD, 9, 0)), r"Found F9\(0\) too often or unneeded"),
    ("an unneeded message", 1, lambda w: (*w, Action(Kind.INPUT_GRAD, 1, 0, 1)), r"rank 1.*I1\(0.1\) too often"),
    ("a list too few", 0, lambda w: (), r"rank 0.*Found no F0\(0\)"),
    ("a head after its use", 1, lambda w: moved(w, Kind.HEAD, 9), r"deadlock.*W0\(0\), I1\(0.0\)"),
    ("a forward after its head", 1, lambda w: moved(w, Kind.FORWARD, 2), r"deadlock.*W0\(0\), H1\(0\), F2\(0\), F3\(0\)"),
    ("waits for each other", 1, lambda w: moved(w, Kind.WEIGHT_GRAD, 0), r"deadlock.*W0\(0\), W1\(0\), F2\(0\), F3\(0\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "change", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_validate_rejects_broken_lists(stage: int, change: Callable[[Actions], Actions], message: str) -> None:
    good = schedule()
    lists = list(good.work)
    assert arrange(good.order, good.flows, lists, costs=COSTS) == good
    lists[stage] = change(lists[stage])
    with pytest.raises(ValueError, match=message):
        validate(arrange("broken", good.flows, lists))
    validate(good)


def test_validate_rejects_broken_numbers() -> None:
    """Lists of numbers in the wrong call or rank, an update before the end, or a number that no task has."""
    good = schedule("rotating-2", 4, 2)
    first, second = good.lists
    early = ((first[0][-1], *first[0][:-1]), *first[1:])
    for lists, message in (
        ((second, first), r"rank 0 in call 0 should contain each.*Found no F0\(0\)"),
        ((first[::-1], second), r"rank 0 in call 0.*Found no F0\(0\)"),
        ((first,), r"one list for each of the 4 ranks in 2 calls. Found \[4\]"),
        ((first[:3], second), r"Found \[3, 4\]"),
        ((early, second), r"rank 0 should update after all other actions of a call. Found U0 before F0\(0\)"),
        ((first, ((*second[0], 999), *second[1:])), r"rank 0 in call 1.*Found task 999 too often or unneeded"),
        ((first, ((*second[0], -1), *second[1:])), r"Found task -1 too often or unneeded"),
    ):
        with pytest.raises(ValueError, match=message):
            validate(Schedule("broken", good.graph, lists))
    with pytest.raises(ValueError, match="one list for each of the 4 ranks. Found 3"):
        arrange("too few", good.flows, good.work[:3])


def test_validate_checks_ages_in_the_given_lists() -> None:
    """Regression: the ages of messages came from the schedule and not from the lists, and nothing compared both ends."""
    good = schedule("end-to-end-delay-2", 3, 2)
    late = make_schedule("late", good.flows, depth_first, ages=good.ages)
    validate(arrange("late", good.flows, late.work, ages=good.ages))
    for kind, stage, age, found in (
        (Kind.BOTH, 1, 0, r"Found B1\(0.0\) on a stage of age 2"),
        (Kind.FORWARD, 0, 1, r"Found F0\(0\)-1 on a stage of age 2"),
        (Kind.HEAD, 2, 1, r"Found H2\(0\)-1 on"),
    ):
        lists = [tuple(a._replace(age=age) if a[:2] == (kind, stage) else a for a in one) for one in late.work]
        with pytest.raises(ValueError, match=f"no result should be older than its use. {found}"):
            validate(arrange("wrong", good.flows, lists, ages=good.ages))
    split = make_schedule("split", good.flows, partial(depth_first, fuse=False), ages=good.ages)
    young = [
        tuple(a._replace(age=0) if a.message is not None and a.stage == 1 else a for a in one) for one in split.work
    ]
    with pytest.raises(ValueError, match=r"no result should be older than its use. Found I1\(0.0\) on"):
        validate(arrange("young", good.flows, young, ages=good.ages))


def test_validate_accepts_mixed_fused_and_split_micro_batches() -> None:
    flow = schedule("end-to-end", 2, 2).flows[0][0]
    split = make_schedule("split", ((flow, flow),), partial(phase, fuse=False))
    fused = make_schedule("fused", ((flow, flow),), partial(phase, fuse=True))
    first = [a for a in fused.work[1] if a.microbatch == 0]
    second = [a for a in split.work[1] if a.microbatch == 1]
    mixed = arrange("mixed", split.flows, (split.work[0], (*first, *second)))
    validate(mixed)
    assert mixed.with_costs(COSTS).period > 0


def test_memory_depends_on_the_lists() -> None:
    flow = schedule("local", 2, 2).flows[0][0]
    small = make_schedule("small", ((flow, flow),), depth_first)
    large = make_schedule("large", ((flow, flow),), partial(phase, fuse=False))
    assert (max(peak_bytes(small.with_costs(COSTS))), small.in_flight) == (13, (1, 1))
    assert (max(peak_bytes(large.with_costs(COSTS))), large.in_flight) == (23, (2, 2))
    with pytest.raises(TypeError, match="`schedule` should be a Schedule, such as.*Found str"):
        validate("small")  # type: ignore[arg-type]


def test_deadlock_names_the_stuck_actions() -> None:
    good = schedule("end-to-end", 2, 2)
    stage0, stage1 = good.work
    # Stage 0 wants the gradient of micro-batch 0 before it gives micro-batch 1, stage 1 the forward of 1 before it.
    first = (stage0[0], *(a for a in stage0 if a.kind is Kind.WEIGHT_GRAD), stage0[1])
    second = (*(a for a in stage1 if a.kind in (Kind.FORWARD, Kind.HEAD)), *(a for a in stage1 if a.kind is Kind.INPUT_GRAD),
              *(a for a in stage1 if a.kind is Kind.WEIGHT_GRAD))  # fmt: skip
    stuck = arrange("by hand", good.flows, (first, second))
    for check in (validate, one_process, lambda s: merge(s.graph, s.lists[0])):
        with pytest.raises(ValueError, match=r"deadlock.*W0\(0\), F1\(1\)"):
            check(stuck)


STRATEGIES = ["local", "2-wise", "3-wise", "3-wise-mean", "end-to-end", "deep-supervision", "geometric-0.5"]
RULES: dict[str, Callable[..., list[Actions]]] = {
    "split skewed": partial(skewed, fuse=False, stride=1),
    "split skewed by two": partial(skewed, fuse=False, stride=2),
    "split phase": partial(phase, fuse=False),
    "nearest": partial(depth_first, fuse=False),
    "wide skewed": partial(skewed, fuse=True, stride=2),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("order", [*ORDERS, *RULES, "in process"])
def test_every_order_computes_the_same_gradients(name: str, order: str) -> None:
    """The in-process runtime runs any schedule value, I and W split or fused, and agrees with the definition."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(4)]
    heads = [nn.Linear(5, 5) for _ in range(3)]

    m = {"local": 1, "3-wise-mean": 3, "end-to-end": 3}.get(name, 2)
    flows, cap = flows_for(nwise.strategy(name), 4, m), m if order == "nearest" else None
    schedule: Any = make_schedule(order, flows, RULES[order], cap=cap) if order in RULES else order
    pipe = nwise.Pipeline(
        stages, heads, nn.functional.mse_loss, name, m, schedule=None if order == "in process" else schedule
    )
    x, y = torch.randn(7, 5), torch.randn(7, 5)
    ran: list[Action] = []
    pipe.on_action = ran.append
    pipe.step(x, target=y)
    expected = nwise.reference_grads(stages, [*heads, None], nn.functional.mse_loss, x, y, pipe.credit, m)
    assert_same(gradients(pipe), expected, 1e-12)
    if order != "best":  # which may split or fuse
        fuses = order not in ("nearest", "zb-h1", "zero-bubble", "zb-v") and not order.startswith("split")
        assert any(a.kind is Kind.BOTH for a in ran) == (fuses and name != "local")
    assert pipe._engine is not None
    assert not pipe._engine.flying
