"""What a cut of the mini-batch may break: losses over all samples, samples that belong together, odd shapes and types."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.findings import LOSS, SAMPLES
from nwise.losses import TokenCrossEntropy
from nwise.microbatch import Batch
from test_contract import assert_same, gradients

pytestmark = pytest.mark.usefixtures("float64")

mse: Callable[..., Tensor] = functional.mse_loss


class Do(nn.Module):
    """A layer inside a function: ``function(layer, *inputs)``."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.function = layer or nn.Linear(4, 4), function

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.function(self.layer, *inputs, **named)


def plain() -> nn.Module:
    return nn.Linear(4, 4)


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)  # samples in dimension 1


def pipeline(stages: Sequence[nn.Module], loss_fn: Any = mse, m: int = 2) -> nwise.Pipeline:
    return nwise.Pipeline(list(stages), None, loss_fn, "end-to-end", m)


def assert_step(stages: Sequence[nn.Module], loss: Tensor, loss_fn: Any, m: int, *inputs: Any, **batch: Any) -> None:
    """Check that a step leaves in copies of end-to-end stages the gradients of a loss of the originals."""
    pipe, parameters = pipeline(copy.deepcopy(list(stages)), loss_fn, m), list(nn.ModuleList(stages).parameters())
    pipe.step(*inputs, **batch)
    wanted = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    for p, gradient in zip(pipe.parameters(), wanted, strict=True):
        torch.testing.assert_close(0 * gradient if p.grad is None else p.grad, gradient, rtol=1e-12, atol=1e-12)


# Networks and losses that a cut changes, and others


def transposed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).transpose(0, 1)


def apart(layer: nn.Module, x: Tensor) -> Tensor:
    return transposed(layer, x.view(5, -1, 4))


def contrasts(output: Tensor, target: Tensor) -> Tensor:
    logits = output[1::2, 0] @ output[0::2, 0].T
    return functional.cross_entropy(logits, torch.arange(len(logits)))


