"""Hogwild as figure 1 of the paper describes it: greedy ages, and passes with the weights in memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nets import perceptron
from nwise.flow import flows_for
from nwise.reference import Call, in_memory_grads
from nwise.schedule import PAPER, TRANSFORMER, Costs, best
from nwise.schedule.ages import Ages, greedy_ages, message_ages, strategy_ages
from nwise.schedule.named import choose
from nwise.schedule.orders import depth_first, make_schedule
from nwise.stage.weights import InMemory
from test_delay import check

RATE, STEPS, WIDTH = 0.5, 12, 4
Layer = tuple[Tensor, Tensor]  # two weights of a stage, [WIDTH, WIDTH] each


def accelerators(stages: list[Layer], batches: list[tuple[Tensor, Tensor]]) -> tuple[list[list[Layer]], list[int]]:
    """Simulate figure 1 with the formulas of ``h -> tanh(B tanh(A h))``, and no word of nwise or autograd.

    In every slot each accelerator takes the gradient that has arrived, if any, makes its pass with the weights that it holds, and
    updates them at once; otherwise it runs the forward of the next mini-batch that has arrived. The loss is the mean square.

    Returns:
        For each stage its weights before each update, and the number of forwards before its first update.
    """
    size = len(stages)
    held = list(stages)
    history: list[list[Layer]] = [[layer] for layer in stages]
    inputs: list[list[Tensor]] = [[x for x, _ in batches], *([] for _ in range(1, size))]
    kept: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in range(size)]  # input, hidden, output of each forward
    gradients: list[list[Tensor]] = [[] for _ in range(size)]  # with respect to each output
    begun = [-1] * size
    while min(map(len, history)) <= STEPS:
        arrived = [(len(one), len(two)) for one, two in zip(inputs, gradients, strict=True)]
        for k in range(size):
            first, second = held[k]
            done = len(history[k]) - 1
            if done < arrived[k][1]:
                x, hidden, out = kept[k][done]
                below = gradients[k][done] * (1 - out**2)  # at the activations of the forward
                inner = (below @ second) * (1 - hidden**2)  # through the weights of now
                if k:
                    gradients[k - 1].append(inner @ first)
                held[k] = first - RATE * inner.T @ x, second - RATE * below.T @ hidden
                begun[k] = len(kept[k]) if begun[k] < 0 else begun[k]
                history[k].append(held[k])
            elif len(kept[k]) < arrived[k][0]:
                x = inputs[k][len(kept[k])]
                hidden = torch.tanh(x @ first.T)
                out = torch.tanh(hidden @ second.T)
                kept[k].append((x, hidden, out))
                if k < size - 1:
                    inputs[k + 1].append(out)
                else:
                    y = batches[len(kept[k]) - 1][1]
                    gradients[k].append(2 * (out - y) / y.numel())
    return history, begun


def layers(num_stages: int) -> list[nn.Module]:
    """Return stages ``h -> tanh(B tanh(A h))``."""
    linear = [[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)] for _ in range(num_stages)]
    return [nn.Sequential(a, nn.Tanh(), b, nn.Tanh()) for a, b in linear]


def weights(stages: list[nn.Module]) -> list[Layer]:
    return [tuple(p.detach().clone() for p in stage.parameters()) for stage in stages]  # type: ignore[misc]


def test_ranks_compare_the_weights_of_late_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ranks whose passes used the weights in memory and those of the forward trained together."""
    compared: list[Any] = []
    for strategy in ("hogwild", "hogwild-forward"):
        pipe = nwise.Pipeline([nn.Linear(2, 2) for _ in range(3)], None, nn.functional.mse_loss, strategy)
        monkeypatch.setattr(pipe.processes, "compare", lambda what, values: compared.append(values))
        pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
    assert compared[0] != compared[1]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_hogwild_is_figure_1(num_stages: int) -> None:
    """Twelve updates of every stage, the first of which have smaller ages, equal those of accelerators that never wait."""
    torch.manual_seed(0)
    stages = layers(num_stages)
    batches = [(torch.randn(5, WIDTH), torch.rand(5, WIDTH)) for _ in range(3 * STEPS)]
    expected, begun = accelerators(weights(stages), batches)
    assert begun == [2 * (num_stages - 1 - k) + 1 for k in range(num_stages)]
    pipe = nwise.Pipeline(stages, None, nn.functional.mse_loss, "hogwild")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    for step in range(STEPS + begun[0]):
        x, y = batches[step]
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        for k, found in enumerate(weights(stages)):
            updates = max(0, step + 2 - begun[k])
            if updates <= STEPS:
                for one, other in zip(found, expected[k][updates], strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=f"{step} {k}")
    assert pipe.staleness[:, 0].tolist() == [count - 1 for count in begun]


