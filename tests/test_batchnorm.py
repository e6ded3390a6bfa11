"""Batch norm under micro-batches: a warning, and statistics of the whole mini-batch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nets import X, Y


def stages() -> list[nn.Module]:
    return [nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), nn.Sequential(nn.Flatten(), nn.Linear(3 * 9, 4))]


def test_micro_batches_with_batchnorm_warn_once() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pipe = nwise.Pipeline(stages(), None, strategy="end-to-end", num_microbatches=2)
        for _ in range(2):
            pipe.step(torch.randn(6, 2, 5, 5), target=torch.tensor([0, 1, 2, 3, 0, 1]))
        assert len(seen) == 1
        assert "`nwise.defer_batchnorm(pipe)`" in str(seen[0].message)
        assert "(stages.0.1)" in str(seen[0].message)
        nwise.Pipeline(stages(), None, strategy="end-to-end")
        deferred = [nwise.defer_batchnorm(stage) for stage in stages()]
        nwise.Pipeline(deferred, None, strategy="end-to-end", num_microbatches=2)
        assert len(seen) == 1


def test_frozen_batch_norms_do_not_warn() -> None:
    """Regression: one in evaluation mode inside a stage that trains normalises by its running statistics, and warned."""
    frozen = stages()
    frozen[0][1].eval()  # type: ignore[index]
    nwise.Pipeline(frozen, None, strategy="end-to-end", num_microbatches=2)
    whole = stages()
    whole[0].eval()  # as of a network that was loaded, and will be switched
    with pytest.warns(UserWarning, match="batch norm normalises"):
        nwise.Pipeline(whole, None, strategy="end-to-end", num_microbatches=2)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.filterwarnings("ignore:With 3 micro-batches")
def test_deferred_batchnorm_stats_match_whole_mini_batch(momentum: float | None, recompute: bool) -> None:
    """The first stage sees the same input either way, so its statistics must be the same."""
    whole = stages()
    whole[0][1].momentum = momentum  # type: ignore[index]
    parts = copy.deepcopy(whole)
    plain = nwise.Pipeline(whole, None, strategy="end-to-end")
    pipe = nwise.Pipeline(parts, None, strategy="end-to-end", num_microbatches=3, recompute=recompute)
    names = list(pipe.state_dict())
    nwise.defer_batchnorm(pipe)
    assert list(pipe.state_dict()) == names
    for _ in range(3):
        x, y = torch.randn(7, 2, 5, 5), torch.randint(0, 4, (7,))
        plain.step(x, target=y)
        pipe.step(x, target=y)
    for (name, a), b in zip(plain.state_dict().items(), pipe.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)
    plain.eval()
    pipe.eval()
    torch.testing.assert_close(pipe(x), plain(x))


def test_deferred_batchnorm_normalises_like_the_original() -> None:
    norm = nn.BatchNorm2d(3)
    deferred = nwise.defer_batchnorm(copy.deepcopy(norm))
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(deferred(x), norm(x))
    with pytest.raises(ValueError, match="at least 2 dimensions. Found 1"):
        deferred(torch.randn(3))


def test_defer_batchnorm_keeps_mode_and_skips_untracked_norms() -> None:
    frozen = nn.BatchNorm1d(3).eval()
    untracked = nn.BatchNorm1d(3, track_running_stats=False)
    assert not nwise.defer_batchnorm(frozen).training
    assert nwise.defer_batchnorm(untracked) is untracked


@pytest.mark.filterwarnings("ignore:With 3 micro-batches")
def test_defer_batchnorm_replaces_bare_stage_and_head() -> None:
    """Regression: the pipeline's modules were replaced, but the old ones continued to run."""
    pipe = nwise.Pipeline(
        [nn.BatchNorm1d(4), nn.Linear(4, 4)], [nn.BatchNorm1d(4)], strategy="local", num_microbatches=3
    )
    nwise.defer_batchnorm(pipe)
    pipe.step(torch.randn(9, 4), target=torch.arange(9) % 4)
    assert int(pipe.stages[0].num_batches_tracked) == 1  # type: ignore[arg-type]
    assert int(pipe.heads[0].num_batches_tracked) == 1  # type: ignore[arg-type]


