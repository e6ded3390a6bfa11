"""The memory of the busiest accelerator, and what a step takes if there is no more of it than local training needs.

    python -m experiments.frontier.memory

measures the sizes of every arm's network piece by piece, and follows them along the schedules that nwise runs
(`nwise.schedule.memory`). The records in ``memory.jsonl`` replace the older ones; the page of results has a table of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import tyro
from rich.progress import track

from experiments.frontier import clock
from experiments.frontier.arms import ARMS, STAGES, STEPS, Arm, arm, rates
from experiments.frontier.costs import measure, measured
from experiments.harness import markdown
from experiments.harness.cell import Record, revision
from experiments.harness.runs import Runs, loss_at
from experiments.harness.store import Store
from nwise.app.records import json_line, write_text
from nwise.machine import machine
from nwise.planning.profiling import Profile
from nwise.schedule import Costs
from nwise.schedule.costs import CLOSE

RECORDS = Path(__file__).parent / "memory.jsonl"
_MIB = 2**20
_TIMES = ("forward", "head", "input_grad", "weight_grad", "chain_share")


def compared() -> list[Arm]:
    """Return the arms with Muon and eight stages that have a rate, but for those that switch strategies."""
    best = rates()
    arms = [one for one in ARMS if one.name in best and one.optimizer == "muon" and "@" not in one.strategy]
    return [one for one in arms if one.num_stages == one.blocks == STAGES]


def fastest(one: Arm, latency: float, sizes: Profile, limit: float | None = None) -> tuple[float, float] | None:
    """Return the slots of an arm's fastest step, and the bytes of the accelerator that needs most; None if nothing fits.

    Args:
        one: the arm.
        latency: of a message, in slots.
        sizes: of its network.
        limit: bytes of each accelerator; default: any.
    """
    strategy = one.phases(STEPS)[0][1]
    result = clock.fastest(strategy, one.num_stages, one.microbatches, lambda m: _costs(one, latency, sizes, m), limit)
    return None if result is None else (result[0].period, max(result[0].peak_bytes))


def leanest(one: Arm, latency: float, sizes: Profile) -> tuple[float, float]:
    """Return the slots of an arm's fastest step, and the least bytes of the accelerator that needs most at this speed.

    The search returns the first schedule of several that are equally fast, and asks for a leaner one only under a limit.

    Args:
        one, latency, sizes: as for `fastest`.
    """
    step = fastest(one, latency, sizes)
    assert step is not None, "nothing is limited"
    while (leaner := fastest(one, latency, sizes, 0.999 * step[1])) and leaner[0] <= step[0] * (1 + CLOSE):
        step = leaner
    return step


def _costs(one: Arm, latency: float, sizes: Profile, m: int) -> Costs:
    """Return costs with measured sizes, and the times of all other tables."""
    price = clock.costs(one, latency).split_in(m)
    times = {name: getattr(price, name) for name in (*_TIMES, "latency", "overhead")}
    return replace(measured(one, sizes, m), **times, update=0.0)


def main() -> None:
    """Measure, and write all records."""
    torch.set_num_threads(1)
    known: dict[tuple[int, bool], Profile] = {}
    records: list[Record] = []
    local, arms = arm("muon local"), compared()
    limits: list[float] = []
    for one in track([local, *(other for other in arms if other != local)], "memory"):
        if (key := (one.head_blocks, one.extrapolate)) not in known:
            known[key] = measure(one, rounds=1)
        for latency in clock.LATENCIES:
            slots, size = leanest(one, latency, known[key])
            limits = limits or [size, 2 * size]
            within = [fastest(one, latency, known[key], limit) for limit in limits]
            records.append(
                {
                    "arm": one.name,
                    "latency": latency,
                    "slots": round(slots, 6),
                    "mib": round(size / _MIB, 2),
                    "limits_mib": [round(limit / _MIB, 2) for limit in limits],
                    "slots_within": [None if step is None else round(step[0], 6) for step in within],
                    "revision": revision(),
                    "machine": machine(),
                }
            )
    write_text(RECORDS, "".join(map(json_line, records)))


def tables(runs: Runs) -> str:
    """Return what a step needs and takes, and losses at equal time and equal memory, by arm that has runs."""
    records = {(record["arm"], record["latency"]): record for record in Store(RECORDS).read()}
    arms = [one for one in compared() if (one.name, 0.0) in records and runs.records_for(one.name)]
    limits = next(iter(records.values()))["limits_mib"]
    end = clock.total(arm("muon local"))
    steps, losses = [], []
    for one in arms:
        pair = [records[one.name, latency] for latency in clock.LATENCIES]
        within = [record["slots_within"][i] for i in range(len(limits)) for record in pair]
        steps.append(
            [
                one.name,
                *(f"{record['mib']:.1f}" for record in pair),
                *("–" if slots is None else f"{slots:.2f}" for slots in within),
            ]
        )
        losses.append(
            [
                one.name,
                *(
                    "–" if slots is None else runs.shown(loss_at(min(STEPS, end / slots)), one.name, digits=3)
                    for slots in within
                ),
            ]
        )
    columns = [f"{limit:.1f} MiB, latency {n:g}" for limit in limits for n in clock.LATENCIES]
    needs = [f"MiB, latency {n:g}" for n in clock.LATENCIES]
    return "\n\n".join(
        [
            markdown.table(["arm", *needs, *(f"slots within {column}" for column in columns)], steps),
            "MiB: with the fastest schedule, of several the leanest, on the accelerator that needs most: parameters, optimizer "
            "state, gradients, old parameters, and activations in flight: what autograd saves, and outputs. "
            f"Local training needs {limits[0]:.1f} MiB; within this limit and within twice as much "
            "the fastest schedule that fits counts. A dash: none fits.",
            markdown.table(["arm", *(f"loss within {column}" for column in columns)], losses),
            "Test loss at equal time and equal memory. The protocol makes no claim about it.",
        ]
    )


if __name__ == "__main__":
    tyro.cli(main)
