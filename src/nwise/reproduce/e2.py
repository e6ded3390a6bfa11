"""E2: residual networks in four stages (table 11); the runs of E3 and E5 too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nwise.recipes import Recipe, recipe
from nwise.reproduce import markdown
from nwise.reproduce.cell import Cell
from nwise.reproduce.claims import Claim, equal, exact, greater
from nwise.reproduce.clock import step_time, work
from nwise.reproduce.experiment import Parts, Size, Trained, on_a_gpu
from nwise.reproduce.plots import accuracy_against_time
from nwise.reproduce.runs import Runs, accuracy

PAPER = ("end-to-end", "1-wise", "2-wise", "3-wise")
BEYOND = ("2-wise-mean", "rotating-2", "geometric-0.5", "deep-supervision")
# The paper's table, accuracy and one standard error over three seeds (ImageNet: one seed).
PRINTED = {
    "CIFAR-10, ResNet-32": ("95.20 (0.11)", "94.20 (0.09)", "95.05 (0.09)", "95.42 (0.06)"),
    "CIFAR-100, ResNet-32": ("76.71 (0.14)", "75.02 (0.09)", "78.09 (0.13)", "77.84 (0.04)"),
    "ImageNet, ResNet-50": ("75.60", "72.05", "74.45", "76.27"),
}
_RECIPES = {"": "cifar10-resnet", "CIFAR-100": "cifar100-resnet", "ImageNet": "imagenet-resnet"}


def base(size: Size, part: str = "") -> Recipe:
    """Everything but strategy and seed."""
    return on_a_gpu(recipe(_RECIPES[part])) if size == "full" else recipe("cifar10-resnet-small")


def cells(size: Size, seeds: int) -> list[Cell]:
    """Methods by seeds; ImageNet, as printed, has one seed."""
    return [
        Cell(method=method, part=part, recipe=replace(base(size, part), strategy=method, seed=seed, heads="all"))
        for part in (_RECIPES if size == "full" else [""])
        for seed in range(1 if part == "ImageNet" else seeds)
        for method in (*PAPER, *BEYOND)
    ]


def claims(runs: Runs) -> list[Claim]:
    """Table 11's, and what more strategies do."""

    def of(method: str) -> dict[int, float]:
        return runs.scores(accuracy, method)

    found = [
        greater("end-to-end above 1-wise", "table 11", of("end-to-end"), of("1-wise")),
        greater("2-wise above 1-wise", "table 11", of("2-wise"), of("1-wise")),
        greater("3-wise above 1-wise", "table 11", of("3-wise"), of("1-wise")),
        equal("2-wise equals end-to-end", "table 11", of("2-wise"), of("end-to-end"), within=1),
        greater("3-wise above end-to-end", "table 11", of("3-wise"), of("end-to-end")),
    ]
    found += [greater(f"{method} above 2-wise", "ours", of(method), of("2-wise")) for method in BEYOND]
    for method in ("2-wise", "3-wise"):
        more = 100 * (work(method, 4) / work("end-to-end", 4) - 1)
        text = f"{method} computes more in total than end-to-end, four stages"
        found.append(exact(text, "section T", more, holds=more > 0, wanted="> 0", unit="%"))
    return found


def tables(runs: Runs) -> str:
    """Ours beside the paper's; equal steps, equal time, equal memory."""
    rows = []
    for part, (name, values) in zip(_RECIPES, PRINTED.items(), strict=True):
        if runs.of("2-wise", part=part):
            rows.append([f"**ours**: {name}", *(runs.shown(accuracy, m, part=part) for m in PAPER)])
        rows.append([f"paper: {name}", *values])
    return f"{markdown.table(['test accuracy, %', *PAPER], rows)}\n\n## Beyond the paper\n\n{_beyond(runs)}"


def _beyond(runs: Runs) -> str:
    memory = step_time("2-wise", 4, "honest").peak
    headings = ("", "accuracy at equal steps, %", "slots a step (M)", f"slots a step with memory {memory:g} (M)")
    rows = []
    for method in (*PAPER, *BEYOND):
        times = (step_time(method, 4, "honest"), step_time(method, 4, "honest", memory))
        rows.append([method, runs.shown(accuracy, method), *(f"{t.slots:.2f} ({t.num_microbatches})" for t in times)])
    note = (
        "Slots are forwards of a mini-batch through a stage; F = I = W, a head of half a stage, 0.02 an action; every method has "
        "its best M, end-to-end is zero-bubble. Memory: mini-batches' activations that a stage keeps at once, as 2-wise does."
    )
    return f"{markdown.table(headings, rows)}\n\n{note}"


def draw(runs: Runs, folder: Path, size: Size) -> None:
    """Accuracy against steps and against time."""
    accuracy_against_time(runs, [*PAPER, *BEYOND], 4, folder / f"{size}.png")


E2 = Trained("e2", "E2, residual networks in four stages", Parts(cells=cells, claims=claims, tables=tables, draw=draw))
