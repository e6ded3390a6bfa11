"""`nwise report`: runs on one page that opens offline."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nwise.app.report.charts import gantt, lines, utilisation
from nwise.app.report.display import number
from nwise.app.report.figures import flow_figure
from nwise.app.report.grid import Picture, row_names
from nwise.app.report.html import HtmlCell, section, table, write_page
from nwise.app.report.summary import AXES, Summary
from nwise.schedule import PAPER, best

__all__ = ["report"]

_WIDEST = 16  # most stages that a picture of the flow has room for
_BATCHES = 3  # mini-batches of a timeline


def report(runs: Sequence[Summary], path: Path) -> None:
    """Write a page about some runs.

    Args:
        runs: the runs, from `Summary.open_all`.
        path: path of the page.

    Raises:
        ImportError: plotly is missing.
        FileNotFoundError, ValueError: a folder's records or timeline are not as `nwise train` writes them.
    """
    charts: dict[str, Any] = {}
    parts = {
        "runs": ("Runs", _overview(runs)),
        "heads": ("Every head", _heads(runs, charts)),
        "timelines": ("What each stage does when", "".join(_timeline(i, run, charts) for i, run in enumerate(runs))),
        "credit": ("Which loss trains which stage", _credit(runs)),
        "configuration": ("Configuration and versions", _configuration(runs)),
    }
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, (heading, _) in parts.items())
    body = f'<h1>{html.escape(title)}</h1><nav aria-label="Parts of this page"><ul>{links}</ul></nav>\n'
    body += "".join(section(name, heading, text) for name, (heading, text) in parts.items())
    write_page(path, f"nwise report: {title}", body, "report.js", {"charts": charts})


def _overview(runs: Sequence[Summary]) -> str:
    rows = []
    for run in runs:
        last, recipe = run.tests[-1], run.recipe
        heads = {series.head: series.values[-1] for series in run.series("test", run.recipe.quality)}
        scores = [number(heads.get(k), 2) for k in range(run.num_stages)]
        unit = {"accuracy": " %", "perplexity": " perplexity"}[run.recipe.quality]
        sizes = [str(run.num_stages), str(recipe.microbatches), str(recipe.batch_size)]
        done = [f"{last['step']:,}", f"{last['samples']:,}", f"{last['seconds']:.1f}"]
        scored = [run.run.status, scores[-1] + unit, ", ".join(scores)]
        rows.append([run.name, recipe.name, recipe.strategy, *sizes, *done, *scored])
    names = ["run", "recipe", "strategy", "stages", "M", "batch", "steps", "samples", "seconds", "status"]
    notes = "".join(f'<p class="note">{html.escape(f"{run.name}: {text}")}</p>' for run in runs for text in run.history)
    return table([*names, "test, last head", "every head"], rows) + notes


def _heads(runs: Sequence[Summary], charts: dict[str, Any]) -> str:
    buttons = "".join(
        f'<label class="choice"><input type="radio" name="axis" value="{axis}"{" checked" * (i == 0)}>{text}</label>'
        for i, (axis, text) in enumerate(AXES.items())
    )
    parts, text = "", f'<div class="choices"><fieldset><legend>against</legend>{buttons}</fieldset></div>\n'
    qualities = {"accuracy": "test accuracy, %", "perplexity": "test perplexity"}
    kinds = [(f"test-{quality}", "test", quality, title) for quality, title in qualities.items()]
    kinds += [("test-loss", "test", "loss", "test loss"), ("train-loss", "train", "loss", "training loss")]
    for name, kind, score, title in kinds:
        shown = [run for run in runs if score in ("loss", run.recipe.quality)]
        curves = [(run.name, run.num_stages, run.series(kind, score)) for run in shown]
        chart = lines(curves, title, several=len(runs) > 1)
        if chart is not None:
            parts += _chart(charts, name, title, chart)
    text += f'<div class="charts">{parts}</div>'
    if len(runs) > 1:
        text += '<p class="note">Of several runs the last head is shown; a click in the legend shows others.</p>'
    return text


def _timeline(index: int, run: Summary, charts: dict[str, Any]) -> str:
    text = f"<h3>{html.escape(run.name)}</h3>"
    if (measured := run.measured) is not None:
        predicted = measured.predicted
        rows = [
            ["time per mini-batch, ms", f"{measured.period:.2f}", f"{predicted.period:.2f}"],
            ["bubble, %", f"{100 * measured.bubble:.1f}", f"{100 * predicted.bubble:.1f}"],
            ["overlap of messages with work, %", f"{100 * measured.overlap:.1f}", "–"],
        ]
        text += table(["", "measured", "predicted"], rows)
        chart = gantt(measured.events, "time, ms", _BATCHES)
        text += "<h3>Measured</h3>" + _chart(charts, f"measured-{index}", f"{run.name}: measured timeline", chart)
        chart = gantt(predicted.events, "time, ms", _BATCHES)
        text += "<h3>Predicted: the same lists, simulated with the medians of the measured times</h3>"
        text += _chart(charts, f"predicted-{index}", f"{run.name}: predicted timeline", chart)
        shares = {"measured": measured.utilisation, "predicted": predicted.utilisation}
        ranks = row_names(measured.schedule.placement)
        return text + _utilisation(charts, f"utilisation-{index}", run.name, ranks, shares)
    text += (
        "<p class='note'>Predicted by the paper's timing model, on one accelerator for every stage: a forward takes one slot, "
        "each loss's pass through a stage one, heads none. There are no measured times, because this run had one process, or "
        "no <code>--timeline</code>.</p>"
    )
    for i, (first, strategy) in enumerate(run.phases):
        timed = best(strategy, num_stages=run.num_stages, num_microbatches=run.recipe.microbatches, costs=PAPER)
        picture, suffix = Picture("", timed, _BATCHES), f"{index}-{i}" if i else str(index)
        chart = gantt(picture.events, "time, slots", _BATCHES)
        since = f", from step {first} on" if len(run.phases) > 1 else ""
        text += f"<p>{html.escape(strategy.name)}{since}: a mini-batch takes {timed.period:.6g} slots.</p>"
        text += _chart(charts, f"predicted-{suffix}", f"{run.name}: predicted timeline of {strategy.name}", chart)
        shares = {"predicted": picture.timeline.utilisation}
        text += _utilisation(charts, f"utilisation-{suffix}", run.name, picture.rows, shares)
    return text


def _utilisation(
    charts: dict[str, Any], name: str, run: str, ranks: Sequence[str], shares: Mapping[str, Sequence[float]]
) -> str:
    heading = "<h3>Utilisation: share of the time that each rank computes</h3>"
    return heading + _chart(charts, name, f"{run}: utilisation of every rank", utilisation(ranks, shares))


def _chart(charts: dict[str, Any], name: str, title: str, chart: dict[str, Any]) -> str:
    """Add a chart to the page's data; return the element that shows it."""
    charts[name] = chart
    return f'<div id="{name}" class="chart" role="img" aria-label="{html.escape(title)}"></div>\n'


