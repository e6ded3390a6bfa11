"""What a user's own code does inside a stage: a step gives the gradients of one plain `backward`, or a sentence."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nwise
from nets import InPlace, Tally
from nwise.flow import Cotangent, StageFlow
from nwise.microbatch import Batch
from nwise.schedule.actions import Action, Kind
from nwise.stage.hooks import add_to_grad
from nwise.stage.stage import Stage
from nwise.stage.tape import Tape
from test_contract import assert_same, gradients

pytestmark = pytest.mark.usefixtures("float64")

WIDTH = 4
Stages = Sequence[nn.Module]


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randint(3, (size,))


def heads(stages: Stages) -> list[nn.Module]:
    return [nn.Linear(WIDTH, 3) for _ in stages[1:]]


def plain(stages: Stages, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients of one `backward` through a copy of the network."""
    twin, h = copy.deepcopy(nn.ModuleList(stages)), x
    for stage in twin:
        h = stage(h)
    functional.cross_entropy(h, y).backward()
    return {f"stages.{name}": p.grad for name, p in twin.named_parameters() if p.grad is not None}


def assert_defined(
    pipe: nwise.Pipeline, net: Stages, sides: Any, data: tuple[Tensor, Tensor] | None = None, tolerance: float = 1e-12
) -> None:
    """Check the gradients of three steps by the definition; the third step makes no check itself."""
    x, y = data or batch()
    assert_steps(pipe, nwise.reference_grads(net, sides, functional.cross_entropy, x, y, pipe.credit), x, y, tolerance)


def assert_steps(
    pipe: nwise.Pipeline, expected: dict[str, Tensor], x: Tensor, y: Tensor, tolerance: float = 1e-12
) -> None:
    for _ in range(3):
        pipe.zero_grad()
        pipe.step(x, target=y)
        assert_same(gradients(pipe), expected, tolerance)


def assert_right(
    make: Callable[[], Stages], strategy: str, schedule: str, *, size: int = 8, sides: Callable[..., Any] = heads
) -> None:
    """Check a net by the definition, whole and cut into three micro-batches that run again."""
    for num_microbatches, recompute in ((1, False), (3, True)):
        net = make()
        given = sides(net) if strategy != "end-to-end" else None
        pipe = nwise.Pipeline(
            net, given, strategy=strategy, num_microbatches=num_microbatches, schedule=schedule, recompute=recompute
        )
        assert_defined(pipe, net, given, batch(size))


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


class Between(nn.Linear):
    """A layer with a function behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor], out: int = WIDTH) -> None:
        super().__init__(WIDTH, out)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


# Backwards that write into their cotangent ------------------------------------------------------------------


scaled: Any = InPlace.apply


class Fused(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.place = nn.Parameter(torch.rand(WIDTH) + 0.5), place

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "start":
            return self.second(self.first(scaled(x, self.scale)))
        if self.place == "end":
            return scaled(self.second(self.first(x)), self.scale)
        return self.second(scaled(self.first(x), self.scale)).view(len(x), WIDTH)


ORDERS = [
    ("end-to-end", "zero-bubble"),
    ("end-to-end", "depth-first"),
    ("2-wise", "depth-first"),
    ("2-wise-mean", "phase"),
    ("3-wise-mean", "depth-first"),
    ("3-wise", "zb-h1"),
    ("deep-supervision", "zb-h1"),
]


@pytest.mark.parametrize("place", ["start", "middle", "end"])
@pytest.mark.parametrize(("strategy", "schedule"), ORDERS)
def test_backwards_may_write_over_their_cotangent(place: str, strategy: str, schedule: str) -> None:
    """Regression: the pass that came later read a cotangent that a fused norm had overwritten; gradients were 36 % off."""
    assert_right(lambda: [Fused(place), Fused(place), Fused("start"), nn.Linear(WIDTH, 3)], strategy, schedule)


def test_one_of_two_messages_may_be_a_cotangent_that_a_later_pass_reads() -> None:
    """A view passes on the memory of its cotangent, a layer beside it does not; the stage below writes over what it gets."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.scale = (*linears(2), nn.Parameter(torch.rand(WIDTH) + 0.5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return scaled(self.first(x), self.scale), self.second(x)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            (self.layer,) = linears(1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a.view(len(a), WIDTH) + self.layer(b)

    net = [Both(), Sum(), nn.Linear(WIDTH, 3)]
    assert_defined(nwise.Pipeline(net, strategy="end-to-end", schedule="zero-bubble"), net, None)


