"""Delayed gradients: updates by hand, and every gradient against the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nwise
from nets import X, Y, perceptron, three, train
from nwise.flow import Flow, find_flow
from nwise.reference import late_grads, reference_grads
from nwise.schedule import Costs, best
from nwise.schedule.ages import When, greedy_ages, message_ages, strategy_ages
from nwise.training.clip import Clip
from nwise.training.nonfinite import NonFiniteGuard


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_end_to_end_staleness_counts_stages_above(num_stages: int) -> None:
    """Twice if no stage ever waits (`tests/test_hogwild.py` has the accelerators of figure 1), once with the least ages."""
    flow = find_flow(nwise.EndToEnd().credit(num_stages))
    assert nwise.staleness(flow) == [[2 * (num_stages - 1 - k)] for k in range(num_stages)]
    assert nwise.staleness(flow, ages="least") == [[num_stages - 1 - k] for k in range(num_stages)]


@pytest.mark.parametrize(
    ("strategy", "num_microbatches", "ages"),
    [
        # No gradient has to travel, so no update comes late.
        ("local", 1, [0, 0, 0, 0]),
        # Stage k, 2-wise: three slots a batch. F(b) in slot 0; the far loss is at its stage in slot 1, its own pass in slot 2,
        # so it arrives for slot 3, where F(b+1) goes first: one update late.
        ("2-wise", 1, [1, 1, 1, 0]),
        # Two slots a micro-batch, four a mini-batch: the last W of stage 0 comes 2 + 7 slots after its first F.
        ("end-to-end", 2, [2, 1, 1, 0]),
        ("end-to-end", 4, [1, 1, 1, 0]),
    ],
)
def test_staleness_by_hand(strategy: str, num_microbatches: int, ages: list[int]) -> None:
    found = nwise.staleness(find_flow(nwise.strategy(strategy).credit(4)), num_microbatches, ages="least")
    assert found == [[age] * num_microbatches for age in ages]


def test_names_and_refusals() -> None:
    assert nwise.strategy("end-to-end-delay-1") == nwise.Delayed() == nwise.Delayed(nwise.EndToEnd(), by=1)
    assert nwise.strategy("credit-1,0;1,1-delay-2").name == "credit-1,0;1,1-delay-2"
    assert nwise.strategy("rotating-2-microbatch-delay-3", heads="all").heads == "all"
    assert nwise.Delayed(nwise.NWise(2), by=0).delay == 0
    for by in (-1, 65, 1.0, True):
        with pytest.raises(
            ValueError, match="`by`, the delay in mini-batches, should be an integer from 0 to 64. Found"
        ):
            nwise.Delayed(nwise.NWise(2), by=by)  # type: ignore[arg-type]
    for base in ("hogwild", "2-wise-delay-1"):
        with pytest.raises(
            ValueError, match="`base` should be a strategy with one credit matrix or a cycle of them. Found"
        ):
            nwise.Delayed(base)  # type: ignore[arg-type]


@st.composite
def flows(draw: st.DrawFn, num_stages: int) -> Flow:
    """Any credit of losses for the stages before them, any stages frozen."""
    bits = draw(st.lists(st.booleans(), min_size=num_stages**2, max_size=num_stages**2))
    credit = torch.tensor(bits).reshape(num_stages, num_stages).tril().double()
    return find_flow(credit, trainable=draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages)))


@given(
    st.data(), st.integers(2, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["early", "late", "greedy"]),
    st.sampled_from([None, 0, 1, 3]),
)  # fmt: skip
def test_no_result_is_older_than_its_use(
    data: st.DataObject,
    num_stages: int,
    num_turns: int,
    num_microbatches: int,
    when: When | Literal["greedy"],
    delay: int | None,
) -> None:
    """Messages are at least as old as what they are made of, at most as old as what is made of them."""
    cycle = tuple((data.draw(flows(num_stages)),) * num_microbatches for _ in range(num_turns))
    strategy = nwise.Hogwild() if delay is None else nwise.Delayed(by=delay)
    ages = greedy_ages(cycle) if when == "greedy" else message_ages(cycle, strategy_ages(strategy, cycle).weights, when)
    for flow in {flow for batch in cycle for flow in batch}:
        for k, stage in enumerate(flow.stages):
            uses = [(ages.messages[k][q], message) for q, message in enumerate(stage.messages)]
            uses += [(ages.weights[k], stage.weights)] if stage.weights is not None else []
            for age, cotangent in uses:
                assert all(0 <= ages.messages[k + 1][p] <= age for p in cotangent.needed)
            if stage.fused is not None:  # W starts from what its message has kept
                assert ages.messages[k][stage.fused] <= ages.weights[k]
                # What an I has kept of one call's weights serves no W of a later one.
                assert when != "greedy" or ages.fuses(k, stage)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("strategy", ["hogwild-forward-least", "end-to-end-delay-1"])
def test_late_updates_by_hand(strategy: str) -> None:
    """y = w1 w0 x, loss = y, x = 1, rate 0.1, w0 = w1 = 2, so g0 = w1 and g1 = w0.

    Hogwild, least ages and the weights of the forward: stage 0 is one update late, stage 1 is not.

        call 0: forward at (2, 2)        w1 = 2 - 0.2 = 1.8              stage 0 has nothing yet
        call 1: forward at (2, 1.8)      w1 = 1.8 - 0.2 = 1.6            w0 = 2 - 0.2 = 1.8    (g0 of call 0: w1 = 2)
        call 2: forward at (1.8, 1.6)    w1 = 1.6 - 0.18 = 1.42          w0 = 1.8 - 0.18 = 1.62 (call 1: w1 = 1.8)
        drain:                                                           w0 = 1.62 - 0.16 = 1.46

    Delay 1: both stages are one update late.

        call 0: forward at (2, 2)        nothing yet
        call 1: forward at (2, 2)        (1.8, 1.8)
        call 2: forward at (1.8, 1.8)    (1.6, 1.6)
        drain:                           (1.6 - 0.18, 1.6 - 0.18)
    """
    stages = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for stage in stages:
        nn.init.constant_(stage.weight, 2.0)
    pipe = nwise.Pipeline(stages, None, lambda output, target: output.mean(), strategy)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    expected = {
        "hogwild-forward-least": ([(2, 1.8), (1.8, 1.6), (1.62, 1.42), (1.46, 1.42)], [4.0, 3.6, 2.88]),
        "end-to-end-delay-1": ([(2, 2), (1.8, 1.8), (1.6, 1.6), (1.42, 1.42)], [4.0, 4.0, 3.24]),
    }[strategy]
    losses = []
    for number, pair in enumerate(expected[0]):
        if number < 3:
            losses.append(pipe.step(torch.ones(1, 1))[-1].item())
        else:
            assert pipe.drain()
        optimizer.step()
        optimizer.zero_grad()
        assert [s.weight.item() for s in stages] == pytest.approx(pair, abs=1e-12)
    assert not pipe.drain()
    assert losses == pytest.approx(expected[1], abs=1e-12)
    assert pipe.steps == 3


class Aliased(nn.Module):
    """A layer that also reaches its weight by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.all = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.all[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_parameter_used_without_its_name_is_refused(*, recompute: bool) -> None:
    """Regression: the list holds the present parameter, not the version that a delay computes with, so it got no gradient."""
    stages = [Aliased(), nn.Linear(3, 2)]
    pipe = nwise.Pipeline(stages, None, strategy="end-to-end-delay-1", recompute=recompute)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    message = "Stage 0 should depend only on parameters .* uses by their names.* Found a use of 'weight'"
    for _ in range(2):  # regression: the second try trained on
        if recompute:  # the first graph is that of the second step, which runs the forward again
            pipe.step(x, target=y)
        with pytest.raises(ValueError, match=message):
            pipe.step(x, target=y)
    pipe.strategy = nwise.strategy("end-to-end")
    pipe.step(x, target=y)
    assert stages[0].weight.grad is not None


ORDERS = ["depth-first", "phase", "1f1b", "zb-h1"]
STRATEGIES = ["local", "2-wise", "3-wise-mean", "end-to-end", "deep-supervision", "rotating-2", "rotating-2-microbatch"]


class Quantized(nn.Parameter):
    """A class of parameters, as libraries of quantized weights have theirs."""


class Scaling(nn.Linear):
    """Asks its weight for its class and an attribute."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.weight = Quantized(self.weight.detach())
        setattr(self.weight, "scale", 0.5)  # noqa: B010 - unknown to the types

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "scale", 1.0) * (1 + isinstance(self.weight, Quantized))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", ["end-to-end-delay-1", "hogwild"])
def test_late_forwards_find_classes_and_attributes_of_parameters(strategy: str, *, recompute: bool) -> None:
    """Regression: copies of the parameters were plain tensors, so another branch of the forward ran, silently."""
    net, (x, y) = [Scaling(), Scaling(), nn.Linear(5, 4)], perceptron(1).draw(6)
    expected = functional.cross_entropy(nn.Sequential(*net)(x), y)
    pipe = nwise.Pipeline(net, strategy=strategy, recompute=recompute)
    torch.testing.assert_close(torch.as_tensor(pipe.step(x, target=y)[-1]), expected.detach())


# Every delay with every strategy, and every order with every delay.
CASES = [
    (delay, strategy, 1 + k % 3, ORDERS[(i + k) % 4])
    for i, delay in enumerate(("-delay-0", "-delay-1", "-delay-2", "-hogwild-forward"))
    for k, strategy in enumerate(STRATEGIES)
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("delay", "strategy", "m", "order"), CASES)
def test_late_gradients_match_the_definition(strategy: str, m: int, delay: str, order: str) -> None:
    """Momentum, ragged batches, and calls after a drain; the definition keeps the gradients of every call."""
    torch.manual_seed(0)
    net = perceptron(4)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy + delay, m, schedule=order)
    now = pipe.strategy
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    ages = [row[0] for row in nwise.staleness(find_flow(pipe.credit), m)]
    if delay != "-hogwild-forward":
        ages = [int(delay[-1])] * 4
    for size, number in ((6, 3), (5, 5)):
        calls: list[dict[str, Tensor]] = []
        for i in range(number):
            x, y = net.draw(size if i % 2 else 6)
            credit = torch.stack([now.credit(4, now.turn(pipe.steps, part)) for part in range(m)])
            calls.append(reference_grads(net.stages, net.heads, net.loss_fn, x, y, credit, m))
            pipe.step(x, target=y)
            if delay == "-hogwild-forward" and strategy.startswith("rotating"):
                ages = pipe.staleness[:, 0].tolist()
            check(pipe, late_grads(calls, ages))
            optimizer.step()
            optimizer.zero_grad()
        for left in range(1, max(ages) + 1):
            assert pipe.drain()
            nothing: dict[str, Tensor] = {}
            calls.append(nothing)
            check(pipe, {n: g for n, g in _due(calls, ages).items() if n.startswith("stages.")}, left)
            optimizer.step()
            optimizer.zero_grad()
        assert not pipe.drain()
        assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("strategy", ["end-to-end-delay-2", "rotating-2-delay-1", "hogwild-forward-least"])
def test_messages_of_one_stage_may_differ_in_age(strategy: str) -> None:
    """On slow links the messages of some micro-batches run a call later; no gradient changes."""
    torch.manual_seed(0)
    net = perceptron(4)
    schedule = best(strategy, num_stages=4, num_microbatches=2, costs=Costs(1, 0.5, 1, 1, latency=2, overhead=0.02))
    ages: dict[tuple[int, int | None, int], set[int]] = {}
    for a in (a for a in schedule.schedule.graph.tasks if a.message is not None):
        ages.setdefault((a.stage, a.message, a.minibatch), set()).add(a.age)
    assert any(len(one) > 1 for one in ages.values())
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, 2, schedule=schedule)
    calls: list[dict[str, Tensor]] = []
    for _ in range(5):
        x, y = net.draw(6)
        credit = torch.stack([pipe.strategy.credit(4, pipe.strategy.turn(pipe.steps, part)) for part in range(2)])
        calls.append(reference_grads(net.stages, net.heads, net.loss_fn, x, y, credit, 2))
        pipe.step(x, target=y)
        check(pipe, late_grads(calls, pipe.staleness[:, 0].tolist()))
        pipe.zero_grad()


@pytest.mark.usefixtures("float64")
def test_two_pipelines_of_one_network_give_prompt_near_and_late_far_credit() -> None:
    """Credit matrices for each age, as `experiments/frontier/ages.py` tries them: both pipelines add to ``.grad``."""
    net = perceptron(4)
    near = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "local")
    far = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "end-to-end-delay-2")
    optimizer = torch.optim.SGD(far.parameters(), lr=0.1)
    late: list[dict[str, Tensor]] = []
    for _ in range(4):
        x, y = net.draw(6)
        prompt = reference_grads(net.stages, net.heads, net.loss_fn, x, y, nwise.strategy("local").credit(4))
        late.append(reference_grads(net.stages, net.heads, net.loss_fn, x, y, nwise.EndToEnd().credit(4)))
        near.step(x, target=y)
        far.step(x, target=y)
        due = late_grads(late, [2] * 4)
        check(far, {name: prompt[name] + due[name] if name in due else prompt[name] for name in prompt})
        optimizer.step()
        optimizer.zero_grad()


def _due(calls: list[dict[str, Tensor]], ages: list[int]) -> dict[str, Tensor]:
    """The gradients that a call leaves, also one without a mini-batch of its own."""
    names = [name for name in calls[0] if name.startswith("stages.")]
    found = {}
    for name in names:
        age = ages[int(name.split(".")[1])]
        if age < len(calls) and name in calls[-1 - age]:
            found[name] = calls[-1 - age][name]
    return found


def check(pipe: nwise.Pipeline, expected: dict[str, Tensor], *where: Any) -> None:
    """Compare all gradients; a stage without credit may have none, or zeros."""
    for name, parameter in pipe.named_parameters():
        wanted = expected.get(name, torch.zeros(()))
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not torch.allclose(found, wanted.expand_as(found), rtol=1e-12, atol=1e-12):  # faster than the next line
            torch.testing.assert_close(found, wanted.expand_as(found), rtol=1e-12, atol=1e-12, msg=f"{name} {where}")


def test_delay_of_zero_is_the_strategy_itself_bitwise() -> None:
    found = []
    for name in ("3-wise-mean", "3-wise-mean-delay-0"):
        torch.manual_seed(0)
        net = perceptron(4)
        pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, name, 2, seed=0)
        optimizer = torch.optim.Adam(pipe.parameters())
        for _ in range(4):
            x, y = net.draw(6)
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        found.append(copy.deepcopy(list(pipe.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:Heads should be trained")  # only the main network is
def test_delay_works_with_clipping_recomputation_and_schedulers() -> None:
    """The gradients that are clipped are those that the update uses."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = perceptron(4)
        pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "2-wise-delay-1", 2, seed=0, recompute=recompute)
        clip, optimizer = Clip(pipe, 1e-4, "stage"), torch.optim.SGD(pipe.main_parameters(), lr=1.0)
        rate = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(4):
            x, y = net.draw(6)
            pipe.step(x, target=y)
            clip()
            grads = [[p.grad for p in s.parameters() if p.grad is not None] for s in net.stages]
            assert [bool(one) for one in grads] == [step > 0] * 4
            assert all(float(g.norm()) <= 1e-4 for one in grads for g in one)
            optimizer.step()
            rate.step()
            pipe.zero_grad()
        found.append([p.detach().clone() for p in pipe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:All gradients should be applied")
def test_staleness_is_that_of_the_phase() -> None:
    net = perceptron(4)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "local")
    ages = []
    for step in range(6):
        pipe.strategy = ("local", "2-wise-hogwild", "end-to-end-delay-2")[step // 2]
        x, y = net.draw(4)
        pipe.step(x, target=y)
        ages.append(pipe.staleness[:, 0].tolist())
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    assert ages == [[0] * 4, [0] * 4, [2, 1, 1, 0], [2, 1, 1, 0], [2] * 4, [2] * 4]


def late(strategy: str = "2-wise-delay-1", num_microbatches: int = 2) -> tuple[Any, nwise.Pipeline]:
    """A network and its pipeline after a step, whose gradients are due."""
    net = perceptron(3)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, num_microbatches, seed=0)
    x, y = net.draw(6)
    pipe.step(x, target=y)
    pipe.zero_grad()
    return net, pipe


@pytest.mark.parametrize(
    "drop",
    [nwise.Pipeline.forget_pending, lambda pipe: pipe.load_state_dict(pipe.state_dict())],
    ids=["forget", "load"],
)
@pytest.mark.filterwarnings("ignore:All gradients should be applied")
def test_dropped_mini_batches_are_a_call_of_all_processes(drop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if one process alone dropped them, the others waited for their messages until the time limit.

    The watch compares the calls that processes announce (`tests/test_watch.py`).
    """
    _, pipe = late()
    announced: list[str] = []
    monkeypatch.setattr(pipe.processes, "begin", announced.append)
    drop(pipe)
    assert announced == ["`forget_pending`"]
    pipe.forget_pending()
    assert len(announced) == 1, "there is nothing left that another process could wait for"


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe: setattr(pipe, "strategy", nwise.Delayed(nwise.Geometric(0.9), by=1)),
        lambda pipe: setattr(pipe, "num_microbatches", 3),
        lambda pipe: setattr(pipe, "steps", 7),
        lambda pipe: pipe.stages[0].requires_grad_(False),
        lambda pipe: pipe.stages.__setitem__(0, copy.deepcopy(pipe.stages[0])),
    ],
    ids=["strategy", "M", "step", "frozen", "stage"],
)
def test_change_while_gradients_are_due_warns(change: Any) -> None:
    """Regression: the gradients were dropped without a word; a strategy that changed at every step trained nothing."""
    net, pipe = late()
    change(pipe)
    x, y = net.draw(6)
    with pytest.warns(UserWarning, match="Found 1 mini-batch with gradients still due, lost now because"):
        pipe.step(x, target=y)
    assert pipe.forget_pending() == 1, "that of the new step"
    assert pipe.forget_pending() == 0
    net, pipe = late()
    while pipe.drain():
        pass
    change(pipe)
    pipe.step(x, target=y)  # no gradient was due, so no warning


def test_drain_that_raises_restores_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the stages after the one that raised kept their gradients."""
    net, pipe = late()
    x, y = net.draw(6)
    pipe.step(x, target=y)
    before = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    monkeypatch.setattr(pipe._stages[0], "_backward", None)
    with pytest.raises(TypeError):
        pipe.drain()
    after = [p.grad for p in pipe.parameters()]
    assert all(
        a is b is None or (a is not None and b is not None and a.equal(b)) for a, b in zip(before, after, strict=True)
    )


def test_new_parameters_while_gradients_are_due_raise() -> None:
    """Regression: a KeyError."""
    net, pipe = late()
    pipe.stages[1].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    x, y = net.draw(6)
    with pytest.raises(
        ValueError, match=r"Stage 1 should keep its parameters while gradients are due. Found other ones \(extra\)"
    ):
        pipe.step(x, target=y)


def test_skipping_under_a_delay_is_refused() -> None:
    """Regression: step s skipped the good gradients of mini-batch s - d, and applied bad ones d steps later."""
    for strategy in ("end-to-end-delay-2", "hogwild"):
        _, pipe = late(strategy, 1)
        with pytest.raises(ValueError, match="`on_nan` should be stop or ignore under a delay.* Found skip with"):
            NonFiniteGuard(pipe, "skip")


def test_fully_sharded_stages_are_refused() -> None:
    """Regression: every gradient was None, without a word."""
    kind = type("FSDPModule", (), {})
    net = perceptron(2)
    net.stages[0].add_module("inner", type("FSDPLinear", (kind, nn.Linear), {})(2, 2))
    with pytest.raises(
        ValueError, match=r"should exchange nothing .* Found `fully_shard` in `stages\[0\]`; pass the plain"
    ):
        nwise.Pipeline(net.stages, net.heads, net.loss_fn, "2-wise")


@pytest.mark.filterwarnings("ignore:All gradients should be applied")
def test_hogwild_thawed_stage_becomes_stale() -> None:
    pipe = three("hogwild", heads=False)
    pipe.stages[0].requires_grad_(False)
    assert train(pipe, 4)[-1] == [0, 2, 0]
    pipe.stages[0].requires_grad_(True)
    assert train(pipe, 5)[-1] == [4, 2, 0]
    pipe.stages[0].requires_grad_(False)
    pipe.step(X, target=Y)
    assert all(p.grad is None for p in pipe.stages[0].parameters())


def test_hogwild_frozen_parameter_gets_no_late_gradient() -> None:
    """Its forward came before it was frozen, so the version of that forward still has a gradient."""
    pipe = three("hogwild", heads=False)
    train(pipe, 4)
    weight, bias = pipe.stages[0].parameters()
    weight.requires_grad_(False)
    pipe.step(X, target=Y)
    assert weight.grad is None
    assert bias.grad is not None


@pytest.mark.filterwarnings("ignore:All gradients should be applied")
def test_hogwild_replaced_stage_has_no_history() -> None:
    """Regression: the new module always ran with the old one's parameters."""
    pipe = three("hogwild", heads=False)
    train(pipe, 5)
    pipe.stages[0] = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in pipe.stages[0].parameters():
            parameter.zero_()
    seen: list[Tensor] = []
    pipe.stages[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    pipe.step(X, target=Y)
    assert not seen[0].any()


def test_copied_pipeline_starts_without_late_gradients() -> None:
    pipe = three("hogwild", heads=False)
    train(pipe, 4)
    twin = copy.deepcopy(pipe)
    assert not twin.drain()
    assert train(twin, 1) == train(pipe, 1) == [[4, 2, 0]]
    assert [pipe.drain() for _ in range(5)] == [True, True, True, True, False]


def test_late_gradients_survive_updates_through_data() -> None:
    """Regression: an optimizer that writes to `parameter.data` leaves torch's counters unchanged."""
    pipe, twin = three("hogwild", heads=False, seed=0), three("hogwild", heads=False, seed=0)
    twin.load_state_dict(pipe.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(5):
        assert torch.equal(pipe.step(X, target=Y).nan_to_num(), twin.step(X, target=Y).nan_to_num())
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("change", ["phase", "cast", "load", "stage", "micro-batches"])
def test_late_gradients_are_dropped_by_changes(change: str) -> None:
    """Gradients of another strategy, kind, or network are not due any more."""
    pipe = three("hogwild", heads=False)
    train(pipe, 4)

    def step() -> None:
        if change == "cast":
            pipe.double()
        elif change == "load":
            pipe.load_state_dict(pipe.state_dict())
        elif change == "stage":
            pipe.stages[0] = nn.Linear(8, 8)
        elif change == "micro-batches":
            pipe.num_microbatches = 2
        elif change == "phase":
            pipe.strategy = "end-to-end"
        pipe.step(X.double() if change == "cast" else X, target=Y)

    with pytest.warns(UserWarning, match="with gradients still due, lost now"):
        step()
    late = [p.grad is None for p in pipe.stages[0].parameters()]
    assert late == [change != "phase"] * 2


@pytest.mark.parametrize("recompute", [False, True])
def test_batches_under_a_delay_may_reuse_their_memory(recompute: bool) -> None:
    """The late gradient was that of the later values, or torch raised an error of changed memory."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)]
    x, y = torch.randn(2, 6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    pipe = nwise.Pipeline(stages, None, strategy="end-to-end-delay-1", recompute=recompute)
    memory = x[0].clone()
    for batch in x:
        memory.copy_(batch)
        pipe.step(memory, target=y)
    expected = torch.autograd.grad(
        functional.cross_entropy(stages[1](stages[0](x[0])), y), list(stages[0].parameters())
    )
    for p, gradient in zip(stages[0].parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradient)


class Tempered(nn.Linear):
    """A layer with a temperature, which a loop may change, and a number of forwards."""

    forwards, inner, t = 0, False, 1.0

    def __init__(self, get: Callable[[Any], Any]) -> None:
        super().__init__(4, 4)
        self.get, self.options, self.steps = get, {"t": 1.0}, [1.0, 1.0]
        self.config = SimpleNamespace(t=1.0, steps=[1.0])
        self.register_buffer("buffer", torch.tensor(1.0))
        self.tensor, self.tensors, self.array = torch.tensor(1.0), {"t": [torch.tensor(1.0)]}, np.ones(1)
        self.others = [nn.BatchNorm1d(1)]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.run, x, use_reentrant=False)) if self.inner else self.run(x)

    def run(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return torch.tanh(super().forward(x) / self.get(self))


# How a loop changes a temperature, and how the forward reads it.
TEMPERATURES: dict[str, tuple[Callable[[Any, float], object], Callable[[Any], Any]]] = {
    "a number, first that of the class": (lambda m, t: setattr(m, "t", t), lambda m: m.t),
    "in a dictionary": (lambda m, t: m.options.update(t=t), lambda m: m.options["t"]),
    "another dictionary": (lambda m, t: setattr(m, "options", {"t": t}), lambda m: m.options["t"]),
    "in a list": (lambda m, t: m.steps.__setitem__(0, t), lambda m: m.steps[0]),
    "a longer list": (lambda m, t: m.steps.append(t), lambda m: len(m.steps)),
    "in an object": (lambda m, t: setattr(m.config, "t", t), lambda m: m.config.t),
    "in a list of an object": (lambda m, t: m.config.steps.__setitem__(0, t), lambda m: m.config.steps[0]),
    "a buffer": (lambda m, t: m.buffer.fill_(t), lambda m: m.buffer.clone()),
    "another buffer": (lambda m, t: setattr(m, "buffer", torch.tensor(t)), lambda m: m.buffer),
    "a tensor": (lambda m, t: m.tensor.fill_(t), lambda m: m.tensor.clone()),
    "another tensor": (lambda m, t: setattr(m, "tensor", torch.tensor(t)), lambda m: m.tensor),
    "a tensor in a list": (lambda m, t: m.tensors["t"][0].fill_(t), lambda m: m.tensors["t"][0].clone()),
    "an array": (lambda m, t: m.array.fill(t), lambda m: float(m.array[0])),
    "a buffer of another module": (
        lambda m, t: m.others[0].running_var.fill_(t),
        lambda m: m.others[0].running_var.clone(),
    ),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", TEMPERATURES)
@pytest.mark.parametrize("setting", [{}, {"recompute": True}, {"inner": True}], ids=str)
def test_late_forwards_have_the_values_of_their_step(setting: dict[str, Any], kind: str) -> None:
    """Regression: a forward that ran again in a later step had the temperature of then; checkpoints inside said nothing."""
    (put, get), inner = TEMPERATURES[kind], setting.get("inner", False)
    layer, last = Tempered(get), nn.Linear(4, 3)
    pipe = nwise.Pipeline([layer, last], strategy="end-to-end-delay-1", recompute=setting.get("recompute", False))
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    before: dict[str, Tensor] | None = None
    for step in range(5):
        layer.inner = inner and step > 1  # may begin later
        if step:
            put(layer, 1.0 + step)
        twins = copy.deepcopy(layer), copy.deepcopy(last)
        functional.cross_entropy(twins[1](twins[0](x)), y).backward()
        pipe.zero_grad()
        pipe.step(x, target=y)
        if before is not None:
            for name, p in layer.named_parameters():
                torch.testing.assert_close(p.grad, before[name])
        before = {name: p.grad for name, p in twins[0].named_parameters() if p.grad is not None}
        assert float(get(layer)) == (2.0 + step if kind == "a longer list" else 1.0 + step)
    assert layer.forwards == 5, "a second run counts once"


class Moving(nn.Linear):
    """A layer whose scale each forward of a checkpointed part moves."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(self.run, x, use_reentrant=False))

    def run(self, x: Tensor) -> Tensor:
        self.scale.add_(1)  # type: ignore[operator]
        return torch.tanh(super().forward(x) / self.scale.clone())  # type: ignore[operator]


@pytest.mark.usefixtures("float64")
def test_checkpoints_have_the_buffers_of_their_micro_batch() -> None:
    """Regression: a part that ran again in a late pass moved the buffers once more, and found those of a later micro-batch."""
    layer, last = Moving(), nn.Linear(4, 3)
    pipe = nwise.Pipeline([layer, last], None, strategy="end-to-end-delay-1", num_microbatches=2)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    for _ in range(2):
        pipe.step(x, target=y)
    assert layer.scale == 5, "two steps of two micro-batches"
    hidden = [
        torch.tanh(nn.functional.linear(x[3 * m : 3 * m + 3], layer.weight, layer.bias) / (2 + m)) for m in range(2)
    ]
    (expected,) = torch.autograd.grad(functional.cross_entropy(last(torch.cat(hidden)), y), [layer.weight])
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("recompute", [False, True])
def test_forwards_that_change_parameters_are_refused(*, recompute: bool) -> None:
    """Regression: a forward changed the copy that it had under a delay, so rows of an embedding kept their norms."""
    embedding = nn.Embedding(9, 4, max_norm=0.5)
    stages = [embedding, nn.Linear(4, 3)]
    pipe = nwise.Pipeline(stages, strategy="end-to-end-delay-1", recompute=recompute)
    x, y = torch.arange(6), torch.tensor([0, 1, 2, 0, 1, 2])
    message = "Stage 0 should leave its parameters as they are under a delay.*'weight' in place"
    with pytest.raises(ValueError, match=message):
        [pipe.step(x, target=y) for _ in range(2)]  # the second one runs the first forward again
    pipe = nwise.Pipeline(stages, strategy="end-to-end")
    pipe.step(x, target=y)
    assert float(embedding.weight.detach()[:6].norm(dim=1).max()) < 0.5 + 1e-3


def test_late_gradients_have_the_dtype_that_a_parameter_asks_for() -> None:
    """Regression: the copies under a delay asked for gradients of their own dtype, which did not fit."""
    stages = [nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3).bfloat16()]
    for p in (*stages[0].parameters(), *stages[1].parameters()):
        p.grad_dtype = torch.float32
    pipe = nwise.Pipeline(stages, strategy="end-to-end-delay-1")
    for _ in range(2):
        pipe.step(torch.ones(2, 4, dtype=torch.bfloat16), target=torch.tensor([0, 1]))
    assert {p.grad.dtype for p in pipe.parameters() if p.grad is not None} == {torch.float32}
