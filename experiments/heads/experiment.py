"""Do cheaper heads help short credit, and predicted weights late gradients? Arms of the frontier with Muon, eight stages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from experiments.frontier import clock
from experiments.frontier.arms import EVERY as FRONTIER_EVERY
from experiments.frontier.arms import Arm
from experiments.frontier.experiment import LOCAL, SMALL, TWO
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, Seeds, differences, greater, no_greater
from experiments.harness.experiment import Result, Size
from experiments.harness.runs import Runs, loss, loss_at, shown
from experiments.harness.search import Search
from experiments.harness.store import Store
from experiments.harness.trained import Parts, TriedFirst
from nwise.app.recipes import Recipe

STEPS = 800
EVERY = 100  # steps between two tests
_TRIAL_STEPS = 300
_BATCH = 8
_SEEDS = 3
_FOLDER = Path(__file__).parent
RECORDS, PERIODS = _FOLDER / "medium.jsonl", _FOLDER / "periods.jsonl"

_FULL = {name: Arm("muon", name) for name in (LOCAL, TWO)}
_QUARTER = {name: replace(one, loss_fraction=0.25) for name, one in _FULL.items()}
_NARROW = replace(_FULL[TWO], head_rank=16)  # a step of local training would take as long as without
_LATE = {delay: Arm("muon", f"end-to-end-delay-{delay}") for delay in (2, 4)}
_EXTRAPOLATED = {delay: replace(one, extrapolate=True) for delay, one in _LATE.items()}
_PREDICTED = {delay: replace(one, predict=delay) for delay, one in _LATE.items()}

# In order of worth, with the rates of their trials: a factor of 2 apart, around the frontier's best.
GRIDS: dict[tuple[float, ...], tuple[Arm, ...]] = {
    (0.01, 0.02, 0.04): (*_FULL.values(), *_QUARTER.values(), _NARROW, _EXTRAPOLATED[2], _PREDICTED[2]),
    (0.005, 0.01, 0.02): (_EXTRAPOLATED[4], _PREDICTED[4]),
}
ARMS = tuple(one for arms in GRIDS.values() for one in arms)


def _fit(recipe: Recipe, steps: int, *, every: int) -> Recipe:
    batches = every * _BATCH / (FRONTIER_EVERY * recipe.batch_size)
    return replace(recipe, name="heads", batch_size=_BATCH, max_steps=steps, eval_every=recipe.eval_every * batches)


def _trial(one: Arm, rate: float) -> Recipe:
    return _fit(one.trial(rate), _TRIAL_STEPS, every=_TRIAL_STEPS)


SEARCHES = tuple(
    Search(title="Muon", grid=grid, trials={one.name: partial(_trial, one) for one in arms})
    for grid, arms in GRIDS.items()
)


def rates() -> dict[str, float]:
    """Return the best rate of every arm that has been tried with all of them."""
    pairs = Store(RECORDS).records_for([cell for search in SEARCHES for cell in search.cells])
    runs = Runs([record for _, record in pairs if record is not None])
    return {name: rate for search in SEARCHES for name, rate in search.best(runs).items()}


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the trials, and the runs of the arms that have a rate."""
    best = rates()
    runs = [
        Cell(method=one.name, recipe=_fit(one.run(best[one.name], seed), STEPS, every=EVERY))
        for seed in range(seeds)
        for one in ARMS
        if one.name in best
    ]
    return [cell for search in SEARCHES for cell in search.cells] + runs


@cache
def _periods() -> dict[tuple[str, float], float]:
    return {(row["arm"], row["latency"]): row["slots"] for row in Store(PERIODS).read()}


def slots(one: Arm, latency: float) -> float:
    """Return the slots of a step of the fastest schedule that nwise finds; see `experiments.deep.periods`."""
    return _periods()[one.name, latency]


def _after(runs: Runs, one: Arm, latency: float, slots_a_step: float) -> Seeds:
    """Return the losses of an arm after the time in which another one, with so many slots a step, does all its steps."""
    return runs.scores(loss_at(min(1.0, slots_a_step / slots(one, latency)) * STEPS), one.name)


