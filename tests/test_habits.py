"""Habits of training scripts: right as they are, or answered by a sentence with the remedy, in one process and under torchrun."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import nwise
from launch import results
from ranks import habits


def test_habits_under_torchrun(tmp_path: Path) -> None:
    """Regressions: `summary` on one rank hung for twenty minutes; a pipeline could not be copied. In silence, torch's clipping
    gave other results on every number of ranks, so did an optimizer with a norm over all parameters, a scheduler that followed
    the last loss changed the rate of some, and a loop that skipped nan left some without updates."""
    norms: list[float] = []
    pipe, model = habits.clipped(lambda pipe: norms.append(float(nwise.clip_grad_norm_(pipe, 0.05))))
    first, second = found = results(2, "habits.py", tmp_path)
    assert first["norms"] == second["norms"] == norms, "bit for bit those of one process"
    assert first["after gathering"] == model(habits.data(1)[0][0]).tolist()
    assert first["summary"] == pipe.summary()
    assert first["local"][:2] == [[0], pipe.credit.tolist()]
    assert first["averaged"] == ""
    assert first["average"] == habits.averaged(), "that of one process"
    for one in found:
        for name in ("clipped by torch", "clipped, then set to zero"):
            assert re.match(
                r"All processes should scale their gradients alike. Found a factor of [\d.]+ on rank 0 and of [\d.]+ on rank 1.*"
                r"; use `nwise.clip_grad_norm_\(pipe, max_norm\)`",
                one[name],
            ), name
        assert re.match(
            r"All processes should change their learning rates alike. Found a factor of 0.1 on rank 0 and of 1 on rank 1 "
            r".*; give it the last loss of `pipe.processes.table",
            one["plateau"],
        )
        assert re.match(
            r"All processes should update their parameters after the same steps. Found an update after step \d on rank 1, but "
            "none on rank 0.*; look at the last loss of `pipe.processes.table",
            one["skipped"],
        )
        assert one["scaled alike"] == ""
        assert re.match(
            "An optimizer should update each parameter by its own gradient alone under several processes.* Found Normed, whose "
            r"updates depend on the gradients of other parameters.*`nwise.clip_grad_norm_\(pipe, max_norm\)`",
            one["mixed"][0],
        )
        assert [one["mixed"][1], *one["mixed alike"], *one["apart"]] == [""] * 5, "once, and of no other optimizer"
        for name in ("copied", "pickled"):
            assert one[name][:2] == [True, True]
            assert all(
                "A copy of a pipeline under several processes should only be read" in text for text in one[name][2:]
            )
        assert re.search(
            "`seed` should be the same .*; call `torch.manual_seed` first, with one number on all", one["seed"]
        )


class Adds(torch.optim.SGD):
    """An optimizer in the old style, which changes `p.data`: that does not count as a change of the parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


def trained(pipe: nwise.Pipeline, *optimizers: torch.optim.Optimizer, every: int = 1) -> None:
    for step in range(6):
        trained_once(pipe)
        for optimizer in optimizers if (step + 1) % every == 0 else ():
            optimizer.step()
            optimizer.zero_grad()


def trained_once(pipe: nwise.Pipeline) -> None:
    pipe.step(torch.ones(3, 4), target=torch.zeros(3, dtype=torch.long))


def made(strategy: str = "2-wise-mean") -> nwise.Pipeline:
    torch.manual_seed(0)
    return nwise.Pipeline([nn.Linear(4, 4) for _ in range(3)], [nn.Linear(4, 4) for _ in range(2)], strategy=strategy)


@pytest.mark.parametrize("every", [1, 2])
def test_optimizer_without_heads_is_said_once(every: int) -> None:
    """Regression: heads kept their first values, and their gradients grew, without a word."""
    pipe = made()
    with pytest.warns(
        UserWarning, match=r"Found gradients of the heads of stages \[0, 1\] that no optimizer"
    ) as caught:
        trained(pipe, torch.optim.Adam(pipe.main_parameters()), every=every)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "at the caller of `step`"


