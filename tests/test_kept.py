"""Kept cotangents: I and then W do the work of B, and give the same gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import nwise
from nets import InPlace
from nwise.app.models import gpt
from nwise.flow import flows_for
from nwise.schedule.orders import make_schedule, phase, skewed
from nwise.stage.kept import Kept, keep


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Aside(nn.Module):
    """Two outputs, one of which depends on no input, and a parameter added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias, self.free = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x) * self.bias.exp() + self.bias, (2 * self.free).expand_as(x)


NETS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4, bias=False)), True),
    "convolution": (lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)), True),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)), True),
    "a branch": (Aside, False),  # `bias` is used twice
    "tied weights": (Tied, False),
}


def finish(kept: Kept) -> None:
    """Compute the gradients to the weights."""
    kept.replay(lambda edges, cotangents, learns: torch.autograd.backward(edges, cotangents, inputs=learns))


@pytest.mark.parametrize("name", NETS)
def test_kept_cotangents_give_the_gradients_of_one_pass(name: str) -> None:
    torch.manual_seed(0)
    make, splits = NETS[name]
    net = make().double()
    learns = list(net.parameters())
    gradients = []
    for split in (False, True):
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        made = net(x)
        outputs = made if isinstance(made, tuple) else (made,)
        seeds = [(y, torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)) for y in outputs]
        net.zero_grad()
        if split:
            with keep(outputs, [g for _, g in seeds], [x], learns) as kept:
                torch.autograd.backward(outputs, [g for _, g in seeds], inputs=[x], retain_graph=True)
            assert all(p.grad is None for p in learns)
            assert (kept is not None) == splits
            if kept is None:
                continue
            assert kept.num_bytes > 0
            finish(kept)
        else:
            torch.autograd.backward([y for y, _ in seeds], [g for _, g in seeds], inputs=[x, *learns])
        gradients.append([x.grad, *(p.grad for p in learns)])
    for here, there in zip(gradients[0], gradients[-1], strict=True):
        assert torch.equal(here, there)  # type: ignore[arg-type]  # a None would raise


@pytest.mark.parametrize("hooked", [False, True])
def test_outputs_apart_from_the_inputs_are_finished_from_their_seeds(*, hooked: bool) -> None:
    """An output that no input reaches is not walked by I, so its seed itself is kept; it has not passed its hooks before W."""
    x, w, v = (torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    outputs, ones = [x * w, v.exp()], [torch.ones(2), torch.ones(2)]
    if hooked:
        outputs[1].register_hook(lambda gradient: 2 * gradient)
    with keep(outputs, ones, [x], [w, v]) as kept:
        torch.autograd.backward(outputs, ones, inputs=[x], retain_graph=True)
    assert kept is not None
    finish(kept)
    found = [leaf.grad.tolist() for leaf in (x, w) if leaf.grad is not None]
    assert found == [[2.0, 2.0], [1.0, 1.0]]
    assert torch.equal(v.grad, (1 + hooked) * v.detach().exp())  # type: ignore[arg-type]


class Two(torch.autograd.Function):
    """A product and a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (g, none), (x, w) = gradients, ctx.saved_tensors
        assert g is not None
        assert none is None
        return g * w, g * x


def test_node_with_an_output_that_is_not_used_is_kept() -> None:
    """No gradient arrives for that output; the node's parameters still need the other one's."""
    x, w = (torch.full((2,), value, requires_grad=True) for value in (3.0, 5.0))
    (y, _), one = Two.apply(x, w), torch.ones(2)  # type: ignore[no-untyped-call]
    with keep([y], [one], [x], [w]) as kept:
        torch.autograd.backward(y, one, inputs=[x], retain_graph=True)
    assert kept is not None
    assert kept.num_bytes == one.nbytes
    finish(kept)
    assert w.grad is not None
    assert w.grad.tolist() == [3.0, 3.0]


def test_cotangent_that_a_custom_backward_writes_over_is_kept_as_it_arrived() -> None:
    """Before any walk has shown that a function writes, only that it is a custom one says that it might."""
    x, w = (torch.full((2,), value, requires_grad=True) for value in (3.0, 5.0))
    y, one = InPlace.apply(x, w), torch.ones(2)  # type: ignore[no-untyped-call]
    with keep([y], [one], [x], [w]) as kept:
        torch.autograd.backward(y, one, inputs=[x], retain_graph=True)
    assert kept is not None
    finish(kept)
    assert (x.grad.tolist(), w.grad.tolist()) == ([5.0, 5.0], [3.0, 3.0])  # type: ignore[union-attr]


@pytest.mark.parametrize("recompute", [False, True])
def test_split_passes_cost_the_flops_of_one_and_are_bitwise_equal(recompute: bool) -> None:
    """End-to-end on a GPT: I and W of every stage against B; without kept cotangents I and W cost a third more than B."""
    found = []
    for fuse in (True, False):
        torch.manual_seed(0)
        model = gpt(2, 2, 8, 2, 5, 11)
        flows = flows_for(nwise.EndToEnd(), 2, 2)
        schedule = make_schedule("", flows, partial(phase, fuse=fuse))
        loss = nwise.losses.TokenCrossEntropy()
        pipe = nwise.Pipeline(
            model.stages, [None], loss, "end-to-end", 2, schedule=schedule, seed=0, recompute=recompute
        )
        tokens = torch.arange(20).view(4, 5) % 11
        with FlopCounterMode(display=False) as counter:
            pipe.step(tokens, target=tokens)
        found.append((counter.get_total_flops(), [p.grad for p in pipe.parameters()]))
    (one, together), (two, apart) = found
    assert two == pytest.approx(one, rel=0.01)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True) if a is not None and b is not None)
    assert [g is None for g in together] == [g is None for g in apart]


def test_second_message_after_a_kept_one_leaves_its_cotangents_alone() -> None:
    """3-wise-mean sends two messages; the W that shares the cotangent of one of them comes after both."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double() for _ in range(4)]
    heads = [nn.Linear(3, 3).double() for _ in range(3)]
    loss = nn.functional.mse_loss
    x, y = (torch.randn(5, 3, dtype=torch.float64) for _ in range(2))
    flows = flows_for(nwise.strategy("3-wise-mean"), 4, 2)
    schedule = make_schedule("", flows, partial(skewed, fuse=False, stride=2))
    pipe = nwise.Pipeline(stages, heads, loss, "3-wise-mean", 2, schedule=schedule)
    expected = nwise.reference_grads(stages, heads, loss, x, y, pipe.credit, 2)
    pipe.step(x, target=y)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-12, atol=1e-14), name


