"""`nwise report`: runs on one page that opens offline."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nwise.app.report.charts import gantt, kinds, lines, utilisation
from nwise.app.report.display import number
from nwise.app.report.figures import flow_figure
from nwise.app.report.grid import Picture, row_names
from nwise.app.report.html import HtmlCell, table, write_page
from nwise.app.report.measured import Comparison
from nwise.app.report.summary import AXES, Summary
from nwise.schedule import PAPER, best
from nwise.schedule.simulation import Event

__all__ = ["report"]

_WIDEST = 16  # most stages that a picture of the flow has room for
_BATCHES = 3  # mini-batches of a timeline
_PREDICTED = """<p class='note'>Predicted by the paper's timing model, on one accelerator for every stage: a forward takes one
slot, each loss's pass through a stage one, heads none. There are no measured times, because this run had one process, or no
<code>--timeline</code>.</p>"""


def report(runs: Sequence[Summary], path: Path) -> None:
    """Write a page about some runs, from `Summary.open_all`.

    Raises:
        ImportError: plotly is missing.
        FileNotFoundError, ValueError: a folder's records or timeline are not as `nwise train` writes them.
    """
    page = _Page(runs)
    parts = {
        "runs": ("Runs", page.overview()),
        "heads": ("Every head", page.heads()),
        "timelines": ("What each stage does when", "".join(map(page.timeline, range(len(runs))))),
        "credit": ("Which loss trains which stage", page.credit()),
        "configuration": ("Configuration and versions", page.configuration()),
    }
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, (heading, _) in parts.items())
    body = f'<h1>{html.escape(title)}</h1><nav aria-label="Parts of this page"><ul>{links}</ul></nav>\n'
    for name, (heading, text) in parts.items():
        body += f'<section id="{name}"><h2>{heading}</h2>\n{text}</section>\n'
    write_page(path, f"nwise report: {title}", body, "report.js", {"kinds": kinds(), "charts": page.charts})


class _Page:
    """The parts of the page as HTML, and the charts that its script draws into them."""

    def __init__(self, runs: Sequence[Summary]) -> None:
        self.runs = runs
        self.charts: dict[str, Any] = {}

    def _chart(self, name: str, title: str, chart: dict[str, Any]) -> str:
        """Add a chart to the page's data; return the element that shows it."""
        self.charts[name] = chart
        return f'<div id="{name}" class="chart" role="img" aria-label="{html.escape(title)}"></div>\n'

    def overview(self) -> str:
        rows = []
        for run in self.runs:
            last = run.tests[-1]
            recipe = run.recipe
            quality = run.recipe.quality
            heads = {series.head: series.values[-1] for series in run.series("test", quality)}
            scores = [number(heads.get(k), 2) for k in range(run.num_stages)]
            sizes = [str(run.num_stages), str(recipe.microbatches), str(recipe.batch_size)]
            done = [f"{last['step']:,}", f"{last['samples']:,}", f"{last['seconds']:.1f}", run.run.status]
            score = scores[-1] + (" %" if quality == "accuracy" else f" {quality}")
            rows.append([run.name, recipe.name, recipe.strategy, *sizes, *done, score, ", ".join(scores)])
        names = ["run", "recipe", "strategy", "stages", "M", "batch", "steps", "samples", "seconds", "status"]
        notes = [f"{run.name}: {text}" for run in self.runs for text in run.history]
        after = "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes)
        return table([*names, "test, last head", "every head"], rows) + after

    def heads(self) -> str:
        buttons = "".join(
            f'<label class="choice"><input type="radio" name="axis" value="{axis}"{" checked" * (i == 0)}>{text}</label>'
            for i, (axis, text) in enumerate(AXES.items())
        )
        kinds = [
            ("test", "accuracy", "test accuracy, %"),
            ("test", "perplexity", "test perplexity"),
            ("test", "loss", "test loss"),
            ("train", "loss", "training loss"),
        ]
        parts = ""
        for kind, score, title in kinds:
            shown = [run for run in self.runs if score in ("loss", run.recipe.quality)]
            curves = [(run.name, run.num_stages, run.series(kind, score)) for run in shown]
            chart = lines(curves, title, several=len(self.runs) > 1)
            if chart is not None:
                parts += self._chart(f"{kind}-{score}", title, chart)
        text = f'<div class="choices"><fieldset><legend>against</legend>{buttons}</fieldset></div>\n'
        text += f'<div class="charts">{parts}</div>'
        if len(self.runs) > 1:
            text += '<p class="note">Of several runs the last head is shown; a click in the legend shows others.</p>'
        return text

    def timeline(self, index: int) -> str:
        run = self.runs[index]
        text = f"<h3>{html.escape(run.name)}</h3>"
        if (measured := run.measured) is not None:
            return text + self._measured(str(index), run.name, measured)
        text += _PREDICTED
        for i, (first, strategy) in enumerate(run.phases):
            schedule = best(strategy, num_stages=run.num_stages, num_microbatches=run.recipe.microbatches, costs=PAPER)
            picture = Picture("", schedule, _BATCHES)
            place = f"{index}-{i}" if i else str(index)
            since = f", from step {first} on" if len(run.phases) > 1 else ""
            text += f"<p>{html.escape(strategy.name)}{since}: a mini-batch takes {schedule.period:.6g} slots.</p>"
            title = f"{run.name}: predicted timeline of {strategy.name}"
            text += self._gantt(f"predicted-{place}", title, picture.events, "slots")
            text += self._utilisation(place, run.name, picture.rows, {"predicted": picture.timeline.utilisation})
        return text

    def _measured(self, place: str, run: str, measured: Comparison) -> str:
        predicted = measured.predicted
        text = table(["", "measured", "predicted"], measured.table()) + "<h3>Measured</h3>"
        text += self._gantt(f"measured-{place}", f"{run}: measured timeline", measured.events, "ms")
        text += "<h3>Predicted: the same lists, simulated with the medians of the measured times</h3>"
        text += self._gantt(f"predicted-{place}", f"{run}: predicted timeline", predicted.events, "ms")
        shares = {"measured": measured.utilisation, "predicted": predicted.utilisation}
        return text + self._utilisation(place, run, row_names(measured.schedule.placement), shares)

    def _gantt(self, name: str, title: str, events: Sequence[Event], unit: str) -> str:
        return self._chart(name, title, gantt(events, f"time, {unit}", _BATCHES))

    def _utilisation(self, place: str, run: str, ranks: Sequence[str], shares: Mapping[str, Sequence[float]]) -> str:
        heading = "<h3>Utilisation: share of the time that each rank computes</h3>"
        chart = utilisation(ranks, shares)
        return heading + self._chart(f"utilisation-{place}", f"{run}: utilisation of every rank", chart)

    def credit(self) -> str:
        text = "<p>Row j, column k: the weight of loss j's gradient in the update of stage k.</p>"
        groups: dict[tuple[str, int], list[Summary]] = {}
        for run in self.runs:
            groups.setdefault((run.strategy, run.num_stages), []).append(run)
        for (strategy_name, num_stages), group in groups.items():
            names = ", ".join(run.name for run in group)
            text += f"<h3>{html.escape(strategy_name)} <span class='note'>({html.escape(names)})</span></h3>"
            for _, strategy in group[0].phases:
                for turn in range(strategy.turns):
                    caption = f"{strategy.name}, turn {turn}" if strategy.turns > 1 else strategy.name
                    text += _matrix(caption, strategy.credit(num_stages, turn).tolist())
            if num_stages <= _WIDEST:
                text += f'<p class="flow">{_flow_picture(group[0])}</p>'
        return text

    def configuration(self) -> str:
        columns = [run.settings() for run in self.runs]
        rows = []
        for name in dict.fromkeys(name for column in columns for name in column):
            values = [column.get(name, "–") for column in columns]
            if len(set(values)) > 1:
                values = [HtmlCell(f'<td class="other">{html.escape(value)}</td>') for value in values]
            rows.append([name, *values])
        note = '<p class="note">Differences are bold.</p>' if len(self.runs) > 1 else ""
        return note + table(["", *(run.name for run in self.runs)], rows, kind="words")


def _matrix(caption: str, credit: list[list[float]]) -> str:
    def cell(weight: float) -> HtmlCell:
        share = min(1.0, abs(weight))
        colour = f"rgba(0,114,178,{0.12 + 0.5 * share:.2f})" if weight > 0 else "#fbe3d6" if weight < 0 else "none"
        return HtmlCell(f'<td style="background:{colour}">{weight:.4g}</td>')

    rows = [[f"loss {j}", *map(cell, row)] for j, row in enumerate(credit)]
    return table(["", *(f"stage {k}" for k in range(len(credit)))], rows, caption)


def _flow_picture(run: Summary) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flow.svg"
        flow_figure([rule for _, rule in run.phases], run.num_stages, path)
        code = base64.b64encode(path.read_bytes()).decode()
    title = f"Flow of activations and gradients under {run.strategy}"
    return f'<img alt="{html.escape(title)}" style="max-width:100%" src="data:image/svg+xml;base64,{code}">'
