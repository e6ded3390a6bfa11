"""The report command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from nwise.cli.output import OK, print_json
from nwise.report.html import check_page
from nwise.report.measured import Comparison
from nwise.report.page import report
from nwise.report.summary import Summary
from nwise.runtime.watch import describe


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show runs on one page that opens offline: every head, timelines, credit, configuration; and measured times in tables."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of runs."""
    out: Path | None = None
    """The page; default: report.html in the first run's folder."""
    json: bool = False
    """Print the numbers as JSON, and nothing else."""

    def run(self, console: Console) -> int:
        if not self.folders:
            raise ValueError("`RUN` should be one or more folders of runs. Found none.")
        out = self.out or self.folders[0] / "report.html"
        runs = Summary.of(self.folders)
        check_page(out)
        for run in runs:
            if (found := run.measured) is not None:
                trace = json.dumps(found.trace(run.title), allow_nan=False)
                (run.run.folder / "trace.json").write_text(trace + "\n")
        report(runs, out)
        if self.json:
            print_json({"page": str(out), "runs": [_numbers(run, run.measured) for run in runs]})
            return OK
        for run in runs:
            if (found := run.measured) is not None:
                _show(console, run, found)
        console.print(f"Page: {out}", soft_wrap=True, highlight=False)
        return OK


def _show(console: Console, run: Summary, found: Comparison) -> None:
    """What was measured beside what was predicted."""
    table = Table(title=run.title, title_justify="left")
    for heading in ("", "measured", "predicted"):
        table.add_column(heading, justify="right" if heading else "left")
    line = found.predicted
    table.add_row("time per mini-batch, ms", f"{found.period:.2f}", f"{line.period:.2f}")
    table.add_row("bubble", f"{100 * found.bubble:.1f} %", f"{100 * line.bubble:.1f} %")
    table.add_row("overlap of messages with work", f"{100 * found.overlap:.1f} %", "")
    for k, one in enumerate(found.bytes_sent):
        table.add_row(f"bytes sent by stage {k} in a step", _pair(one["measured"]), _pair(one["predicted"]))
    console.print(table)
    later = Table(title="Largest deviations: begin within the stage's step, ms", title_justify="left")
    for heading in ("action", "measured", "predicted"):
        later.add_column(heading, justify="right" if heading != "action" else "left")
    for d in found.deviations():
        later.add_row(describe(d.action), f"{d.measured:.2f}", f"{d.predicted:.2f}")
    console.print(later)
    console.print(
        "Predicted is a simulation of the same lists with the medians of the measured times; bytes are forward + back.\n"
        f"Trace of both: {run.run.folder / 'trace.json'} (ui.perfetto.dev)",
        soft_wrap=True,
        highlight=False,
    )


def _numbers(run: Summary, found: Comparison | None) -> dict[str, Any]:
    last = run.tests[-1]
    scores = {name: last[name] for name in ("step", "samples", "seconds", "loss", "accuracy")}
    numbers = {"run": run.name, "strategy": run.strategy.name, "status": run.run.status, "last_test": scores}
    return {**numbers, "timeline": None if found is None else _timeline(found, run.run.folder / "trace.json")}


def _timeline(found: Comparison, trace: Path) -> dict[str, Any]:
    return {
        "period_ms": {"measured": found.period, "predicted": found.predicted.period},
        "bubble": {"measured": found.bubble, "predicted": found.predicted.bubble},
        "utilisation": {"measured": found.utilisation, "predicted": list(found.predicted.utilisation)},
        "overlap": found.overlap,
        "bytes": list(found.bytes_sent),
        "deviations": [
            {"action": str(d.action), "measured_ms": d.measured, "predicted_ms": d.predicted}
            for d in found.deviations()
        ],
        "trace": str(trace),
    }


def _pair(values: list[float]) -> str:
    return " + ".join(f"{value:,.0f}" for value in values)