def test_greedy_ages_by_hand() -> None:
    """2-wise, 4 stages: stage 0 begins mini-batches 0, 1 and 2 in slots 0 to 2 and has W(0) in slot 3. Stage k between has F(0),
    I(0), F(1), W(0), because loss k is at hand, and loss k + 1 two slots later."""
    ages = greedy_ages(flows_for(nwise.NWise(2), 4, 1))
    assert (ages.weights, ages.messages) == ((2, 1, 1, 0), ((), (0,), (0,), (0,)))
    # With two micro-batches stage 0 of two runs F(0) F(1) F(2) W(0) F(3) W(1): its second mini-batch has begun.
    assert greedy_ages(flows_for(nwise.EndToEnd(), 2, 2)).weights == (1, 0)
    assert strategy_ages(nwise.Hogwild(ages="least"), flows_for(nwise.EndToEnd(), 4, 1)).weights == (3, 2, 1, 0)


def test_a_schedule_chooses_the_ages_of_messages_only_with_the_weights_of_the_forward() -> None:
    """Then a message may wait for its use: by default that of stage 1 is made when stage 0 needs it."""
    flows = flows_for(nwise.NWise(2), 4, 1)
    assert strategy_ages(nwise.Hogwild(), flows) == Ages((2, 1, 1, 0), ((), (0,), (0,), (0,)), stashes=False)
    late = strategy_ages(nwise.Hogwild(weights="forward"), flows)
    assert late == Ages((2, 1, 1, 0), ((), (2,), (1,), (0,)), stashes=True)
    kept = best("2-wise-hogwild", num_stages=4, num_microbatches=1, costs=PAPER)
    # Lists made for one form run under the other, with its weights.
    for schedule in (kept, replace(kept, graph=replace(kept.graph, ages=late))):
        for ages in (late, strategy_ages(nwise.Hogwild(), flows)):
            assert choose(schedule, flows, ages=ages).ages == ages
    # The best schedule of three stages and two micro-batches chooses the ages of messages, but not with the weights in memory.
    options: Any = {"num_stages": 3, "num_microbatches": 2, "costs": Costs(1, 0.5, 1, 1, latency=1)}
    assert best("hogwild-forward-least", **options).order == "paced"
    ages = strategy_ages(nwise.Hogwild(ages="least"), flows_for(nwise.EndToEnd(), 3, 2))
    assert ages.hold_in(best("hogwild-least", **options).graph.tasks)


@pytest.mark.parametrize("strategy", ["end-to-end", "2-wise", "3-wise", "3-wise-mean", "deep-supervision", "blocks-2"])
@pytest.mark.parametrize("num_stages", [3, 5])
def test_greedy_ages_let_no_stage_wait(strategy: str, num_stages: int) -> None:
    """The busiest stage works all the time, and with other costs a step takes no longer than with the least ages."""
    found = best(f"{strategy}-hogwild", num_stages=num_stages, num_microbatches=1, costs=PAPER)
    flows = found.flows
    busiest = max(
        sum(1 + flow.stages[k].passes for batch in flows for flow in batch) / len(flows) for k in range(num_stages)
    )
    assert found.period == pytest.approx(busiest)
    periods = [
        best(f"{strategy}-hogwild{form}", num_stages=num_stages, num_microbatches=1, costs=TRANSFORMER).period
        for form in ("", "-least", "-forward-least")
    ]
    assert periods[0] <= min(periods[1:]) + 1e-9


