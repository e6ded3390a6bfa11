"""The frontier with many stages: the order of its cells, its clock, and its claims on made-up records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.deep import experiment as deep
from experiments.deep.gpu import cells_by_worth, tiny
from experiments.depth import experiment as depth
from experiments.frontier import clock
from experiments.frontier.experiment import LOCAL, PROMPT, TWO
from experiments.harness.cell import Cell, Record
from experiments.harness.runs import Runs
from experiments.harness.store import Store
from nwise.app.recipes import to_json


def record(cell: Cell, loss: float) -> Record:
    return {
        "method": cell.method,
        "part": cell.part,
        "seed": cell.recipe.seed,
        "stages": cell.num_stages,
        "tests": [{"step": 0, "loss": [loss]}],
        "config": to_json(cell.recipe),
    }


def test_a_run_follows_all_trials_of_its_arm_and_has_the_best_rate(tmp_path: Path) -> None:
    """The queue of `python -m experiments.deep.gpu`: trials first, and None while runs wait for the last of them."""
    arms = (deep.at(TWO, 16), deep.at(TWO, 32))
    comparison = replace(deep.COMPARISON, records=tmp_path / "medium.jsonl", arms=arms, change=tiny)
    store = Store(comparison.records)
    store.check_writable()
    cells = cells_by_worth(comparison, seeds=1)
    trials = [next(cells) for _ in range(3 * len(arms))]
    assert next(cells) is None
    found: list[Cell] = []
    for trial in trials:
        assert trial is not None
        assert (trial.recipe.seed, trial.recipe.capture) == (100, False)
        store.add(record(trial, 1.0 if trial.part == "rate 0.04" else 2.0))
        run = next(cells)
        found += [run] if run is not None else []
    assert [cell.method for cell in found] == [one.name for one in arms]
    assert {cell.recipe.optimizer.muon_lr / 10 for cell in found} == {0.04}  # type: ignore[union-attr] # Adam's settings
    assert next(cells) is None


def test_steps_are_captured_unless_they_have_a_delay() -> None:
    cells = deep.EXPERIMENT.parts.cells("medium", 1)
    assert {"delay" in cell.method for cell in cells if not cell.recipe.capture} == {True}
    assert {"delay" in cell.method for cell in cells if cell.recipe.capture} == {False}
    trial = cells[0].recipe
    assert (trial.max_steps, trial.batch_size, trial.precision) == (400, 16, "float32")


@pytest.mark.parametrize("name", [LOCAL, TWO])
def test_periods_are_those_of_the_clock(name: str) -> None:
    """Those of other arms take seconds to find."""
    one = deep.at(name, 32)
    assert deep.COMPARISON.slots(one, 0.0) == pytest.approx(clock.slots(one)[0][1])


def test_at_equal_time_the_slower_arm_has_done_fewer_steps() -> None:
    """With latency 0 exact training of 32 stages takes 8.3675 slots a step, and 2-wise-mean 4.67."""

    def run(name: str, end: float) -> dict[str, Any]:
        tests = [{"step": step, "loss": [end + (deep.STEPS - step) / deep.STEPS]} for step in (0, deep.STEPS)]
        return {"method": deep.at(name, 32).name, "part": "", "seed": 0, "stages": 32, "tests": tests}

    runs = Runs([run(PROMPT, 1.0), run(TWO, 1.1)])
    claims = {claim.text: claim for claim in deep.claims(runs)}
    effect = claims["32 stages, equal time, latency 0: end-to-end is worse than 2-wise-mean"].effect
    assert effect == pytest.approx(1.0 + (1 - 4.67 / 8.3675) - 1.1)
    assert len(claims) == 8
    sources = tuple(result.source for result in deep.EXPERIMENT.results)
    assert all(claim.source.startswith(sources) for claim in claims.values())


def test_depth_tries_two_rates_with_32_blocks_and_three_with_fewer(tmp_path: Path) -> None:
    comparison = replace(depth.COMPARISON, records=tmp_path / "medium.jsonl")
    trials = comparison.cells(3)
    assert {"32 blocks" in cell.method for cell in trials[: 2 * 4]} == {True}
    assert {"32 blocks" in cell.method for cell in trials[2 * 4 :]} == {False}
    assert len(trials) == 2 * 4 + 3 * 5
    found = {(cell.recipe.max_steps, cell.recipe.batch_size, cell.recipe.capture) for cell in trials}
    assert found == {(200, 8, False)}
    assert len(depth.claims(Runs([]))) == 12, "Holm's correction counts all of them"
