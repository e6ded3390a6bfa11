"""The figures of the timing model: measured beside modelled, and the speed-up over end-to-end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from experiments.e6.experiment import MEASURED_STEPS
from experiments.harness.plots import legend, make_panels, style
from experiments.t.timing import Row, fitted, plain, window
from nwise.app.report.figures import COLOURS
from nwise.schedule import Slot, paper_time


def draw(rows: Sequence[Row], folder: Path, size: str) -> None:
    """Draw all figures."""
    speed_up(rows, folder / "speedup.png")
    if any(row["kind"] == "measured" for row in rows):
        measured_beside_modelled(rows, folder / f"{size}.png")


def modelled(row: Row, slot: Slot | None) -> float:
    """Return seconds per mini-batch: by the paper's formula with a fitted slot, else by the schedule's slots and their length."""
    if slot is not None:
        return paper_time(row["A"], row["M"], window(row)) * slot.seconds(row["M"])
    return float(row["slots"] * row["slot_seconds"])


def measured_beside_modelled(rows: Sequence[Row], path: Path) -> None:
    """Draw the paper's figure of A = 4 and 6; with it costs as they are, and real networks."""
    measured_rows = plain(rows)
    titles = {
        ("virtual, paper costs", 4): "A = 4, paper's costs",
        ("virtual, paper costs", 6): "A = 6, paper's costs",
        ("virtual, transformer costs", 4): "A = 4, F = I = W, head 0.5",
        ("real", 2): "A = 2, a real network",
    }
    if fitted(rows, MEASURED_STEPS) is not None:
        stages = sorted({row["A"] for row in measured_rows if row["what"] == MEASURED_STEPS})
        titles |= {(MEASURED_STEPS, a): f"A = {a}, Transformers" for a in stages}
    with make_panels(len(titles), path, columns=2, width=3.6) as (_, panels):
        for axes, ((what, a), title) in zip(panels, titles.items(), strict=True):
            slot = None if "transformer" in what else fitted(rows, what)
            for method in dict.fromkeys(row["method"] for row in measured_rows):
                own = [row for row in measured_rows if (row["what"], row["A"], row["method"]) == (what, a, method)]
                _points(axes, own, method, slot)
            axes.set(title=title, xlabel="micro-batches M", ylabel="ms per mini-batch (lines: modelled)")
        legend(panels[0], 8)


def _points(axes: Axes, own: Sequence[Row], method: str, slot: Slot | None) -> None:
    if not own:
        return
    look = style("end-to-end" if method == "gpipe" else method)
    sizes = [row["M"] for row in own]
    lines = [1e3 * modelled(row, slot) for row in own]
    axes.loglog(sizes, lines, color=look["color"], lw=1)
    axes.loglog(sizes, [1e3 * row["seconds"] for row in own], **{**look, "linestyle": "", "label": method})
    axes.set_xticks(sizes, [str(m) for m in sizes])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [
        t for t in (20, 30, 50, 70, 100, 150, 200, 300, 400, 600, 1000, 2000, 5000, 10000, 20000) if low <= t <= high
    ]
    axes.set_yticks(ticks, [str(t) for t in ticks])


def speed_up(rows: Sequence[Row], path: Path) -> None:
    """Draw speed-ups: over GPipe by the paper's model above, over better baselines at costs as they are below."""
    with make_panels(2, path) as (_, (upper, lower)):
        over = {(r["A"], r["N"]): r["over_gpipe"] for r in rows if r["kind"] == "speed-up"}
        for i in range(1, 6):
            own = sorted((a, value) for (a, n), value in over.items() if n == i)
            colour = style(f"{i}-wise")["color"] if i < 5 else COLOURS[7]
            upper.plot([a for a, _ in own], [value for _, value in own], color=colour, label=f"{i}-wise")
        slot = Slot()
        for a in (2, 4, 8, 15, 24, 30):  # the best M of 2-wise at each point, as in the paper's figure
            if (a, 2) not in over:
                continue
            upper.annotate(
                str(slot.best_microbatches(a, min(2, a))), (a, over[a, 2]), fontsize=7, ha="center", va="bottom"
            )
        upper.set(title="paper's model: over GPipe\n(numbers: best M of 2-wise)", xlabel="stages A")
        upper.set_ylabel("speed-up of a step, each at its best M")
        times = {(r["method"], r["A"]): r["time"] for r in rows if r["kind"] == "honest"}
        stages = sorted({a for _, a in times})
        for i, (baseline, line) in enumerate((("1f1b", "--"), ("zero-bubble", "-"))):
            for name in ("2-wise", "3-wise"):
                ratios = [times[baseline, a] / times[name, a] for a in stages]
                look = {"color": style(name)["color"], "marker": "os"[i], "markersize": 3}
                lower.plot(stages, ratios, line, label=f"{name} over {baseline}", **look)
        lower.set(title="F = I = W = 1, head 0.5,\n0.02 an action", xlabel="stages A")
        for axes in (upper, lower):
            axes.axhline(1, color="#555555", lw=0.8)
            legend(axes, 8)