def _credit(runs: Sequence[Summary]) -> str:
    text = "<p>Row j, column k: the weight of loss j's gradient in the update of stage k.</p>"
    groups: dict[tuple[str, int], list[Summary]] = {}
    for run in runs:
        groups.setdefault((run.strategy, run.num_stages), []).append(run)
    for (strategy_name, num_stages), group in groups.items():
        run, names = group[0], ", ".join(each.name for each in group)
        text += f"<h3>{html.escape(strategy_name)} <span class='note'>({html.escape(names)})</span></h3>"
        for _, strategy in run.phases:
            for turn in range(strategy.turns):
                caption = f"{strategy.name}, turn {turn}" if strategy.turns > 1 else strategy.name
                text += _matrix(caption, strategy.credit(num_stages, turn).tolist())
        if num_stages <= _WIDEST:
            text += f'<p class="flow">{_flow_picture(run)}</p>'
    return text


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


def _configuration(runs: Sequence[Summary]) -> str:
    columns = [run.settings() for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        values = [column.get(name, "–") for column in columns]
        differs = len(set(values)) > 1
        rows.append([name, *(HtmlCell(f'<td class="other">{html.escape(v)}</td>') if differs else v for v in values)])
    note = '<p class="note">Differences are bold.</p>' if len(runs) > 1 else ""
    return note + table(["", *(run.name for run in runs)], rows, kind="words")
