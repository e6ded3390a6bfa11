"""E5: ensembles of the top n heads (table 3), from the runs of E2."""

from __future__ import annotations

from pathlib import Path

from experiments.e2 import experiment as e2
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, greater, no_greater
from experiments.harness.experiment import Result, Size
from experiments.harness.plots import accuracy_of_ensembles
from experiments.harness.runs import Runs, ensemble_accuracy
from experiments.harness.trained import Parts, Trained

_METHODS = ("2-wise", "1-wise")
_SHOWN = (*_METHODS, "2-wise-mean", "deep-supervision")
PRINTED = {
    "imagenet": {"2-wise": ("74.45", "73.46", "72.46", "71.75"), "1-wise": ("72.05", "71.70", "71.34", "70.92")},
    "cifar10": {"2-wise": ("95.12", "95.10", "95.18", "95.26"), "1-wise": ("94.78", "94.89", "94.76", "94.82")},
}


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells of E2 whose heads are compared."""
    return [cell for cell in e2.cells(size, seeds) if cell.method in _SHOWN]


def claims(runs: Runs) -> list[Claim]:
    """Test a negative result: an ensemble is not better than the last head alone, here by more than half a point.

    On ImageNet it is worse.
    """
    if runs.source == "imagenet":
        return [
            greater(
                f"{method}: the last head alone is above the top {count}",
                "table 3",
                runs.scores(ensemble_accuracy(1), method),
                runs.scores(ensemble_accuracy(count), method),
            )
            for method in _METHODS
            for count in (2, 3, 4)
        ]
    return [
        no_greater(
            f"{method}: the top {count} heads are no better than the last alone",
            "table 3",
            runs.scores(ensemble_accuracy(count), method),
            runs.scores(ensemble_accuracy(1), method),
            by=0.5,
        )
        for method in _METHODS
        for count in (2, 3, 4)
    ]


def tables(runs: Runs) -> str:
    """Return our accuracies beside the paper's."""
    counts, printed = range(1, 5), PRINTED.get(runs.source, {})
    ours = [[f"**ours**: {m}", *(runs.shown(ensemble_accuracy(n), m) for n in counts)] for m in _SHOWN]
    rows = [*ours, *([f"paper: {m}", *values] for m, values in printed.items())]
    note = (
        "The paper's top-1 values of CIFAR-10 differ from those of its table of E2: other runs. Ours are the same runs."
    )
    return f"{markdown.table([f'{runs.source}, test accuracy, %', *(f'top {n}' for n in counts)], rows)}\n\n{note}"


def draw(runs: Runs, path: Path) -> None:
    """Draw accuracy against the number of heads."""
    accuracy_of_ensembles(runs, list(_SHOWN), 4, path.with_suffix(".png"))


EXPERIMENT = Trained(
    "e5",
    "E5, ensembles of the top heads",
    Parts(
        cells=cells,
        claims=claims,
        tables=tables,
        draw=draw,
        seeds=e2.EXPERIMENT.parts.seeds,
        ours=e2.EXPERIMENT.parts.ours,
    ),
    [Result("table 3", "ensembles (E5)", "table 3")],
    owner="e2",
)