# Base, form, stages and micro-batches; 3-wise has two messages of different ages with four stages.
CASES = [
    ("2-wise", "", 3, 1),
    ("3-wise", "", 4, 1),
    ("3-wise-mean", "", 4, 2),
    ("end-to-end", "", 3, 3),
    ("deep-supervision", "", 3, 1),
    ("rotating-2", "", 3, 1),
    ("2-wise", "-least", 3, 2),
    ("end-to-end", "-least", 3, 1),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("base", "form", "size", "m"), CASES)
def test_gradients_with_weights_in_memory_match_the_definition(base: str, form: str, size: int, m: int) -> None:
    """Any base, any order, micro-batches, momentum, ragged batches, and the calls of `drain`."""
    torch.manual_seed(0)
    net, order = perceptron(size), "depth-first" if m == 1 else "zb-h1"
    strategy = f"{base}-hogwild{form}"
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, m, schedule=order)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3, momentum=0.9)
    flows = flows_for(pipe.strategy, size, m)
    ages = strategy_ages(pipe.strategy, flows)
    assert not ages.stashes
    # The age of loss j at stage i: of the message that holds it, which is one of several only for N-wise.
    passing = [
        [
            0 if not ages.messages[i] else ages.messages[i][min(max(j - i, 0), len(ages.messages[i]) - 1)]
            for i in range(size)
        ]
        for j in range(size)
    ]
    calls: list[Call] = []
    for i in range(6):
        x, y = net.draw(6 if i % 2 else 5)
        credit = torch.stack([pipe.strategy.credit(size, pipe.strategy.turn(i, part)) for part in range(m)])
        calls.append(Call(copy.deepcopy(net.stages), copy.deepcopy(net.heads), x, y, credit))
        pipe.step(x, target=y)
        check(pipe, in_memory_grads(calls, net.loss_fn, ages.weights, passing, m), i)
        optimizer.step()
        optimizer.zero_grad()
    while pipe.drain():
        calls.append(Call(copy.deepcopy(net.stages), copy.deepcopy(net.heads), None, None, credit))
        check(pipe, in_memory_grads(calls, net.loss_fn, ages.weights, passing, m), "drain")
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 6 + max(ages.weights)
    assert all(p.grad is None for p in pipe.parameters())


class Scale(nn.Module):
    """``h -> w h`` with the weight itself, or with a value that is computed from it."""

    def __init__(self, *, derived: bool) -> None:
        super().__init__()
        self.weight, self.derived = nn.Parameter(torch.full((1, 1), 2.0)), derived

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(torch.float32).to(torch.float64) if self.derived else self.weight.t())


