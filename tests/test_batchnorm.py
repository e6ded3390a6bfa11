"""Batch norm under micro-batches: a warning, and statistics of the whole mini-batch."""

from __future__ import annotations

import copy
import warnings

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


@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
def test_deferred_batch_norms_move_like_torchs_outside_a_step() -> None:
    """Regression: `update_bn` of weight averaging resets the statistics, and they stayed at their first values."""
    network = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    averaged = copy.deepcopy(network)
    pipe = nwise.Pipeline([network], strategy="end-to-end", num_microbatches=2)
    nwise.defer_batchnorm(pipe)
    pipe.step(X, target=Y)
    batches = torch.randn(5, 6, 8).unbind()
    for module in (averaged, pipe):
        torch.optim.swa_utils.update_bn(batches, module)
    for name, buffer in averaged.named_buffers():
        torch.testing.assert_close(buffer, network.get_buffer(name))