def test_outputs_of_a_micro_batch_are_gone_before_the_next_one() -> None:
    """In depth-first order a step has the tensors of one micro-batch at a time."""
    made: list[weakref.ref[Tensor]] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not [one for one in made if one() is not None]
            y = super().forward(x)
            made.append(weakref.ref(y))
            return y

    x, y = batch()
    net = [Watched(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    pipe = nwise.Pipeline(net, strategy="end-to-end", num_microbatches=4, schedule="depth-first")
    pipe.step(x, target=y)
    assert len(made) >= 4


def test_tape_lets_go_of_its_tensors_after_the_last_pass_and_the_head() -> None:
    stage, x = Stage(0, nn.Linear(2, 2), None, lambda y, _: y.sum(), recompute=False), (torch.ones(2),)
    stage.survey(stage.module, None)
    for head, passes in ((True, 1), (True, 0), (False, 0)):
        flow = StageFlow(head, head, (), Cotangent(1.0, (), 0, 1.0) if passes else None, None)
        tape = Tape(flow, Batch([x], [None], [[1.0]]), 0, passes, inputs=x)
        kinds = [Kind.FORWARD, *[Kind.HEAD] * head, *[Kind.WEIGHT_GRAD] * passes]
        for kind in kinds:
            assert tape.inputs
            stage.run(Action(kind, 0, 0), tape)
        assert not any((tape.inputs, tape.messages, tape.outputs, tape.own))


def doubled_unseen(g: Tensor) -> None:
    g.data.mul_(2)  # raises no version counter


@pytest.mark.parametrize("write", [lambda g: g.mul_(2), doubled_unseen])
@pytest.mark.parametrize(("strategy", "schedule"), ORDERS)
def test_hooks_that_write_in_place(write: Callable[[Tensor], Tensor | None], strategy: str, schedule: str) -> None:
    """Regression: a tensor's hook that wrote in place ran once in I and again in W; through `.data`, in silence."""

    def doubled(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(write)
        return h.tanh()

    assert_right(lambda: [*(Between(doubled) for _ in range(3)), nn.Linear(WIDTH, 3)], strategy, schedule)


@pytest.mark.parametrize("place", ["input", "output", "residual"])
@pytest.mark.parametrize(("strategy", "schedule"), ORDERS)
def test_hooks_of_tensors_between_stages(place: str, strategy: str, schedule: str) -> None:
    """Regression: a hook that wrote over the gradient of a stage's output changed what another pass read.

    And with `recompute`, a hook on a stage's input ran twice, because the second run put it on the same tensor again.
    """

    def halve(g: Tensor) -> None:
        g.data.mul_(0.5)  # raises no version counter

    class Halving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).tanh()
            hooked = x if place == "input" else h
            if hooked.requires_grad:
                hooked.register_hook(halve)
            return h + x.tanh() if place == "residual" else h

    assert_right(lambda: [*(Halving(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)], strategy, schedule, size=7)


class OneWalk(torch.autograd.Function):
    """Keeps its gradient and scales it in place, as fused losses do: a second walk scales once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.ones_like(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.kept.mul_(grads[0])
        return ctx.kept.clone()


one_walk: Any = OneWalk.apply


def test_backwards_that_serve_for_one_walk_are_refused_in_several() -> None:
    net: list[nn.Module] = [Between(one_walk), Between(one_walk), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected = plain(net, x, y)
    pipe = nwise.Pipeline(net, heads(net), strategy="end-to-end")
    pipe.step(x, target=y)
    assert_same({k: v for k, v in gradients(pipe).items() if "stages" in k}, expected, 1e-12)
    pipe.strategy = nwise.strategy("2-wise-mean")
    pipe.zero_grad()
    with pytest.raises(ValueError, match="Stage 1 should give the same gradients each time"):
        pipe.step(x, target=y)
    assert all(p.grad is None for p in pipe.parameters())


WORKSPACE = torch.zeros(64, dtype=torch.float64)


class Workspace(torch.autograd.Function):
    """A product whose backward returns a part of a workspace, over which its next call writes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return WORKSPACE[: x.numel()].view(x.shape).copy_(grads[0] @ w.T), x.T @ grads[0]


class Worked(nn.Module):
    def __init__(self, outputs: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, Workspace.apply(x, self.weight))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("strategy", "schedule"), ORDERS)
def test_backwards_may_reuse_the_memory_of_their_result(strategy: str, schedule: str) -> None:
    """Regression: the gradient that went to the stage before, or from a head, was overwritten; 8 % off after three steps."""
    assert_right(
        lambda: [*(nn.Sequential(Worked(), nn.Tanh()) for _ in range(3)), Worked(3)],
        strategy,
        schedule,
        sides=lambda net: [Worked(3) for _ in net[1:]],
    )


class Reversed(torch.autograd.Function):
    """Computes its layer again in the backward, which adds to gradients itself, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.x, ctx.layer = x.detach(), layer
        with torch.no_grad():
            return cast(Tensor, layer(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            ctx.layer(x).backward(grads[0])
        return x.grad, None


class Accumulated(torch.autograd.Function):
    """Adds the gradient of its weight to an attribute of that, as fused accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        w.main_grad += grads[0].T @ x
        return grads[0] @ w, None


class SideGradients(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, WIDTH, bias=False)
        setattr(self.layer.weight, "main_grad", torch.zeros(WIDTH, WIDTH))  # noqa: B010 - unknown to the types

    def forward(self, x: Tensor) -> Tensor:
        function: Any = Reversed.apply if self.kind == "reversible" else Accumulated.apply
        return cast(Tensor, function(x, self.layer if self.kind == "reversible" else self.layer.weight))


@pytest.mark.parametrize("kind", ["reversible", "accumulated"])
def test_backwards_that_add_to_gradients_themselves_serve_for_one_pass(kind: str) -> None:
    """Regression: with two passes they added twice, and the gradients of I counted as well; silently."""
    middle, (x, y) = SideGradients(kind), batch()
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, 3)]
    expected = plain([net[0], middle.layer, net[2]], x, y)["stages.1.weight"]
    weight: Any = middle.layer.weight
    for delay in ("", "-delay-1"):
        pipe = nwise.Pipeline(net, strategy=f"end-to-end{delay}", num_microbatches=2)
        pipe.step(x, target=y)
        pipe.drain()
        torch.testing.assert_close(weight.grad if kind == "reversible" else weight.main_grad, expected)
        pipe.zero_grad()
        weight.main_grad.zero_()
    pipe = nwise.Pipeline(net, heads(net), strategy="2-wise")
    with pytest.raises(ValueError, match=r"Stage 1 should return its gradients to autograd, because .* more than once"):
        pipe.step(x, target=y)


