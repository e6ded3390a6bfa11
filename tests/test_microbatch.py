"""What a cut of the mini-batch may break: other dimensions, losses over all samples, samples that belong together, odd types."""

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
from nwise.losses import TokenCrossEntropy
from nwise.microbatch import Batch

pytestmark = pytest.mark.usefixtures("float64")

mse: Callable[..., Tensor] = functional.mse_loss


class Do(nn.Module):
    """A layer inside a function: ``function(layer, *inputs)``."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, width), function

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.function(self.layer, *inputs, **named)


def plain(width: int = 4) -> Do:
    return Do(lambda layer, x: layer(x), width)


def grads(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for module in modules for p in module.parameters()]


def assert_step(stages: Sequence[nn.Module], expected: Tensor, step: Callable[[list[nn.Module]], Any]) -> None:
    """Check that a step leaves in copies of end-to-end stages the gradients of a loss of the originals."""
    twins = copy.deepcopy(list(stages))
    step(twins)
    expected.backward()
    for found, wanted in zip(grads(twins), grads(stages), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def pipeline(stages: Sequence[nn.Module], loss_fn: Any = mse, m: int = 2, **options: Any) -> nwise.Pipeline:
    return nwise.Pipeline(
        list(stages), options.pop("heads", None), loss_fn, options.pop("strategy", "end-to-end"), m, **options
    )


def stepping(
    loss_fn: Any, m: int, *inputs: Any, target: Any = None, **options: Any
) -> Callable[[list[nn.Module]], Any]:
    return lambda stages: pipeline(stages, loss_fn, m, **options).step(*inputs, target=target)


# Micro-batches that are cut already


@pytest.mark.parametrize("strategy", ["local", "2-wise-mean", "end-to-end"])
def test_given_micro_batches_have_the_gradient_of_the_mean_over_all_tokens(strategy: str) -> None:
    """There was no way to say it: two steps averaged by samples are off by several percent."""
    stages, heads = [nn.Embedding(9, 4), plain(), plain(9)], [plain(9), plain(9)]
    tokens = [torch.randint(9, (2, 5)), torch.randint(9, (1, 8)), torch.randint(9, (3, 2))]
    targets = [tokens[0].roll(-1, 1), torch.where(tokens[1] > 4, -100, tokens[1]), tokens[2]]
    pipe = pipeline(stages, TokenCrossEntropy(), 3, heads=heads, strategy=strategy)
    losses = pipe.step(microbatches=tokens, targets=targets)
    found = {name: p.grad for name, p in pipe.named_parameters()}
    count = sum(int((y != -100).sum()) for y in targets)
    values = []
    wanted = {name: torch.zeros_like(p) for name, p in pipe.named_parameters()}
    for j, k in ((0, 0), (1, 1), (2, 2), (1, 0), (2, 1), (2, 0)):
        hidden: list[Any] = list(tokens)
        for stage in stages[: j + 1]:
            hidden = [stage(h) for h in hidden]
        outputs = [heads[j](h) for h in hidden] if j < 2 else hidden
        loss = sum(
            functional.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") / count
            for o, y in zip(outputs, targets, strict=True)
        )
        assert isinstance(loss, Tensor)
        if j == k:
            values.append(loss.detach())
        parts = [(f"stages.{k}.", stages[k], float(pipe.credit[j, k]))]
        parts += [(f"heads.{j}.", heads[j], 1.0)] if j == k < 2 and pipe.credit[j].any() else []
        for prefix, module, weight in parts:
            names, parameters = zip(*module.named_parameters(), strict=True)
            for name, g in zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True):
                wanted[prefix + name] += weight * g
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name] if found[name] is not None else 0 * gradient, gradient, msg=name)
    ran = torch.tensor(losses.ran)
    torch.testing.assert_close(losses[ran], torch.stack(values)[ran])


def test_given_micro_batches_may_be_graphs() -> None:
    graph = Do(lambda layer, x, edges: (layer(x).index_add(0, edges[1], layer(x)[edges[0]]), edges))
    last = Do(lambda layer, x, edges: layer(x))
    inputs = [{"x": torch.randn(n, 4), "edges": torch.randint(n, (2, 3 * n))} for n in (5, 9)]
    targets = [torch.randint(4, (n,)) for n in (5, 9)]

    def loss(net: Sequence[nn.Module]) -> Tensor:
        outputs = [net[1](*net[0](**x)) for x in inputs]
        return functional.cross_entropy(torch.cat(outputs), torch.cat(targets))

    assert_step(
        net := [graph, last],
        loss(net),
        lambda twins: pipeline(twins, functional.cross_entropy).step(microbatches=inputs, targets=targets),
    )


def _stepping_on(stages: list[nn.Module], loss_fn: Any, inputs: Any, targets: Any) -> None:
    pipeline(stages, loss_fn).step(microbatches=inputs, targets=targets)


def test_given_micro_batches_of_elements_count_elements() -> None:
    """`mse_loss` averages over elements, so a longer sample weighs more."""
    inputs = [torch.randn(1, 3, 4), torch.randn(1, 7, 4)]
    targets = [torch.randn(1, 3, 4), torch.randn(1, 7, 4)]
    for loss_fn in (mse, nn.MSELoss(), partial(mse, reduction="mean")):
        stages = [plain(), plain()]
        squares = [(stages[1](stages[0](x)) - y).square().sum() for x, y in zip(inputs, targets, strict=True)]
        assert_step(
            stages,
            sum(squares) / torch.tensor(40.0),
            partial(_stepping_on, loss_fn=loss_fn, inputs=inputs, targets=targets),
        )


def test_samples_of_several_lengths_and_an_unknown_loss_warn_once() -> None:
    pipe = pipeline([plain(), plain()], lambda output, target: (output - target).square().mean())
    given = [torch.randn(1, 3, 4), torch.randn(1, 7, 4)]
    with pytest.warns(
        UserWarning, match="samples of `microbatches` should have one length.*'<lambda>'.*`count"
    ) as caught:
        pipe.step(microbatches=given, targets=given)
    assert caught[0].filename == __file__
    pipe.step(microbatches=given, targets=given)
    pipe = pipeline([plain(), plain()], lambda output, target: output.square().mean())
    with pytest.warns(UserWarning, match="samples of `microbatches` should have one length"):
        pipe.step(microbatches=given)
    pipeline([plain(), plain()], lambda output, target: output.square().mean()).step(
        microbatches=[torch.randn(2, 4), torch.randn(5, 4)]
    )


X = torch.ones(4, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"microbatches": [X]},
            ValueError,
            "`microbatches` should have 2 entries, `num_microbatches` for each replica. Found 1",
        ),
        ({"microbatches": [X, X], "targets": [X]}, ValueError, "`targets` should have 2 entries.*Found 1"),
        (
            {"microbatches": X},
            TypeError,
            "`microbatches` should be a list with one entry for each micro-batch. Found Tensor",
        ),
        ({"microbatches": [X, X], "targets": X}, TypeError, "`targets` should be a list with one entry.*Found Tensor"),
        (
            {"microbatches": [X, (X, X)]},
            ValueError,
            "All `microbatches` should have the same inputs. Found 1 in 0 and 2 in 1",
        ),
        ({"microbatches": [{"x": X}, {"y": X}]}, ValueError, "the same inputs. Found x in 0 and y in 1"),
        ({"microbatches": [X, 3]}, TypeError, r"`microbatches\[1\]` should be a tensor.*Found int"),
        ({"microbatches": [X, X], "targets": [X, "no"]}, TypeError, r"`targets\[1\]` should be a tensor.*Found str"),
        ({"microbatches": [X, X], "target": X}, TypeError, "`microbatches` should come alone, or with `targets`"),
        ({"microbatches": [X, X], "x": X}, TypeError, "`microbatches` should come alone, or with `targets`"),
        (
            {"x": X, "targets": [X, X]},
            TypeError,
            "`targets` should come with `microbatches`. Found none; pass `target=`",
        ),
    ],
)
def test_wrong_micro_batches_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline([plain(), plain()]).step(**arguments)


def test_a_list_as_input_points_to_micro_batches() -> None:
    with pytest.raises(TypeError, match=r"Found one list; unpack it, `step\(\*x\)`, or .*`step\(microbatches=...\)`"):
        pipeline([plain(), plain()]).step([X, X], target=X)  # type: ignore[arg-type] # the error


# Other dimensions


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)  # samples in dimension 1


@pytest.mark.parametrize(("length", "size", "m"), [(6, 4, 2), (3, 3, 2), (4, 5, 5), (2, 7, 3)])
def test_samples_in_dimension_1(length: int, size: int, m: int) -> None:
    net, x, y = [attention(), attention(), plain()], torch.randn(length, size, 4), torch.randint(4, (length, size))
    expected = functional.cross_entropy(net[2](net[1](net[0](x))).flatten(0, 1), y.flatten())
    assert_step(net, expected, stepping(TokenCrossEntropy(), m, x, target=y, batch_dim=1))
    for module in net:
        module.zero_grad()
    unknown: Any = lambda output, target: (output - target[..., None]).square().mean()  # noqa: E731
    assert_step(net, unknown(net[2](net[1](net[0](x))), y), stepping(unknown, m, x, target=y, batch_dim=1))


def test_each_input_and_the_target_may_have_their_own_dimension() -> None:
    """Regression: position ids ``[3, B, T]`` of 3 samples were cut into their axes, silently."""
    rope = Do(lambda layer, x, ids: layer(x) + ids.sum(0)[..., None])
    x, ids, y = torch.randn(3, 5, 4), torch.randint(4, (3, 3, 5)), torch.randn(3, 5, 4)
    for dims in ((0, 1), [0, 1, 0], {"ids": 1}, {"ids": -2, "target": 0}):
        net = [rope, plain()]
        inputs: Any = {"x": x, "ids": ids} if isinstance(dims, dict) else None
        expected = mse(net[1](net[0](x, ids)), y)
        given = (inputs,) if inputs else (x, ids)
        assert_step(net, expected, stepping(mse, 3, *given, target=y, batch_dim=dims))
        for module in net:
            module.zero_grad()
    pooled: list[nn.Module] = [attention(), Do(lambda layer, x: layer(x.mean(0)))]
    target = {"a": torch.randn(5, 4), "scale": torch.ones(4)}
    loss_fn = Counted(lambda output, t: ((output - t["a"]) * t["scale"]).square().mean())
    for batch_dim in ((1, {"a": 0, "scale": None}), (1, (0, None))):
        named = isinstance(batch_dim[1], dict)
        y = target if named else tuple(target.values())  # type: ignore[assignment]
        read = loss_fn if named else Counted(lambda o, t: ((o - t[0]) * t[1]).square().mean())
        expected = read(pooled[1](pooled[0](x)), y)
        assert_step(pooled, expected, stepping(read, 2, x, target=y, batch_dim=batch_dim))
        for part in pooled:
            part.zero_grad()


class Counted:
    """A loss that counts the rows of its target, or of the first tensor in it."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn = loss_fn

    def __call__(self, output: Any, target: Any) -> Tensor:
        return self.loss_fn(output, target)

    def count(self, target: Any) -> int:
        values = target.values() if isinstance(target, dict) else target
        return len(target if isinstance(target, Tensor) else next(iter(values)))


