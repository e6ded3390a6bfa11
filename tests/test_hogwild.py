"""Hogwild: the staleness of the steady grid, and updates by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import nwise
from nets import perceptron
from nwise.flow import Flow, find_flow
from nwise.hogwild import timetable
from nwise.schedule.actions import passes


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_end_to_end_staleness_counts_stages_above(num_stages: int) -> None:
    """Reproduce figure 1 of the paper."""
    ages = nwise.staleness(find_flow(nwise.EndToEnd().credit(num_stages)))
    assert ages == [[num_stages - 1 - k] for k in range(num_stages)]


@pytest.mark.parametrize(
    ("strategy", "num_microbatches", "ages"),
    [
        # No gradient has to travel, so no update comes late.
        ("local", 1, [[0], [0], [0], [0]]),
        # Stage k, 2-wise: three slots a batch. F(b) in slot 0; own loss back in slot 1; the far loss is at its stage in
        # slot 1, its own pass in slot 2, so it arrives for slot 3, where F(b+1) goes first: one update late.
        ("2-wise", 1, [[1], [1], [1], [0]]),
        ("end-to-end", 2, [[2, 1], [1, 1], [1, 0], [0, 0]]),
        ("end-to-end", 4, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_staleness_by_hand(strategy: str, num_microbatches: int, ages: list[list[int]]) -> None:
    assert nwise.staleness(find_flow(nwise.strategy(strategy).credit(4)), num_microbatches) == ages


@st.composite
def flows(draw: st.DrawFn, num_stages: int) -> Flow:
    """Any credit of losses for the stages before them, any stages frozen."""
    bits = draw(st.lists(st.booleans(), min_size=num_stages**2, max_size=num_stages**2))
    credit = torch.tensor(bits).reshape(num_stages, num_stages).tril().double()
    return find_flow(credit, trainable=draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages)))


@given(st.data(), st.integers(2, 6), st.integers(1, 3), st.integers(1, 3))
def test_timetable_has_no_circular_waits(
    data: st.DataObject, num_stages: int, num_turns: int, num_microbatches: int
) -> None:
    """What a stage waits for is sent within the same mini-batch or an earlier one, of which the next stage has the forward.

    Stages that learn nothing, or only from near losses, once waited for what they should hand on before it could be there.
    """
    cycle = [[data.draw(flows(num_stages))] * num_microbatches for _ in range(num_turns)]
    due = timetable(cycle)
    for flow in {flow for batch in cycle for flow in batch}:
        for k, stage in enumerate(flow.stages):
            for action in passes(stage, k, 0):
                is_update = action.message is None or stage.fused == action.message
                when = due[k].update if is_update else due[k].sends[action.message or 0]
                if stage.fused is not None:
                    assert due[k].sends[stage.fused] == due[k].update
                for p, weight in enumerate(stage.cotangent(action.message).received):
                    assert not weight or due[k + 1].sends[p] <= when
    if num_turns == 1:
        assert [one.update for one in due] == [max(ages) for ages in nwise.staleness(cycle[0][0], num_microbatches)]


@pytest.mark.usefixtures("float64")
def test_hogwild_updates_by_hand() -> None:
    """y = w1 w0 x, loss = y, x = 1, rate 0.1, w0 = w1 = 2; stage 0 is one update late, stage 1 is not.

    step 0: both at (2, 2):            g0 = w1 = 2, g1 = w0 = 2        -> w0 = 1.8,  w1 = 1.8
    step 1: stage 0 still at w0 = 2:   g0 = w1 = 1.8, g1 = 2           -> w0 = 1.62, w1 = 1.6
    step 2: stage 0 at w0 = 1.8:       g0 = w1 = 1.6, g1 = 1.8         -> w0 = 1.46, w1 = 1.42
    """
    stages = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for stage in stages:
        nn.init.constant_(stage.weight, 2.0)
    pipe = nwise.Pipeline(stages, None, lambda output, target: output.mean(), "hogwild")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    expected = [(1.8, 1.8), (1.62, 1.6), (1.46, 1.42)]
    losses, ages = [], []
    for pair in expected:
        losses.append(pipe.step(torch.ones(1, 1))[-1].item())
        ages.append(pipe.staleness.flatten().tolist())
        optimizer.step()
        optimizer.zero_grad()
        assert [s.weight.item() for s in stages] == pytest.approx(pair, abs=1e-12)
    assert losses == pytest.approx([4.0, 3.6, 2.88], abs=1e-12)
    assert ages == [[0, 0], [1, 0], [1, 0]]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("hogwild", 1), ("hogwild", 2), ("3-wise-mean-hogwild", 1)])
def test_stage_gradients_use_parameters_of_their_staleness(strategy: str, num_microbatches: int) -> None:
    """Compare with reference gradients of stored copies of the whole network."""
    net = perceptron(4)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, num_microbatches)
    ages = nwise.staleness(find_flow(pipe.credit), num_microbatches)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    history: list[list[nn.Module]] = []
    for step in range(8):
        x, y = net.draw(6)
        history.append(copy.deepcopy(net.stages))
        expected: dict[str, Tensor] = {}
        for m, (part, labels) in enumerate(
            zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True)
        ):
            old = [history[max(0, step - ages[k][m])][k] for k in range(4)]
            grads = nwise.reference_grads(old, net.heads, net.loss_fn, part, labels, pipe.credit)
            for name, gradient in grads.items():
                expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient / num_microbatches
        pipe.step(x, target=y)
        for name, parameter in pipe.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-12, msg=name)
        assert pipe.staleness.tolist() == [[min(age, step) for age in row] for row in ages]
        optimizer.step()
        optimizer.zero_grad()


def test_staleness_counts_updates_not_steps() -> None:
    """Two steps accumulate into one update, so parameters from before it are one update old."""
    stages = [nn.Linear(3, 3) for _ in range(3)]
    pipe = nwise.Pipeline(stages, None, strategy="hogwild")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    seen = []
    for step in range(6):
        pipe.step(torch.randn(4, 3), target=torch.tensor([0, 1, 2, 0]))
        seen.append(pipe.staleness.flatten().tolist())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [[0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0], [2, 1, 0], [2, 1, 0]]


def test_synchronous_phase_has_no_staleness() -> None:
    net = perceptron(4)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "local@2,hogwild")
    ages = []
    for _ in range(4):
        x, y = net.draw(4)
        pipe.step(x, target=y)
        ages.append(int(pipe.staleness.max()))
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    assert ages == [0, 0, 0, 1]


def test_every_phase_has_its_own_staleness() -> None:
    """Regression: the history of parameters was only as deep as the first phase needed."""
    net = perceptron(4)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "2-wise-hogwild@3,hogwild")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(8):
        x, y = net.draw(4)
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    assert pipe.staleness.flatten().tolist() == [3, 2, 1, 0]
