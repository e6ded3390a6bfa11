"""The report command."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

import nwise
from nwise.cli.output import OK, print_json
from nwise.report.measured import Comparison
from nwise.runtime.timeline import load
from nwise.runtime.watch import describe
from nwise.schedule.best import flows_of
from nwise.schedule.choose import choose
from nwise.training.run import Run


@dataclass(frozen=True, kw_only=True)
class Report:
    """Lay the measured timeline of a run beside the predicted one: bubble, overlap, bytes, largest deviations, a trace."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run's folder, made by `nwise train --timeline` under torchrun."""
    out: Path | None = None
    """Where to write the trace for ui.perfetto.dev; default: trace.json in the run's folder."""
    json: bool = False
    """Print the numbers as JSON, and nothing else."""

    def run(self, console: Console) -> int:
        run = Run.open(self.folder)
        recorded = load(self.folder / "timeline.json")
        stages, sent = recorded.events, recorded.bytes_sent
        if not stages or not all(stages):
            raise ValueError(
                f"{self.folder / 'timeline.json'} should hold actions of every stage. Found a stage without; record more steps."
            )
        recipe = run.recipe
        strategy = nwise.strategy(recorded.strategy, heads=recipe.heads)
        flows = flows_of(strategy, len(stages), recipe.microbatches)
        found = Comparison(choose(recipe.schedule, flows), stages, sent)
        title = f"{recipe.name}, {strategy.name}, A = {len(stages)}, M = {recipe.microbatches}"
        out = self.out or self.folder / "trace.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found.trace(title), allow_nan=False) + "\n")
        if self.json:
            print_json(self._numbers(found, out))
            return OK
        table = Table(title=title, title_justify="left")
        for heading in ("", "measured", "predicted"):
            table.add_column(heading, justify="right" if heading else "left")
        line = found.predicted
        table.add_row("time per mini-batch, ms", f"{found.period:.2f}", f"{line.period:.2f}")
        table.add_row("bubble", f"{100 * found.bubble:.1f} %", f"{100 * line.bubble:.1f} %")
        table.add_row("overlap of messages with work", f"{100 * found.overlap:.1f} %", "")
        for k, one in enumerate(sent):
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
            f"Trace of both: {out} (ui.perfetto.dev)",
            soft_wrap=True,
            highlight=False,
        )
        return OK

    def _numbers(self, found: Comparison, out: Path) -> dict[str, object]:
        return {
            "period_ms": {"measured": found.period, "predicted": found.predicted.period},
            "bubble": {"measured": found.bubble, "predicted": found.predicted.bubble},
            "overlap": found.overlap,
            "bytes": list(found.bytes_sent),
            "deviations": [
                {"action": str(d.action), "measured_ms": d.measured, "predicted_ms": d.predicted}
                for d in found.deviations()
            ],
            "trace": str(out),
        }


def _pair(values: list[float]) -> str:
    return " + ".join(f"{value:,.0f}" for value in values)