def test_inputs_that_are_not_cut() -> None:
    table, scale = torch.randn(4, 4), torch.tensor(2.0)
    net = [Do(lambda layer, x, table, scale: layer(x @ table) / scale), plain()]
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    expected = mse(net[1](net[0](x, table, scale)), y)
    assert_step(net, expected, stepping(mse, 3, x, table, scale, target=y, batch_dim=(0, None, None)))


@pytest.mark.parametrize(
    ("batch_dim", "inputs", "target", "message"),
    [
        (
            1,
            (X,),
            torch.ones(4),
            r"`target` should have samples along dimension 1. Found a tensor of shape \[4\]; say in which",
        ),
        (1, (X,), torch.ones(4, 3), r"`target` should have the input's 4 samples. Found 3; say in which dimension"),
        ((0, 1), (X, torch.ones(4, 3)), X, r"the same number of samples in every tensor. Found \[3, 4\]; say in which"),
        ((0, 1), (X,) * 4, X, r"`batch_dim` should fit the input, 4 by position. Found \(0, 1\)"),
        (
            {"x": 0, "ids": 1},
            ({"x": X, "y": X},),
            X,
            "`batch_dim` should fit the input, x, y. Found {'x': 0, 'ids': 1}",
        ),
        ({"x": 0}, (X,), X, "`batch_dim` should fit the input, 1 by position. Found {'x': 0}"),
        ((0, (0, 0)), (X,), X, r"`batch_dim` should fit the target, 1 by position. Found \(0, 0\)"),
        ((0, 0, 0), (X,), X, r"`batch_dim` should fit the input, 1 by position. Found \(0, 0, 0\)"),
        ((None,), (X,), X, "the same number of samples in every tensor. Found no tensor to cut"),
        (0, (X.to_sparse(),), X, "should be dense tensors, which can be cut. Found one of layout torch.sparse_coo"),
        (
            0,
            (torch.nested.nested_tensor([X, X], layout=torch.jagged),),
            X,
            "should be dense tensors, which can be cut. Found a nested one",
        ),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(batch_dim: Any, inputs: Any, target: Any, message: str) -> None:
    pipe = pipeline([Do(lambda layer, *x, **named: layer(x[0])), plain()], batch_dim=batch_dim)
    with pytest.raises(ValueError, match=message):
        pipe.step(*inputs, target=target)


@pytest.mark.parametrize("batch_dim", [None, True, "x", 1.5, ("0",), {"x": "y"}])
def test_dimensions_are_numbers(batch_dim: Any) -> None:
    with pytest.raises(TypeError, match="`batch_dim` should be a dimension, or a list or dictionary of dimensions"):
        pipeline([plain(), plain()], batch_dim=batch_dim)


# One micro-batch may have any shapes


def test_one_micro_batch_may_have_any_shapes() -> None:
    """Regression: a graph was refused, because its nodes and edges differ in number."""
    nodes, edges, y = torch.randn(20, 4), torch.randint(20, (2, 41)), torch.randint(4, (20,))
    net = [Do(lambda layer, x, e: layer(x).index_add(0, e[1], layer(x)[e[0]])), plain()]
    assert_step(
        net,
        functional.cross_entropy(net[1](net[0](nodes, edges)), y),
        stepping(functional.cross_entropy, 1, nodes, edges, target=y),
    )

    x, boxes = torch.randn(4, 4), torch.cat([torch.randint(4, (9, 1)), torch.randn(9, 4)], 1)
    net = [plain(), plain()]

    def detection(output: Tensor, target: Tensor) -> Tensor:
        return (output[target[:, 0].long()] - target[:, 1:]).square().mean()

    assert_step(net, detection(net[1](net[0](x)), boxes), stepping(detection, 1, x, target=boxes))

    net, scale = [Do(lambda layer, x, t: layer(x) / t), plain()], torch.tensor(2.0)
    one = torch.tensor(3.0)
    loss: Any = lambda output, target: (output.mean() - target) ** 2  # noqa: E731
    assert_step(net, loss(net[1](net[0](x, scale)), one), stepping(loss, 1, x, scale, target=one))

    net = [Do(lambda layer, x: torch.sparse.mm(x, layer.weight)), plain()]
    sparse = x.relu().to_sparse()
    assert_step(net, mse(net[1](net[0](sparse)), x), stepping(mse, 1, sparse, target=x))

    net, ragged = (
        [plain(), plain()],
        torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged),
    )
    loss = lambda output, target: torch.cat(output.unbind()).square().mean()  # noqa: E731
    assert_step(net, loss(net[1](net[0](ragged)), None), stepping(loss, 1, ragged))


def test_an_empty_mini_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="The mini-batch should have at least one sample. Found none"):
        pipeline([plain(), plain()], m=1).step(torch.ones(0, 4), target=torch.ones(0, 4))


