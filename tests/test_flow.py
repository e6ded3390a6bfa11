"""Flow: few messages, one W pass, nothing that nobody needs, and no loss in a gradient that has no credit for it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import nwise
from nwise.flow import Cotangent, Flow, find_flow, flows_for

Matrix = NDArray[np.float64]


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    """Lower-triangular, with small numbers so that dependent columns are frequent."""
    size = draw(st.integers(1, 7))
    values = st.sampled_from([0.0, 0.0, 1.0, 0.5, -1.0, 2.0, 0.3])
    rows = draw(st.lists(st.lists(values, min_size=size, max_size=size), min_size=size, max_size=size))
    return np.tril(np.array(rows, dtype=np.float64))


def contents(flow: Flow) -> list[list[Matrix]]:
    """Weights of all losses in every message of every boundary, worked out from the flow's own coefficients."""
    num_stages = len(flow.stages)
    found: list[list[Matrix]] = [[] for _ in range(num_stages + 1)]
    for k in reversed(range(1, num_stages)):
        found[k] = [mixed(c.own, c.received, found[k + 1], k, num_stages) for c in flow.stages[k].messages]
    return found


def mixed(own: float, received: tuple[float, ...], above: list[Matrix], k: int, num_stages: int) -> Matrix:
    vector = np.zeros(num_stages)
    vector[k] = own
    for weight, message in zip(received, above, strict=True):
        vector += weight * message
    return vector


def touched(flow: Flow) -> list[list[set[int]]]:
    """The losses that went into every message of every boundary, whether or not they cancel."""
    found: list[list[set[int]]] = [[] for _ in range(len(flow.stages) + 1)]
    for k in reversed(range(len(flow.stages))):
        found[k] = [mixes(c, found[k + 1], k) for c in flow.stages[k].messages]
    return found


def mixes(cotangent: Cotangent, above: list[set[int]], k: int) -> set[int]:
    return set().union({k} if cotangent.own else set(), *(above[p] for p in cotangent.needed))


@settings(max_examples=150, deadline=None)
@given(matrices())
def test_flow_gives_each_stage_its_credit_column_from_no_other_loss(matrix: Matrix) -> None:
    """Stages use no loss that they have no credit for, and messages wait only for losses that their receivers need.

    Not even a loss that cancels: 0 times infinity is not 0, and a difference keeps the rounding of what it subtracts. In
    3-wise-mean the stages near the top once sent the mean of two losses, and the stage before took one of them off again. A
    message for a column that ends at loss j contains only losses up to j.
    """
    flow = find_flow(torch.from_numpy(matrix))
    num_stages = len(matrix)
    messages, above = contents(flow), touched(flow)
    for k, stage in enumerate(flow.stages):
        block = matrix[k:, :k]
        columns = {tuple(column / abs(column).max()) for column in block.T if column.any()}
        assert np.linalg.matrix_rank(block) <= len(stage.messages) <= min(len(columns), block.any(axis=1).sum())
        got = np.zeros(num_stages)
        if stage.weights is not None:
            got = mixed(stage.weights.own, stage.weights.received, messages[k + 1], k, num_stages)
            assert mixes(stage.weights, above[k + 1], k) == set(np.flatnonzero(matrix[:, k]).tolist())
        np.testing.assert_allclose(got, matrix[:, k], atol=1e-12)
        assert (stage.weights is None) == (not matrix[:, k].any())
        assert stage.head == matrix[k].any()
        if stage.fused is not None:
            assert stage.messages[stage.fused] == stage.weights
        last = [message.farthest_loss for message in flow.stages[k + 1].messages] if k + 1 < num_stages else []
        for cotangent in (*stage.messages, *([stage.weights] if stage.weights else [])):
            used = [j for j, weight in zip(last, cotangent.received, strict=True) if weight]
            assert max(used, default=k) <= cotangent.farthest_loss


def far(size: int) -> Matrix:
    """Distance of loss j from stage k."""
    return np.clip(np.subtract.outer(np.arange(size), np.arange(size)), 0, None)


def normalised(matrix: Matrix, axis: int) -> Matrix:
    return matrix / matrix.sum(axis=axis, keepdims=True)


