"""The contract: every strategy computes what `reference_grads` defines, however it is run."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import nwise
from nets import ZOO, Net, perceptron
from nwise.strategies.base import example_names
from test_flow import Matrix, matrices

STRATEGIES = [
    "local",
    "1-wise",
    "2-wise",
    "3-wise",
    "4-wise",
    "5-wise",
    "6-wise",
    "2-wise-mean",
    "3-wise-mean",
    "4-wise-mean",
    "6-wise-mean",
    "end-to-end",
    "deep-supervision",
    "geometric-0.7",
    "blocks-2",
    "blocks-3",
    "rotating-2",
    "rotating-3",
    "rotating-2-microbatch",
]
# A new strategy is tested by its examples; a matrix has a size, and other tests check strategies over time.
STRATEGIES += [name for name in example_names() if name not in STRATEGIES and not re.search("credit|hogwild|@", name)]


def pipeline(net: Net, strategy: str | nwise.Strategy, num_microbatches: int = 1, **options: Any) -> nwise.Pipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # N > A and batch norm under micro-batches have tests of their own
        return nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, num_microbatches, seed=0, **options)


def gradients(pipe: nwise.Pipeline) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every gradient there should be, and no other; a stage without credit may have None for zero."""
    assert set(found) <= set(expected)
    for name, gradient in expected.items():
        got = found.get(name, torch.zeros_like(gradient))
        same_kind = (got.dtype, got.shape) == (gradient.dtype, gradient.shape)
        if not same_kind or not torch.allclose(
            got, gradient, rtol=tolerance, atol=tolerance
        ):  # faster than the next line
            torch.testing.assert_close(got, gradient, rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def credits(pipe: nwise.Pipeline, step: int) -> Tensor:
    now = pipe.strategy
    return torch.stack([now.credit(pipe.num_stages, now.turn(step, m)) for m in range(pipe.num_microbatches)])


def distinct(stages: Iterable[int]) -> list[tuple[str, int]]:
    """Strategies by number of stages, one for each cycle of matrices: at A = 2, say, 19 names are 8 cycles."""
    cases: dict[tuple[Any, ...], tuple[str, int]] = {}
    for size, name in itertools.product(stages, STRATEGIES):
        cycle = [nwise.strategy(name).credit(size, turn).tolist() for turn in range(nwise.strategy(name).turns)]
        cases.setdefault((size, name.endswith("microbatch"), str(cycle)), (name, size))
    return list(cases.values())


# All sizes on one network, and all networks at one size: what a network is made of does not depend on the matrix. At that size
# the perceptron has every M; elsewhere every two of network or size, strategy and M meet.
CASES = [
    ("perceptron", strategy, size, m)
    for strategy, size in distinct(range(1, 7))
    for m in ((1, 2, 3) if size == 4 else (3 if size % 2 else 1,))
]
CASES += [
    (name, strategy, 4, 3 if name in ("names", "unet") else (1, 3)[(i + j) % 2])
    for i, name in enumerate(sorted(set(ZOO) - {"perceptron"}))
    for j, (strategy, _) in enumerate(distinct([4]))
]


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:`n = ")
@pytest.mark.parametrize(("name", "strategy", "num_stages", "num_microbatches"), sorted(CASES))
def test_gradients_match_reference(name: str, strategy: str, num_stages: int, num_microbatches: int) -> None:
    net = ZOO[name](num_stages)
    pipe = pipeline(net, strategy, num_microbatches)
    for step in range(pipe.strategy.turns):
        x, y = net.draw(7)  # 7 = 4 + 3 = 3 + 2 + 2: uneven
        # Batch norm sees micro-batches, so the reference has to be cut into the same.
        is_cut = net.batch_statistics or strategy.endswith("microbatch")
        cut = (credits(pipe, step), num_microbatches) if is_cut else (pipe.credit,)
        expected = nwise.reference_grads(net.stages, net.heads, net.loss_fn, x, y, *cut)
        pipe.zero_grad()
        pipe.step(x, target=y)
        assert_same(gradients(pipe), expected, 1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", list(ZOO))
def test_probes_train_every_head_and_change_no_stage(name: str) -> None:
    net = ZOO[name](4)
    x, y = net.draw(6)
    live, every = pipeline(net, "3-wise"), pipeline(net, nwise.NWise(3, heads="all"))
    live.step(x, target=y)
    main = {n: g.clone() for n, g in gradients(live).items() if n.startswith("stages.")}
    live.zero_grad()
    losses = every.step(x, target=y)
    found = gradients(every)
    expected = nwise.reference_grads(net.stages, net.heads, net.loss_fn, x, y, every.credit, heads_run="all")
    assert_same(found, expected, 1e-12)
    assert not losses.isnan().any()
    for parameter, gradient in main.items():
        assert torch.equal(found[parameter], gradient)


@pytest.mark.usefixtures("float64")
@settings(max_examples=50, deadline=None)
@given(
    matrices().filter(np.any),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["perceptron", "tuples", "some_without_parameters"]),
)
def test_custom_credit_matrix_matches_reference(
    matrix: Matrix, num_microbatches: int, recompute: bool, name: str
) -> None:
    net = ZOO[name](len(matrix))
    x, y = net.draw(5)
    pipe = pipeline(net, nwise.Credit(matrix), num_microbatches, recompute=recompute)
    pipe.step(x, target=y)
    assert_same(gradients(pipe), nwise.reference_grads(net.stages, net.heads, net.loss_fn, x, y, pipe.credit), 1e-12)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", list(ZOO))
def test_n_wise_of_all_stages_is_end_to_end_bitwise(name: str, num_stages: int) -> None:
    net = ZOO[name](num_stages)
    plain = copy.deepcopy(net.stages)
    x, y = net.draw(6)
    pipe = pipeline(net, nwise.NWise(num_stages))
    losses = pipe.step(x, target=y)

    hidden: object = (x,)
    for stage in plain:
        if isinstance(hidden, dict):
            hidden = stage(**hidden)
        else:
            hidden = stage(*(hidden if isinstance(hidden, tuple) else (hidden,)))
    loss = net.loss_fn(hidden, y)
    loss.backward()

    assert torch.equal(losses[-1], loss.detach())
    for ours, theirs in zip(net.stages, plain, strict=True):
        for (parameter_name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if q.grad is not None:
                assert p.grad is not None
                assert torch.equal(p.grad, q.grad), parameter_name


@pytest.mark.usefixtures("float64")
def test_two_wise_gradients_by_hand() -> None:
    """Three scalar stages y = w x with w = 2, heads v = 3, loss = output, x = 1.

    Loss 0 = 3*2, loss 1 = 3*4, loss 2 = 8. dL1/dw0 = v1*w1*x = 6, dL2/dw1 = w2*w0*x = 4, dL2/dw2 = w1*w0*x = 4;
    head 1: dL1/dv1 = w1*w0*x = 4. Head 0 is dead under 2-wise.
    """
    stages = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    heads = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for module, value in [*((s, 2.0) for s in stages), *((h, 3.0) for h in heads)]:
        nn.init.constant_(module.weight, value)
    pipe = nwise.Pipeline(stages, heads, lambda output, target: output.mean(), "2-wise")
    losses = pipe.step(torch.ones(1, 1))
    assert losses[0].isnan()
    assert losses[1:].tolist() == [12.0, 8.0]
    assert [s.weight.grad.item() for s in stages if s.weight.grad is not None] == [6.0, 4.0, 4.0]
    assert heads[0].weight.grad is None
    assert heads[1].weight.grad is not None
    assert heads[1].weight.grad.item() == 4.0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("num_stages", "n", "steps"), [(5, 2, 4), (7, 3, 3), (8, 4, 3), (5, 5, 1), (3, 1, None)])
def test_last_loss_reaches_the_first_stage_over_steps(num_stages: int, n: int, steps: int | None) -> None:
    """Section 3.2: the last loss trains stages from A - N on, and those before through them: N - 1 more with every step.

    So stage 0 differs after ceil((A - 1) / (N - 1)) steps: for 2-wise A - N steps after the last stages do. 1-wise never.
    """
    net, arrived = perceptron(num_stages), []
    x, y = net.draw(6)
    pipes = []
    for other in (y, (y + 1) % 4):
        last = partial(lambda output, target, other: nn.functional.cross_entropy(output, other), other=other)
        losses: list[Callable[..., Tensor]] = [*[nn.functional.cross_entropy] * (num_stages - 1), last]
        stages, heads = copy.deepcopy((net.stages, net.heads))
        pipes.append(nwise.Pipeline(stages, heads, losses, f"{n}-wise", seed=0))
    for step in range(1, 9):
        for pipe in pipes:
            pipe.step(x, target=y)
            for p in pipe.parameters():
                if p.grad is not None:
                    p.data -= 0.1 * p.grad
                    p.grad = None
        first = [next(pipe.stages[0].parameters()) for pipe in pipes]
        if not torch.equal(*first):
            arrived.append(step)
    assert arrived[:1] == ([] if steps is None else [steps])


@pytest.mark.usefixtures("float64")
def test_gradients_of_two_steps_accumulate() -> None:
    net = perceptron(3)
    x, y = net.draw(6)
    pipe = pipeline(net, "2-wise")
    pipe.step(x, target=y)
    once = {n: g.clone() for n, g in gradients(pipe).items()}
    pipe.step(x, target=y)
    assert_same(gradients(pipe), {n: 2 * g for n, g in once.items()}, 1e-14)


SPOILT = [float("nan"), float("inf"), 1e4]


@pytest.mark.filterwarnings("ignore:`n = ")
@pytest.mark.parametrize(("strategy", "num_stages"), distinct((4, 6)))
def test_zero_credit_isolates_stage_bitwise(strategy: str, num_stages: int) -> None:
    """Whatever becomes of a loss: stages without credit for it learn what they would have learnt, to the last bit.

    In `3-wise-mean` a loss that was infinite once turned stages nan that have no credit for it, and in bf16 one that was
    a hundred times larger changed such a stage's gradient by 16 %.
    """
    check_zeros(perceptron(num_stages), nwise.strategy(strategy))


@settings(max_examples=20, deadline=None)  # a matrix is up to 19 pipelines
@given(matrices().filter(np.any))
def test_zero_credit_of_custom_matrix_isolates_stage_bitwise(matrix: Matrix) -> None:
    check_zeros(perceptron(len(matrix)), nwise.Credit(matrix))


def scaled(loss_fn: Any, factors: list[float], loss: int, output: Tensor, target: Tensor) -> Tensor:
    return factors[loss] * loss_fn(output, target)


def check_zeros(net: Net, strategy: nwise.Strategy) -> None:
    x, y = net.draw(6)
    size = len(net.stages)
    factors = [1.0] * size
    losses = [partial(scaled, net.loss_fn, factors, j) for j in range(size)]
    pipe = pipeline(dataclasses.replace(net, loss_fn=losses), strategy)  # type: ignore[arg-type]

    def stage_gradients(loss: int, factor: float) -> list[list[Tensor]]:
        factors[:] = [factor if j == loss else 1.0 for j in range(size)]
        pipe.zero_grad()
        pipe.steps = 0  # the same turn
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, target=y)
        return [[p.grad.clone() for p in stage.parameters() if p.grad is not None] for stage in pipe.stages]

    expected, credit = stage_gradients(0, 1.0), strategy.credit(size)
    for j in range(size):
        for factor in SPOILT:
            found = stage_gradients(j, factor)
            for k in range(size):
                if not credit[j, k]:
                    assert all(map(torch.equal, found[k], expected[k])), f"loss {j} times {factor} changed stage {k}"
