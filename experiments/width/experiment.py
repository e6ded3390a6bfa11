"""Does bounded credit catch up in a wider network? Arms of the frontier with Muon, at another width."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from experiments.frontier import clock
from experiments.frontier import experiment as frontier
from experiments.frontier.arms import GRIDS, STAGES, STEPS, WIDTH, Arm, arm, reported
from experiments.frontier.experiment import (
    BETTER_LATE,
    LATER,
    LOCAL,
    PROMPT,
    ROTATING,
    SMALL,
    TWO,
    timed_pairs,
    worse_in_time,
)
from experiments.frontier.plots import loss_against_time
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, Seeds, difference, differences, greater, no_greater
from experiments.harness.experiment import Result, Size
from experiments.harness.runs import Runs, loss, loss_at, shown
from experiments.harness.search import Search
from experiments.harness.store import Store
from experiments.harness.trained import Parts, Trained

WIDE = 256
_SEEDS = 5
_SHALLOW = "end-to-end, 1 block"
_COMPARED = (LOCAL, TWO, ROTATING, BETTER_LATE)  # with exact training at both widths
_LATE_BY_TWO = "end-to-end-delay-2, extrapolated"
_DEEP = (PROMPT, BETTER_LATE, _LATE_BY_TWO, LATER, ROTATING, TWO, LOCAL)
_NARROW = Path(__file__).parents[1] / "frontier" / "medium.jsonl"


def at(name: str, width: int = WIDE) -> Arm:
    """Return an arm of the frontier with Muon at a width.

    >>> at("local").name, at("local", 96).name
    ('muon local, width 256', 'muon local')
    """
    return replace(arm(f"muon {name}"), width=width)


ARMS = tuple(map(at, (*_DEEP, _SHALLOW)))
SEARCH = Search(
    title=f"Muon, width {WIDE}",
    grid=GRIDS["muon"],
    trials={one.name: one.trial for one in ARMS},
)


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: every arm that was tried with all rates, by seed."""
    return reported(ARMS, SEARCH.rates(), seeds)