def test_an_output_given_twice_is_finished() -> None:
    """Two walks to one parameter would fail: the first frees the graph that the second needs."""
    v = torch.ones(2, requires_grad=True)
    y = v.exp()
    with keep([y, y], [torch.ones(2), torch.ones(2)], [], [v]) as kept:
        pass
    assert kept is None


def test_a_parameter_before_and_beside_the_inputs_is_not_split() -> None:
    """It is reached from an output without inputs, and branches off on the way to one: again two walks through one graph."""
    x, v = (torch.ones(2, requires_grad=True) for _ in range(2))
    scale, ones = v.exp(), [torch.ones(2), torch.ones(2)]
    outputs = [x * scale, scale]
    with keep(outputs, ones, [x], [v]) as kept:
        torch.autograd.backward(outputs, ones, inputs=[x], retain_graph=True)
    assert kept is None


def test_second_output_of_a_node_keeps_its_own_seed() -> None:
    v = torch.ones(2, requires_grad=True)
    with keep([v.exp().unbind()[1]], [torch.tensor(3.0)], [], [v]) as kept:
        pass
    assert kept is not None
    finish(kept)
    assert torch.equal(v.grad, torch.tensor([0.0, 3.0]) * v.detach().exp())  # type: ignore[arg-type]


class Halved(nn.Module):
    """A layer that halves the gradient of its output by a hook of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient / 2)
        return y.tanh()


def test_hooks_of_tensors_count_once_in_every_order() -> None:
    """Regression: W began at a cotangent that the hooks had changed in I, and ran them on it once more."""
    found = []
    for order in ("depth-first", "zb-h1"):
        torch.manual_seed(0)
        pipe = nwise.Pipeline(
            [Halved(), Halved(), Halved()], None, strategy="end-to-end", num_microbatches=2, schedule=order
        )
        pipe.step(torch.randn(6, 4), target=torch.tensor([0, 1, 2, 3, 0, 1]))
        found.append([p.grad for p in pipe.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_cotangent_kept_for_two_layers_has_its_size_once() -> None:
    x, v, w = (torch.ones(2, requires_grad=True) for _ in range(3))
    y, one = (x + v) + w, torch.ones(2)
    with keep([y], [one], [x], [v, w]) as kept:
        torch.autograd.backward(y, one, inputs=[x], retain_graph=True)
    assert kept is not None
    assert (len(kept.parts), kept.num_bytes) == (2, one.nbytes)


def test_nothing_is_kept_of_later_passes() -> None:
    """A hook left on the graph would hold the cotangents of the next message until the last pass."""
    x, w = (torch.ones(2, requires_grad=True) for _ in range(2))
    y = x * w
    with keep([y], [torch.ones(2)], [x], [w]):
        torch.autograd.backward(y, torch.ones(2), inputs=[x], retain_graph=True)
    later = torch.full((2,), 3.0)
    y.backward(later, inputs=[x], retain_graph=True)
    alive = weakref.ref(later)
    del later
    assert alive() is None


class Stop(torch.autograd.Function):
    """Ends the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


class Stopped(nn.Module):
    """A layer behind a function whose backward returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Stop.apply(self.layer(x))  # type: ignore[no-untyped-call]


def test_function_without_a_gradient_keeps_nothing() -> None:
    """Regression: I and W of a stage with parameters behind such a function raised IndexError, while B did not."""
    schedule = make_schedule("", flows_for(nwise.EndToEnd(), 3, 1), partial(phase, fuse=False))
    stages = [nn.Linear(3, 3), Stopped(), nn.Linear(3, 3)]
    pipe = nwise.Pipeline(stages, None, nn.functional.mse_loss, "end-to-end", schedule=schedule)
    pipe.step(torch.randn(2, 3), target=torch.randn(2, 3))
    assert [all(p.grad is None for p in stage.parameters()) for stage in stages] == [True, True, False]
