"""The cost of reading a process's own targets, beside the cost of sending them to it.

    python -m benchmarks.runtime.targets

writes ``records/targets.jsonl``. The time of a message of that size is that of ``records/messages.jsonl``.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console

from nwise.app.data import batch_indices
from nwise.app.recipes import recipe
from nwise.randomness import generator

ROUNDS = 200


def main(names: tuple[str, ...] = ("digits", "source-code")) -> None:
    """Time whole mini-batches, inputs included, as every process reads them."""
    torch.set_num_threads(1)
    records = []
    for name in names:
        config = recipe(name)
        data, _ = config.load()
        times = []
        for step in range(ROUNDS):
            start_time = time.perf_counter()
            indices = batch_indices(len(data), config.batch_size, config.seed, step)
            _, target = data.batch(indices, generator(config.seed, "augmentation", step))
            times.append(time.perf_counter() - start_time)
        low, middle, high = statistics.quantiles(times, n=4)
        record = {"recipe": name, "batch_size": config.batch_size, "read_ms": [1e3 * t for t in (low, middle, high)]}
        records.append({**record, "target_bytes": target.nbytes, "torch": torch.__version__})
    path = Path(__file__).parent / "records" / "targets.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    Console().print(path.read_text(), soft_wrap=True, highlight=False, markup=False)


if __name__ == "__main__":
    main()