def at_equal_time(runs: Runs, first: Arm, second: Arm, latency: float) -> tuple[Seeds, Seeds]:
    """Return the losses of two arms, by seed, when the faster has done its steps."""
    step = min(slots(first, latency), slots(second, latency))
    return _after(runs, first, latency, step), _after(runs, second, latency, step)


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the first trial; losses in nats a byte, and the smaller is the better."""

    def end(one: Arm) -> Seeds:
        return runs.scores(loss, one.name)

    def little(cheap: Arm, full: Arm) -> Claim:
        text = f"equal steps: {cheap.label} is worse than {full.label}, if at all, by less than {SMALL:g}"
        return no_greater(text, "heads, steps", end(cheap), end(full), by=SMALL, unit="nats")

    def worse(source: str, first: Arm, second: Arm, latency: float) -> Claim:
        text = f"equal time, latency {latency:g}: {first.label} is worse than {second.label}"
        return greater(text, source, *at_equal_time(runs, first, second, latency), unit="nats")

    def helps(delay: int) -> Claim:
        first, second = _EXTRAPOLATED[delay], _PREDICTED[delay]
        text = f"equal steps: {first.label} is worse than {second.label}"
        return greater(text, "prediction", end(first), end(second), unit="nats")

    return [
        *(little(_QUARTER[name], _FULL[name]) for name in _FULL),
        little(_NARROW, _FULL[TWO]),
        *(worse("heads, time", _FULL[name], _QUARTER[name], late) for name in _FULL for late in clock.LATENCIES),
        worse("heads, time", _FULL[TWO], _NARROW, 0.0),
        *map(helps, _LATE),
        *(worse("border", one, _FULL[name], 1.0) for one in _PREDICTED.values() for name in _FULL),
    ]


def tables(runs: Runs) -> str:
    """Return losses at equal steps and at equal time, slots of a step, differences, and the trials."""
    rows = []
    for one in ARMS:
        ends: list[Seeds] = [runs.scores(loss, one.name)]
        ends += [_after(runs, one, late, slots(_FULL[LOCAL], late)) for late in clock.LATENCIES]
        texts = [shown(list(each.values()), 3) for each in ends]
        rows.append([one.label, *texts, *(f"{slots(one, late):.2f}" for late in clock.LATENCIES)])
    pairs = [
        *((_QUARTER[name], _FULL[name]) for name in _FULL),
        (_NARROW, _FULL[TWO]),
        *((_PREDICTED[delay], _EXTRAPOLATED[delay]) for delay in _LATE),
        *((one, _FULL[name]) for one in (*_EXTRAPOLATED.values(), *_PREDICTED.values()) for name in _FULL),
    ]
    compared = [
        (
            f"{a.label} less {b.label}",
            [
                (runs.scores(loss, a.name), runs.scores(loss, b.name)),
                *(at_equal_time(runs, a, b, late) for late in clock.LATENCIES),
            ],
        )
        for a, b in pairs
    ]
    moments = ["equal steps", *(f"equal time, latency {late:g}" for late in clock.LATENCIES)]
    return "\n\n".join(
        [
            markdown.table(["arm", *moments, *(f"slots a step, latency {late:g}" for late in clock.LATENCIES)], rows),
            differences(["", *moments], compared),
            "Test loss in nats a byte. Equal time is that in which local training with all tokens does its steps in the first "
            "table, and that of the faster of the two in the differences, which have 95 % intervals.",
            "## Rates",
            *(search.table(runs) for search in SEARCHES),
        ]
    )


EXPERIMENT = TriedFirst(
    "heads",
    "Cheap heads and predicted weights",
    Parts(cells=cells, claims=claims, tables=tables, seeds={"medium": _SEEDS}),
    [
        Result("", "ours: losses of a quarter of the tokens, heads of rank 16, equal steps", "heads, steps"),
        Result("", "ours: losses of a quarter of the tokens, heads of rank 16, equal time", "heads, time"),
        Result("", "ours: predicted weights against extrapolated updates, delays of 2 and 4", "prediction"),
        Result("", "ours: delays with predicted weights against short credit on slow links", "border"),
    ],
)
