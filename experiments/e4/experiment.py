"""E4: equal time, and fine-tuning with its grid (tables 2, 5 and 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from experiments.e2 import experiment as e2
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, difference, differences, equal, greater, mean_by_seed
from experiments.harness.experiment import Result, Size, Waiting
from experiments.harness.plots import grid_of_fine_tuning
from experiments.harness.runs import Runs, accuracy, shown
from experiments.harness.trained import Parts, Trained
from nwise.app.recipes import ImageSource, Recipe, Sgd

METHODS = ("end-to-end", "2-wise", "1-wise", "fine-tuning")
# The other reading of "the same learning rate schedule as 1-wise", see `Setting.first_drops`.
SCALED = "fine-tuning (drops scaled)"
_DROPS = (0.7, 0.85, 0.95)

# T1, and the rate after it.
Point = tuple[int, float]
# Epochs after T1 at which the rate is divided by 10 (table 6), and the validation accuracy (table 5).
Grid = Mapping[Point, tuple[tuple[int, ...], float]]
_CIFAR10: Grid = {
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
_CIFAR100: Grid = {
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


@dataclass(frozen=True)
class Setting:
    """What differs between the rows of table 2.

    Args:
        base: the network and its data.
        budget: epochs of 2-wise; end-to-end has half as many, 1-wise twice as many, fine-tuning T1 1-wise and then
            (2 budget - T1) / 4 end-to-end.
        high: rate at the start.
        best: the point of the grid that is run on the test images, the paper's best.
        points: of the grid.
        grid_seeds: how many of the seeds have the grid.
        grid: what is printed of it; empty if nothing is.
        printed: accuracy of the four methods.
    """

    base: Recipe
    budget: int
    high: float
    best: Point
    points: tuple[Point, ...]
    grid_seeds: int
    grid: Grid
    printed: tuple[str, ...]

    def plain(self, method: str) -> Recipe:
        """Return the recipe of a method that does not change."""
        epochs = {"end-to-end": self.budget // 2, "2-wise": self.budget, "1-wise": 2 * self.budget}[method]
        settings = replace(self.base, heads="live", strategy=method, epochs=epochs, eval_every=epochs)
        return replace(settings, optimizer=Sgd(lr=self.high, drops=_DROPS))

    def first_drops(self, first: int, *, scaled: bool = False) -> tuple[float, ...]:
        """Return the shares of the first T1 epochs at which the rate drops: "the same learning rate schedule as 1-wise".

        That is 1-wise's own schedule, cut at T1: one 1-wise run passes through all T1. The alternative is a whole
        schedule, scaled to T1. The paper tries rates after T1 within a factor of ten of the rate that a cut schedule has there,
        in all eleven rows of table 5; a scaled one always ends at a thousandth of the rate at the start.
        """
        if scaled:
            return _DROPS
        return tuple(share * 2 * self.budget / first for share in _DROPS if share * 2 * self.budget < first)

    def fine_tuning(self, point: Point, *, scaled: bool = False) -> Recipe:
        """Return T1 epochs 1-wise, then heads discarded, the optimizer reset, T2 epochs end-to-end at another rate."""
        first, rate = point
        second = (2 * self.budget - first) / 4
        # Where no epochs are printed, the shares that the printed ones round: one drop fewer for a lower rate.
        shares = _DROPS if rate == self.high else _DROPS[:2]
        drops = tuple(drop / second for drop in self.grid[point][0]) if point in self.grid else shares
        return replace(
            self.plain("1-wise"),
            strategy=f"local@{first}epochs,end-to-end",
            epochs=first + second,
            eval_every=first + second,
            optimizer=Sgd(lr=self.high, drops=self.first_drops(first, scaled=scaled)),
            then=Sgd(lr=rate, drops=drops),
        )


_PRINTED_10 = ("92.86 (0.15)", "94.06 (0.12)", "93.98 (0.07)", "94.21 (0.07)")
_PRINTED_100 = ("73.98 (0.13)", "76.85 (0.14)", "74.33 (0.09)", "76.40 (0.16)")
# The small size has a twentieth of the epochs, and T1 of the same shares. The medium size has an eighth, and no grid.
_SMALL_POINTS = tuple((first, rate) for rate in (0.1, 0.01) for first in (2, 4, 6))
SETTINGS: dict[tuple[Size, str], Setting] = {
    ("small", "cifar10"): Setting(
        e2.base("small"), 4, 0.1, (4, 0.1), _SMALL_POINTS, grid_seeds=2, grid={}, printed=_PRINTED_10
    ),
    ("medium", "cifar10"): Setting(
        e2.base("medium"), 10, 0.1, (10, 0.1), (), grid_seeds=0, grid={}, printed=_PRINTED_10
    ),
    ("full", "cifar10"): Setting(
        e2.base("full"), 80, 0.1, (80, 0.1), tuple(_CIFAR10), grid_seeds=4, grid=_CIFAR10, printed=_PRINTED_10
    ),
    ("full", "cifar100"): Setting(
        e2.base("full", "cifar100"),
        100,
        0.1,
        (80, 0.1),
        tuple(_CIFAR100),
        grid_seeds=4,
        grid=_CIFAR100,
        printed=_PRINTED_100,
    ),
}


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: the methods, trained on all images, and the grid, scored on a tenth of them that is withheld."""
    cells = []
    for setting in (setting for (its, _), setting in SETTINGS.items() if its == size):
        for seed in range(seeds):
            recipes = {method: setting.plain(method) for method in METHODS[:3]}
            recipes["fine-tuning"] = setting.fine_tuning(setting.best)
            if setting.points:
                recipes[SCALED] = setting.fine_tuning(setting.best, scaled=True)
            cells += [Cell(method=m, recipe=replace(r, seed=seed)) for m, r in recipes.items()]
            for point in setting.points if seed < setting.grid_seeds else ():
                settings = setting.fine_tuning(point)
                assert isinstance(settings.data, ImageSource)
                settings = replace(settings, data=replace(settings.data, withheld=0.1), seed=seed)
                cells.append(Cell(method="fine-tuning", part=_part(point), recipe=settings))
    return cells


