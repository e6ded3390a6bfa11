"""E1: the small convolutional network on CIFAR-10 (figure 5 and its right half)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nwise.recipes import ConvNet, recipe
from nwise.reproduce import markdown
from nwise.reproduce.cell import Cell
from nwise.reproduce.claims import Claim, equal, greater
from nwise.reproduce.experiment import Parts, Size, Trained, on_a_gpu
from nwise.reproduce.plots import lines_over_stages
from nwise.reproduce.runs import Runs, accuracy

DOUBLE = "1-wise double size"
_WISE = ("1-wise", "2-wise", "3-wise", "4-wise", "end-to-end")
_STAGES: dict[Size, tuple[int, ...]] = {"small": (3, 6, 10), "full": tuple(range(3, 11))}


def cells(size: Size, seeds: int) -> list[Cell]:
    """Stages by methods by seeds; an N of A or more is end-to-end and not run twice."""
    base = on_a_gpu(recipe("cifar10-convnet")) if size == "full" else recipe("cifar10-convnet-small")
    assert isinstance(base.model, ConvNet)
    found = []
    for seed in range(seeds):
        for stages in reversed(_STAGES[size]):
            for method in (*_WISE, DOUBLE):
                if method[0] in "234" and int(method[0]) >= stages:
                    continue
                strategy = "blocks-2" if method == DOUBLE else method
                settings = replace(base, model=replace(base.model, num_stages=stages), strategy=strategy, seed=seed)
                found.append(Cell(method=method, recipe=settings))
    return found


def claims(runs: Runs) -> list[Claim]:
    """Figure 5's."""

    def at(method: str, stages: int) -> dict[int, float]:
        return runs.scores(accuracy, method, stages)

    least, *_, most = sorted({r["stages"] for r in runs.records})
    found = [
        greater(
            f"accuracy rises with N, {most} stages: {better} above {worse}",
            "figure 5",
            at(better, most),
            at(worse, most),
        )
        for worse, better in (("1-wise", "2-wise"), ("2-wise", "3-wise"), ("3-wise", "4-wise"))
    ]
    found += [
        equal(f"{n} equals end-to-end at 6 stages", "figure 5", at(n, 6), at("end-to-end", 6), within=1)
        for n in ("3-wise", "4-wise")
    ]

    def gap(stages: int) -> dict[int, float]:
        local, whole = at("1-wise", stages), at("end-to-end", stages)
        return {seed: whole[seed] - local[seed] for seed in local.keys() & whole.keys()}

    grows = f"the gap of 1-wise to end-to-end grows from {least} to {most} stages"
    right, double = "figure 5, right", at(DOUBLE, most)
    return [
        *found,
        greater(grows, "figure 5", gap(most), gap(least)),
        greater(f"double size above 1-wise, {most} stages", right, double, at("1-wise", most)),
        greater(f"2-wise above double size, {most} stages", right, at("2-wise", most), double),
    ]


def tables(runs: Runs) -> str:
    """Accuracy by method and stages; the paper has it as a figure only."""
    stages = sorted({r["stages"] for r in runs.records})
    rows = [[method, *(runs.shown(accuracy, method, a) for a in stages)] for method in (*_WISE, DOUBLE)]
    return markdown.table(["test accuracy, %", *markdown.stages(stages)], rows)


def draw(runs: Runs, folder: Path, size: Size) -> None:
    """The paper's figure: N-wise left, double size right."""
    panels = {"N-wise": list(_WISE), "stages of double size": ["1-wise", DOUBLE, "2-wise"]}
    lines_over_stages(runs, accuracy, panels, "test accuracy, %", folder / f"{size}.png")


E1 = Trained(
    "e1",
    "E1, accuracy against the number of stages",
    Parts(cells=cells, claims=claims, tables=tables, draw=draw, seeds={"small": 4, "full": 4}),
)