# Credits of a size, whose columns or rows would be dependent if there were no rounding, or whose numbers are odd.
ODD: dict[str, Callable[[np.random.Generator, int], Matrix]] = {
    "geometric": lambda r, a: np.float64(r.choice([0.3, 0.5, 0.9, 0.99])) ** far(a),
    "window": lambda r, a: 0.7 ** far(a) * (far(a) < r.integers(1, a + 1)),
    "softmax of rows": lambda r, a: normalised(np.tril(np.exp(r.standard_normal((a, a)))), 1),
    "softmax of columns": lambda r, a: normalised(np.tril(np.exp(r.standard_normal((a, a)))), 0),
    "mean of the later": lambda _, a: normalised(np.tril(np.ones((a, a))), 0),
    "near-equal": lambda r, a: r.choice([1.000001, 0.999999, 1.0, 0.5, 0.0], (a, a)),
    "last digit": lambda r, a: 1 + r.integers(-2, 3, (a, a)).astype(np.float64) * 2.0**-23,
    "low rank": lambda r, a: r.standard_normal((a, 2)) @ r.standard_normal((2, a)),
    "product": lambda r, a: np.outer(r.random(a), r.random(a)) * np.float64(10.0 ** r.integers(-30, 31)),
    "scales": lambda r, a: r.choice([1.0, -1.0, 0.0], (a, a)) * 10.0 ** r.integers(-30, 31, (a, a)),
    "ends of the range": lambda r, a: r.choice([5e-324, -1e-310, 1.0, 0.0, 1e300, 1.7e308], (a, a)),
    "normal": lambda r, a: r.standard_normal((a, a)),
    "integers": lambda r, a: r.integers(-3, 4, (a, a)).astype(np.float64),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ODD)
def test_every_credit_has_a_flow_that_is_exact(kind: str, dtype: torch.dtype) -> None:
    """Regression: dependent columns that float32 rounds apart, as in `0.9 ** (j - k)`, raised an AssertionError at five stages.

    Rounding decided whether a column can be combined, and two neighbouring boundaries could disagree about it. Small numbers of
    columns with large ones could also be lost without a word.
    """
    for seed in range(8):
        numbers = np.random.default_rng(seed)
        size = int(numbers.integers(2, 11))
        made = torch.from_numpy(np.tril(ODD[kind](numbers, size))).to(dtype)
        credit = torch.where(made.isfinite(), made, 1)
        flow, matrix = find_flow(credit), credit.double().numpy()
        messages = contents(flow)
        for k, stage in enumerate(flow.stages):
            assert len(stage.messages) <= min(k, int(matrix[k:, :k].any(axis=1).sum()))
            got, wanted = np.zeros(size), matrix[:, k]
            if stage.weights is not None:
                got = mixed(stage.weights.own, stage.weights.received, messages[k + 1], k, size)
            assert (got[wanted == 0] == 0).all()
            np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12 * abs(wanted).max())


@pytest.mark.parametrize("losses", [((-1e-8, 0, 1e-19), (1, 1, 1)), ((0, 1, 1), (1, -1e9, 1e29))])
def test_boundaries_that_disagree_about_rounding_have_a_flow(losses: tuple[tuple[float, ...], ...]) -> None:
    """Stage 2 cannot combine all its columns from those chosen for the boundary above it, so others are chosen there.

    Every other credit of these tests does without.
    """
    matrix = np.zeros((5, 5))
    matrix[3:, :3] = losses
    flow = find_flow(torch.from_numpy(matrix))
    messages = contents(flow)
    for k, stage in enumerate(flow.stages[:3]):
        assert stage.weights is not None
        got = mixed(stage.weights.own, stage.weights.received, messages[k + 1], k, 5)
        np.testing.assert_allclose(got, matrix[:, k], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_credit_of_any_dtype_trains_with_its_numbers_as_they_are(dtype: torch.dtype) -> None:
    """A custom strategy may compute in torch's default dtype; its float32 numbers are the credit, not those that were meant."""

    class Fading(nwise.Strategy):
        def credit(self, num_stages: int, turn: int = 0) -> torch.Tensor:
            return torch.from_numpy(0.9 ** far(num_stages)).tril().to(dtype).T.contiguous().T

    torch.manual_seed(0)
    stages = [nn.Linear(3, 3).double() for _ in range(6)]
    heads = [nn.Linear(3, 3).double() for _ in range(5)]
    x, y = torch.randn(2, 4, 3, dtype=torch.float64)
    credit = Fading().credit(6).double()
    for strategy in (Fading(), nwise.Credit(Fading().credit(6))):
        pipe = nwise.Pipeline(stages, heads, nn.functional.mse_loss, strategy)
        assert (pipe.credit.dtype, pipe.credit.tolist()) == (torch.float64, credit.tolist())
        pipe.zero_grad()
        pipe.step(x, target=y)
        expected = nwise.reference_grads(stages, list(heads), nn.functional.mse_loss, x, y, credit)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("shape", "others", "found"),
    [
        ((2, 2), {"trainable": [True] * 4}, r"shape \[2, 2\], 4 and 2 entries"),
        ((2, 2), {"trainable": []}, r"shape \[2, 2\], 0 and 2 entries"),
        ((3, 3), {"probes": [True] * 2}, r"shape \[3, 3\], 3 and 2 entries"),
        ((2, 3), {}, r"shape \[2, 3\]"),
        ((), {}, r"shape \[\]"),
    ],
)
def test_other_shapes_are_refused(shape: tuple[int, ...], others: dict[str, list[bool]], found: str) -> None:
    """Regression: a matrix of 2 stages with `trainable` of 4 was taken as one of 4 rows, and numpy failed."""
    with pytest.raises(ValueError, match=f"`credit` should be a square matrix.*Found {found}"):
        find_flow(torch.ones(shape).tril() if len(shape) > 1 else torch.ones(shape), **others)