def _part(point: Point) -> str:
    return f"grid T1 = {point[0]}, rate {point[1]:g}"


def _setting(runs: Runs) -> Setting:
    return SETTINGS[runs.size, runs.source]


def validation(runs: Runs) -> dict[Point, dict[int, float]]:
    """Return accuracies over the grid by seed, as far as it was run."""
    accuracies = {point: runs.scores(accuracy, "fine-tuning", part=_part(point)) for point in _setting(runs).points}
    return {point: values for point, values in accuracies.items() if values}


def claims(runs: Runs) -> list[Claim]:
    """Test the claims of tables 2 and 5; "read": what the table shows and the text does not say."""

    def scores(method: str) -> dict[int, float]:
        return runs.scores(accuracy, method)

    text = "fine-tuning equals 2-wise at equal time"
    claims = [
        greater("2-wise above end-to-end at equal time", "table 2", scores("2-wise"), scores("end-to-end")),
        greater("1-wise above end-to-end at equal time", "table 2, read", scores("1-wise"), scores("end-to-end")),
        greater("fine-tuning above end-to-end at equal time", "table 2", scores("fine-tuning"), scores("end-to-end")),
        greater("2-wise above 1-wise at equal time", "table 2", scores("2-wise"), scores("1-wise")),
        equal(text, "table 2", scores("fine-tuning"), scores("2-wise"), within=1),
        greater("fine-tuning above 1-wise at equal time", "table 2", scores("fine-tuning"), scores("1-wise")),
    ]
    # The order on each data set; written down after the runs of small size, before those of medium size.
    ahead, behind = ("2-wise", "fine-tuning") if runs.source == "cifar100" else ("fine-tuning", "2-wise")
    claims.append(greater(f"{ahead} above {behind} at equal time", "section 4.2", scores(ahead), scores(behind)))
    setting = _setting(runs)
    return claims + _grid_claims(setting, validation(runs)) if setting.points else claims


def _grid_claims(setting: Setting, grid: Mapping[Point, Mapping[int, float]]) -> list[Claim]:
    high, low = setting.high, setting.high / 10
    both = sorted({first for first, rate in grid if rate == high} & {first for first, rate in grid if rate == low})
    text = f"after 1-wise, end-to-end at rate {high:g} is above {low:g} (mean over T1)"
    claims = [
        greater(
            text, "table 5, read", mean_by_seed([difference(grid[first, high], grid[first, low]) for first in both])
        )
    ]
    others = [point for point in grid if point != setting.best]
    if others:
        baseline = max(others, key=lambda point: mean(grid[point].values()))
        text = f"T1 = {setting.best[0]} at rate {high:g} is above the best of the other points (chosen afterwards)"
        claims.append(greater(text, "table 5, read", grid.get(setting.best, {}), grid[baseline]))
    return claims


def tables(runs: Runs) -> str:
    """Return our accuracies beside the paper's, and the grid."""
    setting = _setting(runs)
    rows = [
        [f"**ours**: {runs.source}", *(runs.shown(accuracy, m) for m in METHODS)],
        [f"paper: {runs.source}", *setting.printed],
    ]
    equal_time = markdown.table(["test accuracy at equal time, %", *METHODS], rows)
    if not setting.points:
        return equal_time
    tuned = runs.scores(accuracy, "fine-tuning")
    pairs = [("less the same with drops scaled to T1", [(tuned, runs.scores(accuracy, SCALED))])]
    readings = differences(
        ["fine-tuning with 1-wise's own drops, cut at T1", "points (95 % interval)"], pairs, digits=2
    )
    return "\n\n".join([equal_time, readings, _grid(setting, validation(runs))])


def _grid(setting: Setting, accuracies: Mapping[Point, Mapping[int, float]]) -> str:
    rates = sorted({rate for _, rate in setting.points}, reverse=True)
    rows = []
    for first in sorted({first for first, _ in setting.points}):
        entries = []
        for rate in rates:
            ours = shown(list(accuracies.get((first, rate), {}).values()))
            printed = setting.grid.get((first, rate))
            entries.append(ours if printed is None else f"{ours} [{printed[1]:.2f}]")
        rows.append([first, *entries])
    table = markdown.table(["epochs 1-wise", *(f"rate {rate:g}" for rate in rates)], rows)
    title = "## Grid of fine-tuning"
    return f"{title}\n\nAccuracy on a tenth of the training images, withheld; the paper's in brackets if printed.\n\n{table}"


def draw(runs: Runs, path: Path) -> None:
    """Draw equal time, and below it the grid where there is one."""
    grid_of_fine_tuning(runs, list(METHODS), validation(runs), path.with_suffix(".png"))


EXPERIMENT = Trained(
    "e4",
    "E4, equal time and fine-tuning",
    Parts(
        cells=cells, claims=claims, tables=tables, draw=draw, seeds={"small": 2, "medium": 4, "full": 4}, ours=(SCALED,)
    ),
    [
        Result("table 2", "equal time (E4)", "table 2"),
        Result("table 5", "grid of fine-tuning (E4)", "table 5"),
        Result("", "text: fine-tuning or 2-wise ahead (E4)", "section 4.2"),
    ],
    waiting=[Waiting("tables 2, 5", "equal time, and grid of fine-tuning, on CIFAR-100", ("cifar100",))],
)
