"""Experiments of training runs, each of them a cell."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.harness import claims as claiming
from experiments.harness import markdown
from experiments.harness.cell import ROOT, Cell, Record, missing_data, revision, source_digest
from experiments.harness.claims import Claim
from experiments.harness.experiment import Experiment, Job, NothingMatches, Result, Size
from experiments.harness.pool import run_cells
from experiments.harness.runs import Runs
from experiments.harness.search import RECORDS, TRIAL_SEED
from nwise.app.recipes import EmbeddedText, Gpt, Recipe

# SHA-256 of the source code of records that do not name it.
_FIRST_SOURCE = "2e31e854ce7c5a39d3549a94420e7ba4b51281ef0f32fc8b6ddd601eff6d7d42"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts that are particular to an experiment.

    Args:
        cells: of a size, for so many seeds.
        claims: of the records of one data set.
        tables: likewise, as Markdown.
        draw: likewise, the figures: into files that begin with a path.
        seeds: number of seeds by default, for every size that the experiment has.
        ours: methods that the paper does not have, which a job can leave out.
    """

    cells: Callable[[Size, int], list[Cell]]
    claims: Callable[[Runs], list[Claim]]
    tables: Callable[[Runs], str]
    draw: Callable[[Runs, Path], None] = lambda runs, path: None
    seeds: dict[Size, int] = field(default_factory=lambda: {"small": 3, "full": 3})
    ours: tuple[str, ...] = ()