def first_gradients(stages: list[Scale], steps: int, *, saves: int | None = None) -> list[float | None]:
    """Return what each step leaves in the first stage; in one of them the gradients that are due are asked for."""
    pipe = nwise.Pipeline(stages, None, lambda output, target: output.mean(), "hogwild")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.125)
    first = []
    for step in range(steps):
        pipe.step(torch.ones(1, 1))
        first.append(None if stages[0].weight.grad is None else stages[0].weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == saves:
            pipe.pending_gradients()
    return first


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("derived", [False, True])
def test_views_are_read_at_the_backward_and_casts_are_not(*, derived: bool) -> None:
    """y = w2 w1 w0, loss = y, all weights 2, rate 1/8. Ages 4, 2, 0.

    Stage 1 updates first at the end of call 2, by w2 w0 = 4, to 1.5. The message of mini-batch 0 passes it in call 2 (w1 = 2),
    that of mini-batch 1 in call 3: with w1 = 1.5 in memory, or with the cast of its forward, 2. Stage 2 has made one update
    before mini-batch 1, by w1 w0 = 4, and w2 = 1.5.
    """
    stages = [Scale(derived=derived and k == 1) for k in range(3)]
    first = first_gradients(stages, 6)
    assert first == [None, None, None, None, 2 * 2, 1.5 * (2 if derived else 1.5)]


@pytest.mark.parametrize("base", ["", "2-wise-", "credit-1,0;1,1-"])
@pytest.mark.parametrize("form", ["", "-forward", "-least", "-forward-least"])
def test_forms_have_names(base: str, form: str) -> None:
    name = f"{base}hogwild{form}"
    found: Any = nwise.strategy(name)
    assert found.name == name
    assert nwise.strategy(found.name, heads="all") == nwise.strategy(name, heads="all")
    kinds = {"weights": "forward" if "forward" in form else "memory", "ages": "least" if "least" in form else "greedy"}
    assert {key: getattr(found, key) for key in kinds} == kinds
    assert nwise.strategy(f"{base}hogwild", **kinds) == found
    for key in kinds:
        with pytest.raises(ValueError, match=f"`{key}` should be '.*' or '.*'. Found 'other'"):
            nwise.Hogwild(**{key: "other"})  # type: ignore[arg-type]


def steps(pipe: nwise.Pipeline, count: int, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=rate)
    for step in range(count):
        torch.manual_seed(step)
        pipe.step(torch.randn(6, WIDTH), target=torch.randn(6, WIDTH))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:All gradients should be applied")
def test_what_is_dropped_gives_its_memory_back() -> None:
    """Regression: what waited for a pass kept its own graph alive by the hooks on its saved tensors, for good."""
    kept: list[weakref.ref[Tensor]] = []
    stages = layers(3)
    for stage in stages:
        stage.register_forward_hook(lambda module, given, made: kept.append(weakref.ref(made)))
    pipe = nwise.Pipeline(stages, None, nn.functional.mse_loss, "hogwild")
    steps(pipe, 3)
    assert sum(one() is not None for one in kept) > 0
    assert pipe.forget_pending() > 0
    assert [one for one in kept if one() is not None] == []


def test_a_schedule_with_other_ages_of_messages_is_refused() -> None:
    """Gradients with the weights in memory depend on them, those with the weights of the forward do not."""
    flows = flows_for(nwise.EndToEnd(), 4, 2)
    early = message_ages(flows, greedy_ages(flows).weights, "early")
    schedule = make_schedule("early", flows, lambda f, t: depth_first(f, t, fuse=False), ages=early)
    pipe = nwise.Pipeline(layers(4), None, nn.functional.mse_loss, "hogwild-forward", 2, schedule=schedule)
    steps(pipe, 1)
    pipe = nwise.Pipeline(layers(4), None, nn.functional.mse_loss, "hogwild", 2, schedule=schedule)
    with pytest.raises(ValueError, match="`schedule` should give every message the age that the strategy gives it"):
        steps(pipe, 1)


@pytest.mark.usefixtures("float64")
def test_normalised_gradients_match_the_definition() -> None:
    """Batch norm: the weights of its scale are in memory too, its statistics those of the mini-batch."""
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()]
    stages = [nn.Sequential(*copy.deepcopy(parts)) for _ in range(3)]
    pipe = nwise.Pipeline(stages, None, nn.functional.mse_loss, "hogwild")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.3)
    calls: list[Call] = []
    for _ in range(8):
        x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
        calls.append(Call(copy.deepcopy(stages), [], x, y, pipe.credit))
        pipe.step(x, target=y)
        check(pipe, in_memory_grads(calls, nn.functional.mse_loss, (4, 2, 0), [[4, 2, 0]] * 3))
        optimizer.step()
        optimizer.zero_grad()


class Conjugate(nn.Module):
    """A layer whose autograd saves a lazy conjugate of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.weight.mH
        return y.real + y.imag


class Rows(nn.Linear):
    """A layer that uses a part of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[1:])


