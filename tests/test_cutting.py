"""A mini-batch that is cut into micro-batches gives what it gives as a whole, or the guard says that it does not."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from launch import scripted
from test_microbatch import Counted, Do, X, attention, grads, mse, pipeline, plain

pytestmark = pytest.mark.usefixtures("float64")


class Remembers(nn.Module):
    """Counts its forwards, keeps its last result, and has a buffer that moves."""

    def __init__(self, function: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.forwards, self.last = 0, None
        self.total: Tensor
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.last = self.function(self.layer(x))
        self.total += 1
        return self.last  # type: ignore[return-value]


MIXING: dict[str, Callable[[], list[nn.Module]]] = {
    "attention": lambda: [attention(), plain()],
    "attention later": lambda: [plain(), plain(), attention()],
    "recurrence": lambda: [nn.GRU(4, 4), Do(lambda layer, x, h: layer(x))],
    "earlier samples": lambda: [Do(lambda layer, x: layer(x).cumsum(0)), plain()],
    "later samples": lambda: [Do(lambda layer, x: layer(x).flip(0).cumsum(0).flip(0)), plain()],
    "neighbours": lambda: [plain(), Do(lambda layer, x: layer(x) - torch.cat([x[:1], x[:-1]]))],
    "mean": lambda: [plain(), Do(lambda layer, x: layer(x) - x.mean(0))],
    "complex": lambda: [plain(), Do(lambda layer, x: torch.fft.fft(layer(x), dim=0))],
    "pairs": lambda: [plain(), Do(lambda layer, x: layer(x).flatten(1) @ x.flatten(1).T)],
    "loss inside": lambda: [plain(), Do(lambda layer, x: layer(x).square().mean().sqrt())],
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_are_not_computed_alone_are_refused(name: str) -> None:
    """Regression: ``[T, B, C]`` was cut along the sequence, and gradients were off by tens of percent, silently."""
    stages, x = MIXING[name](), torch.randn(4, 4, 4)
    first = Remembers()
    before = copy.deepcopy(first.state_dict())
    pipe = pipeline([first, *stages], lambda output, target: output.abs().square().mean())
    k = len(stages) if name not in ("attention", "recurrence", "earlier samples", "later samples") else 1
    for _ in range(2):  # not only the first time
        with pytest.raises(
            ValueError, match=f"Stage {k} should compute every sample alone, because the 2 micro-batches"
        ):
            pipe.step(x)
    assert (first.forwards, first.last, pipe.steps) == (0, None, 0)
    torch.testing.assert_close(first.state_dict(), before)
    assert all(p.grad is None for p in pipe.parameters())
    pipe.num_microbatches = 1
    pipe.step(x)
    pipe.num_microbatches = 2
    pipe.step(microbatches=[x[:2], x[2:]])  # the caller says that these belong together


def test_message_names_layers_whose_samples_are_in_dimension_1() -> None:
    with pytest.raises(ValueError, match="layers with `batch_first=False` have the samples in dimension 1"):
        pipeline([attention(), plain()]).step(torch.randn(4, 4, 4), target=torch.randn(4, 4, 4))


def test_heads_that_do_not_compute_samples_alone_are_refused() -> None:
    heads = [Do(lambda layer, x: layer(x - x.mean(0)))]
    with pytest.raises(ValueError, match="The head of stage 0 should compute every sample alone"):
        pipeline([plain(), plain()], heads=heads, strategy="local").step(torch.randn(4, 4), target=X)
    pipe = pipeline([plain(), plain()], heads=heads, strategy="end-to-end")
    pipe.step(torch.randn(4, 4), target=X)  # the head does not run yet
    pipe.strategy = "local"
    with pytest.raises(ValueError, match="The head of stage 0 should compute every sample alone"):
        pipe.step(torch.randn(4, 4), target=X)


ALONE: dict[str, Callable[[], list[nn.Module]]] = {
    "random": lambda: [Do(lambda layer, x: functional.dropout(layer(x)))],
    "merged": lambda: [Do(lambda layer, x: layer(x).flatten(0, 1)), Do(lambda layer, x: layer(x).view(-1, 3, 4))],
    "transposed": lambda: [
        Do(lambda layer, x: layer(x).transpose(0, 1)),
        Do(lambda layer, x: layer(x).transpose(0, 1)),
    ],
    "merged across": lambda: [
        Do(lambda layer, x: layer(x).transpose(0, 1).flatten(0, 1)),
        Do(lambda layer, x: layer(x).view(3, -1, 4).transpose(0, 1)),
    ],
    "integers": lambda: [Do(lambda layer, x: (layer(x), x.argmax(-1))), Do(lambda layer, x, best: layer(x))],
    "a statistic beside": lambda: [Do(lambda layer, x: (layer(x), x.std())), Do(lambda layer, x, deviation: layer(x))],
    "state": lambda: [Remembers()],
    "inside attention": lambda: [Do(lambda layer, x: x + layer(x)), Transposing()],
    "minus infinity": lambda: [
        Do(lambda layer, x: (layer(x), x.clone().fill_(-torch.inf))),
        Do(lambda layer, x, m: layer(x)),
    ],
}


class Transposing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = attention()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.transpose(0, 1))
        return y.transpose(0, 1)


@pytest.mark.parametrize("name", ALONE)
def test_other_networks_run_as_they_are(name: str) -> None:
    pipe = pipeline([*ALONE[name](), plain()], m=3)
    pipe.step(torch.randn(5, 3, 4), target=torch.randn(5, 3, 4))


def test_network_is_compared_once_for_each_number_of_micro_batches() -> None:
    calls: list[int] = []

    def watched(layer: nn.Module, x: Tensor) -> Any:
        calls.append(len(x))
        return layer(x)

    pipe = pipeline([Do(watched), plain()], m=1)
    hooked: list[int] = []
    pipe.stages[0].register_forward_pre_hook(lambda _, given: hooked.append(len(given[0])))
    x = torch.randn(6, 4)
    pipe.step(x, target=x)
    assert calls == [6]
    for m, once in ((2, [6, 6, 3, 3]), (3, [6, 6, 2, 2, 2])):
        compared = once + once  # in evaluation and in training mode
        pipe.num_microbatches = m
        for expected in ([*compared, *[6 // m] * m], [6 // m] * m):
            calls.clear()
            hooked.clear()
            pipe.step(x, target=x)
            assert (calls, hooked) == (expected, [6 // m] * m), "hooks do not see the comparison"


def test_samples_that_are_mixed_behind_random_numbers_are_refused() -> None:
    """Regression: a stage whose output is random ended the comparison, and later ones were not looked at."""
    noisy = Do(lambda layer, x: layer(x) + torch.randn_like(x))
    for odd in (noisy, Do(lambda layer, x: layer(x), 4)):
        odd.lock = threading.Lock() if odd is not noisy else None  # type: ignore[assignment]
        pipe = pipeline([odd, plain(), Do(lambda layer, x: layer(x) - x.mean(0))])
        for _ in range(2):  # not only the first time
            with pytest.raises(ValueError, match="Stage 2 should compute every sample alone"):
                pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
        assert pipe.steps == 0
        assert all(p.grad is None for p in pipe.parameters())


def _normalised(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return functional.batch_norm(y, torch.zeros(4), torch.ones(4), training=layer.training)


def test_samples_that_are_mixed_in_training_mode_warn() -> None:
    """Regressions: the comparison ran in evaluation mode, where a batch norm written by hand mixes nothing; and behind a stage
    that cannot be copied, the warning named a line of the library."""
    locked = plain()
    locked.lock = threading.Lock()  # type: ignore[assignment]
    for k, stages in enumerate(([Do(_normalised), plain()], [locked, Do(_normalised)])):
        pipe = pipeline(stages)
        with pytest.warns(UserWarning, match=f"Stage {k} should compute every sample alone in training mode") as found:
            pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
        assert [warning.filename for warning in found] == [__file__]
    for other in (pipeline([nn.BatchNorm1d(4), plain()], m=1), pipe):
        other.step(torch.randn(6, 4), target=torch.randn(6, 4))


def test_losses_over_tokens_warn_under_autocast() -> None:
    """Regression: under autocast a loss could differ by nine per cent without a word; only its own rounding counts."""
    target = torch.randint(1, 64, (4, 16))
    target[0, 2:] = target[1, 3:] = 0

    def over_tokens(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output.float().flatten(0, 1), y.flatten(), ignore_index=0)

    pipe = nwise.Pipeline([nn.Embedding(64, 16), nn.Linear(16, 64)], None, over_tokens, "end-to-end", 2).float()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(UserWarning, match="The loss of stage 1 should be a mean over the samples"),
    ):
        pipe.step(torch.randint(64, (4, 16)), target=target)


class Halves(nn.Module):
    """Changes its weight in every forward, as a module that clips or normalises its weights does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        result: Tensor = self.layer(x)
        return result


