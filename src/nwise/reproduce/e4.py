"""E4: equal time, and fine-tuning with its grid (tables 12 and 15)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

from nwise.recipes import ImageSource, Recipe, Sgd
from nwise.reproduce import e2, markdown
from nwise.reproduce.cell import Cell
from nwise.reproduce.claims import Claim, equal, exact, greater
from nwise.reproduce.experiment import Parts, Size, Trained
from nwise.reproduce.plots import grid_of_fine_tuning
from nwise.reproduce.runs import Runs, accuracy

METHODS = ("end-to-end", "2-wise", "1-wise", "fine-tuning")
PRINTED = {
    "CIFAR-10": ("92.86 (0.15)", "94.06 (0.12)", "93.98 (0.07)", "94.21 (0.07)"),
    "CIFAR-100": ("73.98 (0.13)", "76.85 (0.14)", "74.33 (0.09)", "76.40 (0.16)"),
}
_DROPS = (0.7, 0.85, 0.95)

# Epochs of 2-wise; end-to-end has half, 1-wise twice as many, fine-tuning T1 local ones and (2 budget - T1) / 4 end-to-end.
BUDGET: Mapping[str, int] = {"small": 4, "CIFAR-10": 80, "CIFAR-100": 100}

# (T1, rate after it): epochs after T1 at which the rate is divided by 10, as printed, and the printed validation accuracy.
Point = tuple[int, float]
_10: dict[Point, tuple[tuple[int, ...], float]] = {
    (60, 0.1): ((18, 21, 24), 93.78),
    (60, 0.01): ((19, 23), 93.31),
    (80, 0.1): ((12, 16, 18), 93.86),
    (80, 0.01): ((14, 18), 93.40),
    (100, 0.1): ((9, 12, 14), 93.70),
    (100, 0.01): ((10, 13), 93.56),
    (120, 0.1): ((5, 7, 9), 93.53),
    (120, 0.01): ((6, 8), 93.45),
    (120, 0.001): ((8,), 93.46),
    (140, 0.01): ((3,), 93.26),
    (140, 0.001): ((4,), 93.34),
}
_100: dict[Point, tuple[tuple[int, ...], float]] = {
    (80, 0.1): ((20, 26, 28), 77.00),
    (80, 0.01): ((22, 27), 75.66),
    (100, 0.1): ((18, 21, 24), 76.71),
    (100, 0.01): ((19, 23), 75.46),
    (120, 0.1): ((12, 16, 18), 76.78),
    (120, 0.01): ((14, 18), 75.42),
    (140, 0.1): ((9, 12, 14), 76.10),
    (140, 0.01): ((10, 13), 75.24),
    (160, 0.1): ((5, 7, 9), 76.16),
    (160, 0.01): ((6, 8), 75.32),
    (160, 0.001): ((8,), 74.57),
    (180, 0.01): ((3, 4), 74.72),
    (180, 0.001): ((4,), 74.50),
}
# The small size: T1 of the same shares of the budget, a twentieth of the epochs, half the rates since it has half the batch.
_SMALL: dict[Point, tuple[tuple[int, ...], float]] = {
    (2, 0.05): ((), 0.0),
    (4, 0.05): ((), 0.0),
    (6, 0.05): ((), 0.0),
    (2, 0.005): ((), 0.0),
    (4, 0.005): ((), 0.0),
    (6, 0.005): ((), 0.0),
}
GRID = {"small": _SMALL, "CIFAR-10": _10, "CIFAR-100": _100}
_BEST: Mapping[str, Point] = {"small": (4, 0.05), "CIFAR-10": (80, 0.1), "CIFAR-100": (80, 0.1)}


def _base(row: str) -> Recipe:
    return e2.base("small") if row == "small" else e2.base("full", _part(row))


def _high(row: str) -> float:
    return 0.05 if row == "small" else 0.1


def _plain(row: str, method: str) -> Recipe:
    epochs = {"end-to-end": BUDGET[row] // 2, "2-wise": BUDGET[row], "1-wise": 2 * BUDGET[row]}[method]
    settings = replace(_base(row), heads="live", strategy=method, epochs=epochs, eval_every=epochs)
    return replace(settings, optimizer=Sgd(lr=_high(row), drops=_DROPS))


def fine_tuning(row: str, point: Point) -> Recipe:
    """T1 epochs 1-wise, then heads discarded, the optimizer reset, T2 epochs end-to-end at another rate."""
    first, rate = point
    second = (2 * BUDGET[row] - first) / 4
    printed = GRID[row][point][0]
    # The small size has no printed epochs: the shares that the paper says it rounds, one or two drops for a lower rate.
    drops = tuple(drop / second for drop in printed) or (_DROPS if rate == _high(row) else _DROPS[:2])
    return replace(
        _plain(row, "1-wise"),
        strategy=f"local@{first}epochs,end-to-end",
        epochs=first + second,
        eval_every=first + second,
        then=Sgd(lr=rate, drops=drops),
    )


def cells(size: Size, seeds: int) -> list[Cell]:
    """The four methods on the test set, and the grid on a tenth of the training set that is withheld."""
    found = []
    for row in ("small",) if size == "small" else ("CIFAR-10", "CIFAR-100"):
        for seed in range(seeds):
            recipes = {method: _plain(row, method) for method in METHODS[:3]}
            recipes["fine-tuning"] = fine_tuning(row, _BEST[row])
            found += [Cell(method=m, part=_part(row), recipe=replace(r, seed=seed)) for m, r in recipes.items()]
            for point in GRID[row] if seed < (2 if size == "small" else 1) else ():
                settings = fine_tuning(row, point)
                assert isinstance(settings.data, ImageSource)
                settings = replace(settings, data=replace(settings.data, withheld=0.1), seed=seed)
                found.append(Cell(method="fine-tuning", part=_part(row, point), recipe=settings))
    return found


def _part(row: str, point: Point | None = None) -> str:
    name = "" if row in ("small", "CIFAR-10") else row
    return name if point is None else f"{name} grid T1 = {point[0]}, rate {point[1]:g}".strip()


def claims(runs: Runs) -> list[Claim]:
    """Table 12's and table 15's."""

    def of(method: str) -> dict[int, float]:
        return runs.scores(accuracy, method)

    found = [
        greater("2-wise above end-to-end at equal time", "table 12", of("2-wise"), of("end-to-end")),
        greater("1-wise above end-to-end at equal time", "table 12", of("1-wise"), of("end-to-end")),
        greater("fine-tuning above end-to-end at equal time", "table 12", of("fine-tuning"), of("end-to-end")),
        equal(
            "fine-tuning equals 2-wise at equal time (CIFAR-10)", "table 12", of("fine-tuning"), of("2-wise"), within=1
        ),
        greater("fine-tuning above 1-wise at equal time", "table 12", of("fine-tuning"), of("1-wise")),
    ]
    grid = _validation(runs, _row(runs))
    high = _high(_row(runs))
    for first in sorted(
        {first for first, rate in grid if rate == high} & {first for first, rate in grid if rate < high}
    ):
        text = f"fine-tuning after {first} epochs: rate {high:g} above {high / 10:g}"
        found.append(greater(text, "table 15", grid[first, high], grid[first, high / 10]))
    if grid:
        best = max(grid, key=lambda point: mean(grid[point].values()))
        text = "the best point of the grid has the high rate, and T1 = the epochs of 2-wise"
        wanted = _BEST[_row(runs)]
        behind = mean(grid[wanted].values()) - mean(grid[best].values()) if wanted in grid else float("nan")
        found.append(exact(text, "table 15", behind, holds=best == wanted, wanted="0 behind the best", unit="points"))
    return found


def _row(runs: Runs) -> str:
    return "small" if any(f"T1 = {first}," in r["part"] for r in runs.records for first, _ in _SMALL) else "CIFAR-10"


def _validation(runs: Runs, row: str) -> dict[Point, dict[int, float]]:
    found = {point: runs.scores(accuracy, "fine-tuning", part=_part(row, point)) for point in GRID[row]}
    return {point: values for point, values in found.items() if values}


def tables(runs: Runs) -> str:
    """Ours beside the paper's, and the grid."""
    rows = []
    for row, printed in PRINTED.items():
        if runs.of("2-wise", part=_part(row)):
            rows.append([f"**ours**: {row}", *(runs.shown(accuracy, m, part=_part(row)) for m in METHODS)])
        rows.append([f"paper: {row}", *printed])
    grids = [_grid(runs, row) for row in GRID if _validation(runs, row)]
    return "\n\n".join([markdown.table(["test accuracy at equal time, %", *METHODS], rows), *grids])


