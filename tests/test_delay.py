"""Delayed gradients: updates by hand, and every gradient against the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import nwise
from nets import X, Y, perceptron, three, train
from nwise.flow import Flow, find_flow
from nwise.reference import late_grads, reference_grads
from nwise.schedule import Costs, best
from nwise.schedule.ages import When, greedy_ages, message_ages, strategy_ages
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
        with pytest.raises(ValueError, match="`by`, the delay in mini-batches, .* integer from 0 to 64. Found"):
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


class Odd(nn.Linear):
    """A layer whose weight has a class and an attribute, and which may reach it by a list."""

    class Weight(nn.Parameter):
        pass

    def __init__(self, *, aliased: bool) -> None:
        super().__init__(5, 5, dtype=torch.bfloat16)
        self.weight = Odd.Weight(self.weight.detach())
        vars(self.weight)["scale"] = 0.5
        self.weight.grad_dtype = torch.float32
        self.all, self.aliased = [self.weight], aliased

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.all[0] if self.aliased else self.weight
        return nn.functional.linear(x, weight * getattr(weight, "scale", 1.0) * (1 + isinstance(weight, Odd.Weight)))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", ["end-to-end-delay-1", "hogwild-forward-least"])
def test_copies_of_parameters_are_like_them_and_found_by_their_names(strategy: str, *, recompute: bool) -> None:
    """Regression: they were plain tensors with gradients of their own dtype, and a forward took another branch.

    A list holds the present parameter, which got no gradient, without a word.
    """
    x, y = torch.randn(6, 5, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 0, 1, 2])
    for aliased in (False, True):
        layer = Odd(aliased=aliased)
        net = nn.Sequential(layer, nn.Linear(5, 3).bfloat16())
        pipe = nwise.Pipeline(list(net), strategy=strategy, recompute=recompute)
        assert pipe.step(x, target=y)[-1] == nn.functional.cross_entropy(net(x), y)
        with pytest.raises(nwise.ContractError, match="stages.0.weight by") if aliased else nullcontext():
            pipe.step(x, target=y)
        assert aliased or getattr(layer.weight.grad, "dtype", None) is torch.float32


ORDERS = ["depth-first", "phase", "1f1b", "zb-h1"]
STRATEGIES = ["local", "2-wise", "3-wise-mean", "end-to-end", "deep-supervision", "rotating-2", "rotating-2-microbatch"]


# Every delay with every strategy, and every order with every delay; half of them run forwards again.
CASES = [
    (delay, strategy, 1 + k % 3, ORDERS[(i + k) % 4], bool((i + k // 4) % 2))
    for i, delay in enumerate(("-delay-0", "-delay-1", "-delay-2", "-hogwild-forward"))
    for k, strategy in enumerate(STRATEGIES)
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("delay", "strategy", "m", "order", "recompute"), CASES)
def test_late_gradients_match_the_definition(strategy: str, m: int, delay: str, order: str, recompute: bool) -> None:
    """Momentum, ragged batches, and calls after a drain; the definition keeps the gradients of every call."""
    torch.manual_seed(0)
    net = perceptron(4)
    name = strategy + delay
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, name, m, schedule=order, recompute=recompute)
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
            x.zero_()  # a loader may use its memory again
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
    for a in (a for a in schedule.graph.tasks if a.message is not None):
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
    monkeypatch.setattr(pipe.processes, "announce", announced.append)
    drop(pipe)
    assert announced == ["`forget_pending`"]
    pipe.forget_pending()
    assert len(announced) == 1, "there is nothing left that another process could wait for"


CHANGES: dict[str, Callable[[nwise.Pipeline], object]] = {
    "strategy": lambda pipe: setattr(pipe, "strategy", nwise.Delayed(nwise.Geometric(0.9), by=1)),
    "form": lambda pipe: setattr(pipe, "strategy", nwise.Hogwild(nwise.NWise(2))),
    "M": lambda pipe: setattr(pipe, "num_microbatches", 3),
    "step": lambda pipe: setattr(pipe, "steps", 7),
    "frozen": lambda pipe: pipe.stages[0].requires_grad_(False),
    "stage": lambda pipe: pipe.stages.__setitem__(0, copy.deepcopy(pipe.stages[0])),
    "cast": lambda pipe: pipe.double(),
    "load": lambda pipe: pipe.load_state_dict(pipe.state_dict()),
    "to the same device": lambda pipe: pipe.to("cpu"),
    "float of float": lambda pipe: pipe.float(),
}


@pytest.mark.parametrize("put_aside", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_change_while_gradients_are_due_warns(change: str, *, put_aside: bool) -> None:
    """Regression: the gradients were dropped without a word; a strategy that changed at every step trained nothing."""
    keeps = change in ("to the same device", "float of float")
    for drains in (False, True):
        net, pipe = late()
        if put_aside:
            pipe.restore_pending(pipe.pending_gradients())
        while drains and pipe.drain():
            pipe.zero_grad()
        x, y = net.draw(6)
        warned = pytest.warns(UserWarning, match="Found 1 mini-batch with gradients still due, lost now because")
        with nullcontext() if keeps or drains else warned:  # if no gradient is due, there is no warning
            CHANGES[change](pipe)
            pipe.step(x.to(next(pipe.parameters()).dtype), target=y)
        assert all((p.grad is not None) == (keeps and not drains) for p in pipe.stages[0].parameters())
        assert pipe.forget_pending() == 1, "that of the new step"


def test_drain_that_raises_restores_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the stages after the one that raised kept their gradients."""
    net, pipe = late()
    x, y = net.draw(6)
    pipe.step(x, target=y)
    before = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
    monkeypatch.setattr(pipe._stages[0], "_walk_back", None)
    with pytest.raises(TypeError):
        pipe.drain()
    after = [p.grad for p in pipe.parameters()]
    assert all(
        a is b is None or (a is not None and b is not None and a.equal(b)) for a, b in zip(before, after, strict=True)
    )


def test_skipping_under_a_delay_is_refused() -> None:
    """Regression: step s skipped the good gradients of mini-batch s - d, and applied bad ones d steps later."""
    for strategy in ("end-to-end-delay-2", "hogwild"):
        _, pipe = late(strategy, 1)
        with pytest.raises(ValueError, match="`on_nan` should be stop or ignore under a delay.* Found skip with"):
            NonFiniteGuard(pipe, "skip")


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


@pytest.mark.parametrize("strategy", ["hogwild", "hogwild-forward"])
def test_frozen_parameter_gets_no_late_gradient(strategy: str) -> None:
    """Its forward came before it was frozen, so the graph of that forward, or the copy in it, still has a gradient."""
    pipe = three(strategy, heads=False)
    train(pipe, 4)
    weight, bias = pipe.stages[0].parameters()
    weight.requires_grad_(False)
    pipe.step(X, target=Y)
    assert weight.grad is None
    assert bias.grad is not None


def test_copied_pipeline_starts_without_late_gradients() -> None:
    pipe = three("hogwild", heads=False)
    train(pipe, 4)
    twin = copy.deepcopy(pipe)
    assert not twin.drain()
    assert train(twin, 1) == train(pipe, 1) == [[4, 2, 0]]
    assert [pipe.drain() for _ in range(5)] == [True, True, True, True, False]
