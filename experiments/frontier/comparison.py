"""Arms that are tried with a few rates, then run and compared: after equal steps, and after equal time by the frontier's clock.

python -m experiments.frontier.comparison deep    # writes deep/periods.jsonl: slots of a step, by arm and latency
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path

from rich.progress import track

from experiments.frontier import clock
from experiments.frontier.arms import BATCH, EVERY, Arm
from experiments.frontier.plots import curve
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, Seeds, differences, greater
from experiments.harness.experiment import Job, Result, Size
from experiments.harness.plots import legend, make_panels
from experiments.harness.runs import Runs, loss, loss_at, shown
from experiments.harness.search import Search
from experiments.harness.store import Store
from experiments.harness.trained import Parts, Trained
from nwise.app.recipes import Recipe
from nwise.app.records import json_line, write_text

_MOMENTS = ["equal steps", *(f"equal time, latency {late:g}" for late in clock.LATENCIES)]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The arms of a comparison, and the lengths of their trials and runs.

    Args:
        name: of the experiment, and of its recipes.
        records: file of the trials, which give the rates of the runs.
        periods: file of the slots of a step.
        arms: the arms, in order of worth.
        grid: function from an arm to the rates of its trials.
        trial_steps: steps of a trial, tested at its end.
        steps: steps of a run.
        every: steps between two tests of a run.
        batch_size: sequences in a mini-batch.
        change: function from an arm and a recipe to the recipe that runs; default: the same.
        label: function from an arm to its name in tables; default: its own label.
    """

    name: str
    records: Path
    periods: Path
    arms: Sequence[Arm]
    grid: Callable[[Arm], tuple[float, ...]]
    trial_steps: int
    steps: int
    every: int
    batch_size: int = BATCH
    change: Callable[[Arm, Recipe], Recipe] = lambda one, recipe: recipe
    label: Callable[[Arm], str] = lambda one: one.label

    @cached_property
    def searches(self) -> list[Search]:
        """The searches for the rates, one for each grid."""
        grids = {grid: [one for one in self.arms if self.grid(one) == grid] for grid in map(self.grid, self.arms)}
        return [
            Search(title="Muon", grid=grid, trials={one.name: partial(self._trial, one) for one in arms})
            for grid, arms in grids.items()
        ]

    def cells(self, seeds: int) -> list[Cell]:
        """Return the trials, and the runs of the arms that have a rate, in order of worth."""
        return [*self.trials(self.arms), *self.runs(self.arms, seeds)]

    def rates(self) -> dict[str, float]:
        """Return the best rate of every arm that has been tried with all of them."""
        pairs = Store(self.records).records_for(self.trials(self.arms))
        runs = Runs([record for _, record in pairs if record is not None])
        return {name: rate for search in self.searches for name, rate in search.best(runs).items()}

    def trials(self, arms: Sequence[Arm]) -> list[Cell]:
        """Return the trials of some arms, in their order."""
        every = [cell for search in self.searches for cell in search.cells]
        return [cell for one in arms for cell in every if cell.method == one.name]

    def runs(self, arms: Sequence[Arm], seeds: int) -> list[Cell]:
        """Return the runs of the arms that have a rate, seed by seed."""
        rates = self.rates()
        return [
            Cell(method=one.name, recipe=self._fit(one, one.run(rates[one.name], seed), self.steps, every=self.every))
            for seed in range(seeds)
            for one in arms
            if one.name in rates
        ]

    def _trial(self, one: Arm, rate: float) -> Recipe:
        return self._fit(one, one.trial(rate), self.trial_steps, every=self.trial_steps)

    def _fit(self, one: Arm, recipe: Recipe, steps: int, *, every: int) -> Recipe:
        between = recipe.eval_every * (every * self.batch_size / (EVERY * BATCH))
        fitted = replace(recipe, name=self.name, batch_size=self.batch_size, max_steps=steps, eval_every=between)
        return self.change(one, fitted)

    @cached_property
    def _slots(self) -> dict[tuple[str, float], float]:
        return {(row["arm"], row["latency"]): row["slots"] for row in Store(self.periods).read()}

    def slots(self, one: Arm, latency: float) -> float:
        """Return the slots of a step of the fastest schedule that nwise finds, as `write_periods` wrote them."""
        return self._slots[one.name, latency]

    def write_periods(self) -> None:
        """Search for the fastest schedules; write slots of a step and M, by arm and latency."""
        rows = []
        for one in track(self.arms, f"periods of {self.name}"):
            for latency in clock.LATENCIES:
                [(_, slots, m)] = clock.slots(one, latency)
                rows.append({"arm": one.name, "latency": latency, "slots": round(slots, 6), "microbatches": m})
        write_text(self.periods, "".join(map(json_line, rows)))

    def after(self, runs: Runs, one: Arm, latency: float, other: Arm) -> Seeds:
        """Return an arm's losses, by seed, after the time in which another one does all its steps."""
        share = min(1.0, self.slots(other, latency) / self.slots(one, latency))
        return runs.scores(loss_at(share * self.steps), one.name)

    def at_equal_time(self, runs: Runs, first: Arm, second: Arm, latency: float) -> tuple[Seeds, Seeds]:
        """Return the losses of two arms, by seed, when the faster has done its steps."""
        faster = min(first, second, key=lambda one: self.slots(one, latency))
        return self.after(runs, first, latency, faster), self.after(runs, second, latency, faster)

    def worse(self, runs: Runs, text: str, source: str, first: Arm, second: Arm, latency: float) -> Claim:
        """Return the claim that the loss of the first arm is higher at equal time."""
        return greater(text, source, *self.at_equal_time(runs, first, second, latency), unit="nats")

    def losses(self, runs: Runs, arms: Iterable[Arm], clocked: Arm) -> str:
        """Return a table of losses, at equal steps and when the arm `clocked` has done its steps, and of slots a step."""
        rows = []
        for one in arms:
            ends = [
                runs.scores(loss, one.name),
                *(self.after(runs, one, late, clocked) for late in clock.LATENCIES),
            ]
            texts = [shown(list(end.values()), 3) for end in ends]
            rows.append([self.label(one), *texts, *(f"{self.slots(one, late):.2f}" for late in clock.LATENCIES)])
        slots = [f"slots a step, latency {late:g}" for late in clock.LATENCIES]
        return markdown.table(["arm", *_MOMENTS, *slots], rows)

    def differences(self, runs: Runs, pairs: Iterable[tuple[Arm, Arm]]) -> str:
        """Return a table of differences of losses, at equal steps and when the faster has done its steps."""
        rows = [
            (
                f"{self.label(first)} less {self.label(second)}",
                [
                    (runs.scores(loss, first.name), runs.scores(loss, second.name)),
                    *(self.at_equal_time(runs, first, second, late) for late in clock.LATENCIES),
                ],
            )
            for first, second in pairs
        ]
        return differences(["", *_MOMENTS], rows)

    def draw(self, runs: Runs, panels: Mapping[str, Sequence[Arm]], latency: float, path: Path) -> None:
        """Draw loss against time, in panels of arms by their title, until the fastest arm of each has done its steps."""
        with make_panels(len(panels), path, width=6.4, height=3.6, share=True) as (_, places):
            for axes, (title, arms) in zip(places, panels.items(), strict=True):
                stop = self.steps * min(self.slots(one, latency) for one in arms)
                for one in arms:
                    curve(axes, runs, one, lambda one, slots: slots / self.slots(one, latency), stop)
                axes.set(title=title, xlabel="slots", ylabel="test loss, nats a byte")
                legend(axes)

    def table_of_rates(self, runs: Runs) -> str:
        """Return the losses of the trials."""
        return "\n\n".join(["## Rates", *(search.table(runs) for search in self.searches)])


