"""Who wins with 16 and 32 stages, where three seeds fit? Four arms of `experiments.deep`, shorter, on a CPU."""

from __future__ import annotations

from pathlib import Path

from experiments.deep.experiment import DEPTHS, ROTATING_THREE, at, frontier_name
from experiments.frontier.comparison import Comparison
from experiments.frontier.experiment import BETTER_LATE, PROMPT, TWO
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, greater
from experiments.harness.experiment import Result, Size
from experiments.harness.runs import Runs, loss
from experiments.harness.trained import Parts, TriedFirst

_SEEDS = 3
_SHORT = (ROTATING_THREE, TWO)  # short credit
NAMES = (PROMPT, BETTER_LATE, *_SHORT)
_GATE = at(PROMPT, 8)
# In order of worth, and the longest runs first.
ARMS = (*(at(name, depth) for depth in reversed(DEPTHS) for name in NAMES), _GATE)

COMPARISON = Comparison(
    name="depth",
    records=Path(__file__).with_name("medium.jsonl"),
    periods=Path(__file__).with_name("periods.jsonl"),
    grids={(0.01, 0.02): ARMS[: len(NAMES)], (0.01, 0.02, 0.04): ARMS[len(NAMES) :]},
    trial_steps=200,
    steps=600,
    every=50,
    batch_size=8,
    label=frontier_name,
)


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the trials, and the runs of the arms that have a rate."""
    return [*COMPARISON.trials(), *COMPARISON.runs(ARMS, seeds)]


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the first trial; losses in nats a byte, and the smaller is the better."""

    def gate(shallow: int, deep: int) -> Claim:
        ends = [runs.scores(loss, at(PROMPT, depth).name) for depth in (shallow, deep)]
        return greater(f"equal steps: {shallow} blocks are worse than {deep}", "depth, gate", *ends, unit="nats")

    def worse(depth: int, latency: float, first: str, second: str) -> Claim:
        text = f"{depth} stages, equal time, latency {latency:g}: {first} is worse than {second}"
        return COMPARISON.worse(runs, text, "depth, time", at(first, depth), at(second, depth), latency)

    return [
        gate(8, 16),
        gate(16, 32),
        *(worse(depth, 0.0, PROMPT, name) for depth in DEPTHS for name in _SHORT),
        *(worse(depth, 0.0, BETTER_LATE, name) for depth in DEPTHS for name in _SHORT),
        *(worse(depth, 1.0, BETTER_LATE, TWO) for depth in DEPTHS),
    ]


def tables(runs: Runs) -> str:
    """Return losses at equal steps and at equal time, slots of a step, differences, and the trials."""
    parts = []
    for depth in DEPTHS:
        exact, late, *short = (at(name, depth) for name in NAMES)
        parts += [f"## {depth} stages", COMPARISON.losses(runs, [exact, late, *short], at(ROTATING_THREE, depth))]
        parts += [COMPARISON.differences(runs, [(one, other) for other in (exact, late) for one in short])]
    shallow = runs.shown(loss, _GATE.name, digits=3)
    notes = (
        f"Test loss in nats a byte; exact training of 8 blocks: {shallow} at equal steps. Equal time is that of rotating blocks "
        "in the tables of losses, and that of the faster of the two in the differences, which have 95 % intervals."
    )
    return "\n\n".join([*parts, notes, COMPARISON.table_of_rates()])


EXPERIMENT = TriedFirst(
    "depth",
    "16 and 32 stages, three seeds",
    Parts(cells=cells, claims=claims, tables=tables, seeds={"medium": _SEEDS}),
    [
        Result("", "ours: does depth help within 600 steps?", "depth, gate"),
        Result("", "ours: 16 and 32 accelerators, three seeds, equal time", "depth, time"),
    ],
)
