"""Lists that could not run are refused before anything runs, each with what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise.flow import flows_for
from nwise.schedule import Action, Buffer, Costs, Kind, Schedule, best, simulate, timed, validate
from nwise.schedule.ages import message_ages
from nwise.schedule.memory import peak_bytes
from nwise.schedule.named import ORDERS
from nwise.schedule.orders import depth_first, make_schedule, phase, skewed
from nwise.schedule.schedule import Word, merge
from timelines import waiting

COSTS = Costs(1, 0.5, 1, 1, activation_bytes=10, fixed_bytes=3)


def schedule(name: str = "2-wise", a: int = 4, m: int = 2) -> Schedule:
    return best(name, num_stages=a, num_microbatches=m, costs=COSTS).schedule


def without(word: Word, kind: Kind) -> Word:
    index = next(i for i, action in enumerate(word) if action.kind is kind)
    return word[:index] + word[index + 1 :]


def moved(word: Word, kind: Kind, to: int) -> Word:
    action = next(action for action in word if action.kind is kind)
    rest = [a for a in word if a != action]
    return (*rest[:to], action, *rest[to:])


BROKEN: list[tuple[str, int, Callable[[Word], Word], str]] = [
    ("a weight gradient forgotten", 1, lambda w: without(w, Kind.WEIGHT_GRAD), r"rank 1.*Found no W1\(0\) \(1 missing"),
    ("a drop forgotten", 2, lambda w: without(w, Kind.DROP), r"rank 2.*Found no D2\(0\)"),
    ("an update twice", 3, lambda w: (*w, w[-1]), "rank 3.*Found U3 too often or unneeded"),
    ("another stage's action", 0, lambda w: (*w, Action(Kind.FORWARD, 1, 0)), r"rank 0.*Found F1\(0\) too often"),
    ("a send forgotten", 0, lambda w: without(w, Kind.SEND_ACTIVATION), r"rank 0.*Found no SX0\(0\)"),
    ("a receive forgotten", 1, lambda w: without(w, Kind.RECEIVE_GRADIENT), r"rank 1.*Found no RG1\(0.0\)"),
    ("used before it is received", 1, lambda w: moved(w, Kind.FORWARD, 0), r"Found F1\(0\) without the activation of stage 0"),
    ("dropped too early", 1, lambda w: moved(w, Kind.DROP, 6), r"drop a micro-batch after its last use. Found RG1\(0.0\) after"),
    ("dropped before it is there", 0, lambda w: moved(w, Kind.DROP, 0), r"Found D0\(0\) without the activation of stage 0"),
    ("updated too early", 2, lambda w: (w[-1], *w[:-1]), r"update after all other actions.*Found U2 before 2 of its"),
    ("dropped after the update", 2, lambda w: (*w[:-2], w[-1], w[-2]), "Found U2 before 1 of its micro-batches were dropped"),
    ("a head after its use", 1, lambda w: moved(w, Kind.HEAD, 9), r"Found I1\(0.0\) without the head of stage 1"),
    ("sent before it is made", 1, lambda w: moved(w, Kind.SEND_GRADIENT, 2), r"SG1\(0.0\) without message 0 of stage 1"),
    ("waits for each other", 1, lambda w: moved(w, Kind.RECEIVE_GRADIENT, 0), r"deadlock.*RG1\(0.0\), RX2\(0\), RX3\(0\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "change", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_validate_rejects_broken_lists(stage: int, change: Callable[[Word], Word], message: str) -> None:
    good = schedule()
    lists = list(good.lists)
    lists[stage] = change(lists[stage])
    with pytest.raises(ValueError, match=message):
        validate(good, lists=lists)
    validate(good)


def test_validate_rejects_swapped_turns() -> None:
    good = schedule("rotating-2", 4, 2)
    swapped = [tuple(a for turn in (1, 0) for a in word if a.turn == turn) for word in good.lists]
    with pytest.raises(ValueError, match=r"rank 0 should update.*call by call. Found U0/1 .* after 0 updates"):
        validate(good, lists=swapped)


def test_validate_checks_ages_in_the_given_lists() -> None:
    """Regression: the ages of messages came from the schedule and not from the lists, and nothing compared both ends."""
    good = schedule("end-to-end-delay-2", 3, 2)
    late = make_schedule("late", good.flows, depth_first, ages=message_ages(good.flows, good.ages))
    validate(good, lists=late.lists)
    lists = list(late.lists)
    lists[1] = moved(lists[1], Kind.RECEIVE_GRADIENT, len(lists[1]) - 2)
    for one in (good, late):
        with pytest.raises(
            ValueError, match=r"rank 1 should compute or receive the inputs.*without message 0 of stage 2"
        ):
            validate(one, lists=lists)
    young = [tuple(a._replace(age=0) if a.kind is Kind.RECEIVE_GRADIENT else a for a in word) for word in late.lists]
    with pytest.raises(
        ValueError, match=r"received in the call in which it is sent, or later. Found RG.*, sent with age 2"
    ):
        validate(late, lists=young)
    sent = [tuple(a._replace(age=0) if a.kind is Kind.SEND_GRADIENT else a for a in word) for word in young]
    with pytest.raises(ValueError, match=r"older than its use. Found SG1.* and message 0 of stage 1, of ages 0 and 2"):
        validate(late, lists=sent)
    kept = [tuple(a._replace(age=3) if a.kind is Kind.DROP else a for a in word) for word in late.lists]
    with pytest.raises(ValueError, match="in the call of its last use. Found D0.*, of age 3, and a last use of age 2"):
        validate(late, lists=kept)


def test_validate_accepts_mixed_fused_and_split_micro_batches() -> None:
    flow = schedule("end-to-end", 2, 2).flows[0][0]
    split = make_schedule("split", [[flow] * 2], lambda f, t: phase(f, t, fuse=False))
    fused = make_schedule("fused", [[flow] * 2], lambda f, t: phase(f, t, fuse=True))
    first = [a for a in fused.words[1] if a.microbatch == 0 and a.kind is not Kind.UPDATE]
    second = [a for a in split.words[1] if a.microbatch == 1]
    mixed = Schedule("mixed", split.flows, (split.words[0], (*first, *second, split.words[1][-1])))
    validate(mixed)
    assert timed(mixed, COSTS).period > 0


def test_memory_depends_on_the_lists() -> None:
    flow = schedule("local", 2, 2).flows[0][0]
    small = make_schedule("small", [[flow] * 2], lambda f, t: depth_first(f, t))
    large = make_schedule("large", [[flow] * 2], lambda f, t: phase(f, t, fuse=False))
    assert (max(peak_bytes(small, COSTS)), small.in_flight) == (13, (1, 1))
    assert (max(peak_bytes(large, COSTS)), large.in_flight) == (23, (2, 2))
    with pytest.raises(TypeError, match="`schedule` should be a Schedule, such as.*Found Timed"):
        validate(timed(small, COSTS))  # type: ignore[arg-type]


def test_deadlock_names_the_stuck_actions() -> None:
    good = schedule("end-to-end", 2, 2)
    stage0, stage1 = good.words
    # Stage 0 wants the gradient of micro-batch 0 before it gives micro-batch 1, stage 1 the forward of 1 before it.
    first = (stage0[0], *(a for a in stage0 if a.kind is Kind.WEIGHT_GRAD), stage0[1], stage0[-1])
    second = (*(a for a in stage1 if a.kind in (Kind.FORWARD, Kind.HEAD)), *(a for a in stage1 if a.kind is Kind.INPUT_GRAD),
              *(a for a in stage1 if a.kind is Kind.WEIGHT_GRAD), stage1[-1])  # fmt: skip
    stuck = Schedule("by hand", good.flows, (first, second))
    for check in (validate, lambda s: merge(s.words, s.flows)):
        with pytest.raises(ValueError, match=r"deadlock.*(W0\(0\)|RG0\(0.0\)), (F1\(1\)|RX1\(1\))"):
            check(stuck)


def test_validate_checks_number_of_lists() -> None:
    good = schedule()
    assert peak_bytes(good, COSTS)[0] == 23
    with pytest.raises(ValueError, match="one list for each of the 4 ranks. Found 3"):
        validate(good, lists=good.lists[:3])


def test_buffers_are_bounded_also_where_nothing_flows_back() -> None:
    assert [(b.activations, b.gradients, b.limited) for b in validate(schedule("local", 3, 4))] == [(4, 0, True)] * 2
    assert [(b.activations, b.gradients, b.limited) for b in validate(schedule("3-wise", 3, 4))] == [(4, 4, False)] * 2
    assert [(b.activations, b.gradients) for b in validate(schedule("rotating-2", 3, 4))] == [(8, 4), (8, 4)]
    assert all(b.limited for b in validate(schedule("rotating-2-microbatch", 3, 2)))  # some of them let nothing back
    borders = [b.limited for b in validate(schedule("blocks-2", 6, 1))]
    assert borders == [False, True, False, True, False]


def test_buffers_of_delays_and_placements() -> None:
    """Regression: under a delay every stage is held back whose next one is on another rank; one rank sends itself nothing."""
    late = best("end-to-end-delay-1", num_stages=4, num_microbatches=2, num_ranks=2, costs=COSTS).schedule
    assert late.placement == (0, 0, 1, 1)
    assert late.oldest == 1  # so two mini-batches of two micro-batches may wait
    assert validate(late) == [Buffer(0, 0, False), Buffer(4, 4, True), Buffer(0, 0, False)]


def test_fast_stage_is_throttled_where_nothing_flows_back() -> None:
    """In local training with a four times slower second stage, the first would pile up activations without limit."""
    costs = Costs([1, 4], 0, [1, 4], [1, 4])
    found = best("local", num_stages=2, num_microbatches=3, costs=costs)
    line = simulate(found.schedule, costs, cycles=30)
    assert waiting(line, 0, 1) == 3
    assert found.period == line.period == 3 * 12


NETS = {
    "local": 1,
    "2-wise": 2,
    "3-wise": 2,
    "3-wise-mean": 3,
    "end-to-end": 3,
    "deep-supervision": 2,
    "geometric-0.5": 2,
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "m"), NETS.items())
@pytest.mark.parametrize("order", [*ORDERS, "split skewed", "split phase", "wide skewed", "nearest", "in process"])
def test_every_order_computes_the_same_gradients(name: str, m: int, order: str) -> None:
    """The in-process runtime runs any schedule value, I and W split or fused, and agrees with the definition."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(4)]
    heads = [nn.Linear(5, 5) for _ in range(3)]

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return (y - t).square().mean()

    rules: dict[str, Callable[[Any, int], list[Word]]] = {
        "split skewed": lambda f, t: skewed(f, t, fuse=False, stride=1),
        "split phase": lambda f, t: phase(f, t, fuse=False),
        "nearest": lambda f, t: depth_first(f, t, fuse=False),
        "wide skewed": lambda f, t: skewed(f, t, fuse=True, stride=2),
    }
    schedule: Any = order if order in ORDERS else None
    if order in rules:
        schedule = make_schedule(
            order, flows_for(nwise.strategy(name), 4, m), rules[order], cap=m if order == "nearest" else None
        )
    pipe = nwise.Pipeline(stages, heads, loss, name, m, schedule=schedule)
    x, y = torch.randn(7, 5), torch.randn(7, 5)
    ran: list[Action] = []
    pipe.on_action = ran.append
    pipe.step(x, target=y)
    expected = nwise.reference_grads(stages, [*heads, None], loss, x, y, pipe.credit, m)
    found = {f"stages.{k}.{n}": p.grad for k, s in enumerate(stages) for n, p in s.named_parameters()}
    for key, gradient in found.items():
        assert gradient is not None
        assert torch.allclose(gradient, expected[key], rtol=1e-12, atol=1e-14), key
    if order != "best":  # which may split or fuse
        fuses = order not in ("split skewed", "split phase", "nearest", "zb-h1", "zero-bubble", "zb-v")
        assert any(a.kind is Kind.BOTH for a in ran) == (fuses and name != "local")
    assert pipe._engine is not None
    assert not pipe._engine._tapes