class Compared(Trained):
    """The experiment of a comparison: in every folder the trials run first, and give the rates of its runs.

    Args:
        comparison: the comparison.
        title: of the experiment.
        claims, tables: as `Parts` takes them.
        results: as `Experiment` takes them.
        seeds: number of seeds.
        cells: function from a comparison and the number of seeds to its cells; default: its own.
        draw: as `Parts` takes it; default: no figures.
    """

    def __init__(
        self,
        comparison: Comparison,
        title: str,
        claims: Callable[[Runs], list[Claim]],
        tables: Callable[[Runs], str],
        results: Sequence[Result],
        *,
        seeds: int = 3,
        cells: Callable[[Comparison, int], list[Cell]] = Comparison.cells,
        draw: Callable[[Runs, Path], None] = lambda runs, path: None,
    ) -> None:
        def of_repository(size: Size, seeds: int) -> list[Cell]:
            return cells(comparison, seeds)

        parts = Parts(cells=of_repository, claims=claims, tables=tables, draw=draw, seeds={"medium": seeds})
        super().__init__(comparison.name, title, parts, results)
        self._comparison, self._cells = comparison, cells

    def all_cells(self, job: Job, seeds: int) -> list[Cell]:
        return self._cells(replace(self._comparison, records=self.store(job).path), seeds)

    def reproduce(self, job: Job) -> None:
        """Run the trials, then the runs."""
        before = None
        while before != (before := self.progress(job)):
            super().reproduce(job)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        import_module(f"experiments.{name}.experiment").COMPARISON.write_periods()