def _grid(runs: Runs, row: str) -> str:
    found = _validation(runs, row)
    rates = sorted({rate for _, rate in GRID[row]}, reverse=True)
    rows = []
    for first in sorted({first for first, _ in GRID[row]}):
        entries = []
        for rate in rates:
            ours = mean(found[first, rate].values()) if (first, rate) in found else None
            printed = GRID[row].get((first, rate), ((), 0.0))[1]
            entries.append(("–" if ours is None else f"{ours:.2f}") + (f" [{printed:.2f}]" if printed else ""))
        rows.append([first, *entries])
    table = markdown.table(["epochs 1-wise", *(f"rate {rate:g}" for rate in rates)], rows)
    title = f"## Grid of fine-tuning, {'CIFAR-10' if row == 'small' else row}"
    return f"{title}\n\nAccuracy on a tenth of the training images, withheld; the paper's in brackets.\n\n{table}"


def draw(runs: Runs, folder: Path, size: Size) -> None:
    """Equal time left, the grid right."""
    grid_of_fine_tuning(runs, list(METHODS), _validation(runs, _row(runs)), folder / f"{size}.png")


E4 = Trained(
    "e4",
    "E4, equal time and fine-tuning",
    Parts(cells=cells, claims=claims, tables=tables, draw=draw, seeds={"small": 4, "full": 4}),
)