def test_backwards_that_cannot_run_again_are_refused() -> None:
    """Regression: the error of a second run, with zeros, was that of the user's own code."""
    stack: list[Tensor] = []

    class Popped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if ctx.needs_input_grad[0]:
                stack.append(x.detach())
            return x.square()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return 2 * stack.pop() * grads[0]

    net, (x, y) = [Between(Popped.apply), nn.Linear(WIDTH, 3)], batch()
    expected = plain(net, x, y)
    pipe = nwise.Pipeline(net, strategy="end-to-end")
    pipe.step(x, target=y)
    assert_same(gradients(pipe), expected, 1e-12)
    pipe.num_microbatches = 2
    with pytest.raises(
        ValueError, match=r"Stage 0 should have a backward that can run .* \(IndexError: pop from empty"
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize(("strategy", "earlier"), [("end-to-end", 0), ("2-wise", 0), ("2-wise-delay-1", 2)])
def test_hooks_that_remove_themselves_serve_for_one_walk(strategy: str, earlier: int) -> None:
    """Regression: the second walk of a deep equilibrium model went past the hook that the first one had removed, silently."""

    class Halving(nn.Linear):
        handle: Any = None

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            if h.requires_grad:
                self.handle = h.register_hook(self.halve)
            return h.tanh()

        def halve(self, g: Tensor) -> Tensor:
            self.handle.remove()
            return g / 2

    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            return ((h + h.detach()) / 2).tanh()

    net: list[nn.Module] = [Halving(WIDTH, WIDTH), Halving(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    pipe, (x, y) = nwise.Pipeline(net, heads(net), strategy=strategy), batch()
    if strategy == "end-to-end":
        twin = [Halved(WIDTH, WIDTH), Halved(WIDTH, WIDTH), net[2]]
        for mine, other in zip(net[:2], twin[:2], strict=True):
            other.load_state_dict(mine.state_dict())
        pipe.step(x, target=y)
        found = {k: v for k, v in gradients(pipe).items() if k.startswith("stages")}
        assert_same(found, plain(twin, x, y), 1e-12)
        return
    for _ in range(earlier):
        pipe.step(x, target=y)
    with pytest.raises(ValueError, match=r"Stage 1 should keep the hooks of its hidden tensors until the last walk"):
        pipe.step(x, target=y)


# Losses inside a stage --------------------------------------------------------------------------------------


class Injecting(torch.autograd.Function):
    """What users write instead of `nwise.inject`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, aux: Tensor) -> Tensor:
        ctx.like = aux
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], torch.ones_like(ctx.like)


injecting: Any = Injecting.apply


class Balanced(nn.Module):
    """A layer with an auxiliary loss, injected where it arises."""

    def __init__(self, out: int, inject: Callable[[Tensor, Tensor], Tensor], *, reruns: bool = False) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(WIDTH, out), nn.Linear(WIDTH, 2)
        self.inject, self.reruns = inject, reruns

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.whole, x, use_reentrant=False) if self.reruns else self.whole(x)

    def whole(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.inject(h, 0.1 * h.square().mean() + self.router(x).square().mean())


@pytest.mark.parametrize(("inject", "reruns"), [(nwise.inject, False), (nwise.inject, True), (injecting, True)])
@pytest.mark.parametrize(
    ("strategy", "schedule"), [*ORDERS, ("geometric-0.5", "depth-first"), ("local", "depth-first")]
)
def test_losses_inside_stages_count_once(inject: Any, strategy: str, schedule: str, *, reruns: bool) -> None:
    """Regression: an injected gradient counted once for each micro-batch and each pass, not with the weight of its loss.

    In the first step the third micro-batch counted too much, because it came before the first walk.
    """
    net: list[nn.Module] = [Balanced(WIDTH, inject, reruns=reruns), Balanced(WIDTH, inject), Balanced(3, inject)]
    sides: Any = [Balanced(3, inject), nn.Linear(WIDTH, 3)] if strategy != "end-to-end" else None
    x, y = batch(6)
    expected = nwise.reference_grads(net, sides, functional.cross_entropy, x, y, nwise.strategy(strategy).credit(3))
    for num_microbatches in (1, 4):
        pipe = nwise.Pipeline(net, sides, strategy=strategy, num_microbatches=num_microbatches, schedule=schedule)
        assert_steps(pipe, expected, x, y)


@pytest.mark.parametrize("schedule", ["depth-first", "zb-h1"])
@pytest.mark.parametrize("inject", [nwise.inject, injecting])
def test_auxiliary_losses_count_by_samples(inject: Any, schedule: str) -> None:
    """Regression: they counted by the targets that are not ignored, and not at all where all are."""
    net: list[nn.Module] = [Balanced(WIDTH, inject), Balanced(3, inject)]
    x, _ = batch(6)
    y = torch.tensor([-100, -100, -100, 1, 0, -100])
    expected = plain(net, x, y)
    for num_microbatches in (1, 2, 3, 4):
        pipe = nwise.Pipeline(net, strategy="end-to-end", num_microbatches=num_microbatches, schedule=schedule)
        assert_steps(pipe, expected, x, y)


def test_inject_equals_a_sum_of_losses() -> None:
    """Worked out by hand: y = w x, aux = w, loss = y."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return nwise.inject(self.w * x, 5 * self.w)

    stages = [Stage(), Stage()]
    pipe = nwise.Pipeline(stages, None, lambda output, target: output.mean(), "end-to-end", 2)
    pipe.step(torch.tensor([[1.0], [3.0], [5.0]]))
    # d/dw of w0 w1 mean(x) + 5 w1 + 5 w0 at w = 2, mean(x) = 3
    assert [float(stage.w.grad) for stage in stages if stage.w.grad is not None] == [11.0, 11.0]


@torch.library.custom_op("checked::balance", mutates_args=())
def balance(x: Tensor, coefficient: float) -> Tensor:
    return x.clone()


balance.register_autograd(
    lambda ctx, g: (g + ctx.coefficient, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "coefficient", inputs[1]),
)


@pytest.mark.parametrize(
    ("schedule", "begins", "checks"),
    [
        ("depth-first", 9, "first"),
        ("zb-h1", 9, "first"),
        ("zero-bubble", 9, "first"),
        ("1f1b", 1, "always"),
    ],
)
@pytest.mark.parametrize("add", [lambda y, aux, c: injecting(y, c * aux), lambda y, aux, c: balance(y, c / len(y))])
def test_losses_that_begin_late_are_found_at_once(add: Any, schedule: str, begins: int, checks: str) -> None:
    """Regression: a coefficient that grew from zero was looked for in steps 1, 2, 4, 8, ... only.

    The function of a custom operation is made inside torch, and counted as torch's own.
    """
    coefficient = 0.0

    def inject(y: Tensor, aux: Tensor) -> Tensor:
        return add(y, aux, coefficient)

    net: list[nn.Module] = [Balanced(WIDTH, inject), Balanced(WIDTH, inject), Balanced(3, inject)]
    x, y = batch(6)
    pipe = nwise.Pipeline(net, strategy="end-to-end", num_microbatches=3, schedule=schedule, checks=checks)
    for step in range(begins + 3):
        coefficient = max(0.0, step - begins + 1.0)
        pipe.zero_grad()
        expected = plain(net, x, y)
        pipe.step(x, target=y)
        assert_same(gradients(pipe), expected, 1e-12)


class Adding(nn.Linear):
    """A layer whose hook adds to the gradient of its output."""

    how = "tensor"

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if h.requires_grad and self.how == "tensor":
            h.register_hook(lambda g: g + 0.1)
        elif h.grad_fn is not None and self.how == "node":
            h.grad_fn.register_prehook(lambda gs: tuple(g + 0.1 for g in gs))
        return h.tanh()


@pytest.mark.parametrize("how", ["tensor", "node", "module"])
@pytest.mark.parametrize("place", ["stage", "head"])
def test_hooks_that_add_a_gradient_are_right_or_refused(how: str, place: str) -> None:
    """Regression: they added once for each micro-batch and pass, in silence."""
    x, y = batch()
    for strategy, num_microbatches in (("end-to-end", 1), ("end-to-end", 3), ("deep-supervision", 1)):
        net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
        net[1 if place == "stage" else 2] = layer = Adding(WIDTH, WIDTH if place == "stage" else 3)
        layer.how = how
        if how == "module":
            layer.register_full_backward_hook(lambda _, inputs, __: tuple(g + 0.1 for g in cast(Any, inputs)))
        sides = heads(net) if strategy != "end-to-end" else None
        pipe = nwise.Pipeline(net, sides, strategy=strategy, num_microbatches=num_microbatches)
        expected = nwise.reference_grads(net, sides, functional.cross_entropy, x, y, pipe.credit)
        if num_microbatches == 1 and (strategy == "end-to-end" or place == "head"):
            pipe.step(x, target=y)
            assert_same(gradients(pipe), expected, 1e-12)
        else:
            with pytest.raises(
                ValueError, match="Stage . should have no hooks of hidden tensors that add to a gradient"
            ):
                pipe.step(x, target=y)
            assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize("how", ["tensor", "module"])
@pytest.mark.parametrize("beside", ["", "function"])
def test_hooks_that_look_on_see_each_gradient_once(how: str, beside: str) -> None:
    """Regression: in the graphs that were looked through, they got a zero gradient too, so their statistics were wrong."""
    seen: list[float] = []

    def noted(h: Tensor) -> Tensor:
        if h.requires_grad and how == "tensor":
            h.register_hook(lambda g: seen.append(float(g.norm())))
        return scaled(h, layer.bias) if beside else h.tanh()

    x, y = batch()
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), layer := Between(noted), nn.Linear(WIDTH, 3)]
    if how == "module":
        layer.register_full_backward_hook(lambda _, __, outputs: seen.append(float(cast(Any, outputs)[0].norm())))
    pipe = nwise.Pipeline(net, None, strategy="end-to-end", num_microbatches=2)
    for _ in range(5):
        pipe.step(x, target=y)
    stepped, seen = seen, []
    twin = nn.Sequential(*net)
    for part in (slice(0, 4), slice(4, 8)):
        (functional.cross_entropy(twin(x[part]), y[part]) / 2).backward()
    assert stepped == pytest.approx(5 * seen)


@pytest.mark.parametrize("write", [lambda g: g.mul_(3), lambda g: g + 0.1])
@pytest.mark.parametrize(("place", "strategy"), [("stage", "end-to-end"), ("head", "deep-supervision")])
def test_hooks_that_begin_later(write: Callable[[Tensor], Tensor], place: str, strategy: str) -> None:
    """Regression: until the next look, one that wrote in place ran twice on a kept cotangent; one that added was overlooked."""
    begins = False

    def hooked(h: Tensor) -> Tensor:
        if begins and h.requires_grad:
            h.register_hook(write)
        return h.tanh()

    late = Between(hooked, 3 if place == "head" else WIDTH)
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), late if place == "stage" else nn.Tanh(), nn.Linear(WIDTH, 3)]
    sides = None if place == "stage" else [late, nn.Linear(WIDTH, 3)]
    pipe = nwise.Pipeline(net, sides, strategy=strategy, schedule="zero-bubble", num_microbatches=2)
    x, y = batch()
    for step in range(6):
        begins = step >= 4
        pipe.zero_grad()
        if begins and write(torch.zeros(1)):  # it adds
            with pytest.raises(ValueError, match="no hooks of hidden tensors that add to a gradient"):
                pipe.step(x, target=y)
            return
        expected = nwise.reference_grads(net, sides, functional.cross_entropy, x, y, pipe.credit)
        pipe.step(x, target=y)
        assert_same(gradients(pipe), expected, 1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_buffer_that_a_backward_moves_rests_in_walks_that_only_look(*, sparse: bool) -> None:
    """The copy of a sparse buffer was written back to another copy, so it moved four times instead of twice."""

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
            ctx.count = count
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
            ctx.count.add_(torch.eye(2).to_sparse() if sparse else torch.eye(2))
            return gradients[0], None

    counting: Any = Counting.apply
    layer = Between(lambda x: counting(x, count))
    layer.register_buffer("count", count := torch.zeros(2, 2).to_sparse() if sparse else torch.zeros(2, 2))
    pipe = nwise.Pipeline([layer, nn.Linear(WIDTH, 3)], [nn.Linear(WIDTH, 3)], strategy="local", num_microbatches=2)
    x, y = batch()
    pipe.step(x, target=y)
    assert torch.equal(count.to_dense(), 2 * torch.eye(2))


@pytest.mark.parametrize("kind", ["buffer", "tensor", "number"])
def test_functions_whose_backward_keeps_a_state(kind: str) -> None:
    """Regression: the second walk of a graph, with zeros, wrote over the largest gradient that a float8 backward keeps."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
            ctx.layer, ctx.largest = layer, layer.largest
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            g, layer = grads[0], ctx.layer
            scale = 16 / float(layer.largest if kind == "number" else ctx.largest)
            if kind == "number":
                layer.largest = float(g.abs().max())
            else:
                ctx.largest.copy_(g.abs().max())
            return (g * scale).round() / scale, None

    class Float8(nn.Linear):
        largest: Any

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, Scaled.apply(super().forward(x), self))  # type: ignore[no-untyped-call]

    x, y = batch()
    net: list[Any] = [Float8(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    if kind == "buffer":
        net[0].register_buffer("largest", torch.tensor(1.0))
    else:
        net[0].largest = torch.tensor(1.0) if kind == "tensor" else 1.0
    twin = nn.Sequential(*copy.deepcopy(net))
    if kind == "buffer":
        again = nwise.Pipeline(copy.deepcopy(net), None, strategy="end-to-end", recompute=True)
        with pytest.raises(
            ValueError, match="Stage 0 should keep no state in its backward with `recompute`.*Found a buffer"
        ):
            again.step(x, target=y)
    pipe = nwise.Pipeline(net, None, strategy="end-to-end", num_microbatches=2)
    for _ in range(3):
        twin.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (functional.cross_entropy(twin(x[part]), y[part]) / 2).backward()
        pipe.zero_grad()
        pipe.step(x, target=y)
        for p, q in zip(pipe.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it from users
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_losses_in_compiled_blocks_have_their_share(backend: str) -> None:
    """Regression: the compiler traced `nwise.inject`, with the share that it had then, so two micro-batches counted twice."""

    net = [Between(lambda h: nwise.inject(h, h.square().mean())), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected = plain(net, x, y)
    net[0].compile(backend=backend)
    pipe = nwise.Pipeline(net, None, strategy="end-to-end", num_microbatches=2)
    pipe.step(x, target=y)
    assert_same(gradients(pipe), expected, 1e-12)


class Rounding(torch.autograd.Function):
    """Rounds gradients up or down by chance, right in the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0] * 2**20 + torch.rand_like(grads[0])).floor() / 2**20


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_backwards_that_draw_random_numbers(num_microbatches: int) -> None:
    """Regression: one whose graph is walked several times was taken for one that writes over what it saved, and refused."""
    net = [*(Between(Rounding.apply) for _ in range(2)), nn.Linear(WIDTH, 3)]
    sides = heads(net)
    pipe = nwise.Pipeline(net, sides, strategy="2-wise", num_microbatches=num_microbatches)
    assert_defined(pipe, net, sides, tolerance=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_in_a_forward_is_refused(*, recompute: bool) -> None:
    """Regression: gradients of a `backward` in a stage or loss counted once for each micro-batch, without its weight."""

    def with_backward(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.square().mean().backward(retain_graph=True)
        return h

    def eager(output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(output, target)
        loss.backward(retain_graph=True)
        return loss

    x, y = batch()
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), Between(with_backward), nn.Linear(WIDTH, 3)]
    pipe = nwise.Pipeline(net, heads(net), strategy="2-wise", recompute=recompute)
    with pytest.raises(ValueError, match="Stage 1 should leave gradients to `step`. Found a call of `backward`"):
        pipe.step(x, target=y)
    assert all(p.grad is None for p in pipe.parameters())
    net[1] = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ValueError, match="loss of stage 2 should leave gradients to `step`.*`nwise.inject`"):
        nwise.Pipeline(net, None, eager, "end-to-end", recompute=recompute).step(x, target=y)


