"""Quality of training when the messages between stages are compressed, and their bytes.

    python -m benchmarks.compression train --data digits     # five minutes; two runs at a time
    python -m benchmarks.compression train --data text       # half an hour
    python -m benchmarks.compression show

`train` writes ``records/<data>.jsonl``, a line for each strategy, compression and seed. Every run has the rate of its recipe,
whatever the compression. The bytes are those that cross all boundaries in a step, counted from the compressed tensors.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import nwise
from nwise.app.data import batch_indices
from nwise.app.recipes import recipe
from nwise.app.training import evaluate, make_loss, make_optimizer, parameter_groups
from nwise.compression import Int8, TopK
from nwise.machine import processor
from nwise.runtime.compression import Cast, Compression
from nwise.runtime.shapes import Spec

HERE = Path(__file__).parent
STRATEGIES = ("end-to-end", "2-wise-mean", "local")
Data = Literal["digits", "text"]
STEPS = {"digits": 300, "text": 250}


COMPRESSIONS: dict[str, Callable[[], Compression]] = {
    "none": lambda: Cast(torch.float32),
    "bf16": lambda: Cast(torch.bfloat16),
    "int8": Int8,
    "top-10%": lambda: TopK(0.1),
    "top-2%": lambda: TopK(0.02),
}


class Counted:
    """A compression that counts the bytes of its parts."""

    def __init__(self, rule: Compression) -> None:
        self._rule, self.num_bytes = rule, 0

    def specs(self, spec: Spec) -> tuple[Spec, ...]:
        """Return the shapes and dtypes of the parts of a tensor."""
        return self._rule.specs(spec)

    def compress(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor."""
        parts = self._rule.compress(tensor)
        self.num_bytes += sum(part.nbytes for part in parts)
        return parts

    def restore(self, parts: tuple[Tensor, ...], spec: Spec) -> Tensor:
        """Return the tensor that the parts describe."""
        return self._rule.restore(parts, spec)


@dataclass(frozen=True)
class Run:
    """A training run."""

    data: Data
    strategy: str
    compression: str
    seed: int


def train_run(run: Run) -> dict[str, Any]:
    """Train a run, score the test set and return a record."""
    torch.set_num_threads(1)
    steps = STEPS[run.data]
    config = replace(recipe("digits" if run.data == "digits" else "source-code"), seed=run.seed, strategy=run.strategy)
    config = replace(config, max_steps=steps)
    train, test = config.load()
    model = config.build(train)
    rule = Counted(COMPRESSIONS[run.compression]())
    pipe = nwise.Pipeline(model.stages, model.heads, make_loss(train), run.strategy, seed=run.seed, compress=rule)
    update = make_optimizer(config.optimizer, parameter_groups(pipe, config.optimizer.lr))
    peak = max(g["lr"] for g in update.param_groups)
    for step in range(steps):
        for group in update.param_groups:  # a tenth to warm up, then a cosine to zero
            group["lr"] = peak * min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))
        x, y = train.batch(batch_indices(len(train), config.batch_size, seed=run.seed, step=step))
        pipe.step(x, target=y)
        update.step()
        update.zero_grad()
    pipe.eval()
    last = evaluate(pipe, test, config.batch_size).heads[-1]
    assert last is not None
    return {
        **asdict(run),
        "loss": last.loss,
        "accuracy": last.accuracy,
        "bytes_per_step": rule.num_bytes // steps,
        "steps": steps,
        "processor": processor(),
        "torch": torch.__version__,
    }


def train(data: Data, seeds: int = 3, jobs: int = 2) -> None:
    """Train every strategy with every compression and write the records.

    Args:
        data: digits (accuracy) or text (bits).
        seeds: number of seeds.
        jobs: runs at a time.
    """
    runs = [Run(data, s, c, seed) for s in STRATEGIES for c in COMPRESSIONS for seed in range(seeds)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        records = list(track(pool.imap(train_run, runs), "training", total=len(runs), console=Console(stderr=True)))
    path = HERE / "records" / f"{data}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(path)


def show() -> None:
    """Print a table for each record, as it is in README.md."""
    for path in sorted((HERE / "records").glob("*.jsonl")):
        cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for line in path.open():
            record = json.loads(line)
            cells[record["compression"], record["strategy"]].append(record)
        digits = path.stem == "digits"
        unit = "test accuracy, %" if digits else "test loss, nats per byte"
        print(f"\n{path.stem}: {unit}; mean and largest distance from it over seeds; KiB per step\n")
        print("| messages | " + " | ".join(f"{s} | KiB" for s in STRATEGIES) + " |")
        print("|---" * (1 + 2 * len(STRATEGIES)) + "|")
        for name in COMPRESSIONS:
            row = [name]
            for strategy in STRATEGIES:
                records = cells[name, strategy]
                values = [100 * r["accuracy"] if digits else r["loss"] for r in records]
                mean = statistics.mean(values)
                row += [
                    f"{mean:.{2 if digits else 3}f} ± {max(abs(v - mean) for v in values):.{2 if digits else 3}f}",
                    f"{records[0]['bytes_per_step'] / 1024:.0f}",
                ]
            print("| " + " | ".join(row) + " |")
