"""E1: the small convolutional network on CIFAR-10 (figure 5 and its right half)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, difference, equal, greater, mean_by_seed, slope
from experiments.harness.experiment import Result, Size
from experiments.harness.plots import lines_over_stages
from experiments.harness.runs import Runs, accuracy
from experiments.harness.search import TRIAL_SEED, Search, with_rate
from experiments.harness.trained import Parts, Trained, on_a_gpu
from nwise.app.recipes import ConvNet, ImageSource, Recipe, recipe

DOUBLE = "1-wise double size"
_WISE = ("1-wise", "2-wise", "3-wise", "4-wise", "end-to-end")
_STAGES: dict[Size, tuple[int, ...]] = {"small": (3, 6, 10), "medium": (3, 6, 10), "full": tuple(range(3, 11))}
_SMALL = recipe("cifar10-convnet-small")
_IMAGES = ImageSource(source="cifar10", hub="uoft-cs/cifar10")
_BASES = {
    "small": _SMALL,
    "medium": replace(_SMALL, name="cifar10-convnet-medium", data=_IMAGES, epochs=6, channels_last=True),
    "full": on_a_gpu(recipe("cifar10-convnet")),
}


def _recipe(base: Recipe, method: str, stages: int, seed: int) -> Recipe:
    assert isinstance(base.model, ConvNet)
    strategy = "blocks-2" if method == DOUBLE else method
    return replace(base, model=replace(base.model, num_stages=stages), strategy=strategy, seed=seed)


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: stages by methods by seeds; an N of A or more is end-to-end and not run twice.

    In medium size every method has its own rate, and one that has not been tried with all rates has no cells.
    """
    bases = dict.fromkeys((*_WISE, DOUBLE), _BASES[size])
    if size == "medium":
        bases = {method: with_rate(_BASES[size], rate) for method, rate in SEARCH.rates().items()}
    cells = []
    for seed in range(seeds):
        for stages in reversed(_STAGES[size]):
            for method, base in bases.items():
                if method[0] in "234" and int(method[0]) >= stages:
                    continue
                cells.append(Cell(method=method, recipe=_recipe(base, method, stages, seed)))
    return cells


def _trial(method: str, rate: float, epochs: int) -> Recipe:
    """Return the run with six stages that tries a rate."""
    base = replace(_BASES["medium"], data=replace(_IMAGES, withheld=0.1), epochs=epochs, eval_every=epochs)
    return _recipe(with_rate(base, rate), method, 6, TRIAL_SEED)


_GRID = (0.0000625, 0.000125, 0.00025, 0.0005, 0.001, 0.002)
SEARCH = Search(
    title="E1, Adam, six epochs",
    grid=_GRID,
    trials={method: partial(_trial, method, epochs=6) for method in (*_WISE, DOUBLE)},
    prefix="E1, six epochs, ",
)
# The best rate of end-to-end training is 16 times as high after six epochs as after one, so these rates are not used.
SHORT_SEARCH = Search(
    title="E1, Adam, one epoch (not used)",
    grid=_GRID,
    trials={method: partial(_trial, method, epochs=1) for method in (*_WISE, DOUBLE)},
    prefix="E1 ",
    seeds=(TRIAL_SEED, TRIAL_SEED + 1),  # one epoch at a constant rate ends on a ragged curve
    decides=False,
)


def claims(runs: Runs) -> list[Claim]:
    """Test the claims of figure 5. They are about curves, so each is tested once, on all points of its curves."""

    def at(method: str, stages: int) -> dict[int, float]:
        return runs.scores(accuracy, method, stages)

    def wise(n: int, stages: int) -> dict[int, float]:
        return at("end-to-end" if n >= stages else f"{n}-wise", stages)

    depths = sorted({r["stages"] for r in runs.records})
    if len(depths) < 2:
        return []
    rise = mean_by_seed([slope({n: wise(n, a) for n in range(1, 1 + min(4, a))}) for a in depths])
    claims = [greater("accuracy rises with N: points for each more, 1 to 4", "figure 5", rise)]
    for n, stages in ((n, stages) for n in (3, 4) for stages in depths if n < stages <= 6):
        text = f"{n}-wise equals end-to-end at {stages} stages"
        claims.append(equal(text, "figure 5", at(f"{n}-wise", stages), at("end-to-end", stages), within=1))
    gaps = {stages: difference(at("end-to-end", stages), at("1-wise", stages)) for stages in depths}
    text = "the gap of 1-wise to end-to-end grows with depth: points for each more stage"
    claims.append(greater(text, "figure 5", slope(gaps)))
    right = "figure 5, right"
    means = {m: mean_by_seed([at(m, a) for a in depths]) for m in ("1-wise", DOUBLE, "2-wise")}
    text = "stages of double size are above 1-wise (mean over depths)"
    claims.append(greater(text, right, means[DOUBLE], means["1-wise"]))
    text = "2-wise is above stages of double size (mean over depths)"
    claims.append(greater(text, right, means["2-wise"], means[DOUBLE]))
    # The text makes these, too; they were written down after the runs of small and medium size.
    for n in (2, 3, 4):
        apart = mean_by_seed([difference(wise(n, a), at("1-wise", a)) for a in depths])
        claims.append(greater(f"{n}-wise is above 1-wise (mean over depths)", "section 4.1", apart))
    apart = mean_by_seed([difference(at("end-to-end", a), wise(4, a)) for a in depths if a > 4])
    claims.append(greater("end-to-end is above 4-wise (mean over depths above 4)", "section 4.1", apart))
    return claims


def tables(runs: Runs) -> str:
    """Return the accuracy by method and stages; the paper has it as a figure only."""
    stages = sorted({r["stages"] for r in runs.records})
    rows = [[method, *(runs.shown(accuracy, method, a) for a in stages)] for method in (*_WISE, DOUBLE)]
    return markdown.table(["test accuracy, %", *markdown.stages(stages)], rows)


def draw(runs: Runs, path: Path) -> None:
    """Draw the paper's figure: N-wise above, double size below."""
    panels = {"N-wise": list(_WISE), "stages of double size": ["1-wise", DOUBLE, "2-wise"]}
    lines_over_stages(runs, accuracy, panels, "test accuracy, %", path.with_suffix(".png"))


EXPERIMENT = Trained(
    "e1",
    "E1, accuracy against the number of stages",
    Parts(cells=cells, claims=claims, tables=tables, draw=draw, seeds={"small": 2, "medium": 3, "full": 4}),
    [
        Result("figure 5", "accuracy against stages, double size (E1)", "figure 5"),
        Result("", "text: N-wise above local, end-to-end best (E1)", "section 4.1"),
    ],
)