def test_inject_refuses_what_is_no_loss() -> None:
    with pytest.raises(ValueError, match=r"`aux` should be one floating-point number.*shape \[2\]; take the mean"):
        nwise.inject(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="`checks` should be 'first' or 'always'. Found 'never'"):
        nwise.Pipeline([nn.Linear(1, 1)], strategy="end-to-end", checks="never")


# What autograd would have reached outside -------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("strategy", "schedule"), [("end-to-end", "zero-bubble"), ("2-wise", "depth-first"), ("local", "phase")]
)
def test_gradients_reach_the_input(strategy: str, schedule: str, *, frozen: bool) -> None:
    """Regression: a module before the pipeline got no gradient, without a word. The input learns as the first stage does."""
    front, stages = nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    sides = [nn.Linear(WIDTH, 3)] if strategy != "end-to-end" else None
    stages[0].requires_grad_(not frozen)
    x, y = batch()
    pipe = nwise.Pipeline(stages, sides, strategy=strategy, schedule=schedule, num_microbatches=3)
    whole: list[nn.Module] = [nn.Sequential(front, stages[0]), stages[1]]
    expected = nwise.reference_grads(whole, sides, functional.cross_entropy, x, y, pipe.credit)
    leaf = x.clone().requires_grad_()
    pipe.step(front(leaf), target=y)
    assert front.weight.grad is not None
    torch.testing.assert_close(front.weight.grad, expected["stages.0.0.weight"], rtol=0, atol=1e-12)
    assert leaf.grad is not None
    pipe.step(x, target=y)  # an input without a gradient needs no pass again
    with pytest.raises(ValueError, match="`step` should not require a gradient with a delay"):
        nwise.Pipeline(stages, sides, strategy="end-to-end-delay-1").step(front(x), target=y)


