"""Does bounded credit win at many stages? Arms of the frontier with Muon, in networks of 16 and 32 blocks, one a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from experiments.frontier import clock
from experiments.frontier.arms import EVERY as FRONTIER_EVERY
from experiments.frontier.arms import Arm, arm
from experiments.frontier.experiment import BETTER_LATE, LOCAL, PROMPT, ROTATING, THREE, TWO
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, Seeds, differences, greater
from experiments.harness.experiment import Result, Size
from experiments.harness.runs import Runs, loss, loss_at, shown
from experiments.harness.search import Search
from experiments.harness.store import Store
from experiments.harness.trained import Parts, TriedFirst
from nwise.app.recipes import Recipe

STEPS = 1500
EVERY = 50  # steps between two tests; over slow links exact training of 32 stages does 76 steps in the time of local training
_TRIAL_STEPS = 400
_SEEDS = 3
DEPTHS = (16, 32)
PERIODS = Path(__file__).with_name("periods.jsonl")

# Rates, a factor of 2 apart, around the frontier's best for the arm.
_LOW, _HIGH = (0.01, 0.02, 0.04), (0.02, 0.04, 0.08)
ROTATING_THREE = "rotating-3, all heads"
_CAPTURED = {PROMPT: _LOW, TWO: _HIGH, ROTATING: _HIGH, LOCAL: _LOW, THREE: _HIGH, ROTATING_THREE: _LOW}
GRIDS = {**_CAPTURED, BETTER_LATE: _LOW}


def at(name: str, depth: int) -> Arm:
    """Return an arm of the frontier with Muon, one block a stage.

    >>> at("local", 32).name
    'muon local, 32 blocks'
    """
    return replace(arm(f"muon {name}"), num_stages=depth, blocks=depth)


# In order of worth. Delays cannot be captured, so their steps take many times as long.
_GATE = at(PROMPT, 8)
_FIRST = (_GATE, *(at(name, depth) for depth in DEPTHS for name in _CAPTURED))
_LATE, _LAST = (at(BETTER_LATE, depth) for depth in DEPTHS)
ARMS = (*_FIRST, _LATE, _LAST)


@dataclass(frozen=True)
class Plan:
    """The cells, and the file of their records.

    Args:
        path: of the records; the rates of the runs are those of its trials.
        change: function from a recipe to that of a rehearsal; default: no rehearsal.
    """

    path: Path
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe

    def searches(self) -> list[Search]:
        """Return the searches for the rates, one for each grid."""
        return [
            Search(
                title="Muon",
                grid=grid,
                trials={one.name: partial(self._trial, one) for one in ARMS if _grid(one) == grid},
            )
            for grid in (_LOW, _HIGH)
        ]

    def rates(self) -> dict[str, float]:
        """Return the best rate of every arm that has been tried with all of them."""
        searches = self.searches()
        pairs = Store(self.path).records_for([cell for search in searches for cell in search.cells])
        runs = Runs([record for _, record in pairs if record is not None])
        return {name: rate for search in searches for name, rate in search.best(runs).items()}

    def cells(self, size: Size, seeds: int) -> list[Cell]:
        """Return the trials, and the runs of the arms that have a rate, in order of worth."""
        trials = [cell for search in self.searches() for cell in search.cells]
        rates = self.rates()

        def tried(arms: Sequence[Arm]) -> list[Cell]:
            return [cell for one in arms for cell in trials if cell.method == one.name]

        def reported(arms: Sequence[Arm]) -> list[Cell]:
            return [
                Cell(method=one.name, recipe=self._run(one, rates[one.name], seed))
                for seed in range(seeds)
                for one in arms
                if one.name in rates
            ]

        # The longest runs come first in every seed.
        return [*tried([*_FIRST, _LATE]), *reported([_LATE, *_FIRST]), *tried([_LAST]), *reported([_LAST])]

    def _trial(self, one: Arm, rate: float) -> Recipe:
        return self._fit(one, one.trial(rate), _TRIAL_STEPS, every=_TRIAL_STEPS)

    def _run(self, one: Arm, rate: float, seed: int) -> Recipe:
        return self._fit(one, one.run(rate, seed), STEPS, every=EVERY)

    def _fit(self, one: Arm, recipe: Recipe, steps: int, *, every: int) -> Recipe:
        return self.change(
            replace(
                recipe,
                name="deep",
                max_steps=steps,
                eval_every=recipe.eval_every * every / FRONTIER_EVERY,
                capture=_name(one) in _CAPTURED,
            )
        )


def _name(one: Arm) -> str:
    """Return the name of the frontier's arm."""
    return replace(one, blocks=8).label


