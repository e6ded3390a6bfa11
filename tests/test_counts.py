"""The operations that are really done: passes, messages, floating-point operations, memory, order."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import nwise
from nets import three
from nwise.flow import find_flow
from nwise.schedule.actions import Action, Kind
from nwise.stage.graph import add_gradients

# Multiplications and additions of one matrix product of these layers.
WIDTH, BATCH = 6, 4
PRODUCT = 2 * BATCH * WIDTH * WIDTH


def layers(count: int, depth: int = 1) -> list[nn.Module]:
    return [nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))) for _ in range(count)]


def pipeline(strategy: str | nwise.Strategy, num_stages: int, depth: int = 1, m: int = 1) -> nwise.Pipeline:
    stages, heads = layers(num_stages, depth), layers(num_stages - 1)
    # The check of the first step would run more forwards and passes than the step itself, which is counted here.
    return nwise.Pipeline(stages, heads, lambda y, target: y.square().mean(), strategy, m, checks="never")


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    "strategy",
    ["local", "2-wise", "3-wise", "2-wise-mean", "3-wise-mean", "end-to-end", "deep-supervision", "blocks-2"],
)
def test_step_flops_match_formula(strategy: str, depth: int) -> None:
    """Work of a stage: F + r I + (rho - r) lambda I + W, with lambda = (depth - 1) / depth; a head: F, I if needed, W."""
    num_stages = 6
    pipe = pipeline(strategy, num_stages, depth)
    flow = find_flow(pipe.credit)
    products = 0
    for k, stage in enumerate(flow.stages):
        own_chains = stage.passes - len(stage.messages)
        products += depth + len(stage.messages) * depth + own_chains * (depth - 1)
        products += depth if stage.weights is not None else 0
        if stage.head and k < num_stages - 1:
            products += 1 + 1 + stage.own
    with FlopCounterMode(display=False) as counter:
        pipe.step(torch.randn(BATCH, WIDTH))
    assert counter.get_total_flops() == products * PRODUCT


def test_dead_heads_cost_no_flops() -> None:
    flops = []
    for heads in ("live", "all"):
        pipe = pipeline(nwise.NWise(3, heads=heads), 5)
        with FlopCounterMode(display=False) as counter:
            pipe.step(torch.randn(BATCH, WIDTH))
        flops.append(counter.get_total_flops())
    # two dead heads, forward and weight gradient each, no gradient to the stage
    assert flops[1] - flops[0] == 2 * 2 * PRODUCT


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("strategy", ["local", "2-wise", "3-wise", "4-wise-mean", "end-to-end", "deep-supervision"])
def test_backward_calls_and_messages(strategy: str, num_microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pipeline(strategy, 6, m=num_microbatches)
    flow = find_flow(pipe.credit)
    calls: list[list[Tensor]] = []
    freed: list[bool] = []

    def counting(roots: Any, seeds: Any, leaves: Any, *, retain_graph: bool) -> None:
        calls.append(list(leaves))
        freed.append(not retain_graph)
        add_gradients(roots, seeds, leaves, retain_graph=retain_graph)

    monkeypatch.setattr("nwise.stage.stage.add_gradients", counting)
    actions: list[Action] = []
    pipe.on_action = actions.append
    pipe.step(torch.randn(7, WIDTH))

    passes = sum(stage.passes for stage in flow.stages)
    assert len(calls) == num_microbatches * (passes + len(flow.heads))
    # Every graph, of a head or a stage, is freed by its last pass.
    assert sum(freed) == num_microbatches * (6 + len(flow.heads))
    # One gradient message for each I or B, and each crosses one boundary.
    sent = [a for a in actions if a.kind in (Kind.INPUT_GRAD, Kind.BOTH)]
    for k in range(1, 6):
        assert sum(a.stage == k for a in sent) == num_microbatches * flow.messages[k - 1]
    # Each stage's weights are asked for exactly once a micro-batch.
    for stage in pipe.stages:
        weight = next(stage.parameters())
        assert sum(any(t is weight for t in inputs) for inputs in calls) == num_microbatches


class Kept:
    """A saved activation."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Alive(nn.Module):
    """Counts how many stages have saved activations that are alive."""

    alive: set[int] = set()  # noqa: RUF012
    peak = 0

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def pack(self, tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        if tensor.shape == (BATCH // 2, WIDTH):
            Alive.alive.add(self.index)
            weakref.finalize(kept, Alive.alive.discard, self.index)
            Alive.peak = max(Alive.peak, len(Alive.alive))
        return kept

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor):
            return self.linear(torch.sin(x))


@pytest.mark.parametrize(("strategy", "expected"), [("local", 1), ("2-wise", 2), ("3-wise", 3), ("end-to-end", 8)])
def test_n_wise_keeps_the_activations_of_n_stages(strategy: str, expected: int) -> None:
    def loss(y: Tensor, target: Tensor | None) -> Tensor:
        return y.mean() if target is None else (y @ target).mean()

    Alive.alive, Alive.peak = set(), 0
    pipe = nwise.Pipeline([Alive(k) for k in range(8)], layers(7), loss, strategy, 2)
    pipe.step(torch.randn(BATCH, WIDTH))
    assert Alive.peak == expected
    assert not Alive.alive
    with pytest.raises(RuntimeError, match="shape"):
        pipe.step(torch.randn(BATCH, WIDTH), target=torch.randn(BATCH, WIDTH + 1))
    assert not Alive.alive


@pytest.mark.parametrize(("strategy", "expected"), [("local", [False] * 4), ("blocks-2", [False, True, False, True])])
def test_stage_inputs_without_needed_gradient_are_not_tracked(strategy: str, expected: list[bool]) -> None:
    pipe = pipeline(strategy, 4)
    tracked: list[bool] = []
    for stage in pipe.stages:
        stage.register_forward_pre_hook(lambda module, args: tracked.append(args[0].requires_grad))
    pipe.step(torch.randn(BATCH, WIDTH))
    assert tracked == expected


def test_running_statistics_move_once_per_micro_batch() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    head = nn.BatchNorm1d(WIDTH)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm), *layers(2)]
    for recompute in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = nwise.Pipeline(
                stages, [head, nn.Identity()], lambda y, t: y.square().mean(), "2-wise-mean", 3, recompute=recompute
            )
        before = int(norm.num_batches_tracked), int(head.num_batches_tracked)  # type: ignore[arg-type]
        pipe.step(torch.randn(9, WIDTH))
        after = int(norm.num_batches_tracked), int(head.num_batches_tracked)  # type: ignore[arg-type]
        assert (after[0] - before[0], after[1] - before[1]) == (3, 3)