def test_parameters_that_the_graph_reaches_otherwise_are_refused() -> None:
    """Regression: gradients to parameters in a closure, a list, or a penalty of the loss were lost without a word."""
    outer, x, y = nn.Linear(WIDTH, WIDTH), *batch()
    net: list[nn.Module] = [Between(lambda h: outer(h)), nn.Linear(WIDTH, 3)]
    with pytest.raises(ValueError, match=r"Stage 0 should depend only on .* a tensor of shape \[4, 4\] in another way"):
        nwise.Pipeline(net, strategy="end-to-end").step(x, target=y)
    net[0] = first = nn.Linear(WIDTH, WIDTH)

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) + first.weight.square().sum()

    with pytest.raises(ValueError, match="The head or loss of stage 1 should depend only on"):
        nwise.Pipeline(net, None, penalised, "end-to-end").step(x, target=y)

    class Slope(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
            return functional.cross_entropy(output, target) + slope.square().mean()

    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="not have been used in the graph") as error:
        nwise.Pipeline(net, None, Slope(), "end-to-end").step(leaf, target=y)
    assert any("the graph of a loss begins at its stage" in note for note in error.value.__notes__)


@pytest.mark.parametrize("setting", [{}, {"num_microbatches": 2, "recompute": True}])
@pytest.mark.parametrize("how", ["returned", "kept", "checkpointed"])
def test_outputs_of_frozen_layers_may_require_gradients(how: str, setting: dict[str, Any]) -> None:
    """Regression: `enable_input_require_grads` of PEFT made a new leaf, which was refused where anything else referred to it."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.table.requires_grad_(False).register_forward_hook(lambda _, __, y: y.requires_grad_(True))

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            h = self.table(x)
            y = checkpoint(self.layer, h, use_reentrant=False) if how == "checkpointed" else self.layer(h)
            if how == "kept":
                self.last = h
            return (y, h) if how == "returned" else y

    class Last(nn.Linear):
        def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
            return super().forward(x if h is None else x + h)

    net: list[nn.Module] = [Frozen(), Last(WIDTH, 3)]
    x, y = torch.randint(9, (6,)), torch.randint(3, (6,))
    assert_defined(nwise.Pipeline(net, strategy="end-to-end", **setting), net, None, (x, y))


@pytest.mark.parametrize(("strategy", "schedule"), ORDERS)
def test_stages_may_differentiate_inside(strategy: str, schedule: str) -> None:
    """Regression: a force, the gradient of an energy by a new leaf, was refused as a use of a tensor from outside."""

    class Force(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                place = x.detach().requires_grad_()
                energy = super().forward(place).tanh().sum()
                (force,) = torch.autograd.grad(energy, place, create_graph=True)
            return x + force

    assert_right(lambda: [Force(WIDTH, WIDTH), Force(WIDTH, WIDTH), nn.Linear(WIDTH, 3)], strategy, schedule)


def test_states_with_a_graph_are_named() -> None:
    """A hidden state that is not detached leads back into the graph of the step before, which is freed."""

    class Recurrent(nn.Linear):
        state: Tensor | float = 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x) + self.state
            self.state = h.mean(0)
            return h

    x, y = batch()
    for place in (0, 1):
        net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
        net.insert(place, Recurrent(WIDTH, WIDTH))
        pipe = nwise.Pipeline(net, strategy="end-to-end")
        pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match="a second time") as error:
            pipe.step(x, target=y)
        assert f"nwise: stage {place} may keep a tensor with its graph, such as a hidden state; detach it" in (
            error.value.__notes__
        )


def test_backward_of_returned_losses_says_what_to_do() -> None:
    """Regression: torch's error named an element 0 that does not require grad."""
    x, y = batch()
    losses = nwise.Pipeline([nn.Linear(WIDTH, 3)], strategy="end-to-end").step(x, target=y)
    scaled = torch.amp.GradScaler("cpu").scale(losses.last)
    for loss in (losses, losses.last, losses[0] / 2, losses.sum(), losses.mean(), torch.mean(losses), scaled):
        with pytest.raises(
            RuntimeError, match=r"should not be differentiated again, because `step` has filled `.grad`"
        ):
            loss.backward()
    penalty = torch.ones((), requires_grad=True)
    (losses.last + 2 * penalty).backward()  # of other terms only
    assert penalty.grad == 2
    assert type(copy.deepcopy(losses.last)) is type(pickle.loads(pickle.dumps(losses.last))) is Tensor
    assert f"{losses.last:.3f}" == f"{float(losses[0]):.3f}"


def test_means_of_losses_are_equal() -> None:
    """Regression: `losses.mean()` left out the losses that did not run, and `torch.mean` was nan."""
    losses = nwise.losses.Losses(torch.tensor([torch.nan, 0.5, 1.5]), ran=[1, 2])
    for mean in (
        losses.mean(),
        losses.mean(dim=0),
        torch.mean(losses),
        torch.mean(losses, 0),
        torch.mean(input=losses),
    ):
        assert mean == 1
    assert torch.mean(losses, 0, keepdim=True).shape == (1,)
    assert losses.sum().isnan()


# A rerun that is not the first run --------------------------------------------------------------------------


