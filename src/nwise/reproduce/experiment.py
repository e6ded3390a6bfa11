"""An experiment: its cells, its claims, and what it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from nwise.recipes import Gpt, Recipe
from nwise.reproduce import claims as claiming
from nwise.reproduce.cell import Cell, Record
from nwise.reproduce.claims import Claim
from nwise.reproduce.pool import Told, run_cells
from nwise.reproduce.runs import Runs
from nwise.reproduce.store import Store

Size = Literal["small", "full"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is asked for.

    Args:
        folder: of all experiments, each of which has a folder of its own in it.
        size: small, for two cores, or full, as printed.
        seeds: how many; None for the experiment's own number.
        only: texts of which a cell's name should contain one; none for all cells.
        workers: processes at once.
        told: called with a cell's name, what of it is done, and how much there is.
        began: called with the experiment's title, how many cells there are, and how many of them are to be run.
    """

    folder: Path
    size: Size = "small"
    seeds: int | None = None
    only: tuple[str, ...] = ()
    workers: int = 1
    told: Told = lambda name, done, total: None
    began: Callable[[str, int, int], None] = lambda name, cells, missing: None


class Experiment(ABC):
    """A row of the index.

    Args:
        name: of its folder.
        title: what it is about.
        of: the experiment whose runs it looks at; its own by default.
    """

    def __init__(self, name: str, title: str, *, of: str | None = None) -> None:
        self.name, self.title, self.of = name, title, of or name

    @abstractmethod
    def reproduce(self, job: Job) -> None:
        """Run what has not been run, and write tables and figures from the records."""

    @abstractmethod
    def claims(self, job: Job) -> list[Claim]:
        """What was found, from the records alone; empty if there are none."""

    def page(self, job: Job) -> Path:
        """Where the tables of a size are."""
        return job.folder / self.name / f"{job.size}.md"

    def document(self, job: Job, text: str) -> None:
        """Write the tables of a size."""
        path = self.page(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        command = f"`nwise reproduce {self.name} --size {job.size}`"
        path.write_text(f"# {self.title}: {job.size} size\n\nWritten by {command}.\n\n{text.strip()}\n")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is particular to an experiment of training runs.

    Args:
        cells: of a size, for so many seeds.
        seeds: how many there are by default, of the small and of the full size.
        claims: of the records.
        tables: of the records, as Markdown.
        draw: the figures of the records, into a folder, for a size.
    """

    cells: Callable[[Size, int], list[Cell]]
    claims: Callable[[Runs], list[Claim]]
    tables: Callable[[Runs], str]
    draw: Callable[[Runs, Path, Size], None] = lambda runs, folder, size: None
    seeds: dict[Size, int] = field(default_factory=lambda: {"small": 3, "full": 3})


class Trained(Experiment):
    """An experiment of training runs, each of them a cell."""

    def __init__(self, name: str, title: str, parts: Parts, *, of: str | None = None) -> None:
        super().__init__(name, title, of=of)
        self.parts = parts

    def cells(self, job: Job) -> list[Cell]:
        """All of a job, a seed after the other, the longest of a seed first."""
        seeds = job.seeds or self.parts.seeds[job.size]
        found = [
            cell
            for cell in self.parts.cells(job.size, seeds)
            if not job.only or any(text in cell.name for text in job.only)
        ]
        if not found:
            names = ", ".join(dict.fromkeys(cell.method for cell in self.parts.cells(job.size, 1)))
            raise ValueError(
                f"`only` should be part of a cell's name, such as '6 stages', 'seed 0' or one of {names}. Found {job.only}."
            )
        return sorted(found, key=lambda cell: cell.recipe.seed)

    def store(self, job: Job) -> Store:
        """Where the records are."""
        return Store(job.folder / self.of / f"{job.size}.jsonl")

    def reproduce(self, job: Job) -> None:
        """Run the cells that have no record, then write."""
        store = self.store(job)
        cells = self.cells(job)
        missing = [cell for cell, record in store.of(cells) if record is None]
        job.began(self.title, len(cells), len(missing))
        for _, record in run_cells(missing, job.workers, job.told):
            store.add(record)
        self.write(job)

    def runs(self, job: Job) -> Runs:
        """The records of all cells that were run as they are configured now."""
        all_seeds = max(self.parts.seeds[job.size], job.seeds or 0)
        found = self.store(job).of(self.parts.cells(job.size, all_seeds))
        return Runs([record for _, record in found if record is not None])

    def claims(self, job: Job) -> list[Claim]:
        runs = self.runs(job)
        return self.parts.claims(runs) if runs.records else []

    def write(self, job: Job) -> None:
        """Tables and figures from the records."""
        runs = self.runs(job)
        if not runs.records:
            return
        parts = [_made(runs.records), self.parts.tables(runs), "## Claims", claiming.table(self.claims(job))]
        self.document(job, "\n\n".join(parts))
        self.parts.draw(runs, job.folder / self.name, job.size)


def on_a_gpu(recipe: Recipe) -> Recipe:
    """The same run, quick on a GPU: bf16, compiled blocks, channels innermost; data and augmentation are on the device."""
    return replace(recipe, precision="bf16", compile=True, channels_last=not isinstance(recipe.model, Gpt))


def _made(records: Sequence[Record]) -> str:
    """Where the records come from."""
    machines = dict.fromkeys(
        ", ".join([*_machine(r["machine"]), f"Python {r['versions']['python']}", f"torch {r['versions']['torch']}"])
        for r in records
    )
    minutes = sum(r["seconds"] for r in records) / 60
    seeds = sorted({r["seed"] for r in records})
    return (
        f"{len(records)} runs, seeds {seeds[0]} to {seeds[-1]}, {minutes:,.1f} minutes of runs in sum; {'; '.join(machines)}. "
        "In brackets: one standard error over seeds."
    )


def _machine(found: dict[str, str]) -> list[str]:
    return [found["processor"], f"{found['cores']} cores", *([found["gpu"]] if "gpu" in found else [])]