class Trained(Experiment):
    """An experiment of training runs; takes what `Experiment` takes, and its parts."""

    def __init__(self, name: str, title: str, parts: Parts, results: Sequence[Result], **options: Any) -> None:
        super().__init__(name, title, results, sizes=tuple(parts.seeds), **options)
        self.parts = parts

    def check(self, job: Job) -> None:
        """Raise `NothingMatches` if the experiment lacks the size, or learning rates for it."""
        super().check(job)
        if not self.all_cells(job, 1):
            raise NothingMatches(
                f"{self.name} should have a learning rate for each method of {job.size} size in {RECORDS}. Found none; run "
                f"`python -m experiments rates --size {job.size}` in the repository."
            )

    def all_cells(self, job: Job, seeds: int) -> list[Cell]:
        """Return all cells of the size of a job, for so many seeds."""
        left_out = self.parts.ours if job.paper_only else ()
        return [cell for cell in self.parts.cells(job.size, seeds) if cell.method not in left_out]

    def cells(self, job: Job) -> list[Cell]:
        """Return all cells of a job: trials, then runs, a seed after the other."""
        seeds = job.seeds or self.parts.seeds[job.size]
        cells = [
            cell for cell in self.all_cells(job, seeds) if not job.only or any(text in cell.name for text in job.only)
        ]
        if job.only and not cells:
            names = ", ".join(dict.fromkeys(cell.method for cell in self.all_cells(job, 1)))
            raise NothingMatches(
                f"`only` should be part of a cell's name, such as '6 stages', 'seed 0' or one of {names}. Found {job.only}."
            )
        return sorted(cells, key=lambda cell: (cell.recipe.seed < TRIAL_SEED, cell.recipe.seed))

    def reproduce(self, job: Job) -> None:
        """Run the cells that have no record, then write."""
        store = self.store(job)
        pairs = store.records_for(self.cells(job))
        missing = [] if job.redraw else self._select_possible([cell for cell, record in pairs if record is None], job)
        job.begin(self.title, len(pairs), len(missing))
        if missing:
            _check_clean(job)
            store.check_writable()  # before hours of work
        checkpoints = store.path.parent / "checkpoints"
        for cell, record in run_cells(missing, job.workers, job.on_progress, checkpoints):
            store.add(record)
            shutil.rmtree(cell.folder(checkpoints), ignore_errors=True)
        self.write(job)

    def _select_possible(self, cells: Sequence[Cell], job: Job) -> list[Cell]:
        """Return the cells whose data are there; it is an error if there are none."""
        kinds = dict.fromkeys(cell.recipe.data for cell in cells)
        why = {data: missing_data(data) or self._other_source(data, job) for data in kinds}
        possible = [cell for cell in cells if why[cell.recipe.data] is None]
        if cells and not possible:
            raise FileNotFoundError(next(filter(None, why.values())))
        for data, text in why.items():
            count = sum(cell.recipe.data == data for cell in cells)
            if text is not None:
                job.on_skip(f"{self.title}: {count} cells are not run. {text}")
        return possible

    def _other_source(self, data: object, job: Job) -> str | None:
        """Return why a text is not that of the records beside which its runs would stand; None if it is, and for images."""
        if not isinstance(data, EmbeddedText):
            return None
        path, digest = self.store(job).path, source_digest(data)
        texts = [(r, r.get("config", {}).get("data", {})) for r in self.store(job).read()]
        others = {r.get("source", _FIRST_SOURCE) for r, text in texts if text.get("max_bytes") == data.max_bytes}
        others.discard(digest)
        if not others:
            return None
        return (
            f"The text should be that of the records in {path}, the standard library with the SHA-256 {min(others)[:8]}. Found "
            f"{digest[:8]}, since another installation of Python has another text; use that one, or another --folder."
        )

    def all_runs(self, job: Job) -> list[Runs]:
        """Return the runs of each data set: records of all cells that were run as they are configured now, of whatever seeds."""
        store = self.store(job)
        seeds = (record.get("seed", 0) for record in store.read())
        last = max((seed for seed in seeds if seed < TRIAL_SEED), default=0)
        cells = self.all_cells(replace(job, paper_only=False), max(self.parts.seeds[job.size], last + 1))
        records = [record for _, record in store.records_for(cells) if record is not None]
        sources = dict.fromkeys(record["config"]["data"].get("source", "") for record in records)
        return [
            Runs([r for r in records if r["config"]["data"].get("source", "") == source], job.size, source)
            for source in sources
        ]

    def claims(self, job: Job) -> list[Claim]:
        return self._claims(self.all_runs(job))

    def _claims(self, groups: Sequence[Runs]) -> list[Claim]:
        named = len(groups) > 1
        return [
            replace(claim, text=f"{runs.source or 'source code'}: {claim.text}") if named else claim
            for runs in groups
            for claim in self.parts.claims(runs)
        ]

    def progress(self, job: Job) -> tuple[int, int]:
        pairs = self.store(job).records_for(self.cells(replace(job, only=(), seeds=None)))
        return sum(record is not None for _, record in pairs), len(pairs)

    def write(self, job: Job) -> None:
        """Write tables and figures from the records."""
        groups = self.all_runs(job)
        unused = len(self.store(job).read()) - sum(len(runs.records) for runs in groups)
        if unused and self.name == self.owner:
            job.on_skip(
                f"{self.title}: {unused} records are unused. Their cells have newer ones, or other settings now."
            )
        sections = []
        for runs in groups:
            path = (
                job.folder / self.name / (job.size if runs.source == groups[0].source else f"{job.size}-{runs.source}")
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            self.parts.draw(runs, path)
            sections += [f"# {runs.source or 'source code'}"] if len(groups) > 1 else []
            sections += [_describe_runs(runs.records), self.parts.tables(runs)]
        if sections:
            self.document(job, "\n\n".join([*sections, "## Claims", claiming.table(self._claims(groups))]))


def _check_clean(job: Job) -> None:
    """Raise ValueError if the repository's own records would come from code that no revision has."""
    found = revision() or ""
    if found.endswith("+") and job.folder.resolve() == ROOT / "experiments":
        raise ValueError(
            f"Records in {job.folder} should come from a revision. Found changes of code since {found[:-1]}; commit them, or "
            "give another `folder`."
        )


def on_a_gpu(recipe: Recipe) -> Recipe:
    """Return the same run, quick on a GPU: bf16, captured steps, channels innermost; data and augmentation are on the device."""
    return replace(recipe, precision="bf16", capture=True, channels_last=not isinstance(recipe.model, Gpt))


def _describe_runs(records: Sequence[Record]) -> str:
    """Return a sentence about the origin of some records."""
    minutes = sum(r["seconds"] for r in records) / 60
    seeds = sorted({r["seed"] for r in records})
    return (
        f"{len(records)} runs, seeds {seeds[0]} to {seeds[-1]}, {minutes:,.1f} minutes in sum, of which several ran at once; "
        f"{markdown.machines(records)}. In brackets: one standard error over seeds."
    )
