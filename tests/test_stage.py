"""What a user's own code does inside a stage: a step gives the gradients of one plain `backward`, or a sentence."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nwise
from nets import InPlace
from nwise.schedule.actions import Action
from nwise.stage.graph import add_to_grad
from nwise.stage.stage import Stage
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


@pytest.mark.parametrize("strategy", ["local", "2-wise", "3-wise-mean"])
def test_a_micro_batch_leaves_the_store_after_its_last_pass_and_its_head(strategy: str) -> None:
    """Its tensors can go, while later micro-batches run."""
    net = [nn.Linear(2, 2) for _ in range(3)]
    pipe = nwise.Pipeline(net, [nn.Linear(2, 2) for _ in range(2)], nn.functional.mse_loss, strategy, 3)
    done: list[tuple[tuple[int, int], set[tuple[int, int]]]] = []

    def look(action: Action) -> None:
        tapes = pipe._engine.flying[0].tapes if pipe._engine is not None else {}
        done.append(((action.stage, action.microbatch), {(k, m) for k in tapes for m in tapes[k]}))

    pipe.on_action = look
    pipe.step(torch.randn(6, 2), target=torch.randn(6, 2))
    last = {place: i for i, (place, _) in enumerate(done) if place[1] < 3}
    for place, i in last.items():
        assert [place in there for _, there in done] == [True] * i + [False] * (len(done) - i)


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


# Losses inside a stage --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("inject", "reruns"), [(nwise.inject, False), (nwise.inject, True)])
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
@pytest.mark.parametrize("inject", [nwise.inject])
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


def test_inject_refuses_what_is_no_loss() -> None:
    with pytest.raises(ValueError, match=r"`aux` should be one floating-point number.*shape \[2\]; take the mean"):
        nwise.inject(torch.zeros(2), torch.zeros(2))


# What autograd would have reached outside -------------------------------------------------------------------


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
        assert f"nwise: Stage {place} may keep a tensor with its graph, such as a hidden state; detach it" in (
            error.value.__notes__
        )


# A rerun that is not the first run --------------------------------------------------------------------------


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


def test_places_without_a_module_are_passed_over() -> None:
    """A block may keep None where another one has a shortcut; its other modules are found, in torch's order."""
    block = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH, bias=False))
    block.register_module("shortcut", None)
    stage = Stage(0, block, None, functional.cross_entropy)
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