def test_comparison_leaves_parameters_that_a_forward_changes() -> None:
    """Regression: the copies shared their parameters with the network, so they halved its weights four times more."""
    first = Halves()
    before = first.layer.weight.detach().clone()
    pipeline([first, plain()]).step(X, target=X)
    torch.testing.assert_close(first.layer.weight.detach(), before / 4)


def test_comparison_leaves_networks_whose_forward_is_a_function() -> None:
    """Regression: a function in place of `forward` ran the network itself, in training mode, and batch norm was refused."""
    first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    forward = first.forward
    first.forward = lambda x: forward(x) * 2  # type: ignore[method-assign, no-untyped-call]
    with pytest.warns(UserWarning, match="With 2 micro-batches, batch norm normalises"):
        pipe = pipeline([first, plain()])
    pipe.step(X, target=X)
    assert first[1].num_batches_tracked == 2


def test_comparison_leaves_random_numbers() -> None:
    """Regression: it drew from Python's and NumPy's generators, and a network with its own generator was refused."""
    own = torch.Generator().manual_seed(5)
    stages = [
        Do(lambda layer, x: layer(x) * random.random() * np.random.rand()),  # noqa: NPY002 - as users draw
        plain(),
    ]
    stages[1].function = Noisy(own)
    left = []
    for m in (1, 2):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        pipeline(stages, m=2).step(X, target=X) if m == 2 else [stages[0](X) for _ in range(2)]
        left.append((random.random(), np.random.rand()))  # noqa: NPY002
    assert left[0] == left[1]
    expected = torch.Generator().manual_seed(5)
    for _ in range(2):
        torch.rand(len(X) // 2, 4, generator=expected)
    assert torch.equal(own.get_state(), expected.get_state())


class Noisy(nn.Module):
    def __init__(self, own: torch.Generator) -> None:
        super().__init__()
        self.own = own

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) + torch.rand(len(x), 4, generator=self.own)


