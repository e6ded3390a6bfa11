"""Cheap heads and predicted weights: the cells, their prices, and the claims on made-up records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.frontier import clock
from experiments.frontier.experiment import LOCAL, TWO
from experiments.harness.experiment import Job
from experiments.harness.runs import Runs
from experiments.harness.store import Store
from experiments.heads import experiment as heads
from nwise.app.recipes import Adam, to_json
from nwise.app.training import make_pipeline


def test_cells_are_trials_and_then_runs_with_the_best_rates(tmp_path: Path) -> None:
    """Arms without all three trials have no runs yet."""
    records = tmp_path / "medium.jsonl"
    comparison = replace(heads.COMPARISON, records=records)
    trials = comparison.cells(3)
    assert len(trials) == 3 * len(heads.ARMS)
    assert {(c.recipe.seed, c.recipe.max_steps, c.recipe.batch_size) for c in trials} == {(100, 300, 8)}
    for cell in (c for c in trials if c.method == "muon local"):
        loss = 1.0 if cell.part == "rate 0.04" else 2.0
        keys = {"method": cell.method, "part": cell.part, "seed": 100, "stages": 8, "config": to_json(cell.recipe)}
        Store(records).add({**keys, "tests": [{"step": 300, "loss": [loss]}]})
    runs = comparison.cells(3)[len(trials) :]
    assert [(run.method, run.recipe.seed, run.recipe.max_steps) for run in runs] == [
        ("muon local", seed, 800) for seed in range(3)
    ]
    optimizer = runs[0].recipe.optimizer
    assert isinstance(optimizer, Adam)
    assert optimizer.muon_lr == pytest.approx(0.04 * 100**0.5)


def test_the_runs_of_a_folder_have_the_rates_of_its_own_trials(tmp_path: Path) -> None:
    """They had those of the repository, so elsewhere trials ran in vain, or no runs followed them."""
    job = Job(folder=tmp_path, size="medium")
    trials = heads.EXPERIMENT.cells(job)
    assert {cell.recipe.max_steps for cell in trials} == {300}, "trials alone, though the repository has records"
    for cell in trials[:3]:
        keys = {"method": cell.method, "part": cell.part, "seed": 100, "stages": 8, "config": to_json(cell.recipe)}
        heads.EXPERIMENT.store(job).add({**keys, "tests": [{"step": 300, "loss": [1.0]}]})
    cells = heads.EXPERIMENT.cells(job)
    assert [cell.recipe.max_steps for cell in cells] == [300] * len(trials) + [800] * 3, "all trials come first"


def test_arms_differ_in_what_their_names_say() -> None:
    recipes = {one.label: one.run(0.02, 0) for one in heads.ARMS}
    quarter, late = recipes["2-wise-mean, losses of 25%"], recipes["end-to-end-delay-4, predicted"].optimizer
    assert quarter.strategy == "2-wise-mean"
    assert isinstance(late, Adam)
    assert (late.predict, late.extrapolate) == (4, False)
    data, _ = heads.COMPARISON.cells(0)[0].recipe.load()
    pipe = make_pipeline(quarter, data, quarter.phases(1)[0][1])
    assert {loss.fraction for loss in pipe.loss_fns} == {0.25}  # type: ignore[attr-defined] # TokenCrossEntropy
    assert isinstance(pipe(next(iter(data.batch(torch.arange(1), None)))), tuple), "the last stage saves, too"
    narrow = recipes["2-wise-mean, heads of rank 16"]
    pipe = make_pipeline(narrow, data, narrow.phases(1)[0][1])
    assert [list(p.shape) for p in pipe.heads[0].parameters()][2:] == [[16, 96], [256, 16]]


@pytest.mark.parametrize("one", heads.ARMS[:5], ids=lambda one: one.label)
def test_periods_are_those_of_the_clock(one: Any) -> None:
    """Those of delays take seconds to find."""
    for latency in clock.LATENCIES:
        assert heads.COMPARISON.slots(one, latency) == pytest.approx(clock.slots(one, latency)[0][1])


def test_cheap_heads_help_local_training_through_the_last_stage_alone() -> None:
    """Its step is that of the last stage: 3 slots, 0.04 for two actions, and a loss of 0.55, or 0.14 of a quarter."""
    assert heads.COMPARISON.slots(heads._FULL[LOCAL], 0.0) == pytest.approx(3.59)
    assert heads.COMPARISON.slots(heads._QUARTER[LOCAL], 0.0) == pytest.approx(3.18)


def test_at_equal_time_cheap_losses_have_done_more_steps() -> None:
    """2-wise-mean takes 4.67 slots, and 4.26 with a quarter of the tokens; it ends no better, and so wins by its steps."""

    def run(one: Any, end: float) -> dict[str, Any]:
        tests = [{"step": s, "loss": [end + (heads.STEPS - s) / heads.STEPS]} for s in (0, heads.STEPS)]
        return {"method": one.name, "part": "", "seed": 0, "stages": 8, "tests": tests}

    runs = Runs([run(heads._FULL[TWO], 1.0), run(heads._QUARTER[TWO], 1.01)])
    claims = {claim.text: claim for claim in heads.claims(runs)}
    faster = claims["equal time, latency 0: 2-wise-mean is worse than 2-wise-mean, losses of 25%"]
    assert faster.effect == pytest.approx((1 - 4.26 / 4.67) - 0.01)
    little = claims["equal steps: 2-wise-mean, losses of 25% is worse than 2-wise-mean, if at all, by less than 0.03"]
    assert little.effect == pytest.approx(0.01)
    assert little.wanted == "< 0.03"
    assert len(claims) == 14, "Holm's correction counts all of them"
    assert "| 2-wise-mean, losses of 25% less 2-wise-mean | +0.010 |" in heads.tables(runs)