class Listed(nn.Module):
    """A layer whose batch norm is in a list, which registers nothing."""

    def __init__(self, hold: Callable[[nn.Module], Any], *, learns: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), hold(nn.BatchNorm1d(4, affine=learns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.norm[0](self.layer(x)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("m", [1, 2])
def test_batch_norms_in_a_list_work_as_registered_ones(m: int, recompute: bool) -> None:
    """Regression: with micro-batches they were refused as no function of each sample; `recompute` moved statistics twice."""
    found, x, y = [], torch.randn(8, 4), torch.arange(8) % 4
    for hold in (nn.ModuleList, list):
        torch.manual_seed(0)
        net = [Listed(lambda norm, hold=hold: hold([norm]), learns=False), nn.Linear(4, 4)]  # type: ignore[misc]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pipe = nwise.Pipeline(net, [nn.Linear(4, 4)], strategy="2-wise", num_microbatches=m, recompute=recompute)
        assert len(seen) == (m > 1)
        for _ in range(2):
            pipe.step(x, target=y)
        found.append([*(p.grad for p in pipe.main_parameters()), *net[0].norm[0].buffers()])  # type: ignore[index, union-attr]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
def test_batch_norms_in_a_list_that_learn_or_should_be_deferred_are_refused(m: int) -> None:
    learns = Listed(lambda norm: [norm], learns=True)
    pipe = nwise.Pipeline([learns, nn.Linear(4, 4)], strategy="end-to-end", num_microbatches=m)
    with pytest.raises(ValueError, match=r"Stage 0 should depend only on parameters that it holds .* a child module"):
        pipe.step(torch.randn(8, 4), target=torch.arange(8) % 4)
    with pytest.raises(ValueError, match="to defer should be registered.*Found BatchNorm1d in a plain attribute"):
        nwise.defer_batchnorm(learns)


@pytest.mark.filterwarnings("ignore:With 3 micro-batches")
def test_defer_batchnorm_keeps_shared_norm_shared() -> None:
    norm = nn.BatchNorm1d(8)
    stage = nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh(), norm, nn.Sequential(nn.Linear(8, 8), norm))
    pipe = nwise.Pipeline([stage, nn.Linear(8, 3)], None, strategy="end-to-end", num_microbatches=3)
    nwise.defer_batchnorm(pipe)
    assert stage[1] is stage[3] is stage[4][1]  # type: ignore[index]
    pipe.step(X, target=Y)
    assert int(stage[1].num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
def test_deferred_batchnorm_sums_are_float64_and_reset() -> None:
    """Regression: in bf16 the difference of two large sums gave a variance of 0.9 instead of 1.1."""
    norm = nn.BatchNorm1d(8)
    pipe = nwise.Pipeline([nn.Sequential(norm), nn.Linear(8, 3)], None, strategy="end-to-end", num_microbatches=2)
    nwise.defer_batchnorm(pipe)
    deferred = pipe.stages[0][0]  # type: ignore[index]
    pipe.bfloat16()
    assert deferred._sums.dtype == torch.float64
    pipe.float()
    with pytest.raises(IndexError):
        pipe.step(X, target=torch.tensor([0, 1, 2, 0, 1, 99]))
    pipe(100 * X)  # inference in training mode
    before = deferred.running_mean.clone()
    pipe.step(X, target=Y)
    torch.testing.assert_close(deferred.running_mean, before.lerp(X.mean(0), 0.1))


class ActNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_deferring_keeps_what_a_batch_norm_does() -> None:
    """A subclass lost its activation, and any batch norm its hooks."""
    with pytest.raises(ValueError, match="the forward of torch's batch norm. Found ActNorm, which has its own"):
        nwise.defer_batchnorm(nn.Sequential(ActNorm(3)))
    norm, calls = nn.BatchNorm1d(3), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    nwise.defer_batchnorm(nn.Sequential(norm))(torch.randn(4, 3))
    assert calls == [1]


def test_batch_norm_warning_when_m_rises() -> None:
    pipe = nwise.Pipeline([nn.BatchNorm1d(2), nn.Linear(2, 2)], None, strategy="end-to-end")
    with pytest.warns(UserWarning, match="With 2 micro-batches, batch norm") as seen:
        pipe.num_microbatches = 2
    assert [w.filename for w in seen] == [__file__]
    for fewer in (2, 1):
        pipe.num_microbatches = fewer  # without a warning


def test_synchronised_batch_norm_is_not_deferred() -> None:
    """It became one that no longer synchronises, without a word."""
    with pytest.raises(ValueError, match="Found SyncBatchNorm, which has its own"):
        nwise.defer_batchnorm(nn.Sequential(nn.SyncBatchNorm(3)))
