"""The learning rates of the frontier's arms: short runs of one seed, tested on withheld text."""

from __future__ import annotations

from math import inf

from experiments.frontier.arms import ARMS, rates_tried
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, measured
from experiments.harness.experiment import Result, Size
from experiments.harness.runs import Runs, loss, shown
from experiments.harness.trained import Parts, Trained


def _part(rate: float) -> str:
    return f"rate {rate:g}"


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: every arm with every rate, one seed."""
    del size, seeds
    return [
        Cell(method=one.name, part=_part(rate), recipe=one.trial(rate)) for one in ARMS for rate in rates_tried(one)
    ]


def best_rates(runs: Runs) -> dict[str, float]:
    """Return the rate with the lowest withheld loss, for every arm that was tried with all its rates."""
    rates = {}
    for one in ARMS:
        losses = {rate: runs.scores(loss, one.name, part=_part(rate)) for rate in rates_tried(one)}
        if all(losses.values()):
            rates[one.name] = min(losses, key=lambda rate: min(losses[rate].values(), default=inf))
    return rates


def tables(runs: Runs) -> str:
    """Return the withheld loss by arm and rate, for each optimizer."""
    best = best_rates(runs)
    sections = []
    for optimizer in dict.fromkeys(one.optimizer for one in ARMS):
        arms = [one for one in ARMS if one.optimizer == optimizer]
        rates = rates_tried(arms[0])
        rows = []
        for one in arms:
            texts = [shown(list(runs.scores(loss, one.name, part=_part(rate)).values()), 3) for rate in rates]
            rows.append(
                [one.name, *(f"**{t}**" if best.get(one.name) == r else t for r, t in zip(rates, texts, strict=True))]
            )
        sections.append(markdown.table(["withheld loss, nats; peak rate", *map("{:g}".format, rates)], rows))
    return "\n\n".join([*sections, "Bold: the rate that the arm's reported runs use."])


def claims(runs: Runs) -> list[Claim]:
    """Test whether the grids are wide enough."""
    best = best_rates(runs)
    inside = sum(best[one.name] in rates_tried(one)[1:-1] for one in ARMS if one.name in best)
    text = f"the best of five rates lies inside the grid, of {len(best)} arms"
    return [measured(text, "ours", inside, holds=inside == len(best), wanted="all", unit="arms")] if best else []


EXPERIMENT = Trained(
    "rates",
    "Learning rates of the frontier",
    Parts(cells=cells, claims=claims, tables=tables, seeds={"medium": 1}),
    [Result("", "ours: learning rates of the frontier's arms", "ours")],
)
