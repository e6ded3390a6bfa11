"""The learning rates of all experiments of medium size: short runs with seeds of their own, tested on withheld data."""

from __future__ import annotations

from experiments.e1 import experiment as e1
from experiments.e2 import experiment as e2
from experiments.frontier import arms
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, measured
from experiments.harness.experiment import Result, Size
from experiments.harness.runs import Runs
from experiments.harness.search import Search
from experiments.harness.trained import Parts, Trained
from experiments.width import experiment as width

SEARCHES = (*arms.SEARCHES, width.SEARCH, e1.SEARCH, e1.SHORT_SEARCH, e2.SEARCH)


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: every method with every rate, with the seeds of its search."""
    return [cell for search in SEARCHES for cell in search.cells]


def _searched(runs: Runs) -> list[Search]:
    """Return the searches on the runs' data."""
    names = {(record["method"], record["part"]) for record in runs.records}
    return [one for one in SEARCHES if any((cell.method, cell.part) in names for cell in one.cells)]


def tables(runs: Runs) -> str:
    """Return the withheld loss by method and rate, for each search."""
    return "\n\n".join(
        [
            *(search.table(runs) for search in _searched(runs)),
            "Bold: the best rate, which the method's reported runs have, unless the title says otherwise. A star: it is the "
            "first or the last of the grid.",
        ]
    )


def claims(runs: Runs) -> list[Claim]:
    """Test whether the grids are wide enough."""
    decisive = [search for search in _searched(runs) if search.decides]
    inside = [rate in search.grid[1:-1] for search in decisive for rate in search.best(runs).values()]
    text = f"the best rate lies inside the grid, of {len(inside)} methods"
    return [measured(text, "ours", sum(inside), holds=all(inside), wanted="all", unit="methods")] if inside else []


EXPERIMENT = Trained(
    "rates",
    "Learning rates in medium size",
    Parts(cells=cells, claims=claims, tables=tables, seeds={"medium": 1}),
    [Result("", "ours: learning rates in medium size", "ours")],
)
