"""Compare strategies from the same start, at equal steps and at equal modelled time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nwise.app.data import Images, Tokens
from nwise.app.recipes import Recipe, spans
from nwise.app.report.figures import Curve, compare_figure
from nwise.app.training import Callback, Run, Trainer, new_run
from nwise.schedule import PAPER, best

__all__ = ["Result", "check", "compare", "draw"]


@dataclass(frozen=True, slots=True)
class Result:
    """One strategy's run.

    Args:
        strategy: name of the strategy.
        run: folder of the run.
        kind: ``"accuracy"`` (per cent) or ``"perplexity"``.
        curve: test quality of the last head.
        seconds: duration of this run, with all stages in one process; it does not predict A accelerators.
    """

    strategy: str
    run: str
    kind: str
    curve: Curve
    seconds: float

    def at_slots(self, slots: float) -> float:
        """Interpolate the quality between two tests, at a modelled time."""
        return float(np.interp(slots, self.curve.slots, self.curve.values))


Data = tuple[Images, Images] | tuple[Tokens, Tokens]


def check(recipe: Recipe, strategies: Sequence[str], data: Data) -> None:
    """Raise the errors that training would raise, before anything is written.

    Raises:
        ValueError: there is no strategy, or one that does not suit the network or the recipe.
    """
    if not strategies:
        raise ValueError("`strategies` should name at least one. Found none.")
    for variant in _variants(recipe, strategies):
        Trainer(variant, data)


def compare(
    recipe: Recipe,
    strategies: Sequence[str],
    folder: Path,
    callbacks: tuple[Callback, ...] = (),
    data: Data | None = None,
) -> list[Result]:
    """Train each strategy from the same initial values on the same batches.

    Args:
        recipe: everything but the strategy.
        strategies: names, as for `nwise.strategy`.
        folder: parent folder of the runs' folders.
        callbacks: callbacks for every run.
        data: the recipe's data, if already loaded.
    """
    return [_result(variant, folder, callbacks, data or recipe.load()) for variant in _variants(recipe, strategies)]


def _variants(recipe: Recipe, strategies: Sequence[str]) -> list[Recipe]:
    # Divergence is a result too.
    return [dataclasses.replace(recipe, strategy=strategy, on_nan="ignore") for strategy in strategies]


def _result(recipe: Recipe, folder: Path, callbacks: tuple[Callback, ...], data: Data) -> Result:
    trainer = Trainer(recipe, data)
    run = new_run(recipe, folder)
    trainer.train(run, callbacks)
    if run.unwritten:
        raise OSError(
            f"{run.folder} should have the results of {recipe.strategy}. Found that nwise could not write them."
        )
    kind = recipe.quality
    steps, values, seconds = _tests(run, kind)
    return Result(recipe.strategy, str(run.folder), kind, Curve(steps, values, _slots(trainer, steps)), seconds)


def _tests(run: Run, kind: str) -> tuple[list[int], list[float], float]:
    """Read steps, scores and seconds from the records, so every number shown was written."""
    records = run.metrics()
    tests = [record for record in records if record["kind"] == "test"]
    last = [record["loss" if kind == "perplexity" else "accuracy"][-1] for record in tests]
    # The loss of a run that diverged is null; it stays in the table.
    numbers = np.array([math.nan if value is None else value for value in last])
    with np.errstate(over="ignore"):
        values = (np.exp(numbers) if kind == "perplexity" else 100 * numbers).tolist()
    return [record["step"] for record in tests], values, records[-1]["seconds"]


def _slots(trainer: Trainer, steps: Sequence[int]) -> list[float]:
    """Model the slots until each of the steps, on one accelerator per stage."""
    rates = []
    for made, rule in spans(trainer.recipe.phases(trainer.steps_per_epoch), steps[-1]):
        m = trainer.recipe.microbatches
        timed = best(rule, num_stages=trainer.pipe.num_stages, num_microbatches=m, costs=PAPER)
        rates.append((made, timed.period))
    return [sum(rate * len(range(made.start, min(step, made.stop))) for made, rate in rates) for step in steps]


def draw(results: Sequence[Result], recipe: Recipe, path: Path) -> None:
    """Draw quality over steps and over modelled time."""
    kind = results[0].kind
    quality = "test perplexity" if kind == "perplexity" else "test accuracy, %"
    title = f"{recipe.name}: batch {recipe.batch_size}, M = {recipe.microbatches}, seed {recipe.seed}"
    compare_figure({result.strategy: result.curve for result in results}, quality, title, path)
