"""Figures for papers and documents: the flow of gradients, and the style of all figures.

matplotlib is imported only to draw, because the import takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nwise.checks import needed
from nwise.flow import find_flow
from nwise.strategies import Strategy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "MARKERS",
    "check_format",
    "flow_figure",
    "method_colour",
    "new_figure",
]

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# The colour of a method, the same in every figure of the documents, by the beginning of its name.
_METHODS = {
    ("end-to-end", "zero-bubble", "exact"): COLOURS[0],
    ("1-wise double size",): "#882255",
    ("local@", "fine-tuning"): "#8C564B",
    ("local", "1-wise"): COLOURS[1],
    ("2-wise",): COLOURS[2],
    ("3-wise",): COLOURS[3],
    ("rotating",): COLOURS[4],
    ("4-wise", "1f1b"): COLOURS[5],
    ("deep-supervision",): COLOURS[6],
    ("geometric", "gpipe"): COLOURS[7],
    ("hogwild-forward",): "#332288",
    ("hogwild",): "#999933",
}


def method_colour(method: str) -> str | None:
    """Return the colour of a method in figures, or None for an unknown one.

    The mean variant and a delay have the colour of their base; the line or the marker tells them apart.

    >>> method_colour("2-wise-mean") == method_colour("2-wise-delay-1") == method_colour("2-wise")
    True
    """
    name = method.lower()
    return next((colour for begins, colour in _METHODS.items() if name.startswith(begins)), None)


def check_format(path: Path | None) -> None:
    """Raise early, before any work for the figure, if its format is unknown or matplotlib is missing."""
    if path is not None and (path.suffix not in (".png", ".svg", ".pdf") or path.is_dir()):
        raise ValueError(f"A figure should be a file that ends in .png, .svg or .pdf. Found {str(path)!r}.")
    needed("matplotlib", "app", "A figure")


@contextmanager
def new_figure(width: float, height: float, path: Path, **saving: Any) -> Iterator[Figure]:
    """Yield an empty figure of a size in inches, in the style of all; write it at the end, with options of `savefig`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "axes.titlesize": 10, "svg.fonttype": "none", "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, dpi=150, **saving)


def flow_figure(strategies: Sequence[Strategy], num_stages: int, path: Path) -> None:
    """Draw the flow of activations and gradients, as in the paper's second figure.

    There is a panel for each strategy, and for each turn of one that rotates. Stages run from left to right, each below its
    head and loss if those run. Black arrows are activations; coloured ones are gradients, in the colour of the farthest loss
    that they carry.
    """
    turns = [(strategy, turn) for strategy in strategies for turn in range(strategy.turns)]
    columns = min(len(turns), max(1, 12 // num_stages))
    if len(turns) == columns + 1 and columns > 1:
        columns = -(-len(turns) // 2)  # two even rows, not one panel alone in the second
    rows = -(-len(turns) // columns)
    width = 1.05 * (num_stages + 0.5) * columns
    height = 2.2 * rows
    with new_figure(width, height, path, bbox_inches="tight", pad_inches=0.12) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes in panels:
            axes.axis("off")
        for axes, (strategy, turn) in zip(panels, turns, strict=False):
            title = strategy.name + (f", turn {turn + 1} of {strategy.turns}" if strategy.turns > 1 else "")
            axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
            _draw_flow(axes, strategy.credit(num_stages, turn))


def _draw_flow(axes: Axes, credit: Tensor) -> None:
    num_stages = len(credit)
    flow = find_flow(credit)
    axes.set(xlim=(-0.75, num_stages - 0.25), ylim=(-0.72, 1.12), aspect="equal")
    for k, stage in enumerate(flow.stages):
        trained = stage.weights is not None
        _box(axes, k, 0.0, 0.66, 0.46, f"stage {k}", "#e8eef4" if trained else "#ffffff", "#444444")
        _arrow(axes, (k - 0.67, 0.1), (k - 0.33, 0.1), "#222222")
        if stage.head:
            colour = COLOURS[k % len(COLOURS)]
            _box(axes, k, 0.88, 0.6, 0.34, f"loss {k}", "#ffffff", colour)
            _arrow(axes, (k - 0.08, 0.23), (k - 0.08, 0.71), "#222222")
            if stage.own:
                _arrow(axes, (k + 0.08, 0.71), (k + 0.08, 0.23), colour)
    for k in range(1, num_stages):
        # A gradient crosses for every later loss that trains an earlier stage; those in one message share a lane.
        for lane, message in enumerate(flow.stages[k].messages):
            y = -0.06 - 0.11 * lane
            _arrow(axes, (k - 0.33, y), (k - 0.67, y), COLOURS[message.farthest_loss % len(COLOURS)])
    for k in range(num_stages):
        losses = [j for j in range(num_stages) if credit[j, k]]
        whole = len(losses) > 2 and losses[-1] - losses[0] == len(losses) - 1
        label = f"{losses[0]} to {losses[-1]}" if whole else ", ".join(map(str, losses)) or "–"
        label = f"loss {label}" if len(losses) == 1 else f"losses {label}" if len(losses) == 2 else label
        colour = COLOURS[losses[-1] % len(COLOURS)] if losses else "#555"
        axes.text(k, -0.42, "learns from", ha="center", va="center", fontsize=9, color="#555555")
        axes.text(k, -0.6, label, ha="center", va="center", fontsize=10.5, color=colour)


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, fill: str, edge: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = (x - width / 2, y - height / 2)
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=fill, edgecolor=edge))
    axes.text(x, y, text, ha="center", va="center", fontsize=10.5)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "color": colour, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style)
