"""Does bounded credit win at many stages? Arms of the frontier with Muon, in networks of 16 and 32 blocks, one a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from experiments.frontier.arms import Arm, arm
from experiments.frontier.comparison import Compared, Comparison
from experiments.frontier.experiment import BETTER_LATE, LOCAL, PROMPT, ROTATING, THREE, TWO
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, greater
from experiments.harness.experiment import Result
from experiments.harness.runs import Runs, loss
from nwise.app.recipes import Recipe

STEPS = 1500
EVERY = 50  # steps between two tests; over slow links exact training of 32 stages does 76 steps in the time of local training
DEPTHS = (16, 32)

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


def frontier_name(one: Arm) -> str:
    """Return the name of the frontier's arm.

    >>> frontier_name(at("local", 32))
    'local'
    """
    return replace(one, blocks=8).label


# In order of worth. Delays cannot be captured, so their steps take many times as long.
_GATE = at(PROMPT, 8)
_FIRST = (_GATE, *(at(name, depth) for depth in DEPTHS for name in _CAPTURED))
_LATE, _LAST = (at(BETTER_LATE, depth) for depth in DEPTHS)


def _captured(one: Arm, recipe: Recipe) -> Recipe:
    return replace(recipe, capture=frontier_name(one) in _CAPTURED)


COMPARISON = Comparison(
    name="deep",
    records=Path(__file__).with_name("medium.jsonl"),
    periods=Path(__file__).with_name("periods.jsonl"),
    arms=(*_FIRST, _LATE, _LAST),
    grid=lambda one: GRIDS[frontier_name(one)],
    trial_steps=400,
    steps=STEPS,
    every=EVERY,
    change=_captured,
    label=frontier_name,
)


def cells(comparison: Comparison, seeds: int) -> list[Cell]:
    """Return the trials, and the runs of the arms that have a rate, in order of worth."""

    def there(*arms: Arm) -> Sequence[Arm]:
        return [one for one in arms if one in comparison.arms]

    early, late, last = there(*_FIRST), there(_LATE), there(_LAST)
    # The longest runs come first in every seed.
    runs = comparison.runs([*late, *early], seeds)
    return [*comparison.trials([*early, *late]), *runs, *comparison.trials(last), *comparison.runs(last, seeds)]


def gates(comparison: Comparison, runs: Runs) -> list[Claim]:
    """Return the claims that exact training is better with more blocks."""
    ends = {depth: runs.scores(loss, at(PROMPT, depth).name) for depth in (_GATE.blocks, *DEPTHS)}
    source = f"{comparison.name}, gate"
    return [
        greater(f"equal steps: {few} blocks are worse than {many}", source, ends[few], ends[many], unit="nats")
        for few, many in pairwise(ends)
    ]


def worse(comparison: Comparison, runs: Runs, depth: int, latency: float, first: str, second: str) -> Claim:
    """Return the claim that the loss of the first arm is higher at equal time."""
    text = f"{depth} stages, equal time, latency {latency:g}: {first} is worse than {second}"
    return comparison.worse(runs, text, f"{comparison.name}, time", at(first, depth), at(second, depth), latency)


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the first trial; losses in nats a byte, and the smaller is the better."""
    compared = partial(worse, COMPARISON, runs)
    return [
        *gates(COMPARISON, runs),
        compared(32, 0.0, PROMPT, TWO),
        compared(32, 0.0, PROMPT, ROTATING),
        compared(32, 1.0, PROMPT, ROTATING),
        compared(16, 0.0, PROMPT, ROTATING),
        compared(16, 0.0, BETTER_LATE, ROTATING),
        compared(16, 1.0, BETTER_LATE, ROTATING),
    ]


def tables(runs: Runs) -> str:
    """Return losses at equal steps and at equal time, slots of a step, differences from exact training, and the trials."""
    parts = []
    for depth in DEPTHS:
        arms, exact = [at(name, depth) for name in GRIDS], at(PROMPT, depth)
        parts += [f"## {depth} stages", COMPARISON.losses(runs, arms, at(LOCAL, depth))]
        parts += [COMPARISON.differences(runs, [(one, exact) for one in arms if one != exact])]
    shallow = runs.shown(loss, _GATE.name, digits=3)
    notes = (
        f"Test loss in nats a byte; exact training of 8 blocks: {shallow} at equal steps. Equal time is that of local training "
        "in the tables of losses, and that of the faster of the two in the differences, which have 95 % intervals."
    )
    return "\n\n".join([*parts, notes, COMPARISON.table_of_rates(runs)])


def experiment(comparison: Comparison) -> Compared:
    """Return the experiment of a comparison, which a rehearsal changes."""
    return Compared(
        comparison,
        "The frontier with many stages",
        claims,
        tables,
        [
            Result("", "ours: does depth help up to 32 blocks?", "deep, gate"),
            Result("", "ours: credit and delay on 16 and 32 accelerators, equal time", "deep, time"),
        ],
        cells=cells,
    )


EXPERIMENT = experiment(COMPARISON)