def backward_of(module: nn.Module, change: Callable[[Tensor], object]) -> list[float]:
    """Return the gradient of the input after a change between forward and backward, with the weights in memory."""
    x = torch.ones(1, 2, requires_grad=True)
    with InMemory(list(module.parameters()), module, "Stage 0").computing:
        y = module(x)
    change(y)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return x.grad.flatten().tolist()


def test_updates_by_any_write_are_seen_and_other_writes_refused() -> None:
    """Optimizers write in place or replace ``.data``; a write to an activation stays an error, as without hooks."""
    layer, strided, conjugate, rows = nn.Linear(2, 2), nn.Linear(2, 2), Conjugate(), Rows(2, 3)
    strided.weight = nn.Parameter(torch.arange(12.0).view(3, 4)[1:, 1:3])

    def fill(module: Any, value: float) -> Callable[[Tensor], object]:
        return lambda _: nn.init.constant_(module.weight, value)

    def replace_by(data: Tensor, module: nn.Linear = layer) -> Callable[[Tensor], object]:
        return lambda _: setattr(module.weight, "data", data)

    assert backward_of(layer, fill(layer, 3.0)) == [6, 6]
    assert backward_of(layer, replace_by(torch.full((2, 2), 4.0))) == [8, 8]
    assert backward_of(layer, replace_by(torch.arange(8.0)[4:].view(2, 2))) == [4 + 6, 5 + 7]
    assert backward_of(rows, replace_by(torch.arange(6.0).view(3, 2), rows)) == [2 + 4, 3 + 5]
    assert backward_of(layer, fill(layer, 3.0)) == [6, 6]
    with pytest.raises(RuntimeError, match=r"Stage 0 should leave .* tensor of shape \[1, 2\] that was modified"):
        backward_of(nn.Sequential(layer, nn.Tanh()), lambda y: y.detach().zero_())
    with pytest.raises(
        RuntimeError, match=r"Stage 0 should keep .* torch.float32 on cpu with strides \(1, 2\) instead"
    ):
        backward_of(layer, lambda _: setattr(layer.weight, "data", layer.weight.t().contiguous().t()))
    assert backward_of(strided, lambda _: None) == [5 + 9, 6 + 10]
    assert backward_of(strided, fill(strided, 3.0)) == [6, 6]
    assert backward_of(conjugate, lambda _: None) == [2, 2]
    assert backward_of(conjugate, fill(conjugate, 2.0)) == [4, 4]
    conjugate.weight = nn.Parameter(torch.full((2, 2), 1 + 3j).conj())  # 1 - 3j, as its bit says
    assert backward_of(conjugate, lambda _: None) == [8, 8]


def test_hogwild_in_memory_refuses_a_second_forward() -> None:
    """It would have later weights."""
    pipe = nwise.Pipeline(layers(2), None, nn.functional.mse_loss, "hogwild", recompute=True)
    with pytest.raises(ValueError, match="Stage 0 should keep its activations under Hogwild .* Found `recompute=True`"):
        steps(pipe, 1)


@pytest.mark.usefixtures("float64")
def test_a_checkpoint_makes_due_passes_with_the_weights_of_its_moment() -> None:
    """Scale network, all weights 2, rate 1/8, ages 4, 2, 0, and `pending_gradients` after call 2, which updates w1 to 1.5.

    The message of mini-batch 1 would pass stage 1 in call 3 with w1 = 1.5, and then reads the same; the pass of stage 1 for
    mini-batch 2 would come in call 4, after another update of w1, and reads 1.5. The gradients are still left in calls 4 to 6.
    """
    found = []
    for saves in (False, True):
        stages = [Scale(derived=False) for _ in range(3)]
        found.append(first_gradients(stages, 7, saves=2 if saves else None))
    # w2 is 2, 1.5, 1 in mini-batches 0 to 2; w1 in calls 2 to 4 is 2, 1.5, 1.5 - 1.5 * 2 / 8 = 1.125.
    assert found == [[None] * 4 + [4, 1.5 * 1.5, 1 * w1] for w1 in (1.125, 1.5)]
