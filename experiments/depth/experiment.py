"""Who wins with 16 and 32 stages, where three seeds fit? Four arms of `experiments.deep`, shorter, on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from experiments.deep.experiment import DEPTHS, ROTATING_THREE, at, frontier_name, gates, worse
from experiments.frontier.comparison import Compared, Comparison
from experiments.frontier.experiment import BETTER_LATE, PROMPT, TWO
from experiments.harness.claims import Claim
from experiments.harness.experiment import Result
from experiments.harness.runs import Runs, loss

_SHORT = (ROTATING_THREE, TWO)  # short credit
NAMES = (PROMPT, BETTER_LATE, *_SHORT)
_GATE = at(PROMPT, 8)

COMPARISON = Comparison(
    name="depth",
    records=Path(__file__).with_name("medium.jsonl"),
    periods=Path(__file__).with_name("periods.jsonl"),
    arms=(*(at(name, depth) for depth in reversed(DEPTHS) for name in NAMES), _GATE),  # the longest runs first
    grid=lambda one: (0.01, 0.02) if one.blocks == 32 else (0.01, 0.02, 0.04),
    trial_steps=200,
    steps=600,
    every=50,
    batch_size=8,
    label=frontier_name,
)


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the first trial; losses in nats a byte, and the smaller is the better."""
    compared = partial(worse, COMPARISON, runs)
    return [
        *gates(COMPARISON, runs),
        *(compared(depth, 0.0, rival, name) for rival in (PROMPT, BETTER_LATE) for depth in DEPTHS for name in _SHORT),
        *(compared(depth, 1.0, BETTER_LATE, TWO) for depth in DEPTHS),
    ]


def tables(runs: Runs) -> str:
    """Return losses at equal steps and at equal time, slots of a step, differences, and the trials."""
    parts = []
    for depth in DEPTHS:
        exact, delayed, *short = (at(name, depth) for name in NAMES)
        parts += [f"## {depth} stages", COMPARISON.losses(runs, [exact, delayed, *short], at(ROTATING_THREE, depth))]
        parts += [COMPARISON.differences(runs, [(one, other) for other in (exact, delayed) for one in short])]
    shallow = runs.shown(loss, _GATE.name, digits=3)
    notes = (
        f"Test loss in nats a byte; exact training of 8 blocks: {shallow} at equal steps. Equal time is that of rotating blocks "
        "in the tables of losses, and that of the faster of the two in the differences, which have 95 % intervals."
    )
    return "\n\n".join([*parts, notes, COMPARISON.table_of_rates(runs)])


def draw(runs: Runs, path: Path) -> None:
    """Draw loss against time on fast links."""
    panels = {f"{depth} stages, fast links": [at(name, depth) for name in NAMES] for depth in DEPTHS}
    shown = {title: arms for title, arms in panels.items() if all(runs.records_for(one.name) for one in arms)}
    if shown:
        COMPARISON.draw(runs, shown, 0.0, path.with_suffix(".png"))


EXPERIMENT = Compared(
    COMPARISON,
    "16 and 32 stages, three seeds",
    claims,
    tables,
    [
        Result("", "ours: does depth help within 600 steps?", "depth, gate"),
        Result("", "ours: 16 and 32 accelerators, three seeds, equal time", "depth, time"),
    ],
    draw=draw,
)