def _grid(one: Arm) -> tuple[float, ...]:
    return GRIDS[_name(one)]


@cache
def _periods() -> dict[tuple[str, float], float]:
    return {(row["arm"], row["latency"]): row["slots"] for row in Store(PERIODS).read()}


def slots(one: Arm, latency: float) -> float:
    """Return the slots of a step of the fastest schedule that nwise finds; see `experiments.deep.periods`."""
    return _periods()[one.name, latency]


def at_equal_time(runs: Runs, first: Arm, second: Arm, latency: float) -> tuple[Seeds, Seeds]:
    """Return the losses of two arms, by seed, when the faster has done its steps."""
    step = min(slots(first, latency), slots(second, latency))
    return _after(runs, first, latency, step), _after(runs, second, latency, step)


def _after(runs: Runs, one: Arm, latency: float, slots_a_step: float) -> Seeds:
    """Return the losses of an arm after the time in which another one, with so many slots a step, does all its steps."""
    return runs.scores(loss_at(min(1.0, slots_a_step / slots(one, latency)) * STEPS), one.name)


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the first trial; losses in nats a byte, and the smaller is the better."""

    def gate(shallow: int, deep: int) -> Claim:
        ends = [runs.scores(loss, at(PROMPT, depth).name) for depth in (shallow, deep)]
        return greater(f"equal steps: {shallow} blocks are worse than {deep}", "deep, gate", *ends, unit="nats")

    def worse(depth: int, latency: float, first: str, second: str) -> Claim:
        text = f"{depth} stages, equal time, latency {latency:g}: {first} is worse than {second}"
        losses = at_equal_time(runs, at(first, depth), at(second, depth), latency)
        return greater(text, "deep, time", *losses, unit="nats")

    return [
        gate(8, 16),
        gate(16, 32),
        worse(32, 0.0, PROMPT, TWO),
        worse(32, 0.0, PROMPT, ROTATING),
        worse(32, 1.0, PROMPT, ROTATING),
        worse(16, 0.0, PROMPT, ROTATING),
        worse(16, 0.0, BETTER_LATE, ROTATING),
        worse(16, 1.0, BETTER_LATE, ROTATING),
    ]


def tables(plan: Plan, runs: Runs) -> str:
    """Return losses at equal steps and at equal time, slots of a step, differences from exact training, and the trials."""
    parts = []
    for depth in DEPTHS:
        arms, exact = [at(name, depth) for name in GRIDS], at(PROMPT, depth)
        rows: list[list[str]] = []
        pairs: list[tuple[str, list[tuple[Seeds, Seeds]]]] = []
        for one in arms:
            ends: list[Seeds] = [runs.scores(loss, one.name)]
            ends += [_after(runs, one, late, slots(at(LOCAL, depth), late)) for late in clock.LATENCIES]
            texts = [shown(list(end.values()), 3) for end in ends]
            rows.append([_name(one), *texts, *(f"{slots(one, late):.2f}" for late in clock.LATENCIES)])
            moments: list[tuple[Seeds, Seeds]] = [(ends[0], runs.scores(loss, exact.name))]
            moments += [at_equal_time(runs, one, exact, late) for late in clock.LATENCIES]
            pairs.append((f"{_name(one)} less {PROMPT}", moments))
        at_time = [f"equal time, latency {late:g}" for late in clock.LATENCIES]
        headings = ["arm", "equal steps", *at_time, *(f"slots a step, latency {late:g}" for late in clock.LATENCIES)]
        parts += [f"## {depth} stages", markdown.table(headings, rows)]
        parts += [differences(["", "equal steps", *at_time], pairs[1:])]
    shallow = runs.shown(loss, _GATE.name, digits=3)
    notes = (
        f"Test loss in nats a byte; exact training of 8 blocks: {shallow} at equal steps. Equal time is that of local training "
        "in the tables of losses, and that of the faster of the two in the differences, which have 95 % intervals."
    )
    return "\n\n".join(
        [*parts, notes, "## Rates", *(search.table(_trials(plan, search)) for search in plan.searches())]
    )


def _trials(plan: Plan, search: Search) -> Runs:
    return Runs([record for _, record in Store(plan.path).records_for(search.cells) if record is not None])


class Deep(TriedFirst):
    """The experiment of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            "deep",
            "The frontier with many stages",
            Parts(cells=plan.cells, claims=claims, tables=partial(tables, plan), seeds={"medium": _SEEDS}),
            [
                Result("", "ours: does depth help up to 32 blocks?", "deep, gate"),
                Result("", "ours: credit and delay on 16 and 32 accelerators, equal time", "deep, time"),
            ],
        )


EXPERIMENT = Deep(Plan(Path(__file__).with_name("medium.jsonl")))
