"""E5: ensembles of the top n heads (table 13), from the runs of E2."""

from __future__ import annotations

from pathlib import Path

from nwise.reproduce import e2, markdown
from nwise.reproduce.claims import Claim, greater
from nwise.reproduce.experiment import Parts, Size, Trained
from nwise.reproduce.plots import accuracy_of_ensembles
from nwise.reproduce.runs import Runs, ensemble_of

_METHODS = ("2-wise", "1-wise")
_SHOWN = (*_METHODS, "2-wise-mean", "deep-supervision")
PRINTED = {
    "ImageNet, 2-wise": ("74.45", "73.46", "72.46", "71.75"),
    "ImageNet, 1-wise": ("72.05", "71.70", "71.34", "70.92"),
    "CIFAR-10, 2-wise": ("95.12", "95.10", "95.18", "95.26"),
    "CIFAR-10, 1-wise": ("94.78", "94.89", "94.76", "94.82"),
}


def claims(runs: Runs) -> list[Claim]:
    """A negative result: an ensemble is not better than the last head alone, here by more than half a point."""
    found = []
    for method in _METHODS:
        alone = {seed: value + 0.5 for seed, value in runs.scores(ensemble_of(1), method).items()}
        for count in (2, 3, 4):
            text = f"{method}: the top {count} heads are no more than 0.5 points better than the last"
            found.append(greater(text, "table 13", alone, runs.scores(ensemble_of(count), method)))
    return found


def tables(runs: Runs) -> str:
    """Ours beside the paper's."""
    counts = range(1, 5)
    ours = [[f"**ours**: CIFAR-10, {m}", *(runs.shown(ensemble_of(n), m) for n in counts)] for m in _SHOWN]
    rows = [*ours, *([f"paper: {name}", *values] for name, values in PRINTED.items())]
    note = (
        "The paper's top-1 values of CIFAR-10 differ from those of its table of E2: other runs. Ours are the same runs."
    )
    return f"{markdown.table(['test accuracy, %', *(f'top {n}' for n in counts)], rows)}\n\n{note}"


def draw(runs: Runs, folder: Path, size: Size) -> None:
    """Accuracy against the number of heads."""
    accuracy_of_ensembles(runs, list(_SHOWN), 4, folder / f"{size}.png")


E5 = Trained(
    "e5", "E5, ensembles of the top heads", Parts(cells=e2.cells, claims=claims, tables=tables, draw=draw), of="e2"
)