# Odd outputs and targets


def test_losses_that_change_their_target_are_refused() -> None:
    """Regression: later losses and steps got the changed target, silently."""

    def clipped(output: Tensor, target: Any) -> Tensor:
        target["y"].clamp_(min=0)
        return (output - target["y"]).square().mean()

    for m in (1, 2):
        with pytest.raises(
            ValueError, match="The loss of stage 1 should not change its target in place.*clone the target"
        ):
            pipeline([plain(), plain()], clipped, m).step(X, target={"y": X.clone()})


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("m", [1, 2])
def test_named_tuples_are_refused(m: int) -> None:
    """Regression: their names were dropped."""
    named = Do(lambda layer, x: Pair(layer(x), x))
    with pytest.raises(
        TypeError, match="output of stage 0 .*Found the named tuple Pair, whose names would be lost; use its"
    ):
        pipeline([named, plain()], m=m).step(X, target=X)
    with pytest.raises(TypeError, match="`target` should be .*Found the named tuple Pair"):
        pipeline([plain(), plain()], m=m).step(X, target=Pair(X, X))
    packed = Do(
        lambda layer, x: nn.utils.rnn.pack_padded_sequence(layer(x), torch.ones(x.size(1)).long(), enforce_sorted=False)
    )
    with pytest.raises(TypeError, match="output of stage 0 .*Found the named tuple PackedSequence"):
        pipeline([packed, plain()], m=m).step(torch.randn(4, 4, 4), target=X)


