"""The cost of checkpoints: a step with one saved every fifty steps against a step without, in turns in one run.

    python -m benchmarks.faults cost --rounds 6

writes ``records/cost.jsonl``: milliseconds a step without anything, looking for numbers that are not finite, saving, and saving
in the background; bytes on the disk against bytes of the parameters.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.progress import track

import nwise
from nwise.app.models import gpt
from nwise.checkpoint import Checkpoints
from nwise.losses import TokenCrossEntropy
from nwise.machine import processor
from nwise.training import NonFiniteGuard

HERE = Path(__file__).parent
EVERY = 50
VARIANTS = ("nothing", "finite", "checkpoints", "checkpoints in the background")
Record = dict[str, Any]


class Bench:
    """A GPT with Adam, and the work that may be done between its steps."""

    def __init__(self, width: int, folder: Path) -> None:
        model = gpt(4, 1, width, 4, 64, 512)
        self.pipe = nwise.Pipeline(model.stages, model.heads, TokenCrossEntropy(), "2-wise", seed=0)
        self.optimizer = torch.optim.Adam(self.pipe.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
        self.finite = NonFiniteGuard(self.pipe, "stop")
        self.checkpoints = {
            "checkpoints": Checkpoints(folder / "a", self.pipe, self.optimizer),
            "checkpoints in the background": Checkpoints(folder / "b", self.pipe, self.optimizer, asynchronous=True),
        }

    def steps(self, variant: str, count: int) -> float:
        """Run so many steps and return their mean milliseconds."""
        checkpoints = self.checkpoints.get(variant)
        start_time = time.perf_counter()
        for step in range(1, count + 1):
            self.pipe.step(self.tokens, target=self.tokens)
            if variant == "finite":
                self.finite()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if checkpoints is not None and step % EVERY == 0:
                checkpoints.save()
        if checkpoints is not None:
            checkpoints.wait()
        return 1e3 * (time.perf_counter() - start_time) / count


def main(rounds: int = 6, width: int = 128, out: Path = HERE / "records" / "cost.jsonl") -> None:
    """Measure and write the records.

    Args:
        rounds: turns of every variant, of a hundred steps each.
        width: of the tokens.
        out: file for the records.
    """
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    bench = Bench(width, folder)
    bench.steps("nothing", 10)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in track(range(rounds), "rounds"):
        for variant in VARIANTS:
            times[variant].append(bench.steps(variant, 2 * EVERY))
    disk = sum(file.stat().st_size for file in next((folder / "a").glob("step-*")).iterdir())
    shutil.rmtree(folder)
    parameters = sum(p.numel() * p.element_size() for p in bench.pipe.parameters())
    facts = {
        "every": EVERY,
        "bytes_of_parameters": parameters,
        "bytes_of_a_checkpoint": disk,
        "torch": torch.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
    }
    base = statistics.median(times["nothing"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w") as file:
        for variant, values in times.items():
            median = statistics.median(values)
            record = {"variant": variant, "ms": [round(t, 2) for t in values], "median_ms": round(median, 2)}
            file.write(json.dumps({**record, "over_nothing": round(median / base - 1, 4), **facts}) + "\n")
            print(
                f"{variant}: {median:.1f} ms ({min(values):.1f} to {max(values):.1f}), {100 * (median / base - 1):+.1f} %"
            )
    print(f"{disk / 2**20:.1f} MiB on the disk, {disk / parameters:.3f} times the parameters")


if __name__ == "__main__":
    tyro.cli(main)
