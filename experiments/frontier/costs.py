"""What a step takes by costs measured on this machine, beside the costs that the clock assumes.

    python -m experiments.frontier.costs     # half a minute on a quiet machine

measures the pieces of the network with every number of micro-batches, and writes ``costs.jsonl``; the page of results has a table
of it. A slot is the measured forward of a mean stage for a whole mini-batch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
import tyro
from rich.progress import track

from experiments.frontier import clock
from experiments.frontier.arms import COMPARED, STEPS, Arm, arm
from experiments.harness import markdown
from experiments.harness.cell import Record, revision
from experiments.harness.runs import Runs, loss_at
from experiments.harness.store import Store
from nwise.app.records import json_line, write_text
from nwise.app.training import measurable
from nwise.flow import flows_for
from nwise.machine import machine
from nwise.planning.partitions import stage_costs
from nwise.planning.profiling import Profile, profile
from nwise.schedule import Costs

RECORDS = Path(__file__).parent / "costs.jsonl"
ARMS = (*COMPARED, "3-wise-mean")
_PARTS = ("forward", "head", "input_grad", "weight_grad", "update")


def measure(one: Arm, rounds: int) -> Profile:
    """Measure the pieces of an arm's network for every M that the clock tries; see `nwise.planning.profiling`."""
    recipe = one.run(0.02, seed=0)  # times and sizes depend on neither
    network = measurable(recipe, recipe.load()[0], torch.device("cpu"))
    return profile(network, clock.COUNTS, rounds=rounds)


def measured(one: Arm, sizes: Profile, m: int) -> Costs:
    """Return the measured costs of a micro-batch, in seconds and bytes."""
    turns = [flows[0] for flows in flows_for(one.phases(STEPS)[0][1], one.num_stages, m)]
    return stage_costs(sizes.pieces[m], sizes.starts, turns)


def main(rounds: int = 5) -> None:
    """Measure, and write all records.

    Args:
        rounds: measurements of every piece, of which the median counts.
    """
    torch.set_num_threads(1)
    local = arm("muon local")
    sizes = measure(local, rounds)
    slot = fmean(measured(local, sizes, 1).per_stage("forward", local.num_stages))
    records: list[Record] = []
    for one in track([arm(f"muon {name}") for name in ARMS], "steps"):
        costs = {m: measured(one, sizes, m) for m in clock.COUNTS}
        parts = {name: round(fmean(costs[1].per_stage(name, one.num_stages)) / slot, 3) for name in _PARTS}
        slots = []
        for latency in clock.LATENCIES:
            found = clock.fastest(
                one.phases(STEPS)[0][1],
                one.num_stages,
                one.microbatches,
                lambda m, late=latency, known=costs: replace(known[m], latency=late * slot),  # type: ignore[misc]
            )
            assert found is not None, "nothing is limited"
            slots.append(round(found[0].period / slot, 3))
        records.append(
            {"arm": one.name, "slots": slots, "parts": parts, "slot_ms": round(1000 * slot, 3)}
            | {"revision": revision(), "machine": machine()}
        )
    write_text(RECORDS, "".join(map(json_line, records)))


def tables(runs: Runs) -> str:
    """Return the slots of a step by assumed and by measured costs, and the losses at equal time by the measured ones."""
    records = list(Store(RECORDS).read())
    ends = next(record["slots"] for record in records if record["arm"] == "muon local")
    rows = []
    for record in records:
        one = arm(record["arm"])
        assumed = [clock.total(one, latency) / STEPS for latency in clock.LATENCIES]
        losses = [
            runs.shown(loss_at(min(STEPS, STEPS * end / slots)), one.run_name, digits=3)
            for end, slots in zip(ends, record["slots"], strict=True)
        ]
        rows.append([one.label, *(f"{round(slots, 6):.2f}" for slots in (*assumed, *record["slots"])), *losses])
    headings = [
        f"{kind}, latency {latency:g}" for kind in ("assumed", "measured", "loss") for latency in clock.LATENCIES
    ]
    parts, place = records[-1]["parts"], records[-1]["machine"]
    sizes = ", ".join(f"{name.replace('_', ' ')} {parts[name]:.2f}" for name in _PARTS)
    return "\n\n".join(
        [
            markdown.table(["slots a step", *headings], rows),
            "Losses in nats at equal time, by measured costs. Measured with one thread of "
            f"{place['processor']}: a slot, the forward of a mean stage, takes {records[-1]['slot_ms']:.1f} ms without "
            f"micro-batches. In slots, mean over stages, local training: {sizes}.",
        ]
    )


if __name__ == "__main__":
    tyro.cli(main)
