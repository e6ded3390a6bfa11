"""The command that runs the paper again: `python -m experiments e1`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from experiments.harness.claims import NOTE, Claim, seeds_text, seeds_to_decide
from experiments.harness.experiment import Job, NothingMatches, Size
from experiments.index import EXPERIMENTS, experiment, write_index
from experiments.t.experiment import Timing
from nwise.app.cli.dispatch import execute
from nwise.app.cli.output import INTERRUPTED, OK, PARSING, print_json
from nwise.checks import check_limits
from nwise.machine import num_cores
from nwise.runtime.launch import launched, variable

PROGRAM = "python -m experiments"

_TITLES = "; ".join(
    [*(f"{name} ({one.title})" for name, one in EXPERIMENTS.items()), "all (an hour in the small size)"]
)


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run an experiment of the paper again: tables, figures and verdicts from records; cells with a record are skipped.

    Example: python -m experiments e1 --seeds 1
    """

    experiment: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="{" + ",".join([*EXPERIMENTS, "all"]) + "}", help=f"One of: {_TITLES}."),
    ] = ""
    size: Size = "small"
    """small: two cores, an hour for all with two seeds each; medium: two cores, up to 20 hours for each experiment that has
    it; full: the paper's length and network, for a GPU."""
    folder: Path = Path("experiments")
    """Folder of the records, tables and figures; another one leaves those of the repository as they are."""
    seeds: int | None = None
    """Number of seeds; default: that of the experiment."""
    only: tuple[str, ...] = ()
    """Run only cells whose name has one of these texts in it, such as "2-wise" "seed 0"."""
    paper_only: bool = False
    """Leave out methods that the paper does not have."""
    redraw: bool = False
    """Run nothing, only write tables and figures from the existing records."""
    workers: int | None = None
    """Processes at once; default: one for each core, on a GPU one."""
    json: bool = False
    """Print the claims as JSON, and nothing else."""

    def run(self, console: Console) -> int:
        if not self.experiment:
            raise ValueError(
                f"`EXPERIMENT` should be one of {', '.join(EXPERIMENTS)}, or all, which takes an hour in the small size. Found "
                "none."
            )
        check_limits(seeds=self.seeds, workers=self.workers)
        names = list(EXPERIMENTS) if self.experiment == "all" else [experiment(self.experiment).name]
        display = _Display(console, quiet=self.json)
        job = Job(
            folder=self.folder,
            size=self.size,
            seeds=self.seeds,
            only=self.only,
            paper_only=self.paper_only,
            redraw=self.redraw,
            workers=self.workers or (1 if torch.cuda.is_available() else num_cores()),
            on_progress=display.show_progress,
            on_begin=display.begin,
            on_skip=display.report_skip,
        )
        if launched():
            return self._measure_steps(job)
        try:
            with display.progress:
                matches = [name for name in names if _reproduce(name, job, alone=len(names) == 1)]
        except KeyboardInterrupt:
            Console(stderr=True).print(
                f"Interrupted. The records so far are in {self.folder}; the same command continues."
            )
            return INTERRUPTED
        if not matches:
            raise NothingMatches(
                f"`only` should be part of the name of a cell. Found {self.only}, which is part of none."
            )
        write_index(self.folder)
        claims = [(name, claim) for name in matches for claim in experiment(name).claims(job)]
        if self.json:
            rows = [
                {"experiment": name, **dataclasses.asdict(claim), "seeds_to_decide": seeds_to_decide(claim)}
                for name, claim in claims
            ]
            print_json({"claims": rows})
        else:
            for name, group in groupby(claims, key=itemgetter(0)):
                console.print(_table(name, [claim for _, claim in group]))
            if any(seeds_text(claim) for _, claim in claims):
                console.print(NOTE.replace("*", ""), soft_wrap=True, highlight=False)
            console.print(
                f"Tables and figures: {self.folder}; all results: {self.folder / 'README.md'}",
                soft_wrap=True,
                highlight=False,
            )
        return OK

    def _measure_steps(self, job: Job) -> int:
        """Measure with a process for each stage; every process of torchrun calls it."""
        timing = EXPERIMENTS["t"]
        if self.experiment != "t" or not isinstance(timing, Timing):
            raise ValueError(
                "`EXPERIMENT` should be t under torchrun, which measures steps of Transformers with a process for each stage. "
                f"Found {self.experiment}; start it without torchrun."
            )
        timing.check(job)
        timing.measure_steps(job, variable("WORLD_SIZE"), is_first=variable("RANK") == 0)
        return OK


def _reproduce(name: str, job: Job, *, alone: bool) -> bool:
    """Run an experiment's cells of a job and return whether it has any; alone it should."""
    try:
        experiment(name).check(job)
        experiment(name).reproduce(job)
    except NothingMatches:
        if alone:
            raise
        return False
    return True


def _table(name: str, claims: Sequence[Claim]) -> Table:
    table = Table(title=f"Claims of {name}", title_justify="left")
    table.add_column("claim", overflow="fold")
    table.add_column("effect", no_wrap=True)
    table.add_column("95 % interval", no_wrap=True)
    table.add_column("verdict")
    colours = {"holds": "green", "exact": "green", "does not hold": "red", "undecided": "yellow"}
    for claim in claims:
        if isnan(claim.effect):
            table.add_row(claim.text, "not run", "", "")
            continue
        between = f"{claim.low:+.3g} to {claim.high:+.3g}" if claim.seeds > 1 else ""
        verdict = f"[{colours[claim.verdict]}]{claim.verdict}[/]{seeds_text(claim)}"
        table.add_row(claim.text, f"{claim.effect:+.3g} {claim.unit}", between, verdict)
    return table


class _Display:
    """A bar for all cells of an experiment and one for each that runs; a line for each where there is no terminal."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._plain = not quiet and not console.is_terminal
        self._console = console
        self._all: TaskID | None = None
        self._missing = self._done = 0
        self._start_time = time.perf_counter()
        self._running: dict[str, TaskID] = {}

    def begin(self, title: str, cells: int, missing: int) -> None:
        """Begin the display of an experiment."""
        self._missing, self._done, self._start_time = missing, 0, time.perf_counter()
        note = f"{title}: {cells} cells" + (f", {cells - missing} of them recorded before" if missing < cells else "")
        if self._plain:
            self._console.print(note, soft_wrap=True, highlight=False)
        if missing:
            self._all = self.progress.add_task(title, total=missing)

    def report_skip(self, why: str) -> None:
        """Print why some cells cannot be run."""
        Console(stderr=True).print(f"python -m experiments: {why}", soft_wrap=True, highlight=False, markup=False)

    def show_progress(self, name: str, done: int, total: int) -> None:
        """Show the progress of a cell."""
        if name not in self._running:
            self._running[name] = self.progress.add_task(f"  {name}", total=total)
        self.progress.update(self._running[name], completed=done, total=total)
        if done == total:
            self.progress.remove_task(self._running.pop(name))
            self._done += 1
            if self._all is not None:
                self.progress.update(self._all, completed=self._done)
            if self._plain:
                seconds = time.perf_counter() - self._start_time
                left = seconds / self._done * (self._missing - self._done)
                line = f"  {self._done}/{self._missing} {name}; {left / 60:.0f} minutes left"
                self._console.print(line, soft_wrap=True, highlight=False)


def main(arguments: list[str]) -> int:
    """Parse a command line, run it, and return its exit code."""
    return execute(PROGRAM, lambda: tyro.cli(Reproduce, prog=PROGRAM, args=arguments, config=PARSING))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