class SecondTarget(nn.Module):
    """Its `ignore_index` is that of another target than the first."""

    ignore_index = -100

    def forward(self, output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(output[:, 0], target[1])


class Half(nn.Module):
    """Its attribute `weight` is no weight of classes."""

    weight = 0.5

    def forward(self, output: Tensor, target: None) -> Tensor:
        return self.weight * output.square().mean()


class Counted:
    """Counts the targets that are not ignored."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output[:, 0], target)

    def count(self, target: Tensor) -> Tensor:
        return (target != -100).sum()


LABELS = torch.tensor([-100, 1, 2, 3, -100, -100, 0, 1])
NETWORKS: dict[str, tuple[list[nn.Module], str | None]] = {
    "attention over dimension 0": ([plain(), attention()], SAMPLES),
    "recurrence over dimension 0": ([nn.GRU(4, 4), Do(lambda layer, x, h: layer(x))], SAMPLES),
    "later samples": ([plain(), Do(lambda layer, x: layer(x).flip(0).cumsum(0).flip(0))], SAMPLES),
    "neighbours": ([plain(), Do(lambda layer, x: layer(x) - torch.cat([x[:1], x[:-1]]))], SAMPLES),
    "behind random numbers": ([nn.Dropout(0.5), Do(lambda layer, x: layer(x) - x.mean(0))], SAMPLES),
    "attention inside": ([plain(), Do(lambda layer, x: transposed(layer, x.transpose(0, 1)), attention())], None),
    "merged": ([Do(lambda layer, x: layer(x).flatten(0, 1)), Do(lambda layer, x: layer(x).view(-1, 5, 4))], None),
    "transposed": ([Do(transposed), Do(transposed)], None),
    "merged across": ([Do(lambda layer, x: transposed(layer, x).flatten(0, 1)), Do(apart)], None),
    "integers beside": ([Do(lambda layer, x: (layer(x), x.argmax(-1))), Do(lambda layer, x, best: layer(x))], None),
    "a statistic beside": ([Do(lambda layer, x: (layer(x), x.std())), Do(lambda layer, x, deviation: layer(x))], None),
    "infinity beside": ([Do(lambda layer, x: (layer(x), x - torch.inf)), Do(lambda layer, x, mask: layer(x))], None),
}
LOSSES: dict[str, tuple[Callable[..., Tensor], Any, str | None]] = {
    "contrasts": (contrasts, None, LOSS),
    "root": (lambda output, target: output.square().mean().sqrt(), None, LOSS),
    "hardest": (lambda output, target: output.square().mean((1, 2)).topk(2).values.mean(), None, LOSS),
    "another target": (SecondTarget(), (torch.zeros(8, dtype=torch.long), LABELS), LOSS),
    "numbers before labels": (SecondTarget(), (torch.rand(8), LABELS.clamp(0)), None),
    "any attribute": (Half(), None, None),
    "count": (Counted(), LABELS, None),
    "pairs": (lambda o, t: functional.cosine_embedding_loss(o[:, 0], o[:, 1], t), torch.tensor([1, -1] * 4), None),
    "zero": (lambda output, target: (output - output).sum(), None, None),
}


@pytest.mark.parametrize("m", [3, 4])
@pytest.mark.parametrize("name", [*NETWORKS, *LOSSES])
def test_a_cut_keeps_the_gradients_or_the_first_step_says_so(name: str, m: int) -> None:
    """Regressions: ``[T, B, C]`` was cut along the sequence and InfoNCE into parts, silently; gradients were tens of percent off.

    Networks whose samples lie in another dimension for a while, or with tensors beside them, run without a word.
    """
    net, mixed = NETWORKS.get(name, ([plain(), plain()], None))
    loss_fn, target, uneven = LOSSES.get(name, (mse, torch.randn(8, 5, 4), None))
    x, stages = torch.randn(8, 5, 4), [copy.deepcopy(stage).double() for stage in net]
    if kind := mixed or uneven:
        with pytest.warns(UserWarning, match=kind):
            pipeline(stages, loss_fn, m).step(x, target=target)
        return
    hidden: Any = x
    for stage in stages:
        hidden = stage(*hidden) if isinstance(hidden, tuple) else stage(hidden)
    assert_step(stages, loss_fn(hidden, target), loss_fn, m, x, target=target)


# Micro-batches that are cut already


@pytest.mark.parametrize("strategy", ["local", "2-wise-mean", "end-to-end"])
@pytest.mark.parametrize("loss_fn", [TokenCrossEntropy(), mse, nn.MSELoss(), partial(mse, reduction="mean")])
def test_given_micro_batches_have_the_gradients_of_the_mean_over_all_terms(strategy: str, loss_fn: Any) -> None:
    """There was no way to say it: two steps averaged by samples are off by several percent.

    The stages look at each place alone, so the definition may get all places as one sequence.
    """
    stages, heads = [plain(), plain(), plain()], [plain(), plain()]
    inputs = [torch.randn(2, 5, 4), torch.randn(1, 8, 4), torch.randn(3, 2, 4)]
    targets = [x.argmax(-1) for x in inputs] if isinstance(loss_fn, TokenCrossEntropy) else [x.sin() for x in inputs]
    if isinstance(loss_fn, TokenCrossEntropy):
        targets[1][:, 3:] = -100
    x, y = (torch.cat([one.flatten(0, 1) for one in parts])[None] for parts in (inputs, targets))
    pipe = nwise.Pipeline(stages, heads, loss_fn, strategy, 3)
    expected = nwise.reference_grads(stages, heads, loss_fn, x, y, pipe.credit)
    losses = pipe.step(microbatches=inputs, targets=targets)
    assert_same(gradients(pipe), expected, 1e-12)
    whole = nwise.Pipeline(stages, heads, loss_fn, strategy).step(x, target=y)
    torch.testing.assert_close(losses, whole, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_given_micro_batches_may_be_graphs() -> None:
    graph = Do(lambda layer, x, edges: (layer(x).index_add(0, edges[1], layer(x)[edges[0]]), edges))
    net = [graph, Do(lambda layer, x, edges: layer(x))]
    inputs = [{"x": torch.randn(n, 4), "edges": torch.randint(n, (2, 3 * n))} for n in (5, 9)]
    targets = [torch.randint(4, (n,)) for n in (5, 9)]
    loss = functional.cross_entropy(torch.cat([net[1](*net[0](**x)) for x in inputs]), torch.cat(targets))
    assert_step(net, loss, functional.cross_entropy, 2, microbatches=inputs, targets=targets)


def test_given_micro_batches_of_an_unknown_loss_count_their_samples() -> None:
    def loss_fn(output: Tensor, target: Tensor | None) -> Tensor:
        return (output if target is None else output - target).square().mean()

    x, net = torch.randn(5, 4), [plain(), plain()]
    for y in (None, x.sin()):
        targets = None if y is None else [y[:1], y[1:]]
        assert_step(net, loss_fn(net[1](net[0](x)), y), loss_fn, 2, microbatches=[x[:1], x[1:]], targets=targets)


X = torch.ones(4, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatches": [X[:0], X[:0]]}, "`microbatches` should have at least one sample in all. Found none"),
        ({"microbatches": [X]}, "`microbatches` should have 2 entries, `num_microbatches` for each replica. Found 1"),
        ({"microbatches": X}, "`microbatches` should be a list with one entry for each micro-batch. Found Tensor"),
        ({"microbatches": [X, X], "targets": [X]}, "`targets` should have 2 entries.*Found 1"),
        ({"microbatches": [X, (X, X)]}, "All `microbatches` should have the same inputs. Found 1 in 0 and 2 in 1"),
        ({"microbatches": [{"x": X}, {"y": X}]}, "the same inputs. Found x in 0 and y in 1"),
        ({"microbatches": [X, X], "targets": [X, "no"]}, r"`targets\[1\]` should be a tensor.*Found str"),
        ({"microbatches": [X, X], "x": X}, "`microbatches` should come alone, or with `targets`"),
        ({"x": X, "targets": [X, X]}, "`targets` should come with `microbatches`. Found none; pass `target=`"),
        ({"x": X, "target": torch.ones(3, 4)}, r"the input's 4 samples. Found 3; cut .* `step\(microbatches=...\)`"),
        ({"x": X, "t": torch.tensor(2.0)}, "samples along dimension 0. Found a tensor without dimensions; cut"),
        ({"x": X, "ids": torch.ones(3, 4)}, r"the same number of samples in every tensor. Found \[3, 4\]; cut"),
        ({"x": X.to_sparse()}, "should be dense tensors, which can be cut. Found one of layout torch.sparse_coo"),
        ({"x": torch.nested.nested_tensor([X, X], layout=torch.jagged)}, "which can be cut. Found a nested one"),
        ({"x": torch.ones(0, 4)}, "The mini-batch should have at least one sample. Found none"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(arguments: Any, message: str) -> None:
    pipe = pipeline([Do(lambda layer, x, **others: layer(x)), plain()])
    with pytest.raises((ValueError, TypeError), match=message):
        pipe.step(**({} if "microbatches" in arguments or "targets" in arguments else {"target": X}) | arguments)


def test_a_list_as_input_points_to_micro_batches() -> None:
    with pytest.raises(TypeError, match=r"Found one list; unpack it, `step\(\*x\)`, or .*`step\(microbatches=...\)`"):
        pipeline([plain(), plain()]).step([X, X], target=X)  # type: ignore[arg-type] # the error


def test_one_micro_batch_may_have_any_shapes() -> None:
    """Regression: a graph was refused, because its nodes and edges differ in number."""

    def detection(output: Tensor, target: Tensor) -> Tensor:
        return (output[target[:, 0].long()] - target[:, 1:]).square().mean()

    x, boxes = torch.randn(20, 4), torch.cat([torch.randint(20, (9, 1)), torch.randn(9, 4)], 1)
    edges, scale = torch.randint(20, (2, 41)), torch.tensor(3.0)
    ragged = torch.nested.nested_tensor([x[:2], x[2:5]], layout=torch.jagged)
    graph = Do(lambda layer, x, e: layer(x).index_add(0, e[1], layer(x)[e[0]]))
    cases: list[tuple[nn.Module, Any, tuple[Tensor, ...], Any]] = [
        (graph, functional.cross_entropy, (x, edges), torch.randint(4, (20,))),
        (plain(), detection, (x,), boxes),
        (Do(lambda layer, x, t: layer(x) / t), lambda output, t: (output.mean() - t) ** 2, (x, scale), scale),
        (Do(lambda layer, x: torch.sparse.mm(x, layer.weight)), mse, (x.relu().to_sparse(),), x),
        (plain(), lambda output, _: torch.cat(output.unbind()).square().mean(), (ragged,), None),
    ]
    for first, loss_fn, inputs, target in cases:
        net = [first, plain()]
        assert_step(net, loss_fn(net[1](net[0](*inputs)), target), loss_fn, 1, *inputs, target=target)


# Odd outputs and targets


@pytest.mark.parametrize("m", [1, 2])
def test_losses_that_change_their_target_are_refused(m: int) -> None:
    """Regression: later losses and steps got the changed target, silently."""

    def clipped(output: Tensor, target: Any) -> Tensor:
        return (output - target["y"].clamp_(min=0)).square().mean()

    with pytest.raises(ValueError, match="head or loss of stage 1 should not change its input or target in place"):
        pipeline([plain(), plain()], clipped, m).step(X, target={"y": X.clone()})


def test_losses_may_change_the_output_of_a_head_in_place() -> None:
    losses = [lambda output, target: output.mul_(2).square().mean(), mse]
    nwise.Pipeline([plain(), plain()], [plain()], losses, "local", 2).step(torch.randn(6, 4), target=torch.ones(6, 4))


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("m", [1, 2])
def test_named_tuples_are_refused(m: int) -> None:
    """Regression: their names were dropped."""
    message = "output of stage 0 .*Found the named tuple Pair, whose names would be lost; use its"
    with pytest.raises(TypeError, match=message):
        pipeline([Do(lambda layer, x: Pair(layer(x), x)), plain()], m=m).step(X, target=X)
    with pytest.raises(TypeError, match="`target` should be .*Found the named tuple Pair"):
        pipeline([plain(), plain()], m=m).step(X, target=Pair(X, X))
    packed = Do(lambda layer, x: nn.utils.rnn.pack_sequence([layer(x)]))
    with pytest.raises(TypeError, match="output of stage 0 .*Found the named tuple PackedSequence"):
        pipeline([packed, plain()], m=m).step(X, target=X)


@pytest.mark.parametrize("m", [1, 2])
def test_a_tuple_of_one_reaches_the_loss_as_it_is(m: int) -> None:
    """Regression: a loss that took item 0 of a tuple got the first sample of its only tensor."""
    x, y, net = torch.randn(6, 4), torch.randn(6, 4), [plain(), Do(lambda layer, x: (layer(x),))]

    def loss_fn(output: tuple[Tensor], target: list[Tensor]) -> Tensor:
        return (output[0] - target[0]).square().mean()

    for target in ([y], (y,)):
        assert_step(net, loss_fn(net[1](net[0](x)), [y]), loss_fn, m, x, target=target)


@pytest.mark.parametrize("m", [1, 2])
def test_dictionaries_keep_their_order(m: int) -> None:
    """Regression: a loss that looped over the values of a dictionary got them in the order of their names."""
    x, target = torch.randn(6, 4), {"z": torch.randn(6, 4), "a": torch.randn(6, 4)}
    net = [
        Do(lambda layer, x: {"q": layer(x), "b": x}),
        Do(lambda layer, **named: dict(zip("zy", (layer(next(iter(named.values()))), named["b"]), strict=True))),
    ]

    def loss_fn(output: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
        return (next(iter(output.values())) - next(iter(y.values()))).square().mean()

    assert_step(net, loss_fn(net[1](**net[0](x)), target), loss_fn, m, x, target=target)


def test_losses_of_two_precisions_keep_theirs() -> None:
    losses = {(0, 0): torch.tensor(1.0, dtype=torch.bfloat16), (1, 0): torch.tensor(1.0236), (2, 0): torch.tensor(2)}
    batch = Batch([], [], [[1.0] * 4], losses=losses)
    assert batch.results(4).means.tolist() == pytest.approx([1.0, 1.0236, 2.0, float("nan")], nan_ok=True, abs=1e-6)