def test_mixed_messages_stay_few() -> None:
    """Rounding costs messages only where it makes columns independent."""
    fading = torch.from_numpy(0.9 ** far(8)).tril()
    assert find_flow(fading).messages == (1, 1, 1, 1, 1, 1, 1)
    assert find_flow(fading.float()).messages == (1, 2, 3, 4, 3, 2, 1)
    assert find_flow(torch.from_numpy(0.5 ** far(8)).tril().float()).messages == (1, 1, 1, 1, 1, 1, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.randoms(use_true_random=False))
def test_message_count_of_dense_credit_is_its_rank(size: int, random: Random) -> None:
    matrix = np.tril(np.array([[random.choice([0.5, 1.0, -1.0, 2.0, 0.3]) for _ in range(size)] for _ in range(size)]))
    for k, stage in enumerate(find_flow(torch.from_numpy(matrix)).stages):
        assert len(stage.messages) == np.linalg.matrix_rank(matrix[k:, :k])
        assert stage.passes == np.linalg.matrix_rank(matrix[k:, : k + 1])


def test_message_count_exceeds_rank_to_avoid_subtraction() -> None:
    """Columns (1, 1, 0), (0, 1, 1) and (1, 0, -1) have rank 2, but the third is the difference of the others over loss 4."""
    matrix = np.zeros((6, 6))
    matrix[3:, :3] = [[1, 0, 1], [1, 1, 0], [0, 1, -1]]
    flow = find_flow(torch.from_numpy(matrix))
    assert len(flow.stages[3].messages) == 3 == np.linalg.matrix_rank(matrix[3:, :3]) + 1


@pytest.mark.parametrize(
    ("strategy", "messages", "passes", "heads"),
    [
        ("local", (0, 0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1, 1, 1), 8),
        ("2-wise", (1, 1, 1, 1, 1, 1, 1), (1, 2, 2, 2, 2, 2, 2, 1), 7),
        ("2-wise-mean", (1, 1, 1, 1, 1, 1, 1), (1, 2, 2, 2, 2, 2, 2, 1), 8),
        ("3-wise", (1, 2, 2, 2, 2, 2, 1), (1, 2, 3, 3, 3, 3, 2, 1), 6),
        ("3-wise-mean", (1, 2, 2, 2, 2, 2, 1), (1, 2, 3, 3, 3, 3, 3, 1), 8),
        ("4-wise", (1, 2, 3, 3, 3, 2, 1), (1, 2, 3, 4, 4, 3, 2, 1), 5),
        ("end-to-end", (1, 1, 1, 1, 1, 1, 1), (1,) * 8, 1),
        ("deep-supervision", (1, 1, 1, 1, 1, 1, 1), (1,) * 8, 8),
        ("geometric-0.9", (1, 1, 1, 1, 1, 1, 1), (1,) * 8, 8),
        ("blocks-2", (1, 0, 1, 0, 1, 0, 1), (1,) * 8, 4),
    ],
)
def test_flow_counts_for_eight_stages(
    strategy: str, messages: tuple[int, ...], passes: tuple[int, ...], heads: int
) -> None:
    flow = find_flow(nwise.strategy(strategy).credit(8))
    assert flow.messages == messages
    assert tuple(stage.passes for stage in flow.stages) == passes
    assert len(flow.heads) == heads
    assert not flow.stages[0].messages


def test_n_wise_message_is_the_gradient_of_one_loss() -> None:
    flow = find_flow(nwise.NWise(3).credit(6))
    for k, boundary in enumerate(contents(flow)[1:6], start=1):
        losses = [int(np.flatnonzero(message)[0]) for message in boundary]
        assert all(message.sum() == 1.0 == message.max() for message in boundary)
        assert losses == list(range(max(k, 2), min(k + 2, 6)))


def test_gradients_for_frozen_stages_are_not_sent() -> None:
    flow = find_flow(nwise.EndToEnd().credit(4), trainable=[False, False, True, True])
    assert flow.messages == (0, 0, 1)
    assert [stage.passes for stage in flow.stages] == [0, 0, 1, 1]
    local = find_flow(nwise.Local().credit(2), trainable=[False, True])
    assert local.heads == (0, 1)  # the head of a frozen stage still learns
    assert not local.stages[0].own