class Moody(nn.Module):
    """Skips its layer or not, as something tells it."""

    def __init__(self, draw: Callable[[Moody], bool]) -> None:
        super().__init__()
        self.layer, self.draw, self.number = nn.Linear(WIDTH, WIDTH), draw, 0
        self.calls, self.list, self.set, self.deque = Tally(), list[None](), set[int](), deque([0], maxlen=1)
        self.own, self.python = torch.Generator().manual_seed(3), random.Random(3)
        self.numpy, self.old = np.random.default_rng(3), np.random.RandomState(3)
        self.system = random.SystemRandom()  # has no state
        self.nested: dict[str, Any] = {"list": [torch.Generator().manual_seed(3)], "tuple": (random.Random(3),)}
        self.plain = SimpleNamespace(own=torch.Generator().manual_seed(3))

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.calls.count += 1
        self.list.append(None)
        self.set.add(len(self.set))
        self.deque.append(self.deque[0] + 1)
        return x + self.layer(x).tanh() if self.draw(self) else x + 0 * self.layer(x)


RESTORED: dict[str, Callable[[Moody], bool]] = {
    "torch": lambda _: bool(torch.rand(()) < 0.5),
    "python": lambda _: random.random() < 0.5,
    "numpy": lambda _: bool(np.random.rand() < 0.5),  # noqa: NPY002
    "a generator of torch": lambda m: bool(torch.rand((), generator=m.own) < 0.5),
    "a generator of Python": lambda m: m.python.random() < 0.5,
    "a generator of NumPy": lambda m: bool(m.numpy.random() < 0.5),
    "an old generator of NumPy": lambda m: bool(m.old.rand() < 0.5),
    "a generator in a list in a dictionary": lambda m: bool(torch.rand((), generator=m.nested["list"][0]) < 0.5),
    "a generator in a tuple in a dictionary": lambda m: m.nested["tuple"][0].random() < 0.5,
    "a number": lambda m: m.number % 3 == 0,
    "a list": lambda m: len(m.list) % 3 == 0,
    "a set": lambda m: len(m.set) % 3 == 0,
    "a deque": lambda m: m.deque[0] % 3 == 0,
    "a generator of a plain object": lambda m: bool(torch.rand((), generator=m.plain.own) < 0.5),
}


