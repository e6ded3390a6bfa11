"""Losses: what they count, and how they are weighted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import nwise
from nets import perceptron
from nwise.losses import TokenCrossEntropy
from nwise.microbatch import Batch
from nwise.terms import Terms
from test_contract import assert_same, gradients, pipeline
from test_pipeline import linears


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "loss_fn",
    [
        functools.partial(cross_entropy, ignore_index=2),
        nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)),
        functools.partial(cross_entropy, label_smoothing=0.2),
        functools.partial(
            cross_entropy, weight=torch.tensor([1.0, 0.1, 0.5, 3.0], dtype=torch.float64), ignore_index=1
        ),
    ],
)
def test_micro_batches_are_weighted_by_the_terms_that_count(loss_fn: Callable[..., Tensor]) -> None:
    net = perceptron(3)
    net.loss_fn = loss_fn
    x = torch.randn(7, 5)
    y = torch.tensor([2, 2, 2, 1, 0, 3, 1])  # with M = 3 the first micro-batch counts for nothing if 2 is ignored
    expected = nwise.reference_grads(net.stages, net.heads, loss_fn, x, y, nwise.NWise(2).credit(3))
    for m in (1, 2, 3):
        pipe = pipeline(net, "2-wise", m)
        pipe.zero_grad()
        losses = pipe.step(x, target=y)
        assert_same(gradients(pipe), expected, 1e-12)
        assert losses[1:].isfinite().all()
        assert losses[-1] == pytest.approx(loss_fn(nn.Sequential(*net.stages)(x), y).item())
        if m == 3 and getattr(loss_fn, "keywords", {}).get("ignore_index") == 2:
            assert pipe.microbatch_losses[1, 0] == 0, "not the mean over no terms"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target": torch.zeros(3, 2, dtype=torch.long)},
            r"tokens of shape \[2, 3\], as the logits have. Found shape \[3, 2\]",
        ),
        ({"weight": torch.ones(7)}, "the mean over tokens of equal weight. Found an assigned"),
        ({"reduction": "sum"}, "the mean over tokens of equal weight. Found an assigned"),
    ],
)
def test_token_losses_refuse_what_they_would_ignore(change: dict[str, object], message: str) -> None:
    """Regression: transposed targets passed, and options that were assigned counted for logits but not for their factors."""
    loss = TokenCrossEntropy()
    target = change.pop("target", torch.zeros(2, 3, dtype=torch.long))
    for name, value in change.items():
        setattr(loss, name, value)
    for logits in torch.zeros(2, 3, 7), (torch.zeros(2, 3, 4), torch.zeros(7, 4)):
        with pytest.raises(ValueError, match=message):
            loss(logits, target)


@pytest.mark.usefixtures("float64")
def test_per_stage_losses_match_reference() -> None:
    net = perceptron(3)
    x, y = net.draw(6)
    losses: list[Callable[..., Tensor]] = [
        cross_entropy,
        lambda output, target: output.square().mean(),
        functools.partial(cross_entropy, label_smoothing=0.5),
    ]
    pipe = nwise.Pipeline(net.stages, net.heads, losses, "2-wise-mean", 2)
    found = pipe.step(x, target=y)
    expected = nwise.reference_grads(net.stages, net.heads, losses, x, y, pipe.credit)
    assert_same(gradients(pipe), expected, 1e-12)
    outputs = pipe.head_outputs(x)
    wanted = torch.stack([loss(output, y) for loss, output in zip(losses, outputs, strict=True)])
    torch.testing.assert_close(found, wanted.detach())


def test_loss_without_target_is_accepted() -> None:
    pipe = nwise.Pipeline(linears(3, 3, 3), [nn.Linear(3, 2)], lambda y, target: y.square().mean(), "local", 2)
    assert pipe.step(torch.randn(5, 3)).isfinite().all()


def test_losses_are_nan_where_a_head_did_not_run() -> None:
    net = perceptron(4)
    x, y = net.draw(6)
    for strategy, dead in (("3-wise", 2), ("end-to-end", 3), ("local", 0)):
        assert pipeline(net, strategy).step(x, target=y).isnan().tolist() == [True] * dead + [False] * (4 - dead)


def test_losses_are_means_over_the_micro_batches_that_had_one() -> None:
    batch = Batch([], [], [[0.25]] * 4)
    batch.losses.update({(0, 0): torch.tensor(2.0), (0, 3): torch.tensor(4.0)})
    assert batch.results(2).means[0] == 3.0


def test_losses_are_a_plain_tensor() -> None:
    net = perceptron(3)
    x, y = net.draw(6)
    losses = pipeline(net, "2-wise").step(x, target=y)
    assert type(losses) is Tensor
    assert losses.isnan().tolist() == [True, False, False]
    assert not losses.requires_grad
    assert losses.nanmean() == pytest.approx(float(losses[1:].mean()))


class Counted:
    """A loss with a number of terms of its own."""

    def __init__(self, count: float) -> None:
        self._terms = count

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)

    def count(self, target: Tensor) -> float:
        return self._terms


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1])
def test_invalid_loss_count_raises(count: float) -> None:
    net = perceptron(2)
    net.loss_fn = Counted(count)
    x, y = net.draw(6)
    with pytest.raises(
        ValueError, match=f"`count` of the loss should be a number of terms, 0 or more. Found {count:g}"
    ):
        pipeline(net, "local", 2).step(x, target=y)


@functools.wraps(cross_entropy)
def decorated(*args: Any, **kwargs: Any) -> Tensor:
    return cross_entropy(*args, **kwargs)


WRAPPED: dict[str, Callable[..., Tensor]] = {
    "partial of a module": functools.partial(nn.CrossEntropyLoss(ignore_index=2)),
    "partial of a partial": functools.partial(functools.partial(cross_entropy, ignore_index=0), ignore_index=2),
    "forward": nn.CrossEntropyLoss(ignore_index=2).forward,
    "call": nn.CrossEntropyLoss(ignore_index=2).__call__,
    "call of an object": TokenCrossEntropy(ignore_index=2).__call__,
    "compiled function": torch.compile(functools.partial(cross_entropy, ignore_index=2), backend="eager"),
    "compiled module": torch.compile(nn.CrossEntropyLoss(ignore_index=2), backend="eager"),
    "decorated": functools.partial(decorated, ignore_index=2),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_losses_count_what_the_loss_inside_counts(name: str) -> None:
    """Regression: unrecognised losses counted samples; ignored targets shifted micro-batch weights by up to a half."""
    assert Terms(WRAPPED[name]).counts([(torch.tensor([2, 2, 2, 1]),)], [4]) == [1]


@pytest.mark.parametrize("wrapped", [False, True])
def test_options_of_a_loss_may_be_set_during_training(*, wrapped: bool) -> None:
    """Regression: micro-batches kept the weights of classes with which the pipeline was made."""
    torch.manual_seed(0)
    weights = torch.tensor([1.0, 5.0, 20.0])
    loss: Any = nn.CrossEntropyLoss(weight=torch.ones(3))
    if wrapped:
        loss = functools.partial(cross_entropy, weight=torch.ones(3))
    net = [nn.Linear(4, 4), nn.Linear(4, 3)]
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 1, 1, 1])
    pipe = nwise.Pipeline(net, None, loss, "end-to-end", 2)
    for change in ({}, {"weight": weights}, {"ignore_index": 1}):
        if wrapped:
            loss.keywords.update(change)
        for name, value in change.items() if not wrapped else ():
            setattr(loss, name, value)
        pipe.zero_grad()
        pipe.step(x, target=y)
        expected = torch.autograd.grad(loss(net[1](net[0](x)), y), list(pipe.parameters()))
        torch.testing.assert_close([p.grad for p in pipe.parameters()], list(expected))
    if not wrapped:
        loss.reduction = "sum"
        with pytest.raises(ValueError, match="should be the mean over a micro-batch. Found reduction = 'sum'"):
            pipe.step(x, target=y)


def test_smoothing_of_classes_without_weight_alone_in_a_microbatch_is_refused() -> None:
    """Regression: torch divides by their weights, 0, and nwise left the micro-batch out, though its smoothing counts."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0, 2.0]), label_smoothing=0.1)
    x, y = torch.randn(6, 4), torch.tensor([0, 2, 0, 2, 1, 1])
    pipe = nwise.Pipeline([nn.Linear(4, 3)], None, loss, "end-to-end", 3)
    with pytest.raises(ValueError, match="a target whose class has a weight above 0"):
        pipe.step(x, target=y)
    loss.label_smoothing = 0.0
    assert pipe.step(x, target=y)[-1].isfinite()