def test_comparison_leaves_warnings_to_the_step() -> None:
    def warns(layer: nn.Module, x: Tensor) -> Any:
        warnings.warn("seen", stacklevel=1)
        return layer(x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline([Do(warns), plain()]).step(X, target=X)
    assert len(caught) == 2, "one for each micro-batch"


def test_data_dependent_starts_are_refused() -> None:
    """Layers that set their parameters from the first batch would set them from the first micro-batch."""

    class Starts(Do):
        started = False

        def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
            if not self.started:
                self.started = True
                self.layer.bias.data.copy_(-inputs[0].mean(0))
            return self.layer(*inputs)

    first = Starts(lambda layer, x: layer(x))
    before = first.layer.bias.detach().clone()
    with pytest.raises(ValueError, match="Stage 0 should compute every sample alone"):
        pipeline([first, plain()]).step(torch.randn(4, 4), target=X)
    assert torch.equal(first.layer.bias, before)


def test_rounding_is_no_difference() -> None:
    rounded = Do(lambda layer, x: layer(x) * (1 + 1e-6 * len(x)))
    pipe = pipeline([rounded, plain()], lambda o, t: o.square().mean() * (1 + 1e-6 * len(o))).float()
    pipe.step(torch.randn(6, 4, dtype=torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        pipe = pipeline([nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), nn.Linear(64, 64)], m=5).to(dtype)
        pipe.step(torch.randn(33, 64, dtype=dtype), target=torch.randn(33, 64, dtype=dtype))
    pipe = pipeline(
        [nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))], lambda o, t: o.square().mean()
    ).float()
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(torch.randn(33, 64, dtype=torch.float32))


