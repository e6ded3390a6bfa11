"""An experiment: its jobs, its claims, and the files that it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from experiments.harness.claims import Claim
from experiments.harness.pool import OnProgress
from experiments.harness.store import Store
from nwise.app.records import write_text

Size = Literal["small", "medium", "full"]
SIZES: tuple[Size, ...] = get_args(Size)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request to an experiment.

    Args:
        folder: of all experiments, each of which has a folder of its own in it.
        size: small, an hour of two cores for all; medium, some evenings of them for each; or full, on a GPU.
        seeds: number of seeds; None for the experiment's own number.
        only: texts of which a cell's name should contain one; none for all cells.
        paper_only: whether methods that the paper does not have are left out.
        redraw: run nothing, only write tables and figures from the records.
        workers: number of processes at once.
        on_progress: function called with a cell's name, its steps done, and all its steps.
        on_begin: function called with the experiment's title, the number of cells, and the number of those to run.
        on_skip: function called with a sentence about cells that cannot be run.
    """

    folder: Path
    size: Size = "small"
    seeds: int | None = None
    only: tuple[str, ...] = ()
    paper_only: bool = False
    redraw: bool = False
    workers: int = 1
    on_progress: OnProgress = lambda name, done, total: None
    on_begin: Callable[[str, int, int], None] = lambda name, cells, missing: None
    on_skip: Callable[[str], None] = lambda why: None

    def begin(self, title: str, cells: int, missing: int) -> None:
        """Report that an experiment begins, unless it runs nothing."""
        if not self.redraw:
            self.on_begin(title, cells, missing)


class Result(NamedTuple):
    """A row of the index.

    Args:
        place: the paper's figure or table, such as ``"figure 5"``; empty for claims of the text and for questions of our own.
        what: the row's text.
        source: what the sources of its claims begin with, see `Claim`.
    """

    place: str
    what: str
    source: str


class Waiting(NamedTuple):
    """A row of the index for which other data are needed than the small size has.

    Args:
        place: the paper's figures and tables.
        what: the row's text.
        sources: names of the data sets.
    """

    place: str
    what: str
    sources: tuple[str, ...]


class NothingMatches(ValueError):
    """An experiment has no cell of the size, or none whose name contains one of the texts."""


class Experiment(ABC):
    """An experiment of the paper, or several of its results.

    Args:
        name: of its folder.
        title: what it is about.
        results: its rows of the index.
        owner: name of the experiment that owns its runs; default: its own.
        waiting: its rows for which there may be no data.
        sizes: the sizes that it has.
    """

    def __init__(
        self,
        name: str,
        title: str,
        results: Sequence[Result],
        *,
        owner: str | None = None,
        waiting: Sequence[Waiting] = (),
        sizes: Sequence[Size] = ("small", "full"),
    ) -> None:
        self.name, self.title, self.results = name, title, tuple(results)
        self.owner, self.waiting, self.sizes = owner or name, tuple(waiting), tuple(sizes)

    def check(self, job: Job) -> None:
        """Raise `NothingMatches` if the experiment lacks the size."""
        if job.size not in self.sizes:
            raise NothingMatches(f"`size` of {self.name} should be {' or '.join(self.sizes)}. Found {job.size}.")

    @abstractmethod
    def reproduce(self, job: Job) -> None:
        """Run what has not been run, and write tables and figures from the records."""

    @abstractmethod
    def progress(self, job: Job) -> tuple[int, int]:
        """Return the number of cells that have a record, and of all cells."""

    @abstractmethod
    def claims(self, job: Job) -> list[Claim]:
        """Return the claims, tested on the records alone; empty if there are none."""

    def store(self, job: Job) -> Store:
        """Return the store of the records of a size."""
        return Store(job.folder / self.owner / f"{job.size}.jsonl")

    def page(self, job: Job) -> Path:
        """Return the path of the tables of a size."""
        return job.folder / self.name / f"{job.size}.md"

    def document(self, job: Job, text: str) -> None:
        """Write the tables of a size."""
        path = self.page(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        command = f"`python -m experiments {self.name} --size {job.size}`"
        write_text(path, f"# {self.title}: {job.size} size\n\nWritten by {command}.\n\n{text.strip()}\n")