@pytest.mark.parametrize("m", [1, 2])
def test_a_tuple_of_one_reaches_the_loss_as_it_is(m: int) -> None:
    """Regression: a loss that took item 0 of a tuple got the first sample of its only tensor."""
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    net = [plain(), Do(lambda layer, x: (layer(x),))]

    def loss_fn(output: tuple[Tensor], target: list[Tensor]) -> Tensor:
        return (output[0] - target[0]).square().mean()

    for target in ([y], (y,)):
        assert_step(net, loss_fn(net[1](net[0](x)), [y]), stepping(loss_fn, m, x, target=target))
        for module in net:
            module.zero_grad()


@pytest.mark.parametrize("m", [1, 2])
def test_dictionaries_keep_their_order(m: int) -> None:
    """Regression: a loss that looped over the values of a dictionary got them in the order of their names."""
    x, target = torch.randn(6, 4), {"z": torch.randn(6, 4), "a": torch.randn(6, 4)}
    net = [
        Do(lambda layer, x: {"q": layer(x), "b": x}),
        Do(lambda layer, **named: dict(zip("zy", (layer(next(iter(named.values()))), x[:3]), strict=True))),
    ]

    def loss_fn(output: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
        return (next(iter(output.values())) - next(iter(y.values()))).square().mean()

    expected = loss_fn(net[1](**net[0](x)), target)
    assert_step(net, expected, stepping(loss_fn, m, x, target=target))


def test_losses_of_two_precisions_keep_theirs() -> None:
    losses = {(0, 0): torch.tensor(1.0, dtype=torch.bfloat16), (1, 0): torch.tensor(1.0236), (2, 0): torch.tensor(2)}
    batch = Batch([], [], [[1.0] * 4], losses=losses)
    assert batch.results(4).means.tolist() == pytest.approx([1.0, 1.0236, 2.0, float("nan")], nan_ok=True, abs=1e-6)