@dataclass
class Masked:
    """A mean over the targets that are there; constant if there are none."""

    scale: float = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        there = ~target.isnan()
        return self.scale * (output - target)[there].square().mean() if there.any() else torch.zeros(())

    def count(self, target: Tensor) -> int:
        return int((~target.isnan()).sum())


def test_loss_of_a_dataclass_that_is_constant_where_nothing_counts() -> None:
    """A micro-batch of weight 0 was refused, and a loss without a hash raised a TypeError."""
    target = torch.randn(4, 2)
    target[2:] = float("nan")
    pipe = nwise.Pipeline([nn.Linear(3, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], Masked(), "local", 2)
    assert torch.isfinite(pipe.step(torch.randn(4, 3), target=target)).all()


def test_loss_without_a_counted_term_has_not_diverged() -> None:
    """With all targets of its micro-batches ignored, a loss was nan, and the warning advised a lower rate."""
    target = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    pipe = three("rotating-2-microbatch", num_microbatches=4)
    target[[0, 1, 4, 5]] = -100
    losses = pipe.step(torch.linspace(-1, 1, 64).view(8, 8), target=target)
    assert losses.isnan().any()
    pipe.num_microbatches = 2  # with a single micro-batch it was 0
    assert pipe.step(torch.ones(8, 8), target=torch.tensor([-100] * 4 + [0] * 4)).isnan().any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in pipe.parameters())
