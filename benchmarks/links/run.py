"""Steps over slow links: planned, and measured on virtual devices with virtual links.

    python -m benchmarks.links --devices 4 8         # 20 minutes on a quiet machine
    python -m benchmarks.links --devices --again     # what was more than 5 % off, with slots four times as long

writes ``records/<devices>.jsonl`` and ``tables.md``. A slot is the forward of a mini-batch through one device's share of the
network. Every method has the number of micro-batches with the shortest planned step.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import nwise
from benchmarks.runtime.bench import Case, start_all
from nwise.machine import processor
from nwise.schedule import BASELINES, TRANSFORMER

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


def options(network: Network, devices: int) -> Iterator[nwise.Plan]:
    """Iterate over the methods at their best M."""
    plans = nwise.plan(
        TRANSFORMER,
        devices=devices,
        strategy=STRATEGIES,
        microbatches=MICROBATCHES,
        latency=network.latency,
        bandwidth=network.bandwidth,
        report=None,
    )
    # End-to-end is the best of the pipelines, by another name, and one device alone has no links.
    yield from (plan for plan in plans.plans if plan.strategy not in ("end-to-end", "one device alone"))


def as_case(plan: nwise.Plan, devices: int, slot_ms: float) -> Case:
    """Return the case of a plan, for `benchmarks.runtime.bench`."""
    values = {field.name: getattr(plan.schedule.costs, field.name) for field in fields(plan.schedule.costs)}
    text = json.dumps({name: value for name, value in values.items() if value != float("inf")})
    return Case(
        method=plan.strategy,
        stages=len(plan.placement),
        ranks=devices,
        microbatches=plan.num_microbatches,
        slot_ms=slot_ms,
        costs=text,
        batches=4,
        rounds=1,
    )


def measure(devices: int, slot_ms: float, wanted: Collection[tuple[str, str]] = ()) -> list[dict[str, Any]]:
    """Plan and measure on all networks.

    Args:
        devices: number of devices.
        slot_ms: milliseconds of a slot.
        wanted: names of networks and methods to measure; default: all.
    """
    console = Console(stderr=True)
    planned = {
        network: [
            (option, as_case(option, devices, slot_ms))
            for option in options(network, devices)
            if not wanted or (network.name, option.strategy) in wanted
        ]
        for network in track(NETWORKS, f"planning {devices}", console=console)
    }
    machine = {"torch": torch.__version__, "processor": processor(), "cores": os.cpu_count()}
    records = []
    for network, cases in track(planned.items(), f"measuring {devices}", console=console):
        results = start_all([case for _, case in cases]) if cases else []
        for (option, _), result in zip(cases, results, strict=True):
            records.append(
                {
                    "devices": devices,
                    "network": asdict(network) | {"bandwidth": str(network.bandwidth)},
                    "method": option.strategy,
                    "end_to_end": option.end_to_end,
                    "microbatches": option.num_microbatches,
                    "slot_ms": slot_ms,
                    "planned_slots": option.seconds,
                    "measured_slots": result.measured_slots,
                    **machine,
                }
            )
    return records


def tables(records: list[dict[str, Any]], again: list[dict[str, Any]]) -> str:
    """Return a table for each number of devices and network, and one of what was measured again."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[record["devices"], record["network"]["name"]].append(record)
    lines = ["# Tables, written by run.py", ""]
    for (devices, network), rows in groups.items():
        best = min((row for row in rows if row["method"] in BASELINES), key=lambda row: row["measured_slots"])
        unit = "over the internet" if network == INTERNET.name else f"latency {network}"
        lines += [f"## {devices} devices, {unit}", ""]
        lines += [f"| method | M | planned slots | measured slots | measured / planned | {best['method']} / method |"]
        lines += ["|---|---|---|---|---|---|"]
        for row in sorted(rows, key=lambda row: row["measured_slots"]):
            lines.append(_row(row, [f"{best['measured_slots'] / row['measured_slots']:.2f}"]))
        lines.append("")
    if again:
        lines += ["## More than 5 % off, measured with longer slots", ""]
        lines += ["| method | M | planned slots | measured slots | measured / planned | devices | links | slot, ms |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in again:
            lines.append(_row(row, [str(row["devices"]), row["network"]["name"], f"{row['slot_ms']:g}"]))
        lines.append("")
    one = records[0]
    lines.append(f"Slots of {one['slot_ms']:g} ms; {one['cores']} cores, {one['processor']}, torch {one['torch']}.")
    return "\n".join([*lines, ""])


def _row(row: dict[str, Any], more: list[str]) -> str:
    planned, measured = row["planned_slots"], row["measured_slots"]
    cells = [row["method"], str(row["microbatches"]), f"{planned:.2f}", f"{measured:.2f}", f"{measured / planned:.3f}"]
    return "| " + " | ".join([*cells, *more]) + " |"


def _key(row: dict[str, Any]) -> tuple[int, str, str]:
    return row["devices"], row["network"]["name"], row["method"]


def _read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.open()]


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main(devices: tuple[int, ...] = (4, 8), methods: tuple[str, ...] = (), again: bool = False) -> None:
    """Measure and write.

    Args:
        devices: numbers of devices, one after the other; none to write the tables alone.
        methods: methods to measure, where the others keep their records; default: all.
        again: whether to measure once more what was more than 5 % off, with slots four times as long.
    """
    RECORDS.mkdir(exist_ok=True)
    for count in devices:
        path = RECORDS / f"{count}.jsonl"
        if methods and not path.exists():
            raise SystemExit(
                f"`methods` should be left out for {count} devices. Found no records of other methods to keep."
            )
        kept = [row for row in _read([path] if methods else []) if row["method"] not in methods]
        wanted = {(network.name, method) for network in NETWORKS for method in methods}
        order = [network.name for network in NETWORKS]
        rows = kept + measure(count, SLOT_MS, wanted)
        _write(path, sorted(rows, key=lambda row: order.index(row["network"]["name"])))
    records = _read(sorted(RECORDS.glob("[0-9]*.jsonl"), key=lambda path: int(path.stem)))
    off = {_key(row) for row in records if row["measured_slots"] > 1.05 * row["planned_slots"]}
    path = RECORDS / "again.jsonl"
    if again:
        repeated = []
        for count in sorted({key[0] for key in off}):
            repeated += measure(count, 4 * SLOT_MS, {key[1:] for key in off if key[0] == count})
        _write(path, repeated)
    longer = [row for row in _read([path] if path.exists() else []) if _key(row) in off]
    (HERE / "tables.md").write_text(tables(records, longer))