@cache
def _narrow() -> Runs:
    """Return the runs of the frontier in this repository."""
    records = [record for _, record in Store(_NARROW).records_for(frontier.cells("medium", _SEEDS))]
    return Runs([record for record in records if record is not None])


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the first trial; losses in nats a byte, and the smaller is the better."""

    def end(name: str) -> Seeds:
        return runs.scores(loss, at(name).name)

    def worse(source: str, first: str, second: str) -> Claim:
        return greater(f"{first} is worse than {second}", source, end(first), end(second), unit="nats")

    def little(source: str, first: str, second: str) -> Claim:
        text = f"{first} is worse than {second}, if at all, by less than {SMALL:g}"
        return no_greater(text, source, end(first), end(second), by=SMALL, unit="nats")

    return [
        worse("wide, gate", _SHALLOW, PROMPT),
        *(worse("wide, figure 7", *pair) for pair in (*pairwise((LOCAL, TWO, PROMPT)), (LOCAL, PROMPT))),
        little("wide, rotating", ROTATING, TWO),
        little("wide, delay", BETTER_LATE, PROMPT),
        *(_closer(runs, name) for name in _COMPARED),
        *(claim for latency in clock.LATENCIES for claim in _at_equal_time(runs, latency)),
    ]


def _closer(runs: Runs, name: str) -> Claim:
    """Test whether an arm is less far behind exact training than in the narrow network, both at the end."""
    gaps = [_behind(_narrow(), name, WIDTH), _behind(runs, name, WIDE)]
    text = f"{name} is behind {PROMPT} by less at width {WIDE} than at {WIDTH}, equal steps"
    return greater(text, "width", *gaps, unit="nats")


def _distances(runs: Runs, name: str) -> list[str]:
    """Return the mean distance of an arm from exact training at both widths, and their unpaired difference with its interval."""
    narrow, broad = (list(_behind(*each).values()) for each in ((_narrow(), name, WIDTH), (runs, name, WIDE)))
    if min(len(narrow), len(broad)) < 2:
        return ["–"] * 4
    from scipy.stats import ttest_ind

    low, high = ttest_ind(narrow, broad, equal_var=False).confidence_interval()
    return [
        f"{fmean(narrow):.3f}",
        f"{fmean(broad):.3f}",
        f"{fmean(narrow) - fmean(broad):+.3f}",
        f"{low:+.3f} to {high:+.3f}",
    ]


def _behind(runs: Runs, name: str, width: int) -> Seeds:
    return difference(*(runs.scores(loss, at(each, width).name) for each in (name, PROMPT)))


def _steps_at_equal_time(one: Arm, latency: float, share: float = 1.0) -> float:
    return clock.steps_done(one, share * frontier.equal_time(one), latency)


def _at_equal_time(runs: Runs, latency: float) -> list[Claim]:
    where = f"equal time, latency {latency:g}"
    return [worse_in_time(runs, where, "time", at(a), at(b), latency) for a, b in timed_pairs(latency)]


# The moments at which arms are compared, and the steps that an arm has done then.
_MOMENTS: dict[str, Callable[[Arm], float]] = {
    "equal steps": lambda one: STEPS,
    **{
        f"equal time, latency {latency:g}": partial(_steps_at_equal_time, latency=latency)
        for latency in clock.LATENCIES
    },
    "half of it, latency 1": partial(_steps_at_equal_time, latency=1.0, share=0.5),
}


def tables(runs: Runs) -> str:
    """Return losses, their differences, and slots of a step, at both widths."""
    widths = {WIDTH: _narrow(), WIDE: runs}

    def scores(name: str, width: int, steps: Callable[[Arm], float]) -> Seeds:
        one, all_runs = at(name, width), widths[width]
        if not all_runs.records_for(one.name):
            return {}  # a period takes seconds to find
        return all_runs.scores(loss_at(steps(one)), one.name)

    losses = {
        name: [scores(name, width, steps) for steps in _MOMENTS.values() for width in widths]
        for name in (*_DEEP, _SHALLOW)
    }
    pairs = [(name, PROMPT) for name in _DEEP if name != PROMPT]
    pairs += [(BETTER_LATE, name) for name in (TWO, ROTATING, LOCAL)] + [(ROTATING, TWO), (LOCAL, TWO)]
    rows = [(f"{a} less {b}", list(zip(losses[a], losses[b], strict=True))) for a, b in pairs]
    slots = [
        [name, *(frontier.slots(at(name, width), latency) for latency in clock.LATENCIES for width in widths)]
        for name in _DEEP
    ]
    heads = [clock.costs(at(LOCAL, width)).per_stage("head", STAGES)[0] for width in widths]

    def headings(moments: Iterable[str]) -> list[str]:
        return ["arm", *(f"{moment}, width {width}" for moment in moments for width in widths)]

    return "\n\n".join(
        [
            "## Losses",
            markdown.table(
                headings(_MOMENTS),
                [[name, *(shown(list(each.values()), 3) for each in row)] for name, row in losses.items()],
            ),
            "Test loss in nats a byte. Equal time is the time in which local training of the same width does all its steps.",
            "## Differences",
            differences(headings(_MOMENTS), rows),
            "Nats, with 95 % intervals of paired differences, of the seeds that both arms have. The first table has all seeds.",
            "## Distance from exact training",
            markdown.table(
                ["equal steps", f"width {WIDTH}", f"width {WIDE}", "less, all seeds", "95 % interval"],
                [[name, *_distances(runs, name)] for name in _COMPARED],
            ),
            "Nats, computed after the runs. The claims below compare runs of the same seed at both widths, which have the same "
            "order of the data; the intervals of this table take all seeds, unpaired (Welch).",
            "## Slots a step",
            markdown.table(headings(f"latency {latency:g}" for latency in clock.LATENCIES), slots),
            f"By the frontier's timing model: a slot is a forward of a block. A head with its backward takes {heads[0]:g} slots "
            f"at width {WIDTH} and {heads[1]:g} at width {WIDE}.",
        ]
    )


def draw(runs: Runs, path: Path) -> None:
    """Draw test loss against steps, work and time."""
    if arms := [one for one in map(at, _DEEP) if runs.records_for(one.name)]:
        loss_against_time(runs, arms, f"Eight stages, Muon, width {WIDE}", path.with_suffix(".png"))


EXPERIMENT = Trained(
    "width",
    "The frontier in a wider network",
    Parts(cells=cells, claims=claims, tables=tables, draw=draw, seeds={"medium": _SEEDS}),
    [
        Result("", f"ours: credit and delay at width {WIDE}, equal steps", "wide"),
        Result("", f"ours: does bounded credit catch up at width {WIDE}?", "width"),
        Result("", f"ours: credit and delay at width {WIDE}, equal time", "time"),
    ],
)
