"""The methods with the shortest step, by stages and latency: every row is a schedule that nwise runs.

Writes one JSON record per method to ``records/methods.jsonl``, and ``methods.md`` with the tables.

    python -m benchmarks.planning.methods
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.progress import track

import nwise
from nwise.planning.plans import STRATEGIES
from nwise.schedule import TRANSFORMER, validate

HERE = Path(__file__).parent
METHODS = (*STRATEGIES, "2-wise-delay-1", "end-to-end-delay-2", "hogwild-forward-least")


def plan(devices: int, latency: float) -> nwise.Plans:
    """Plan all methods at their best M, at the prices of `TRANSFORMER`."""
    return nwise.plan(TRANSFORMER, devices=devices, strategy=METHODS, latency=latency, report=None)


def main(devices: tuple[int, ...] = (4, 8, 16, 32), latencies: tuple[float, ...] = (0.0, 1.0)) -> None:
    """Plan and write.

    Args:
        devices: numbers of devices.
        latencies: times of a message, in forwards of a whole mini-batch through a stage.
    """
    records: list[dict[str, Any]] = []
    places = [(latency, count) for latency in latencies for count in devices]
    for latency, count in track(places, description="planning"):
        plans = plan(count, latency)
        for one in plans.plans:
            validate(one.schedule)  # what could not run is not in the table
            records.append({"devices": count, "latency": latency, **one.as_json(), "speedup": plans.speedup(one)})
    (HERE / "records").mkdir(exist_ok=True)
    (HERE / "records" / "methods.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (HERE / "methods.md").write_text(tables(records, devices, latencies))


def tables(records: Sequence[dict[str, Any]], devices: Sequence[int], latencies: Sequence[float]) -> str:
    """Return a table for every latency: steps in slots with M, and the shortest in bold."""
    lines = ["# Methods, written by methods.py", ""]
    for latency in latencies:
        here = [r for r in records if r["latency"] == latency]
        lines += [f"## Latency {latency:g}", "", "| method | " + " | ".join(f"A = {count}" for count in devices) + " |"]
        lines.append("|---" * (len(devices) + 1) + "|")
        best = {count: min(r["period"] for r in here if r["devices"] == count) for count in devices}
        for name in dict.fromkeys(r["method"] for r in here):
            cells = []
            for count in devices:
                one = next((r for r in here if (r["devices"], r["method"]) == (count, name)), None)
                text = "–" if one is None else f"{one['period']:.2f} ({one['microbatches']})"
                cells.append(f"**{text}**" if one is not None and one["period"] == best[count] else text)
            lines.append("| " + " | ".join([name, *cells]) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    tyro.cli(main)
