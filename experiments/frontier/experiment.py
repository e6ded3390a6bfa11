"""The frontier: credit through space and time, at equal time on one accelerator a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from experiments.frontier import clock, memory
from experiments.frontier import costs as measured
from experiments.frontier.arms import ARMS, COMPARED, EVERY, STAGES, STEPS, Arm, arm, rates, reported
from experiments.frontier.plots import draw_frontier
from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import (
    Claim,
    Seeds,
    decided_with,
    difference,
    differences,
    greater,
    greater_at_all,
    holm,
    no_greater,
    table,
)
from experiments.harness.clock import step_time
from experiments.harness.experiment import Result, Size
from experiments.harness.runs import Runs, loss, loss_at
from experiments.harness.trained import Parts, Trained
from nwise.schedule import PAPER, TRANSFORMER

SMALL = 0.03  # nats; chosen before the runs; a Muon run of end-to-end training falls by 0.018 in its last tenth


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: every arm that was tried with all rates, by seed."""
    return reported(ARMS, rates(), seeds)


PROMPT, LOCAL, TWO, THREE = "end-to-end", "local", "2-wise-mean", "3-wise-mean"
ROTATING = "rotating-2, all heads"
LATE = "end-to-end-delay-1"
BETTER_LATE, LATER = f"{LATE}, extrapolated", "end-to-end-delay-4"


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the runs; losses in nats a byte, and the smaller is the better."""
    claims = [claim for optimizer in ("muon", "adam") for claim in _at_equal_steps(runs, optimizer)]
    prices = [difference(_end(runs, f"{o} {LATE}"), _end(runs, f"{o} {PROMPT}")) for o in ("adam", "muon")]
    claims.append(greater("delay 1 costs Muon less than Adam", "delay", *prices, unit="nats"))
    claims += [claim for latency in clock.LATENCIES for claim in _at_equal_time(runs, latency)]
    return claims + [claim for latency in clock.LATENCIES for claim in _with_four_stages(runs, latency)]


def _end(runs: Runs, name: str) -> Seeds:
    return runs.scores(loss, name)


def _at_equal_steps(runs: Runs, optimizer: str) -> list[Claim]:
    def worse(source: str, first: str, second: str, text: str = "") -> Claim:
        ends = [_end(runs, f"{optimizer} {name}") for name in (first, second)]
        return greater(f"{optimizer}: {text or f'{first} is worse than {second}'}", source, *ends, unit="nats")

    def little(source: str, first: str, second: str, text: str) -> Claim:
        ends = [_end(runs, f"{optimizer} {name}") for name in (first, second)]
        return no_greater(f"{optimizer}: {text} by less than {SMALL:g}", source, *ends, by=SMALL, unit="nats")

    return [
        worse("gate", "end-to-end, 1 block", PROMPT, "depth helps: one block is worse than eight"),
        *(worse("figure 7", *pair) for pair in (*pairwise((LOCAL, TWO, THREE, PROMPT)), (LOCAL, PROMPT))),
        little("rotating", ROTATING, TWO, f"{ROTATING} is worse than {TWO}, if at all,"),
        worse("delay", LATE, PROMPT, "delay 1 costs something"),
        worse("delay", LATE, BETTER_LATE, "extrapolated updates help delay 1"),
        little("delay", BETTER_LATE, PROMPT, "with extrapolated updates delay 1 is worse, if at all,"),
    ]


def at_equal_time(runs: Runs, first: Arm, second: Arm, latency: float) -> list[Seeds]:
    """Return the losses of two arms, by seed, when the faster has done its steps.

    Args:
        runs: the records.
        first: an arm.
        second: another.
        latency: of a message, in slots.
    """
    if not all(runs.records_for(one.run_name) for one in (first, second)):
        return [{}, {}]  # a period takes seconds
    end = min(clock.total(one, latency) for one in (first, second))
    return [runs.scores(loss_at(clock.steps_done(one, end, latency)), one.run_name) for one in (first, second)]


def _at_equal_time(runs: Runs, latency: float) -> list[Claim]:
    where = f"muon, equal time, latency {latency:g}"
    pairs = timed_pairs(latency)
    return [worse_in_time(runs, where, "time", arm(f"muon {a}"), arm(f"muon {b}"), latency) for a, b in pairs]


def timed_pairs(latency: float) -> list[tuple[str, str]]:
    """Return what is compared at equal time: exact training, and the shortest delay that hides the latency at eight stages."""
    late = LATER if latency else BETTER_LATE
    return [(PROMPT, late), *((rival, better) for rival in (PROMPT, late) for better in (ROTATING, TWO, LOCAL))]


def _with_four_stages(runs: Runs, latency: float) -> list[Claim]:
    """Compare the same blocks in four stages; there a delay of one hides a latency of one slot."""
    where = f"muon, four stages, equal time, latency {latency:g}"
    pairs = [(rival, better) for rival in (PROMPT, BETTER_LATE) for better in (TWO, LOCAL)]
    return [worse_in_time(runs, where, "four", _in_four(a), _in_four(b), latency) for a, b in pairs]


def _in_four(name: str) -> Arm:
    return replace(arm(f"muon {name}"), num_stages=4)


def worse_in_time(runs: Runs, where: str, source: str, worse: Arm, better: Arm, latency: float) -> Claim:
    """Test whether one arm is worse than another at equal time; `where` begins the text of the claim."""
    text = f"{where}: {worse.label} is worse than {better.label}"
    return greater(text, source, *at_equal_time(runs, worse, better, latency), unit="nats")


def tables(runs: Runs) -> str:
    """Return losses at equal steps and at equal time, slots of a step, and work; then the same for other numbers of stages."""
    deep = [one for one in ARMS if one.blocks == STAGES and one.num_stages == STAGES]
    shallow = [[one.name, runs.shown(loss, one.name, digits=3)] for one in ARMS if one.blocks == 1]
    four = [_in_four(name) for name in (PROMPT, BETTER_LATE, LATER)]
    four += [one for one in ARMS if one.blocks == STAGES and one.num_stages == 4]
    return "\n\n".join(
        [
            "## Eight stages",
            _compared(runs, deep),
            f"Test loss in nats a byte. Equal time is {clock.total(arm('muon local')):,.0f} slots, in which local training does "
            "all its steps. A slot is a forward of a stage for a mini-batch. A message arrives 1 slot late with latency 1. Work "
            "is counted in slots over all stages; overheads are not in it. Equal work is that of an end-to-end run. "
            f"{_COSTS}",
            "## Earlier moments",
            _earlier(runs, deep + four),
            "Test loss at shares of the equal time; four stages have an equal time of their own. A dash: fewer steps than "
            "between two tests.",
            "## One block",
            markdown.table(["arm", "test loss, equal steps"], shallow),
            "## Four stages of two blocks",
            _compared(runs, four),
            "An end-to-end run is the same for every cut, so these are the runs with eight stages. A slot is a forward of two "
            "blocks.",
            "## E6's claims again",
            table(e6_claims(runs)),
            _E6,
            "## Memory",
            memory.tables(runs),
            "## Steps with more accelerators",
            _deeper(),
            "## Steps with a smaller overhead",
            _cheaper(),
            "An action adds 0.005 slots.",
            "## Steps by measured costs",
            measured.tables(runs),
            "## Differences without a claim",
            _without_claim(runs),
            "Test loss of the first less that of the second, in nats, with 95 % intervals. Computed after the runs, and no part "
            "of Holm's correction. Equal time is that of the first table.",
            "## More seeds",
            _more_seeds(runs),
        ]
    )


_E6 = (
    "Claims of E6 that are no claims of this page, tested after the runs; the last column corrects them among themselves. The "
    "lead over exact training is that at the worst of eight moments of equal time, from the first test of the slower method to "
    "the end of local training. The paper's costs: a forward and each loss's pass take a slot, heads and messages nothing, "
    "without micro-batches. Intervals that deny a lead are corrected for eight."
)


_COSTS = (
    "Costs: F = I = W = 1 slot. A head with its backward takes time in proportion to its multiplications, and an action adds "
    f"{TRANSFORMER.overhead:g}. Every arm runs the fastest order that nwise finds, at its best M up to 16."
)


def _compared(runs: Runs, arms: Sequence[Arm]) -> str:
    rows = []
    for one in arms:
        prompt = replace(arm(f"muon {PROMPT}"), num_stages=one.num_stages)
        work, end = clock.work(one), equal_time(one)
        steps = [STEPS, STEPS * clock.work(prompt) / work]
        steps += [clock.steps_done(one, end, latency) for latency in clock.LATENCIES]
        losses = [runs.shown(loss_at(each), one.run_name, digits=3) for each in steps]
        rows.append([one.name, *losses, *(slots(one, latency) for latency in clock.LATENCIES), f"{work:.1f}"])
    moments = [f"{what}, latency {latency:g}" for what in ("equal time", "slots a step") for latency in clock.LATENCIES]
    return markdown.table(["arm", "equal steps", "equal work", *moments, "work a step"], rows)


def _earlier(runs: Runs, arms: Sequence[Arm]) -> str:
    moments = [(share, latency) for latency in clock.LATENCIES for share in (0.25, 0.5, 0.75)]
    rows = []
    for one in (each for each in arms if runs.records_for(each.run_name)):
        steps = [clock.steps_done(one, share * equal_time(one), latency) for share, latency in moments]
        losses = [runs.shown(loss_at(each), one.run_name, digits=3) if each >= EVERY else "–" for each in steps]
        rows.append([one.name, *losses])
    return markdown.table(["arm", *(f"{share:.0%}, latency {latency:g}" for share, latency in moments)], rows)


def equal_time(one: Arm) -> float:
    """Return the slots in which local training with as many stages does all its steps."""
    return clock.total(replace(arm(f"muon {LOCAL}"), num_stages=one.num_stages, width=one.width))


def slots(one: Arm, latency: float, overhead: float = TRANSFORMER.overhead) -> str:
    """Return the mean slots of a step, as text."""
    return f"{round(_mean_slots(one, latency, overhead), 6):.2f}"  # without the sum's rounding, which moves 5.575


def _deeper() -> str:
    counts = (4, STAGES, 16, 32)
    headings = [f"A = {count}, latency {latency:g}" for latency in clock.LATENCIES for count in counts]
    rows = []
    for name in COMPARED:
        arms = [replace(arm(f"muon {name}"), num_stages=count, blocks=count) for count in counts]
        rows.append([name, *(slots(one, latency) for latency in clock.LATENCIES for one in arms)])
    return markdown.table(["slots a step", *headings], rows)


def _cheaper() -> str:
    arms = [arm(f"muon {name}") for name in COMPARED]
    rows = [[one.label, *(slots(one, latency, 0.005) for latency in clock.LATENCIES)] for one in arms]
    return markdown.table(["slots a step", *(f"latency {latency:g}" for latency in clock.LATENCIES)], rows)


def e6_claims(runs: Runs) -> list[Claim]:
    """Test the claims of E6 that `claims` does not have."""
    pairs = (("2-wise", TWO), ("rotating-2", TWO), (THREE, "geometric-0.5"), (THREE, "deep-supervision"))
    claims = [
        greater(
            f"equal steps: {a} is worse than {b}", "E6", _end(runs, f"muon {a}"), _end(runs, f"muon {b}"), unit="nats"
        )
        for a, b in pairs
    ]
    bounded = (LOCAL, TWO, THREE)
    claims += [_leads(runs, name, "the paper's costs", _paper_slots) for name in bounded]
    for latency in clock.LATENCIES:
        step = partial(_mean_slots, latency=latency)
        names = (*bounded, "rotating-2", "geometric-0.5", "deep-supervision")
        claims += [_leads(runs, name, f"our costs, latency {latency:g}", step) for name in names]
    return claims


def _paper_slots(one: Arm) -> float:
    return step_time(one.strategy, one.num_stages, PAPER).slots


def _mean_slots(one: Arm, latency: float, overhead: float = TRANSFORMER.overhead) -> float:
    return clock.total(one, latency, overhead) / STEPS


def _leads(runs: Runs, name: str, costs: str, step: Callable[[Arm], float]) -> Claim:
    """Test whether an arm is ahead of exact training at all of eight moments of equal time, given the slots of a step."""
    exact, one = arm(f"muon {PROMPT}"), arm(f"muon {name}")
    moments: list[tuple[Seeds, Seeds]] = [({}, {})]
    if runs.records_for(one.name) and runs.records_for(exact.name):
        slots_exact, slots_one = step(exact), step(one)
        first = EVERY * max(slots_exact, slots_one)  # nothing is known before the first test
        last = STEPS * step(arm(f"muon {LOCAL}"))
        times = [first + (last - first) * i / 7 for i in range(8)]
        moments = [
            (runs.scores(loss_at(time / slots_exact), exact.name), runs.scores(loss_at(time / slots_one), one.name))
            for time in times
        ]
    claim = greater_at_all(f"{costs}: {name} leads {PROMPT} at all of eight moments", "E6", moments, unit="nats")
    assert claim is not None
    return claim


# Pairs that the documents compare and no claim names.
_PAIRS = (
    ("muon deep-supervision", "muon end-to-end"),
    ("muon geometric-0.5", "muon end-to-end"),
    ("muon local@half,end-to-end", "muon end-to-end"),
    ("muon local@half,end-to-end", "muon local"),
    ("muon local@quarter,2-wise-mean@half,end-to-end", "muon local@half,end-to-end"),
    ("muon end-to-end-delay-1, extrapolated", "muon local"),
    ("muon end-to-end-delay-1, extrapolated", "muon 2-wise-mean"),
    ("muon end-to-end-delay-2, extrapolated", "muon local"),
    ("muon end-to-end-delay-2, extrapolated", "muon 2-wise-mean"),
    ("muon end-to-end-delay-4, extrapolated", "muon end-to-end-delay-4"),
    ("muon end-to-end-delay-4, extrapolated", "muon end-to-end"),
    ("muon end-to-end-delay-4, extrapolated", "muon local"),
    ("muon hogwild-forward-least", "muon end-to-end"),
    ("muon hogwild-forward-least", "muon local"),
    ("adam hogwild-forward-least", "adam end-to-end"),
    ("adam hogwild-forward-least", "adam local"),
    ("muon 2-wise", "muon 2-wise-mean"),
    ("muon 2-wise", "muon local"),
    ("muon 2-wise", "muon end-to-end"),
    ("muon 3-wise", "muon 3-wise-mean"),
    ("muon 3-wise", "muon 2-wise"),
    ("muon 2-wise-mean-delay-1, extrapolated", "muon 2-wise-mean"),
    ("muon local, heads of 1", "muon local"),
    ("muon 2-wise-mean, heads of 1", "muon 2-wise-mean"),
    ("muon rotating-2", "muon rotating-2, all heads"),
    ("muon rotating-2-microbatch, all heads", "muon 2-wise-mean"),
    ("muon rotating-3, all heads", "muon 2-wise-mean"),
    ("muon rotating-3, all heads", "muon rotating-2, all heads"),
    ("muon rotating-3", "muon rotating-3, all heads"),
)


def _without_claim(runs: Runs) -> str:
    rows = []
    for pair in _PAIRS:
        arms = [arm(name) for name in pair]
        if not all(runs.records_for(one.run_name) for one in arms):
            continue
        columns = []
        for late in (None, *clock.LATENCIES):
            steps = [STEPS if late is None else clock.steps_done(one, equal_time(one), late) for one in arms]
            first, second = (runs.scores(loss_at(n), one.run_name) for n, one in zip(steps, arms, strict=True))
            columns.append((first, second))
        rows.append((" less ".join(pair), columns))
    return differences(("", "equal steps", *(f"equal time, latency {late:g}" for late in clock.LATENCIES)), rows)


def _more_seeds(runs: Runs) -> str:
    every = claims(runs)
    numbers = ", ".join(f"{decided_with(every, seeds)} with {seeds}" for seeds in (4, 5, 6))
    return (
        f"If means and spreads stayed as they are, of {len(every)} claims these would stay decided after Holm's correction: "
        f"{numbers} seeds. With three it is {sum(holm(every))}."
    )


EXPERIMENT = Trained(
    "frontier",
    "The frontier of credit and delay",
    Parts(cells=cells, claims=claims, tables=tables, draw=draw_frontier, seeds={"medium": 3}),
    [
        Result("", "ours: does depth help where methods are compared? (frontier)", "gate"),
        Result("", "figure 7 again, eight stages and tuned rates (frontier)", "figure 7"),
        Result("", "ours: rotating blocks with all heads (frontier)", "rotating"),
        Result("", "ours: delayed gradients, Adam and Muon (frontier)", "delay"),
        Result("", "ours: equal time on eight accelerators (frontier)", "time"),
        Result("", "ours: equal time on four accelerators (frontier)", "four"),
    ],
)