def test_message_of_weight_zero_is_not_waited_for() -> None:
    assert Cotangent(0.0, (0.0, 2.0, 0.0), 3, 2.0).needed == [1]


def test_all_heads_run_if_the_strategy_asks_for_them() -> None:
    """By default every stage has a head; one without is left out."""
    strategy = nwise.strategy("end-to-end", heads="all")
    assert flows_for(strategy, 3, 1)[0][0].heads == (0, 1, 2)
    assert flows_for(strategy, 3, 1, heads=[True, False, True])[0][0].heads == (0, 2)


def test_gradient_of_an_own_loss_without_credit_is_not_asked_for() -> None:
    """A stage whose head runs for its own sake needs no gradient of that loss, which would cost memory and a walk."""
    flow = find_flow(nwise.EndToEnd().credit(3), probes=[True] * 3)
    assert flow.heads == (0, 1, 2)
    assert [stage.own for stage in flow.stages] == [False, False, True]


@pytest.mark.parametrize("strategy", ["end-to-end", "2-wise", "3-wise", "3-wise-mean", "deep-supervision"])
def test_shared_are_the_gradients_that_two_passes_read(strategy: str) -> None:
    """A pass may write over a sum that is made for it, and over a gradient that no other pass reads."""
    for stage in find_flow(nwise.strategy(strategy).credit(6)).stages:
        passes = [*stage.messages, *([stage.weights] if stage.weights and stage.fused is None else [])]
        for cotangent in passes:
            weights = [weight for weight in (cotangent.own, *cotangent.received) if weight]
            readers = sum(any(a and b for a, b in zip(cotangent.reads, other.reads, strict=True)) for other in passes)
            assert cotangent.shared == (weights == [1.0] and readers > 1)


def test_no_message_is_multiplied_until_digits_are_lost() -> None:
    """Column 2 is -4095 times column 0 plus 4096 times column 1, exactly; in float32 that would lose half the digits."""
    matrix = np.zeros((5, 5))
    matrix[3, :3], matrix[4, :3] = 1, (1, 1 + 2**-12, 2)
    flow = find_flow(torch.from_numpy(matrix))
    assert max(abs(w) for stage in flow.stages if stage.weights for w in stage.weights.received) <= 2


def test_of_as_few_messages_the_mixtures_share_more_passes() -> None:
    """Mixtures up to boundary 3 let stage 3 make its weights and a message in one pass; single losses would cost a pass more."""
    matrix = np.zeros((5, 5))
    matrix[0, 0], matrix[1, 0], matrix[2, 2] = 1, -1, -1
    matrix[3, :4], matrix[4, :4] = (-1, 1, 1, -1), (2, 0, 0, 0.5)
    flow = find_flow(torch.from_numpy(matrix))
    assert (sum(flow.messages), sum(stage.passes for stage in flow.stages)) == (6, 9)


@pytest.mark.parametrize("num_stages", [3, 6, 8, 12, 16])
@pytest.mark.parametrize("kind", ["geometric", "power", "gaussian", "wild"])
def test_credit_of_extreme_magnitudes_stays_accurate(kind: str, num_stages: int) -> None:
    """Regression: fading credit failed an assertion, or lost digits by multiplying messages by 1e10."""
    distance = np.arange(num_stages)[:, None] - np.arange(num_stages)[None, :]
    random = np.random.default_rng(num_stages)
    matrix = np.tril(
        {
            "geometric": 1e-3 ** np.maximum(distance, 0.0),
            "power": 1.0 / (1.0 + np.maximum(distance, 0)) ** 6,
            "gaussian": np.exp(-2.0 * distance**2.0),
            "wild": 10.0 ** random.uniform(-10, 4, (num_stages, num_stages)),
        }[kind]
    )
    flow = find_flow(torch.from_numpy(matrix))
    above: list[np.ndarray[Any, Any]] = []
    for k in reversed(range(num_stages)):
        stage = flow.stages[k]
        contents = []
        for cotangent in (*stage.messages, *([stage.weights] if stage.weights else [])):
            vector = np.zeros(num_stages)
            vector[k] = cotangent.own
            for weight, message in zip(cotangent.received, above, strict=True):
                vector += weight * message
            contents.append(vector)
        np.testing.assert_allclose(contents[-1], matrix[:, k], rtol=1e-9, atol=1e-11 * matrix[:, k].max())
        above = contents[: len(stage.messages)]
    if kind == "geometric":
        assert set(flow.messages) == {1}