def test_optimizer_that_loses_the_heads_later_is_said() -> None:
    """Regression: only the first two updates were looked at, and an optimizer made later without the heads was not said."""
    pipe = made()
    trained(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    main = torch.optim.SGD(pipe.main_parameters(), lr=0.1)
    trained(pipe, main)  # one look, after step 8
    with pytest.warns(UserWarning, match=r"heads of stages \[0, 1\] that no optimizer") as caught:
        trained(pipe, main)
    assert len(caught) == 1
    trained(pipe, main, main, main)  # once


def test_other_optimizers_are_not_blamed() -> None:
    pipe = made()
    trained(pipe, torch.optim.Adam(pipe.main_parameters()), torch.optim.SGD(pipe.head_parameters(), lr=0.0))
    pipe = made()
    trained(pipe, Adds(pipe.parameters(), lr=0.1))
    pipe = made("end-to-end")
    trained(pipe, torch.optim.Adam(pipe.main_parameters()))
    pipe = made()
    pipe.heads.requires_grad_(False)
    trained(pipe, torch.optim.Adam(pipe.main_parameters()))
    trained(made())  # without an update


def test_optimizers_of_heads_that_step_at_other_times_are_not_blamed() -> None:
    """Regression: heads that an optimizer updates less often, later, or by `data` were said to have no optimizer."""
    for period, kind in ((4, torch.optim.Adam), (1, Adds)):
        pipe = made()
        main, heads = torch.optim.Adam(pipe.main_parameters()), kind(pipe.head_parameters(), lr=0.1)
        for step in range(6):
            trained_once(pipe)
            main.step()
            if step % period == period - 1:
                heads.step()
            pipe.zero_grad()
    pipe = made()
    optimizer = torch.optim.Adam(pipe.parameters())
    for _ in range(4):
        trained_once(pipe)
        with torch.no_grad():
            for p in pipe.main_parameters():
                p.clamp_(-1, 1)  # while gradients accumulate
    optimizer.step()


def test_clipping_returns_the_norms_of_torch() -> None:
    pipe = made().double()
    pipe.step(torch.ones(3, 4).double(), target=torch.zeros(3, dtype=torch.long))
    gradients = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    norm = nwise.clip_grad_norm_(pipe, 0.05)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(gradients), rtol=1e-12, atol=0)
    for gradient, clipped in zip(gradients, (p.grad for p in pipe.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(clipped, gradient * (0.05 / (norm + 1e-6)), rtol=1e-12, atol=1e-15)
    norms = nwise.clip_grad_norm_(pipe, 1.0, by="stage")
    assert norms.shape == (3,)
    torch.testing.assert_close(norms.square().sum().sqrt(), torch.tensor(0.05).double(), rtol=1e-4, atol=0)


def test_bytes_before_a_step_are_refused() -> None:
    with pytest.raises(RuntimeError, match="should be read after a step. Found none so far; call `step` first"):
        _ = made().bytes_per_step


def wrapped(name: str, base: type = object) -> nn.Module:
    """A layer whose class looks like a wrapper's; real ones need a process group."""
    return type("Layer", (type(name, (base,), {}), nn.Linear), {})(4, 4)


@pytest.mark.parametrize(
    "name", ["DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "FSDPModule"]
)
def test_wrappers_that_synchronise_are_refused(name: str) -> None:
    """Regression: a wrapper inside a stage summed gradients over ranks with other stages, or gave none at all."""
    match = "Stages and heads should exchange nothing with other processes; .* Found .* in {}; pass the plain module"
    bad = nn.Sequential(nn.Identity(), nn.Sequential(wrapped(name)))
    with pytest.raises(ValueError, match=match.format(r"`stages\[0\]`")):
        nwise.Pipeline([bad, nn.Linear(4, 4)], strategy="end-to-end")
    with pytest.raises(ValueError, match=match.format(r"`heads\[0\]`")):
        nwise.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], [bad])
    with pytest.raises(ValueError, match=match.format("a stage or head")):
        nwise.Pipeline([lambda: bad, nn.Linear(4, 4)], strategy="end-to-end")
    pipe = nwise.Pipeline([nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)], strategy="end-to-end")
    trained(pipe)
    pipe.stages[0][0] = bad  # type: ignore[operator]
    with pytest.raises(ValueError, match=match.format("a stage or head")):
        trained(pipe)


def test_data_parallel_and_fully_shard_are_refused() -> None:
    layer = nn.Linear(4, 4)
    layer.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as `fully_shard` does
    for bad in (nn.DataParallel(nn.Linear(4, 4)), layer):
        with pytest.raises(ValueError, match="should exchange nothing with other processes"):
            nwise.Pipeline([bad, nn.Linear(4, 4)], strategy="end-to-end")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nwise.Pipeline([nn.SyncBatchNorm(4), nn.Linear(4, 4)], strategy="end-to-end")  # plain batch norm in one process
