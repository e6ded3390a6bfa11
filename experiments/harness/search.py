"""A search for learning rates: every method is tried with every rate of a grid, in short runs tested on withheld data.

python -m experiments rates  ->  rates/medium.jsonl  ->  the reported runs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.runs import Runs, loss, shown
from experiments.harness.store import Store
from nwise.app.recipes import Recipe

TRIAL_SEED = 100  # of trials, and those that follow; no reported run has them
RECORDS = Path(__file__).parents[1] / "rates" / "medium.jsonl"


def with_rate(recipe: Recipe, rate: float) -> Recipe:
    """Return a recipe with another learning rate."""
    return replace(recipe, optimizer=replace(recipe.optimizer, lr=rate))


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search for the rates of some methods.

    Args:
        title: of its table, such as ``"E1, Adam"``.
        grid: rates, a factor of 2 apart.
        trials: function from a rate to the short run that tries it, by method; the search sets its seed.
        prefix: text before each method's name in the records; default: none.
        seeds: seeds of the trials, none of them of a reported run; default: one.
        decides: whether reported runs have its best rates; default: they do.
    """

    title: str
    grid: Sequence[float]
    trials: Mapping[str, Callable[[float], Recipe]]
    prefix: str = ""
    seeds: Sequence[int] = (TRIAL_SEED,)
    decides: bool = True

    @cached_property  # an index asks every search for every experiment and size
    def cells(self) -> list[Cell]:
        """The cells: every method with every rate and seed."""
        return [
            Cell(method=self.prefix + method, part=_part(rate), recipe=replace(trial(rate), seed=seed))
            for seed in self.seeds
            for method, trial in self.trials.items()
            for rate in self.grid
        ]

    def rates(self) -> dict[str, float]:
        """Return the best rates by the records of this repository: those of the reported runs."""
        records = [record for _, record in Store(RECORDS).records_for(self.cells)]
        return self.best(Runs([record for record in records if record is not None]))

    def best(self, runs: Runs) -> dict[str, float]:
        """Return the rate with the lowest mean of withheld losses, for every method that was tried with all rates and seeds."""
        rates = {}
        for method in self.trials:
            losses = {rate: self._losses(runs, method, rate) for rate in self.grid}
            if all(len(values) == len(self.seeds) for values in losses.values()):
                rates[method] = min(losses, key=lambda rate: fmean(losses[rate]))
        return rates

    def table(self, runs: Runs) -> str:
        """Return the withheld loss by method and rate; the best rate is bold, with a star at an end of the grid."""
        best, rows = self.best(runs), []
        for method in self.trials:
            texts = [shown(self._losses(runs, method, rate), 3) for rate in self.grid]
            if method in best:
                i = self.grid.index(best[method])
                texts[i] = f"**{texts[i]}**" + (r" \*" if i in (0, len(self.grid) - 1) else "")
            rows.append([method, *texts])
        return markdown.table([f"{self.title}: withheld loss, nats; peak rate", *map("{:g}".format, self.grid)], rows)

    def _losses(self, runs: Runs, method: str, rate: float) -> list[float]:
        return list(runs.scores(loss, self.prefix + method, part=_part(rate)).values())


def _part(rate: float) -> str:
    return f"rate {rate:g}"