def test_batch_norm_without_running_statistics_warns_too() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.warns(UserWarning, match=r"With 2 micro-batches, batch norm normalises by .*\(stages.0\)"):
        pipe = pipeline([norm, plain()])
    pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


def neighbours(output: Tensor, target: Tensor) -> Tensor:
    a, b = output[0::2], output[1::2]
    return functional.cross_entropy(a @ b.T, torch.arange(len(a)))


class Centred(nn.Module):
    """Moves its centre with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - target - self.centre).square().mean()
        self.centre += output.detach().mean(0)
        return loss


class SecondTarget(nn.Module):
    ignore_index = -100  # of another target than the first

    def forward(self, output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(output, target[1])


LABELS = torch.tensor([-100, -100, -100, 1, 2, 3, 0, 1])


OVER_ALL: dict[str, Callable[..., Tensor]] = {
    "neighbours": neighbours,
    "root": lambda output, target: (output - target).square().mean().sqrt(),
    "sum": lambda output, target: (output - target).square().sum() / 8,
    "mask": lambda output, target: (output - target)[target > 0.5].square().mean(),
    "variance": lambda output, target: output.var(),
    "hardest": lambda output, target: (output - target).square().mean(1).topk(2).values.mean(),
    "weights": lambda output, target: functional.cross_entropy(output, target.argmax(1), weight=torch.arange(1.0, 5)),
    "memory": Centred(),
    "wrong count": Counted(lambda output, target: functional.cross_entropy(output, LABELS[: len(output)])),
}


@pytest.mark.parametrize("name", OVER_ALL)
def test_losses_that_the_cut_changes_warn_once(name: str) -> None:
    """Regression: InfoNCE with two micro-batches was another loss, silently."""
    pipe, x, y = pipeline([plain(), plain()], OVER_ALL[name]), torch.randn(8, 4), torch.randn(8, 4)
    said = r"loss of stage 1 should be a mean over .* Found .* for the whole mini-batch and .* from 2 micro-batches"
    with pytest.warns(UserWarning, match=said) as caught:
        pipe.step(x, target=y)
    assert [warning.filename for warning in caught] == [__file__]
    pipe.step(x, target=y)
    if name == "neighbours":
        pipe.num_microbatches = 4
        with pytest.warns(UserWarning, match="from 4 micro-batches"):
            pipe.step(x, target=y)
        pipe.num_microbatches = 1
        pipe.step(x, target=y)


@pytest.mark.parametrize("checks", ["first", "always"])
def test_losses_that_the_cut_changes_later_warn(checks: str) -> None:
    """Regression: a mean over a mask whose first mini-batch was full was looked at in the first step only; 80 % off."""

    def masked(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - target[0]).square().mean(1) * target[1]).sum() / target[1].sum()

    pipe = pipeline([plain(), plain()], masked)
    pipe = nwise.Pipeline(list(pipe.stages), None, masked, "end-to-end", 2, checks=checks)
    x, y, mask = torch.randn(8, 4), torch.randn(8, 4), torch.ones(8)
    full = 2 if checks == "always" else 3
    for _ in range(full):
        pipe.step(x, target=(y, mask))
    mask[:3] = 0
    with pytest.warns(UserWarning, match=r"loss of stage 1 should be a mean over .* This warning appears once"):
        pipe.step(x, target=(y, mask))
    for _ in range(5):
        pipe.step(x, target=(y, mask))


class Counting:
    """A loss that is an object with a state, and cannot be copied if it has a lock."""

    def __init__(self, *, locked: bool) -> None:
        self.calls, self.lock = 0, threading.Lock() if locked else None

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return mse(output, target)


class Keeping(nn.Module):
    """A loss that keeps its last result, which has a graph and cannot be copied."""

    last: Tensor | None = None

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.last = mse(output, target)
        return self.last


def test_losses_are_compared_without_a_trace() -> None:
    """Regression: a loss module that cannot be copied failed the step, and the state of another loss moved on."""
    for loss_fn in (Counting(locked=False), Counting(locked=True), Keeping()):
        pipe = pipeline([plain(), plain()], loss_fn)
        for calls, m in ((2, 2), (6, 4)):
            pipe.num_microbatches = m
            pipe.step(X, target=X)
            assert getattr(loss_fn, "calls", calls) == calls


def test_losses_with_an_ignored_index_may_have_another_first_target() -> None:
    """Regression: a weight for every sample, before the labels, ended in an IndexError."""

    class Weighted(nn.Module):
        ignore_index = -100

        def forward(self, output: Tensor, target: Sequence[Tensor]) -> Tensor:
            return (target[0] * functional.cross_entropy(output, target[1], reduction="none")).mean()

    pipeline([plain(), plain()], Weighted()).step(X, target=(torch.rand(len(X)), torch.zeros(len(X)).long()))


def test_losses_that_count_another_target_warn() -> None:
    """Regression: `ignore_index` was taken for that of the first target; gradients were 40 percent off, silently."""
    target = (torch.zeros(8, dtype=torch.long), LABELS)
    with pytest.warns(UserWarning, match="gradients are those of another loss; give it such a method"):
        pipeline([plain(), plain()], SecondTarget()).step(torch.randn(8, 4), target=target)


class Ignores(Counted):
    def count(self, target: Any) -> int:
        return int((target != -100).sum())


MEANS: dict[str, Callable[..., Tensor]] = {
    "mean": lambda output, target: (output - target[..., None]).square().mean(),
    "count": Ignores(functional.cross_entropy),
    "random": lambda output, target: functional.dropout(output).square().mean(),
    "another size": lambda output, target: (
        output.view(2, -1, 4)[:, :3].mean() if len(output) < 8 else output.view(7, 7).mean()
    ),
    "zero": lambda output, target: (output - output).sum(),
    "pairs": lambda output, target: functional.cosine_embedding_loss(output[:, :2], output[:, 2:], target),
}


@pytest.mark.parametrize("name", MEANS)
def test_other_losses_do_not_warn(name: str) -> None:
    pipe = pipeline([plain(), nn.Sequential(plain(), nn.Identity())], MEANS[name])
    target = {"count": LABELS, "pairs": torch.tensor([1, -1] * 4)}.get(name, LABELS.abs())
    pipe.step(torch.randn(8, 4), target=target)


def test_losses_may_change_the_output_of_a_head_in_place() -> None:
    losses = [lambda output, target: output.mul_(2).square().mean(), mse]
    pipe = pipeline([plain(), plain()], losses, heads=[plain()], strategy="local")
    pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))


class Half(nn.Module):
    """Half the mean square; its attribute `weight` is no weight of classes."""

    weight = 0.5

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.weight * (output - target).square().mean()


def test_a_loss_may_have_any_attribute_weight() -> None:
    """Regression: the count of terms took a number for a tensor, an AttributeError."""
    pipe = pipeline([plain(), plain()], [Half()] * 2, heads=[plain()], strategy="local")
    x = torch.randn(6, 4)
    twin = nwise.Pipeline(copy.deepcopy([*pipe.stages]), copy.deepcopy([*pipe.heads.values()]), Half(), "local")
    torch.testing.assert_close(pipe.step(x, target=x), twin.step(x, target=x))


def test_heads_are_compared_under_their_own_losses() -> None:
    losses = [mse, lambda output, target: output.std(), mse]
    pipe = pipeline([plain(), plain(), plain()], losses, heads=[plain(), plain()], strategy="end-to-end")
    x = torch.randn(6, 4)
    pipe.step(x, target=x)  # the head of stage 1 does not run yet
    pipe.strategy = "local"
    with pytest.warns(UserWarning, match="loss of stage 1 should be a mean"):
        pipe.step(x, target=x)
    pipe.strategy = "deep-supervision"
    pipe.step(x, target=x)


SCRIPT = """
import sys, warnings, torch, nwise
from torch import nn
from torch.nn import functional
from ranks.common import RANK
torch.set_default_dtype(torch.float64)

