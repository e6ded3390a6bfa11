"""E7: Hogwild on the Transformers (table 4), from the runs of E6."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from experiments.e6 import experiment as e6
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, greater
from experiments.harness.experiment import Result, Size
from experiments.harness.plots import lines_over_stages
from experiments.harness.runs import Runs, loss, perplexity
from experiments.harness.trained import Parts, Trained

PRINTED = {3: "82.682", 4: "100.183", 5: "110.278"}


_OTHERS = ("end-to-end", "1-wise", "2-wise-mean", "3-wise-mean")
_METHODS = (*e6.HOGWILD_FORMS, *_OTHERS)


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells of E6 that are compared with Hogwild, and Hogwild's."""
    return [cell for cell in e6.cells(size, seeds) if cell.method in _METHODS and cell.num_stages in e6.HOGWILD]


def claims(runs: Runs) -> list[Claim]:
    """Test the claims about stale gradients: worse than global and than interlocking training, and the worse the more stages."""

    def at(method: str, stages: int) -> dict[int, float]:
        return runs.scores(loss, method, stages)

    claims = []
    for stages in e6.HOGWILD:
        for other in _OTHERS:
            text = f"Hogwild is worse than {other} at equal steps, {stages} stages"
            claims.append(greater(text, "table 4", at("hogwild", stages), at(other, stages), unit="nats"))
        text = f"Hogwild is worse than its milder form, {stages} stages"
        claims.append(greater(text, "ours", at("hogwild", stages), at(e6.HOGWILD_FORMS[1], stages), unit="nats"))
    for fewer, more in pairwise(e6.HOGWILD):
        text = f"Hogwild is worse with {more} stages than with {fewer}"
        claims.append(greater(text, "table 4", at("hogwild", more), at("hogwild", fewer), unit="nats"))
    return claims


def tables(runs: Runs) -> str:
    """Return our perplexities beside the paper's, whose data, vocabulary and size are others: only the order can be compared."""
    rows = [[f"**ours**: {m}", *(runs.shown(perplexity, m, a) for a in e6.HOGWILD)] for m in _METHODS]
    rows.append(["paper: hogwild", *PRINTED.values()])
    return markdown.table(["test perplexity", *markdown.stages(e6.HOGWILD)], rows)


def draw(runs: Runs, path: Path) -> None:
    """Draw the table as a figure; the paper has none."""
    lines_over_stages(
        runs, perplexity, {"equal steps": _METHODS}, "test perplexity per token", path.with_suffix(".png")
    )


EXPERIMENT = Trained(
    "e7",
    "E7, Hogwild on Transformers",
    Parts(
        cells=cells,
        claims=claims,
        tables=tables,
        draw=draw,
        seeds=e6.EXPERIMENT.parts.seeds,
        ours=e6.EXPERIMENT.parts.ours,
    ),
    [
        Result("table 4", "Hogwild (E7)", "table 4"),
        Result("", "ours: the paper's form of Hogwild against a milder one", "ours"),
    ],
    owner="e6",
)
