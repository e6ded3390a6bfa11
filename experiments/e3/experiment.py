"""E3: the accuracy of every head (figure 6), from the runs of E2."""

from __future__ import annotations

from pathlib import Path

from experiments.e2 import experiment as e2
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, equal, greater, mean_by_seed, slope
from experiments.harness.experiment import Result, Size
from experiments.harness.plots import accuracy_of_heads
from experiments.harness.runs import Runs, head_accuracy
from experiments.harness.trained import Parts, Trained

_METHODS = (*e2.PAPER, *e2.BEYOND)


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells of E2 that are shown."""
    return [cell for cell in e2.cells(size, seeds) if cell.method in _METHODS]


def claims(runs: Runs) -> list[Claim]:
    """Test the claims of the figure: early heads of 1-wise nearly as good as its last, those of 2-wise worse, its last better."""

    def head(method: str, index: int) -> dict[int, float]:
        return runs.scores(head_accuracy(index), method)

    rise = {method: slope({k: head(method, k) for k in range(4)}) for method in ("1-wise", "2-wise")}
    early = {method: mean_by_seed([head(method, k) for k in (0, 1)]) for method in ("1-wise", "2-wise")}
    text = "1-wise: the head of stage 2 of 4 is close to the last"
    return [
        equal(text, "figure 6", head("1-wise", 1), head("1-wise", 3), within=1),
        greater(
            "early heads (the first two) of 1-wise are above those of 2-wise",
            "figure 6",
            early["1-wise"],
            early["2-wise"],
        ),
        greater("2-wise: each stage adds (points from head to head)", "figure 6", rise["2-wise"]),
        greater("2-wise: each stage adds more than 1-wise", "figure 6", rise["2-wise"], rise["1-wise"]),
        greater("the last head of 2-wise is above that of 1-wise", "figure 6", head("2-wise", 3), head("1-wise", 3)),
    ]


def tables(runs: Runs) -> str:
    """Return the accuracy of every head of every method. Heads that train no stage are probes on detached activations."""
    rows = [[method, *(runs.shown(head_accuracy(k), method) for k in range(4))] for method in _METHODS]
    note = (
        "The paper's figure is of ResNet-50 on ImageNet, without numbers. Heads that train no stage are probes, but with "
        "rotating blocks they train one in another turn."
    )
    return f"{markdown.table(['head of stage, test accuracy, %', 1, 2, 3, 4], rows)}\n\n{note}"


def draw(runs: Runs, path: Path) -> None:
    """Draw the paper's figure."""
    accuracy_of_heads(runs, list(_METHODS), 4, path.with_suffix(".png"))


EXPERIMENT = Trained(
    "e3",
    "E3, the accuracy of every head",
    Parts(
        cells=cells,
        claims=claims,
        tables=tables,
        draw=draw,
        seeds=e2.EXPERIMENT.parts.seeds,
        ours=e2.EXPERIMENT.parts.ours,
    ),
    [Result("figure 6", "accuracy of every head (E3)", "figure 6")],
    owner="e2",
)
