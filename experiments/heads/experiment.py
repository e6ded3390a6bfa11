"""Do cheaper heads help short credit, and predicted weights late gradients? Arms of the frontier with Muon, eight stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.frontier import clock
from experiments.frontier.arms import Arm
from experiments.frontier.comparison import Compared, Comparison
from experiments.frontier.experiment import LOCAL, SMALL, TWO
from experiments.harness.claims import Claim, Seeds, greater, no_greater
from experiments.harness.experiment import Result
from experiments.harness.runs import Runs, loss

STEPS = 800

_FULL = {name: Arm("muon", name) for name in (LOCAL, TWO)}
_QUARTER = {name: replace(one, loss_fraction=0.25) for name, one in _FULL.items()}
_NARROW = replace(_FULL[TWO], head_rank=16)  # a step of local training would take as long as without
_LATE = {delay: Arm("muon", f"end-to-end-delay-{delay}") for delay in (2, 4)}
_EXTRAPOLATED = {delay: replace(one, extrapolate=True) for delay, one in _LATE.items()}
_PREDICTED = {delay: replace(one, predict=delay) for delay, one in _LATE.items()}

_CHEAP = (*_FULL.values(), *_QUARTER.values(), _NARROW)
_LATER = (_EXTRAPOLATED[4], _PREDICTED[4])
ARMS = (*_CHEAP, _EXTRAPOLATED[2], _PREDICTED[2], *_LATER)

COMPARISON = Comparison(
    name="heads",
    records=Path(__file__).with_name("medium.jsonl"),
    periods=Path(__file__).with_name("periods.jsonl"),
    arms=ARMS,
    grid=lambda one: (0.005, 0.01, 0.02) if one in _LATER else (0.01, 0.02, 0.04),  # around the frontier's best
    trial_steps=300,
    steps=STEPS,
    every=100,
    batch_size=8,
)


def claims(runs: Runs) -> list[Claim]:
    """Test all claims, written down before the first trial; losses in nats a byte, and the smaller is the better."""

    def end(one: Arm) -> Seeds:
        return runs.scores(loss, one.name)

    def little(cheap: Arm, full: Arm) -> Claim:
        text = f"equal steps: {cheap.label} is worse than {full.label}, if at all, by less than {SMALL:g}"
        return no_greater(text, "heads, steps", end(cheap), end(full), by=SMALL, unit="nats")

    def worse(source: str, first: Arm, second: Arm, latency: float) -> Claim:
        text = f"equal time, latency {latency:g}: {first.label} is worse than {second.label}"
        return COMPARISON.worse(runs, text, source, first, second, latency)

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
    pairs = [
        *((_QUARTER[name], _FULL[name]) for name in _FULL),
        (_NARROW, _FULL[TWO]),
        *((_PREDICTED[delay], _EXTRAPOLATED[delay]) for delay in _LATE),
        *((one, _FULL[name]) for one in (*_EXTRAPOLATED.values(), *_PREDICTED.values()) for name in _FULL),
    ]
    return "\n\n".join(
        [
            COMPARISON.losses(runs, ARMS, _FULL[LOCAL]),
            COMPARISON.differences(runs, pairs),
            "Test loss in nats a byte. Equal time is that in which local training with all tokens does its steps in the first "
            "table, and that of the faster of the two in the differences, which have 95 % intervals.",
            COMPARISON.table_of_rates(runs),
        ]
    )


EXPERIMENT = Compared(
    COMPARISON,
    "Cheap heads and predicted weights",
    claims,
    tables,
    [
        Result("", "ours: losses of a quarter of the tokens, heads of rank 16, equal steps", "heads, steps"),
        Result("", "ours: losses of a quarter of the tokens, heads of rank 16, equal time", "heads, time"),
        Result("", "ours: predicted weights against extrapolated updates, delays of 2 and 4", "prediction"),
        Result("", "ours: delays with predicted weights against short credit on slow links", "border"),
    ],
)
