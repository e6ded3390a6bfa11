"""The commands `nwise report` and `nwise same`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nwise.app.cli.output import FAILED, OK, Output, print_json
from nwise.app.records import json_line
from nwise.app.report.display import numbers_table
from nwise.app.report.grid import row_names
from nwise.app.report.html import check_page
from nwise.app.report.measured import Comparison
from nwise.app.report.page import report
from nwise.app.report.same import parting
from nwise.app.report.summary import Summary
from nwise.app.training import Run
from nwise.schedule.actions import describe


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Show runs on one page that opens offline (heads, timelines, credit, configuration), and measured times in tables.

    Example: nwise report runs/digits-2-wise-mean-001
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of runs."""
    out: Path | None = None
    """Page to write; default: report.html in the first run's folder."""
    json: bool = False
    """Print only JSON: the numbers."""

    def run(self, console: Output) -> None:
        if not self.folders:
            raise ValueError("`RUN` should be one or more folders of runs. Found none.")
        out = self.out or self.folders[0] / "report.html"
        runs = Summary.open_all(self.folders)
        check_page(out)
        measured = [(run, run.run.folder / "trace.json", run.measured) for run in runs]
        for run, trace, comparison in measured:
            if comparison is not None:
                trace.write_text(json_line(comparison.trace(run.title)))
        report(runs, out)
        if self.json:
            print_json({"page": str(out), "runs": [_numbers(*one) for one in measured]})
            return
        for run, trace, comparison in measured:
            if comparison is not None:
                _print_comparison(console, run.title, trace, comparison)
        console.say(f"Page: {out}")


@dataclass(frozen=True, kw_only=True)
class SameCommand:
    """Compare the records and the weights of two runs, bit for bit; the exit code is 1 if they differ.

    Example: nwise same runs/digits-2-wise-mean-001 runs/digits-2-wise-mean-002
    """

    one: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run."""
    other: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of another run."""
    json: bool = False
    """Print only JSON: the numbers."""

    def run(self, console: Output) -> int:
        found = parting(Run.open(self.one), Run.open(self.other))
        if self.json:
            print_json({"same": found.same, **dataclasses.asdict(found)})
            return OK if found.same else FAILED
        if found.same:
            console.say(f"The same: {found.records:,} records and {found.tensors:,} tensors, bit for bit.")
            return OK
        if not found.records + found.tensors + found.alone:
            console.say("Neither run has a record or weights.")
            return FAILED
        records = f"{found.records:,} records of the same kind and step are equal"
        console.say(f"They part at {found.first}." if found.first else f"All {records}.")
        if found.alone:
            console.say(f"One run alone has {found.alone:,} more records.")
        if found.apart:
            worst = max(found.apart, key=found.apart.__getitem__)
            some = f"{len(found.apart):,} of {found.tensors:,} tensors"
            console.say(f"{some} of the weights differ, {worst} most: by {found.apart[worst]:.2g}.")
        return FAILED


def _print_comparison(console: Output, title: str, trace: Path, comparison: Comparison) -> None:
    rows = comparison.table()
    for name, sent in zip(row_names(comparison.schedule.placement), comparison.bytes_sent, strict=True):
        rows.append((f"bytes sent by {name} in a step", " + ".join(f"{value:,.0f}" for value in sent), "–"))
    console.print(numbers_table(title, ("", "measured", "predicted"), rows))
    rows = [(describe(d.action), f"{d.measured:.2f}", f"{d.predicted:.2f}") for d in comparison.deviations()]
    heading = "Largest deviations: start within the stage's step, ms"
    console.print(numbers_table(heading, ("action", "measured", "predicted"), rows))
    console.say(
        "Predicted: a simulation of the same lists with the medians of the measured times. Bytes: forward + back.\n"
        f"Trace of both: {trace} (ui.perfetto.dev)"
    )


def _numbers(run: Summary, trace: Path, comparison: Comparison | None) -> dict[str, Any]:
    scores = {name: run.tests[-1][name] for name in ("step", "samples", "seconds", "loss", "accuracy")}
    timeline = None if comparison is None else {**comparison.as_json(), "trace": str(trace)}
    return {
        "run": run.name,
        "strategy": run.strategy,
        "status": run.run.status,
        "last_test": scores,
        "timeline": timeline,
    }