@pytest.mark.parametrize("source", RESTORED)
def test_reruns_find_the_random_numbers_of_the_first_run(source: str) -> None:
    """Regression: with `recompute` the second run drew other numbers, and its gradients belonged to another network.

    With a generator in a list or in an object, an equal forward was refused.
    """
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        net: list[nn.Module] = [*(Moody(RESTORED[source]) for _ in range(3)), nn.Linear(WIDTH, 3)]
        pipe = nwise.Pipeline(net, heads(net), strategy="2-wise-mean", recompute=recompute, seed=0)
        for _ in range(4):
            pipe.step(*batch()[:1], target=torch.zeros(8, dtype=torch.long))
        found.append(gradients(pipe))
    assert_same(found[1], found[0], 0.0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_reruns_that_differ_are_refused(*, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        net: list[nn.Module] = [Moody(lambda m: m.calls.count % 2 == 1), nn.Linear(WIDTH, 3)]
        pipe = nwise.Pipeline(net, heads(net), strategy="2-wise", recompute=True)
        x, y = batch()
        with pytest.raises(
            ValueError, match="Stage 0 should compute the same when it runs again.*Found another output"
        ):
            pipe.step(x, target=y)
        assert all(p.grad is None for p in net[0].parameters())
    finally:
        torch.use_deterministic_algorithms(False)


def test_reruns_are_compared_always_if_asked() -> None:
    """A module that changes later is found with checks="always"; otherwise each shape is compared, and reruns 1, 2, 4, 8, ..."""
    x, y = batch()
    for checks in ("first", "always"):
        net: list[nn.Module] = [Moody(lambda m: m.calls.count < 10), nn.Linear(WIDTH, 3)]
        pipe = nwise.Pipeline(net, heads(net), strategy="2-wise", recompute=True, checks=checks)
        with pytest.raises(ValueError, match="compute the same") if checks == "always" else warnings.catch_warnings():
            for _ in range(6):
                pipe.step(x, target=y)


def test_reruns_that_begin_to_differ_are_refused() -> None:
    """Regression: a warm-up counter in the forward, which changed nothing at first, was never noticed."""
    net: list[nn.Module] = [Moody(lambda m: m.calls.count < 16), nn.Linear(WIDTH, 3)]
    pipe = nwise.Pipeline(net, heads(net), strategy="2-wise", recompute=True)
    x, y = batch()
    for _ in range(7):
        pipe.step(x, target=y)
    with pytest.raises(ValueError, match="Stage 0 should compute the same when it runs again"):
        pipe.step(x, target=y)


class Once(torch.autograd.Function):
    """Frees what it has kept, as fused kernels do, and divides by the norm of its cotangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.detach()
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        assert g.any(), "a cotangent of zeros"
        kept, ctx.kept = ctx.kept, None
        result: Tensor = g * (1 - kept.tanh() ** 2)
        return result


def test_the_only_walk_of_a_graph_is_not_repeated() -> None:
    """Regression: the first graph was walked again with zeros, though one micro-batch adds in full what it adds."""
    net: list[nn.Module] = [Between(Once.apply), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected = plain(net, x, y)
    pipe = nwise.Pipeline(net, strategy="end-to-end")
    pipe.step(x, target=y)
    assert_same(gradients(pipe), expected, 1e-12)


class Odd(nn.Module):
    """Returns another layout, or a second output without values."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


class Dense(nn.Linear):
    """Takes any layout."""

    def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        return super().forward(x if x.layout is torch.strided else x.to_dense())


@pytest.mark.parametrize("setting", [{"recompute": True}, {"schedule": "zero-bubble"}], ids=str)
@pytest.mark.parametrize("function", [Tensor.to_sparse, lambda y: (y, y.to("meta"))], ids=["sparse", "meta"])
def test_sparse_outputs_and_outputs_without_values_are_right(function: Any, setting: dict[str, Any]) -> None:
    """Regression: the comparison of reruns, and the look for shared memory, knew dense tensors only."""
    torch.manual_seed(0)
    net: list[nn.Module] = [Odd(function), Dense(WIDTH, 3)]
    sides: list[nn.Module] = [Dense(WIDTH, 3)]
    assert_defined(nwise.Pipeline(net, sides, strategy="2-wise-mean", **setting), net, sides, tolerance=1e-5)


def test_nested_outputs_are_refused_with_recompute() -> None:
    """Regression: torch's words about shapes with unknown numbers."""
    net: list[nn.Module] = [Odd(lambda y: torch.nested.as_nested_tensor([y], layout=torch.jagged)), nn.Identity()]
    pipe = nwise.Pipeline(net, None, lambda y, _: y.values().mean(), "end-to-end", recompute=True)
    with pytest.raises(ValueError, match="Stage 0 should return no nested tensor with `recompute`.*Found one; return"):
        pipe.step(batch()[0])


# Hooks and memory of gradients ------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"strategy": "end-to-end"},
    {"strategy": "end-to-end", "num_microbatches": 3},
    {"strategy": "end-to-end", "schedule": "zero-bubble"},
    {"strategy": "end-to-end", "recompute": True, "num_microbatches": 2},
    {"strategy": "end-to-end-delay-1"},
    {"strategy": "end-to-end-hogwild", "num_microbatches": 2},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_hooks_of_parameters_run_once_on_the_whole_gradient(setting: dict[str, Any]) -> None:
    """Regression: hooks ran for every micro-batch, and not at all under a delay. These are not linear."""
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected = {name: g / g.norm() for name, g in plain(net, x, y).items()}
    seen: list[Tensor] = []
    for stage in net:
        for p in stage.parameters():
            p.register_hook(lambda g: g / g.norm())
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    pipe = nwise.Pipeline(net, **setting)
    for _ in range(4):
        pipe.zero_grad()
        seen.clear()
        pipe.step(x, target=y)
    assert_same(gradients(pipe), expected, 1e-12)
    assert len(seen) == 6
    functional.cross_entropy(net[2](net[1](net[0](x))), y).backward()
    assert len(seen) == 12  # the hooks are still there


def test_hooks_on_several_parameters_run() -> None:
    """Regression: such a hook asks autograd where it is, and failed outside a backward."""
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected = plain(net, x, y)
    seen: list[int] = []
    register_multi_grad_hook(list(net[0].parameters()), lambda given: seen.append(len(given)))
    pipe = nwise.Pipeline(net, num_microbatches=2)
    pipe.step(x, target=y)
    assert seen == [2]
    assert_same(gradients(pipe), expected, 1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_hooks_of_the_nodes_of_parameters_run_once(setting: dict[str, Any]) -> None:
    """Regression: such hooks ran for every micro-batch and never under a delay, so a second memory of gradients stayed empty."""
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected = plain(net, x, y)
    nodes, main, calls = [], {}, []

    def move(p: Tensor) -> None:
        assert p.grad is not None
        calls.append(p)
        main[p] = p.grad * p.grad.norm()  # not linear
        p.grad = None

    for p in nn.ModuleList(net).parameters():
        nodes.append(get_gradient_edge(p).node)
        nodes[-1].register_hook(lambda *_, p=p: move(p))
    pipe = nwise.Pipeline(net, **setting)
    for _ in range(4):
        calls.clear()
        pipe.step(x, target=y)
    assert len(calls) == 6
    got = {name: main[p] for name, p in pipe.named_parameters()}
    assert_same(got, {name: g * g.norm() for name, g in expected.items()}, 1e-12)
    functional.cross_entropy(copy.deepcopy(pipe).stages[0](x)[:, :3], y).backward()  # a copy has no hooks


def test_pipelines_in_turn_do_not_make_each_other_look_for_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the look of each put hooks on, so the other saw a new number of hooks, and looked in every step."""
    pipes = [nwise.Pipeline(linears(2), strategy="end-to-end") for _ in range(2)]
    looked: list[Any] = []
    x, y = batch()

    def look(node: Any) -> list[Any]:
        looked.append(node)
        return []

    def step() -> None:
        for pipe in pipes:
            pipe.step(x, target=y)

    for _ in range(16):
        step()
    monkeypatch.setattr("nwise.stage.hooks.node_hooks", look)
    step()
    assert not looked
    pipes[1].stages[1].weight.register_hook(lambda g: g)  # type: ignore[operator]
    step()
    assert looked


def test_hooks_of_nodes_that_are_put_on_late_run_once() -> None:
    """Regression: put on after five steps, they ran for every micro-batch until step 8."""
    net = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    pipe, calls = nwise.Pipeline(net, None, strategy="end-to-end", num_microbatches=2), []
    x, y = batch()
    for _ in range(5):
        pipe.step(x, target=y)
    node = get_gradient_edge(net[0].weight).node
    node.register_hook(lambda *_: calls.append(net[0].weight.grad))
    pipe.step(x, target=y)
    assert len(calls) == 1


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_optimizers_inside_the_backward_update_once(setting: dict[str, Any]) -> None:
    """Regression: torch's own optimizer in hooks of nodes updated between micro-batches, and never under a delay."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns of TorchScript
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    twin = copy.deepcopy(net)
    x, y = batch()
    pipe, other = nwise.Pipeline(net, **setting), nwise.Pipeline(twin, **setting)
    _apply_optimizer_in_backward(torch.optim.SGD, nn.ModuleList(net).parameters(), {"lr": 0.5})
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    for _ in range(5):
        pipe.step(x, target=y)
        assert all(p.grad is None for p in pipe.parameters())
        other.zero_grad()
        other.step(x, target=y)
        optimizer.step()
    for mine, p in zip(pipe.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_updates_in_hooks_happen_once_with_the_mean_gradient(num_microbatches: int) -> None:
    """Regression: an optimizer in post-accumulate hooks updated after every micro-batch, between forwards and passes."""
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    twin = copy.deepcopy(net)
    x, y = batch()

    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(0.5 * cast(Tensor, p.grad))
        p.grad = None

    for p in nn.ModuleList(net).parameters():
        p.register_post_accumulate_grad_hook(update)
    pipe = nwise.Pipeline(net, strategy="end-to-end", num_microbatches=num_microbatches)
    for _ in range(3):
        pipe.step(x, target=y)
        functional.cross_entropy(twin[1](twin[0](x)), y).backward()
        torch.optim.SGD(nn.ModuleList(twin).parameters(), 0.5).step()
        nn.ModuleList(twin).zero_grad()
    for mine, other in zip(nn.ModuleList(net).parameters(), nn.ModuleList(twin).parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_gradients_stay_in_their_memory(setting: dict[str, Any]) -> None:
    """Regression: under a delay `.grad` became another tensor, and a flat buffer of gradients stayed zero."""
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected = plain(net, x, y)
    parameters = list(nn.ModuleList(net).parameters())
    flat, start = torch.zeros(sum(p.numel() for p in parameters)), 0
    for hooked, p in enumerate(parameters):
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
        if hooked % 2:
            p.register_hook(lambda g: None)
    pipe = nwise.Pipeline(net, **setting)
    for _ in range(4):
        flat.zero_()
        pipe.step(x, target=y)
    whole = torch.cat([expected[f"stages.{k}.{name}"].flatten() for k in (0, 1) for name in ("weight", "bias")])
    torch.testing.assert_close(flat, whole, rtol=0, atol=1e-12)


# Weights written from elsewhere while gradients are due -----------------------------------------------------


def write(how: str, model: nn.Sequential, stages: Stages, state: dict[str, Tensor] | None = None) -> None:
    state = state or {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    if how in ("load", "assign"):
        model.load_state_dict(state, assign=how == "assign")
    elif how == "stage":
        for stage in stages:
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    elif how == "data":
        for name, p in model.named_parameters():
            p.data = state[name]
    else:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(state[name])


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("how", ["load", "assign", "stage", "copy", "data"])
def test_weights_written_while_gradients_are_due_drop_them(how: str, optimizer: Any) -> None:
    """Regression: after `model.load_state_dict` the next update applied a gradient of the weights before it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    stages = nwise.split(model, at=["2", "3"])
    pipe = nwise.Pipeline(stages, strategy="end-to-end-delay-1")
    update = None if optimizer is None else optimizer(pipe.parameters(), lr=0.1)
    x, y = batch()
    for _ in range(3):
        pipe.step(x, target=y)
        if update is not None:
            update.step()
        pipe.zero_grad()
    write(how, model, stages)
    with pytest.warns(UserWarning, match="lost now because the weights were written outside `optimizer.step"):
        pipe.step(x, target=y)
    assert all(p.grad is None for p in pipe.parameters())
    pipe.step(x, target=y)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("how", ["load", "stage", "copy", "data"])
def test_weights_that_are_swapped_and_restored_keep_due_gradients(how: str) -> None:
    """Regression: averaged weights that were written for an evaluation, and then the present ones, dropped a mini-batch."""
    x, y = batch()
    found = []
    for swaps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        stages = nwise.split(model, at=["2", "3"])
        pipe = nwise.Pipeline(stages, strategy="end-to-end-delay-1")
        update = torch.optim.Adam(pipe.parameters(), lr=0.1)
        for _ in range(4):
            pipe.step(x, target=y)
            update.step()
            pipe.zero_grad()
            if swaps:
                kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                write(how, model, stages)
                pipe(x)
                write(how, model, stages, kept)
        pipe.step(x, target=y)
        found.append(gradients(pipe))
    assert_same(found[1], found[0], 0.0)


@pytest.mark.parametrize("shares", ["layer", "parameter"])
def test_layers_used_twice_keep_their_parameters_under_a_delay(shares: str) -> None:
    """Regression: the stage kept copies as its own parameters, so each step dropped a mini-batch and nothing was trained."""
    inner, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = inner.weight
    net: list[nn.Module] = [nn.Sequential(inner, nn.Tanh(), inner if shares == "layer" else other), nn.Linear(WIDTH, 3)]
    x, y = batch()
    expected, before = plain(net, x, y), [p for stage in net for p in stage.parameters()]
    pipe = nwise.Pipeline(net, strategy="end-to-end-delay-1")
    for _ in range(2):
        pipe.step(x, target=y)
        torch.optim.SGD(pipe.parameters(), lr=0.0).step()
    assert all(p is old for p, old in zip(pipe.parameters(), before, strict=True))
    assert_same(gradients(pipe), expected, 1e-12)


@pytest.mark.parametrize("how", ["clamp", "wide clamp", "normalise", "by hand"])
def test_writes_after_every_update_are_a_part_of_it(how: str) -> None:
    """Regression: weights clipped after each update, as in a WGAN, dropped each mini-batch, so nothing learnt at all.

    By hand, a stage whose gradients came later than those of others counted as loaded."""
    x, y = batch()
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    pipe = nwise.Pipeline(net, strategy="end-to-end-delay-1" if how != "by hand" else "end-to-end-hogwild")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    lost: list[warnings.WarningMessage] = []
    bound = 0.1 if how == "clamp" else 0.6  # of which the latter changes nothing at first
    for _ in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(x, target=y)
        lost += caught
        if how != "by hand":
            optimizer.step()
        with torch.no_grad():
            for p in pipe.parameters():
                if "clamp" in how:
                    p.clamp_(-bound, bound)
                elif how == "normalise":
                    p.div_(p.norm())
                elif p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
        pipe.zero_grad()
    assert len(lost) == (how in ("clamp", "normalise"))
    assert all("write in a hook, `optimizer.register_step_post_hook`" in str(warning.message) for warning in lost)
    pipe.step(x, target=y)
    assert all(p.grad is not None for p in pipe.parameters())
    optimizer.step()
    for _ in range(2):  # as the usual write, and another
        write("copy", nn.Sequential(*net), net)
    with pytest.warns(UserWarning, match="the weights were written outside"):
        pipe.step(x, target=y)


def test_updates_are_not_writes() -> None:
    """Updates by optimizers, by hand, and by an optimizer's own hooks go on as before."""
    x, y = batch()
    for kind in ("optimizer", "projected", "by hand"):
        net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
        pipe = nwise.Pipeline(net, strategy="end-to-end-delay-1")
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

        def project(*_: Any, net: list[nn.Module] = net) -> None:
            with torch.no_grad():
                for p in nn.ModuleList(net).parameters():
                    p.clamp_(-1, 1)

        if kind == "projected":
            optimizer.register_step_post_hook(project)
        for step in range(6):
            pipe.step(x, target=y)
            if kind == "by hand":
                with torch.no_grad():
                    for p in pipe.parameters():
                        if p.grad is not None:
                            p.sub_(0.1 * p.grad)
            else:
                optimizer.step()
            assert step == 0 or all(p.grad is not None for p in pipe.parameters())
            pipe.zero_grad()


def test_updates_inside_a_backward_are_refused() -> None:
    """Regression: a weight that its own backward moves changed between two micro-batches, in silence."""

    class Moving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.w = w
            return x * w.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                ctx.w.sub_(0.1 * (grads[0] * x).sum(0))
            return grads[0] * ctx.w.detach(), None

    moving: Any = Moving.apply

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH))
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return moving(self.layer(x), self.w)

    x, y = batch()
    pipe = nwise.Pipeline([Layer(), nn.Linear(WIDTH, 3)], strategy="end-to-end", num_microbatches=2)
    with pytest.raises(ValueError, match="Stage 0 should leave updates to the time after `step`"):
        pipe.step(x, target=y)


def test_attributes_of_outputs_are_refused() -> None:
    """Regression: the next stage got the values without the attribute, and went another way."""

    def marked(h: Tensor) -> Tensor:
        h.scale = 2.0  # type: ignore[attr-defined]
        return h

    x, y = batch()
    pipe = nwise.Pipeline([Between(marked), nn.Linear(WIDTH, 3)], strategy="end-to-end")
    with pytest.raises(ValueError, match="The output of stage 0 should be plain tensors.*Found an attribute 'scale'"):
        pipe.step(x, target=y)


def test_places_without_a_module_are_passed_over() -> None:
    """A block may keep None where another one has a shortcut; its other modules are found, in torch's order."""
    block = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH, bias=False))
    block.register_module("shortcut", None)
    stage = Stage(0, block, None, functional.cross_entropy, recompute=False)
    assert stage.survey(block, None) == list(block.modules())
    assert [id(p) for p in stage.learns] == [id(p) for p in block.parameters()]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("gradient_is_sparse", [False, True])
@pytest.mark.parametrize("old_is_sparse", [False, True])
def test_sparse_and_dense_gradients_add_up(old_is_sparse: bool, gradient_is_sparse: bool) -> None:
    """Regression: a dense gradient beside a sparse one ended in torch's "add(sparse, dense) is not supported"."""
    old, gradient = torch.eye(3), torch.arange(9.0).view(3, 3)
    parameter = nn.Parameter(torch.zeros(3, 3))
    parameter.grad = old.to_sparse() if old_is_sparse else old.clone()
    add_to_grad(parameter, gradient.to_sparse() if gradient_is_sparse else gradient)
    assert parameter.grad.to_dense().equal(old + gradient)
