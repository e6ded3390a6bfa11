"""Kept cotangents: I and then W do the work of B, and give the same gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
from nwise.schedule.orders import make_schedule, phase
from nwise.stage.graph import add_gradients
from nwise.stage.kept import keep

Graph = tuple[Sequence[Tensor], list[Tensor], list[Tensor]]  # outputs, inputs, parameters


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Two(torch.autograd.Function):
    """A product and a sum, whose gradient does not arrive."""

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


class Stop(torch.autograd.Function):
    """Ends the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def of_module(net: nn.Module) -> Graph:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    return [net.double()(x)], [x], list(net.parameters())


def apply(function: Any, *inputs: Tensor) -> Any:
    return function.apply(*inputs)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient / 2)
    return x


def of_function(function: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]], *, alone: bool = False) -> Graph:
    x, v, w = (torch.full((2,), value, requires_grad=True) for value in (2.0, 3.0, 5.0))
    return function(x, v, w), [] if alone else [x], [v, w]


# Each graph, with the bytes that are kept; None where two ways lead to one parameter, so that nothing is.
GRAPHS: dict[str, tuple[Callable[[], Graph], int | None]] = {
    "layers": (
        lambda: of_module(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4, bias=False))),
        3 * 3 * 4 * 8,
    ),
    "a convolution": (
        lambda: of_module(nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))),
        2 * 3 * 3 * 4 * 8,
    ),
    "a weight norm": (
        lambda: of_module(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))),
        2 * 3 * 4 * 8,
    ),
    "a tied weight": (lambda: of_module(Tied()), None),
    "a parameter twice": (lambda: of_function(lambda x, v, w: [x * v.exp() + v * w]), None),
    "an output twice": (lambda: of_function(lambda x, v, w: [v.exp()] * 2, alone=True), None),
    "a parameter before and beside the inputs": (lambda: of_function(lambda x, v, w: [x * (z := v.exp()), z]), None),
    "an output without inputs": (lambda: of_function(lambda x, v, w: [x * w, v.exp()]), 16),
    "the same behind a hook": (lambda: of_function(lambda x, v, w: [x * w, hooked(v.exp())]), 16),
    "the second output of a node": (lambda: of_function(lambda x, v, w: [v.exp().unbind()[1]], alone=True), 4),
    "one cotangent for two layers": (lambda: of_function(lambda x, v, w: [(x + v) + w]), 8),
    "a hook inside": (lambda: of_function(lambda x, v, w: [hooked(x * v).tanh() * w]), 16),
    "an output that is not used": (lambda: of_function(lambda x, v, w: [apply(Two, x, w)[0]]), 8),
    "a backward that writes": (lambda: of_function(lambda x, v, w: [apply(InPlace, x, w)]), 8),
    "a backward without a gradient": (lambda: of_function(lambda x, v, w: [apply(Stop, x * v) * w]), 8),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_kept_cotangents_give_the_gradients_of_one_pass(name: str) -> None:
    """Regressions: a hook of a tensor ran on a cotangent that it had changed; no gradient at all was an IndexError in W."""
    make, num_bytes = GRAPHS[name]
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        outputs, inputs, learns = make()
        seeds = [torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y) for y in outputs]
        if split:
            with keep(outputs, seeds, inputs, learns) as kept:
                if inputs:
                    torch.autograd.backward(outputs, seeds, inputs=inputs, retain_graph=True)
            assert all(p.grad is None for p in learns)
            assert (None if kept is None else kept.num_bytes) == num_bytes
            if kept is None:
                return
            kept.replay(partial(add_gradients, retain_graph=False))
        else:
            torch.autograd.backward(outputs, seeds, inputs=[*inputs, *learns])
        found.append([leaf.grad for leaf in (*inputs, *learns)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_split_passes_cost_the_flops_of_one_and_are_bitwise_equal(recompute: bool) -> None:
    """End-to-end on a GPT: I and W of every stage against B; without kept cotangents I and W cost a third more than B."""
    found = []
    for fuse in (True, False):
        model = gpt(2, 2, 8, 2, 5, 11, seed=0)
        schedule = make_schedule("", flows_for(nwise.EndToEnd(), 2, 2), partial(phase, fuse=fuse))
        # A check multiplies, too.
        options: dict[str, Any] = {"schedule": schedule, "recompute": recompute, "checks": "never"}
        pipe = nwise.Pipeline(model.stages, [None], nwise.losses.TokenCrossEntropy(), "end-to-end", 2, **options)
        tokens = torch.arange(20).view(4, 5) % 11
        with FlopCounterMode(display=False) as counter:
            pipe.step(tokens, target=tokens)
        found.append((counter.get_total_flops(), [p.grad for p in pipe.parameters()]))
    (one, together), (two, apart) = found
    assert two == pytest.approx(one, rel=0.01)
    torch.testing.assert_close(together, apart, rtol=0, atol=0)


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
