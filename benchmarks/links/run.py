"""Steps over slow links: planned, and measured on virtual devices with virtual links.

    python -m benchmarks.links.run --devices 8

writes ``records/<devices>.jsonl`` and ``tables.md``. A slot is the forward of a mini-batch through one device's share of the
network. Every method has the number of micro-batches with the shortest planned step.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.runtime.bench import Case, start_all
from nwise._machine import processor
from nwise.schedule import TRANSFORMER, Costs
from nwise.schedule.baselines import BASELINES, stages_on
from nwise.schedule.plan import Option, plan

HERE = Path(__file__).parent
RECORDS = HERE / "records"
STRATEGIES = ("local", "2-wise", "3-wise", *(f"end-to-end-delay-{late}" for late in (1, 2, 4)))
MICROBATCHES = (1, 2, 4, 8, 16)
SLOT_MS = 50.0


@dataclass(frozen=True)
class Network:
    """Links between neighbours.

    Args:
        name: name of the links.
        latency: latency of a message, in slots.
        bandwidth: activations of a whole mini-batch that a link carries in a slot.
    """

    name: str
    latency: float
    bandwidth: float = float("inf")


# 200 Mbit/s and 80 ms, where a slot takes 100 ms and the activations of a mini-batch have 2 MiB.
INTERNET = Network("internet", 0.8, 200e6 / 8 * 0.1 / 2**21)
NETWORKS = (Network("0", 0), Network("1/4", 0.25), Network("1", 1), Network("3", 3), INTERNET)


def options(network: Network, devices: int) -> Iterator[tuple[Option, Costs]]:
    """Iterate over the methods at their best M, each with the costs of a micro-batch."""
    base = replace(TRANSFORMER, latency=network.latency, bandwidth=network.bandwidth)

    def costs(size: int, m: int) -> Costs:
        return base.split_in(m).cut_in(size // devices)

    result = plan(
        lambda flows, m: costs(len(flows[0].stages), m), devices, microbatches=MICROBATCHES, strategies=STRATEGIES
    )
    for option in result.options:
        if option.name == "end-to-end":  # the best of the pipelines, by another name
            continue
        yield option, costs(stages_on(devices, option.name), option.num_microbatches)


def as_case(option: Option, costs: Costs, devices: int) -> Case:
    """Return the case of an option, for `benchmarks.runtime.bench`."""
    values = {field.name: getattr(costs, field.name) for field in fields(costs)}
    text = json.dumps({name: value for name, value in values.items() if value != float("inf")})
    return Case(
        method=option.name,
        stages=stages_on(devices, option.name),
        ranks=devices,
        microbatches=option.num_microbatches,
        slot_ms=SLOT_MS,
        costs=text,
        batches=4,
        rounds=1,
    )


def measure(devices: int, rounds: int) -> list[dict[str, Any]]:
    """Measure all methods on all networks, in turn."""
    console = Console(stderr=True)
    planned = {
        network: [(option, as_case(option, costs, devices)) for option, costs in options(network, devices)]
        for network in track(NETWORKS, f"planning {devices}", console=console)
    }
    machine = {"torch": torch.__version__, "processor": processor(), "cores": os.cpu_count()}
    records = []
    turns = [(number, network) for number in range(rounds) for network in NETWORKS]
    for number, network in track(turns, f"measuring {devices}", console=console):
        measured = start_all([case for _, case in planned[network]])
        for (option, _), result in zip(planned[network], measured, strict=True):
            records.append(
                {
                    "devices": devices,
                    "network": asdict(network) | {"bandwidth": str(network.bandwidth)},
                    "method": option.name,
                    "end_to_end": option.end_to_end,
                    "microbatches": option.num_microbatches,
                    "round": number,
                    "planned_slots": option.period,
                    "measured_slots": result.measured_slots,
                    **machine,
                }
            )
    return records


def tables(records: list[dict[str, Any]]) -> str:
    """Return a table for each number of devices and network."""
    groups: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        groups[record["devices"], record["network"]["name"]][record["method"]].append(record)
    lines = ["# Tables, written by run.py", ""]
    for (devices, network), methods in groups.items():
        times = {name: statistics.median(r["measured_slots"] for r in rows) for name, rows in methods.items()}
        pipelines = {name: time for name, time in times.items() if name in BASELINES}
        best = min(pipelines, key=lambda name: pipelines[name])
        unit = "over the internet" if network == INTERNET.name else f"latency {network}"
        lines += [f"## {devices} devices, {unit}", ""]
        lines += [f"| method | M | planned slots | measured slots | measured / planned | {best} / method |"]
        lines += ["|---|---|---|---|---|---|"]
        for name in sorted(times, key=lambda name: times[name]):
            one = methods[name][0]
            cells = [name, str(one["microbatches"]), f"{one['planned_slots']:.2f}", f"{times[name]:.2f}"]
            cells += [f"{times[name] / one['planned_slots']:.3f}", f"{times[best] / times[name]:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    one = records[0]
    lines.append(f"Slots of {SLOT_MS:g} ms; {one['cores']} cores, {one['processor']}, torch {one['torch']}.")
    return "\n".join([*lines, ""])


def main(devices: tuple[int, ...] = (4, 8), rounds: int = 1) -> None:
    """Measure and write.

    Args:
        devices: numbers of devices, one after the other; none to write the tables alone.
        rounds: turns of every method.
    """
    RECORDS.mkdir(exist_ok=True)
    for count in devices:
        text = "".join(json.dumps(record) + "\n" for record in measure(count, rounds))
        (RECORDS / f"{count}.jsonl").write_text(text)
    paths = sorted(RECORDS.glob("*.jsonl"), key=lambda path: int(path.stem))
    (HERE / "tables.md").write_text(tables([json.loads(line) for path in paths for line in path.open()]))


if __name__ == "__main__":
    tyro.cli(main)