class Cumulated(nn.Linear):
    def forward(self, x):
        return super().forward(x).cumsum(0)

def loss_of(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())

def root(output, target):
    return output.square().mean().sqrt()

def steps(pipe, first):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(microbatches=[first[:1, :3], first[1:]], targets=[first[:1, :3], first[1:]])
    return [str(warning.message)[:40] for warning in caught]

torch.manual_seed(0)
tokens = torch.randint(0, 5, (3, 7))
stages = [nn.Embedding(5, 4), nn.Linear(4, 5)]
pipe = nwise.Pipeline(stages, None, nwise.losses.TokenCrossEntropy(), "end-to-end", 2)
steps(pipe, tokens)
grad = (stages[0] if RANK == 0 else stages[1]).weight.grad
pipe.close()
parts = [tokens[:1, :3], tokens[1:]]
twins = [nn.Embedding(5, 4), nn.Linear(4, 5)]
for twin, stage in zip(twins, stages):
    twin.load_state_dict(stage.state_dict())
sum(functional.cross_entropy(twins[1](twins[0](p)).flatten(0, 1), p.flatten(), reduction="sum") for p in parts).div(17).backward()
torch.testing.assert_close(grad, twins[RANK].weight.grad, rtol=1e-12, atol=1e-12)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pipe = nwise.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], None, root, "end-to-end", 2)
    pipe.step(torch.randn(6, 4))
assert ["loss of stage 1" in str(w.message) for w in caught] == [True] * RANK, caught
pipe.close()
pipe = nwise.Pipeline([Cumulated(4, 4), nn.Linear(4, 4)], None, root, "end-to-end", 2)
print("so far", RANK, flush=True)
pipe.step(torch.randn(6, 4))
print("not refused", flush=True)
"""


def test_several_processes_notice_the_same(tmp_path: Path) -> None:
    """Given micro-batches, a loss on the last rank, and a network on the first, whose error ends the other."""
    done = scripted(2, SCRIPT, tmp_path)
    assert done.stdout.count("so far") == 2, done.stderr[-3000:]
    assert done.returncode != 0
    assert "not refused" not in done.stdout
    assert "Stage 0 should compute every sample alone" in done.stderr


def test_modules_that_cannot_be_copied_train() -> None:
    net, x = [Remembers(), plain()], torch.randn(6, 4)
    twins = copy.deepcopy(net)
    twins[0].endless = iter(int, 1)  # type: ignore[assignment] # cannot be copied
    mse(net[1](net[0](x)), x).backward()
    pipeline(twins).step(x, target=x)
    for found, wanted in zip(grads(twins), grads(net), strict=True):
        torch.testing.assert_close(found, wanted)
