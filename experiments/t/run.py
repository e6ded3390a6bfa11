"""Section T of the paper, again: time per batch, the timing grids, best M, predicted speed-up; ours beside the paper's.

Every schedule was built and validated. Its period is that of a simulated run in the first two tables (Hogwild's is the work
of its busiest stage), and the exact one elsewhere. Writes ``records.jsonl``, ``tables.md`` and the
figures beside this file.

    python experiments/t/run.py
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.progress import track

from nwise.report.figures import COLOURS
from nwise.report.grid import Picture, schedule_figure
from nwise.schedule import PAPER, Chains, Costs, Slot, Timed, paper_time, simulate, validate
from nwise.schedule.costs import TRANSFORMER
from nwise.schedule.paper import POWERS, PRINTED_STAGES, BestCell, best_table
from nwise.schedule.rivals import timed_method

HERE = Path(__file__).parent
PER_BATCH = {"end-to-end": "2A", "hogwild": "2", "local": "2", "2-wise": "4", "3-wise": "6"}


def find(name: str, num_stages: int, m: int, costs: Costs = PAPER, chains: Chains = "stored") -> Timed:
    """The best schedule of a strategy, or a pipeline, checked."""
    found = timed_method(name, num_stages=num_stages, num_microbatches=m, costs=costs, chains=chains)
    validate(found.schedule)
    return found


def per_batch(num_stages: int = 8) -> list[dict[str, Any]]:
    """Slots per batch without micro-batches (the paper's table: 2A, 2, 2, 4, 6, 2N)."""
    rows = []
    for name, formula in PER_BATCH.items():
        found = find(name, num_stages, 1)
        printed = 2 * num_stages if formula == "2A" else int(formula)
        simulated = found.period if name == "hogwild" else _simulated(found)
        rows.append(
            {"method": name, "num_stages": num_stages, "printed": printed, "ours": simulated, "formula": formula}
        )
    return rows


def _simulated(found: Timed) -> float:
    """Period of a run of four mini-batches."""
    return simulate(found.schedule, PAPER, cycles=4).period


def formula_cells() -> list[dict[str, Any]]:
    """Period of the chosen schedule and the formula, in all 816 cells."""
    cells = [(a, n, m) for a in range(1, 17) for n in range(1, a + 1) for m in POWERS]
    return [
        {"A": a, "N": n, "M": m, "formula": paper_time(a, m, n), "ours": _simulated(find(f"{n}-wise", a, m))}
        for a, n, m in track(cells, "816 cells")
    ]


def realistic(methods: Sequence[str] = ("zero-bubble", "1f1b", "2-wise", "3-wise")) -> list[dict[str, Any]]:
    """Time at the best M with F = I = W = 1, a head of 0.5, and 0.02 for every action."""
    rows = []
    for num_stages in track((3, 4, 6, 8, 12, 16, 24, 32), "realistic costs"):
        for name in methods:
            times = {m: find(name, num_stages, m, TRANSFORMER.split_in(m)).period for m in POWERS}
            m = min(times, key=lambda m: (round(times[m], 9), m))
            rows.append({"method": name, "num_stages": num_stages, "M": m, "time": times[m]})
    return rows


def grids() -> None:
    """The timing grid of four steps, and the grids with micro-batches."""
    steps = [Picture(name, find(name, 4, 1, chains="walked"), batches=4) for name in PER_BATCH]
    schedule_figure(steps, HERE / "grid.png")
    micro = [Picture(f"{name}, M = 4", find(name, 6, 4, chains="walked"), batches=2) for name in ("gpipe", "3-wise")]
    schedule_figure(micro, HERE / "microbatches.png")


def curves(extension: Sequence[dict[str, Any]]) -> None:
    """Time against M for A = 4 and 6, and speed-up over end-to-end against A."""
    slot = Slot()
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    for axes, num_stages in zip(figure.subplots(1, 2, sharey=True), (4, 6), strict=True):
        for i, n in enumerate((1, 2, 3, num_stages)):
            times = [slot.batch_seconds(num_stages, m, n) for m in POWERS]
            name = "end-to-end" if n == num_stages else f"{n}-wise"
            axes.loglog(POWERS, times, "o-", color=COLOURS[i], markersize=4, label=name)
        axes.set(title=f"A = {num_stages}", xlabel="micro-batches M", xticks=POWERS, xticklabels=POWERS)
        axes.minorticks_off()
        axes.set_yticks([2, 3, 4, 6, 8, 12], ["2", "3", "4", "6", "8", "12"])
        _tidy(axes)
    figure.axes[0].set_ylabel("modelled seconds per mini-batch")
    figure.axes[0].legend(frameon=False)
    figure.savefig(HERE / "time-per-batch.png", dpi=150)

    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    stages = range(2, 31)
    for i, n in enumerate((1, 2, 3, 4, 5)):
        left.plot(stages, [slot.speedup(a, n) for a in stages], color=COLOURS[i], label=f"{n}-wise")
    left.set(title="paper's model: over GPipe", xlabel="stages A", ylabel="speed-up of a step, each at its best M")
    for i, (rival_name, style) in enumerate((("1f1b", "--"), ("zero-bubble", "-"))):
        for j, name in enumerate(("2-wise", "3-wise")):
            time = {(r["method"], r["num_stages"]): r["time"] for r in extension}
            xs = sorted({r["num_stages"] for r in extension})
            ys = [time[rival_name, a] / time[name, a] for a in xs]
            right.plot(
                xs, ys, style, color=COLOURS[j + 1], label=f"{name} over {rival_name}", marker="os"[i], markersize=3
            )
    right.set(title="F = I = W = 1, head 0.5, 0.02 an action", xlabel="stages A")
    for axes in (left, right):
        axes.axhline(1, color="#555555", lw=0.8)
        axes.legend(frameon=False, fontsize=8)
        _tidy(axes)
    figure.savefig(HERE / "speedup.png", dpi=150)


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def tables(
    batch: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]], extension: Sequence[dict[str, Any]]
) -> str:
    """The tables as Markdown."""
    equal = sum(cell["formula"] == cell["ours"] for cell in cells)
    lines = [
        "Written by `python experiments/t/run.py`.",
        "",
        f"## Slots per batch, M = 1, A = {batch[0]['num_stages']}",
        "",
    ]
    lines += ["| method | paper | ours |", "|---|---|---|"]
    for r in batch:
        paper = r["formula"] if r["formula"].isdigit() else f"{r['formula']} = {r['printed']}"
        lines.append(f"| {r['method']} | {paper} | {r['ours']:g} |")
    lines += [
        "",
        "## T(A, M, N)",
        "",
        f"The chosen schedule's period equals the formula in {equal} of {len(cells)} cells.",
    ]
    lines += [
        "",
        "## Best M among powers of two",
        "",
        "paper / formula where they differ, with what the paper's M costs more",
        "",
    ]
    headings = ["2", "3", "4", "5", "6-11", "12-30"]
    lines += [f"| | {' | '.join(headings)} |", "|---|" + "---|" * len(headings)]
    found = best_table()
    for method in dict.fromkeys(cell.method for cell in found):
        row = [_cell([c for c in found if c.method == method and c.num_stages in group]) for group in PRINTED_STAGES]
        lines.append(f"| {method} | {' | '.join(row)} |")
    slot = Slot()
    lines += [
        "",
        "## Predicted speed-up over GPipe, paper's model",
        "",
        "| A | 1-wise | 2-wise | 3-wise | 4-wise | 5-wise |",
    ]
    lines.append("|---|" + "---|" * 5)
    for a in (3, 4, 8, 12, 15, 16, 20, 30):
        lines.append(f"| {a} | {' | '.join(f'{100 * (slot.speedup(a, n) - 1):+.1f} %' for n in range(1, 6))} |")
    names = list(dict.fromkeys(r["method"] for r in extension))
    lines += ["", "## Time at the best M with F = I = W = 1, head 0.5, 0.02 an action (M in brackets)", ""]
    lines += [f"| A | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for a in sorted({r["num_stages"] for r in extension}):
        row = [f"{r['time']:.2f} ({r['M']})" for r in extension if r["num_stages"] == a]
        lines.append(f"| {a} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _cell(cells: Sequence[BestCell]) -> str:
    """A cell of the printed table, which may stand for several A; marked where the formula differs for one of them."""
    off = [cell for cell in cells if cell.loss > 1e-12]
    if not off:
        return str(cells[0].printed)
    formula = ", ".join(f"{c.formula} at {c.num_stages}" if len(cells) > 1 else str(c.formula) for c in off)
    return f"**{cells[0].printed} / {formula}** (+{100 * max(c.loss for c in off):.1f} %)"


def main() -> None:
    """Everything: a minute on one core."""
    batch, cells, extension = per_batch(), formula_cells(), realistic()
    best_cells = [dataclasses.asdict(cell) for cell in best_table()]
    slot = Slot()
    speedups = [{"A": a, "N": n, "over_gpipe": slot.speedup(a, n)} for a in range(2, 31) for n in range(1, 6)]
    kinds = {"per batch": batch, "formula": cells, "best M": best_cells, "speed-up": speedups, "realistic": extension}
    records = [{"kind": kind, **row} for kind, rows in kinds.items() for row in rows]
    (HERE / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (HERE / "tables.md").write_text(f"# Section T in numbers\n\n{tables(batch, cells, extension)}")
    grids()
    curves(extension)
    print((HERE / "tables.md").read_text())


if __name__ == "__main__":
    main()
