"""E3: the accuracy of every head (figure 6), from the runs of E2."""

from __future__ import annotations

from pathlib import Path

from nwise.reproduce import e2, markdown
from nwise.reproduce.claims import Claim, equal, greater
from nwise.reproduce.plots import accuracy_of_heads
from nwise.reproduce.runs import Runs, head_of
from nwise.reproduce.trained import Parts, Trained

_METHODS = (*e2.PAPER, *e2.BEYOND)


def claims(runs: Runs) -> list[Claim]:
    """The figure's: early heads of 1-wise nearly as good as its last, those of 2-wise worse, its last better."""

    def head(method: str, index: int) -> dict[int, float]:
        return runs.scores(head_of(index), method)

    first, second, last = (head("1-wise", k) for k in (0, 1, 3))
    found = [
        equal("1-wise: the head of stage 2 of 4 is close to the last", "figure 6", second, last, within=1),
        greater("the first head of 1-wise above that of 2-wise", "figure 6", first, head("2-wise", 0)),
        greater("the last head of 2-wise above that of 1-wise", "figure 6", head("2-wise", 3), last),
    ]
    for k in range(3):
        text = f"2-wise: stage {k + 2} adds to stage {k + 1}"
        found.append(greater(text, "figure 6", head("2-wise", k + 1), head("2-wise", k)))
    return found


def tables(runs: Runs) -> str:
    """Every head of every method. Heads that train no stage are probes on detached activations."""
    rows = [[method, *(runs.shown(head_of(k), method) for k in range(4))] for method in _METHODS]
    note = "The paper's figure is of ResNet-50 on ImageNet, without numbers. Heads that train no stage are probes."
    return f"{markdown.table(['head of stage, test accuracy, %', 1, 2, 3, 4], rows)}\n\n{note}"


def draw(runs: Runs, path: Path) -> None:
    """The paper's figure."""
    accuracy_of_heads(runs, list(_METHODS), 4, path.with_suffix(".png"))


E3 = Trained(
    "e3",
    "E3, the accuracy of every head",
    Parts(cells=e2.cells, claims=claims, tables=tables, draw=draw, seeds=e2.E2.parts.seeds),
    of="e2",
)
