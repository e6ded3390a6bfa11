"""How long a step of each arm takes on one accelerator a stage, by the frontier's clock.

    python -m experiments.deep.periods     # two minutes

searches for the fastest schedules and writes ``periods.jsonl``, because 32 stages with a delay take long.
"""

from __future__ import annotations

from pathlib import Path

from rich.progress import track

from experiments.deep.experiment import ARMS, PERIODS
from experiments.frontier import clock
from nwise.app.records import json_line, write_text


def main(path: Path = PERIODS) -> None:
    """Search, and write all periods: slots of a step and M, by arm and latency."""
    rows = []
    for one in track(ARMS, "periods"):
        for latency in clock.LATENCIES:
            [(_, slots, m)] = clock.slots(one, latency)
            rows.append({"arm": one.name, "latency": latency, "slots": round(slots, 6), "microbatches": m})
    write_text(path, "".join(map(json_line, rows)))


if __name__ == "__main__":
    main()
