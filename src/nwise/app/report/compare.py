"""Compare strategies from the same start, at equal steps and at equal modelled time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nwise.app.data import Images, Tokens
from nwise.app.recipes import Recipe, spans
from nwise.app.report.summary import Summary
from nwise.app.training import Callback, Trainer, new_run
from nwise.schedule import PAPER, best

__all__ = ["Curve", "Result", "check", "compare"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Test scores of one run.

    Args:
        steps: steps of the tests.
        values: accuracy in per cent, or perplexity.
        slots: modelled time of each test on A accelerators, in slots.
    """

    steps: Sequence[int]
    values: Sequence[float]
    slots: Sequence[float]


@dataclass(frozen=True, slots=True)
class Result:
    """One strategy's run.

    Args:
        strategy: name of the strategy.
        seed: the run's seed.
        lr: its learning rate.
        run: folder of the run.
        kind: ``"accuracy"`` (per cent) or ``"perplexity"``.
        curve: test quality of the last head.
        seconds: duration of this run, with all stages in one process; it does not predict A accelerators.
    """

    strategy: str
    seed: int
    lr: float
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
    for strategy in strategies:
        Trainer(_variant(recipe, strategy, recipe.seed, recipe.optimizer.lr), data)


def compare(
    recipe: Recipe,
    strategies: Sequence[str],
    folder: Path,
    callbacks: tuple[Callback, ...] = (),
    data: Data | None = None,
    seeds: int = 1,
    rates: Sequence[float] = (),
) -> list[Result]:
    """Train each strategy from the same initial values on the same batches, for each seed; each at the best of some rates.

    With several rates each strategy first has a trial of every rate, with the first seed; the one whose last test is best counts.

    Args:
        recipe: everything but the strategy.
        strategies: names, as for `nwise.strategy`.
        folder: parent folder of the runs' folders.
        callbacks: callbacks for every run.
        data: the recipe's data, if already loaded.
        seeds: number of seeds, from the recipe's on; default 1.
        rates: learning rates to try; default: that of the recipe.
    """
    loaded = {recipe.seed: data or recipe.load()}  # the seed splits some data sets
    for seed in range(recipe.seed + 1, recipe.seed + seeds):
        loaded[seed] = dataclasses.replace(recipe, seed=seed).load()
    results = []
    for strategy in dict.fromkeys(strategies):
        trials = [
            _result(_variant(recipe, strategy, recipe.seed, lr), folder, callbacks, loaded[recipe.seed])
            for lr in dict.fromkeys(rates or [recipe.optimizer.lr])
        ]
        best_trial = max(trials, key=_rank)
        variants = [_variant(recipe, strategy, seed, best_trial.lr) for seed in list(loaded)[1:]]
        results += [best_trial, *(_result(variant, folder, callbacks, loaded[variant.seed]) for variant in variants)]
    return results


def _rank(result: Result) -> float:
    """Return a sort key that is larger for a better run; one that diverged is the worst."""
    value = result.curve.values[-1]
    return float("-inf") if value != value else value if result.kind == "accuracy" else -value


def _variant(recipe: Recipe, strategy: str, seed: int, lr: float) -> Recipe:
    optimizer = dataclasses.replace(recipe.optimizer, lr=lr)
    # Divergence is a result too.
    return dataclasses.replace(recipe, strategy=strategy, seed=seed, optimizer=optimizer, on_nan="ignore")


def _result(recipe: Recipe, folder: Path, callbacks: tuple[Callback, ...], data: Data) -> Result:
    trainer = Trainer(recipe, data)
    run = new_run(recipe, folder)
    trainer.train(run, callbacks)
    if run.unwritten:
        raise OSError(
            f"{run.folder} should have the results of {recipe.strategy}. Found that nwise could not write them; make room, "
            "and compare again."
        )
    # The numbers come from the records, so every number shown was written.
    summary = Summary(run.folder.name, run)
    last = trainer.pipe.num_stages - 1
    tests = summary.head("test", recipe.quality, last)
    losses = summary.head("test", "loss", last)
    steps = tests.along["step"]
    # A network of nan is still right by chance.
    pairs = zip(tests.values, losses.values, strict=True)
    values = [float("nan") if value is None or loss is None else value for value, loss in pairs]
    curve = Curve([int(step) for step in steps], values, _slots(trainer, steps))
    seconds = run.metrics()[-1]["seconds"]
    return Result(recipe.strategy, recipe.seed, recipe.optimizer.lr, str(run.folder), recipe.quality, curve, seconds)


def _slots(trainer: Trainer, steps: Sequence[float]) -> list[float]:
    """Model the slots until each of the steps, on one accelerator per stage."""
    rates = []
    for made, rule in spans(trainer.recipe.phases(trainer.steps_per_epoch), int(steps[-1])):
        m = trainer.recipe.microbatches
        schedule = best(rule, num_stages=trainer.pipe.num_stages, num_microbatches=m, costs=PAPER)
        rates.append((made, schedule.period))
    return [sum(rate * max(0, min(step, made.stop) - made.start) for made, rate in rates) for step in steps]
