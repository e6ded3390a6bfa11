"""The command `nwise report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from nwise.app.cli.output import OK, Output, print_json
from nwise.app.records import json_line
from nwise.app.report.display import numbers_table
from nwise.app.report.grid import row_names
from nwise.app.report.html import check_page
from nwise.app.report.measured import Comparison
from nwise.app.report.page import report
from nwise.app.report.summary import Summary
from nwise.schedule.actions import describe


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Show runs on one page that opens offline (heads, timelines, credit, configuration), and measured times in tables.

    Example: nwise report runs/digits-2-wise-001
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Folders of runs."""
    out: Path | None = None
    """Page to write; default: report.html in the first run's folder."""
    json: bool = False
    """Print only JSON: the numbers."""

    def run(self, console: Output) -> int:
        if not self.folders:
            raise ValueError("`RUN` should be one or more folders of runs. Found none.")
        out = self.out or self.folders[0] / "report.html"
        runs = Summary.open_all(self.folders)
        check_page(out)
        for run in runs:
            if run.measured is not None:
                _trace_file(run).write_text(json_line(run.measured.trace(run.title)))
        report(runs, out)
        if self.json:
            print_json({"page": str(out), "runs": [_numbers(run) for run in runs]})
            return OK
        for run in runs:
            if run.measured is not None:
                _print_comparison(console, run, run.measured)
        console.say(f"Page: {out}")
        return OK


def _trace_file(run: Summary) -> Path:
    return run.run.folder / "trace.json"


def _print_comparison(console: Output, run: Summary, comparison: Comparison) -> None:
    """Print measured times beside predicted ones."""
    table = numbers_table(run.title, "", "measured", "predicted")
    predicted = comparison.predicted
    table.add_row("time per mini-batch, ms", f"{comparison.period:.2f}", f"{predicted.period:.2f}")
    table.add_row("bubble", f"{100 * comparison.bubble:.1f} %", f"{100 * predicted.bubble:.1f} %")
    table.add_row("overlap of messages with work", f"{100 * comparison.overlap:.1f} %", "")
    for name, sent in zip(row_names(comparison.schedule.placement), comparison.bytes_sent, strict=True):
        table.add_row(f"bytes sent by {name} in a step", _pair(sent["measured"]), _pair(sent["predicted"]))
    console.print(table)
    title = "Largest deviations: start within the stage's step, ms"
    deviations = numbers_table(title, "action", "measured", "predicted")
    for d in comparison.deviations():
        deviations.add_row(describe(d.action), f"{d.measured:.2f}", f"{d.predicted:.2f}")
    console.print(deviations)
    console.say(
        "Predicted: a simulation of the same lists with the medians of the measured times. Bytes: forward + back.\n"
        f"Trace of both: {_trace_file(run)} (ui.perfetto.dev)"
    )


def _numbers(run: Summary) -> dict[str, Any]:
    last = run.tests[-1]
    scores = {name: last[name] for name in ("step", "samples", "seconds", "loss", "accuracy")}
    return {
        "run": run.name,
        "strategy": run.strategy,
        "status": run.run.status,
        "last_test": scores,
        "timeline": None if run.measured is None else _timeline(run.measured, _trace_file(run)),
    }


def _timeline(comparison: Comparison, trace: Path) -> dict[str, Any]:
    return {
        "period_ms": {"measured": comparison.period, "predicted": comparison.predicted.period},
        "bubble": {"measured": comparison.bubble, "predicted": comparison.predicted.bubble},
        "utilisation": {"measured": comparison.utilisation, "predicted": list(comparison.predicted.utilisation)},
        "overlap": comparison.overlap,
        "bytes": list(comparison.bytes_sent),
        "deviations": [
            {"action": str(d.action), "measured_ms": d.measured, "predicted_ms": d.predicted}
            for d in comparison.deviations()
        ],
        "trace": str(trace),
    }


def _pair(values: list[float]) -> str:
    return " + ".join(f"{value:,.0f}" for value in values)
