"""How long a step of each arm takes on one accelerator a stage, by the frontier's clock.

    python -m experiments.deep.periods deep heads     # three minutes

searches for the fastest schedules and writes ``periods.jsonl`` of both experiments, because delays take long.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.progress import track

from experiments.frontier import clock
from experiments.frontier.arms import Arm
from nwise.app.records import json_line, write_text


def write(arms: Sequence[Arm], path: Path) -> None:
    """Search, and write all periods: slots of a step and M, by arm and latency."""
    rows = []
    for one in track(arms, "periods"):
        for latency in clock.LATENCIES:
            [(_, slots, m)] = clock.slots(one, latency)
            rows.append({"arm": one.name, "latency": latency, "slots": round(slots, 6), "microbatches": m})
    write_text(path, "".join(map(json_line, rows)))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        experiment = import_module(f"experiments.{name}.experiment")
        write(experiment.ARMS, experiment.PERIODS)
