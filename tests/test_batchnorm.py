"""Batch norm under micro-batches: a warning, and statistics of the whole mini-batch."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import nwise


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
