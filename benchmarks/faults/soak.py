"""Two thousand steps on four processes: does the memory of any of them grow?

    python -m benchmarks.faults soak --steps 2000

writes ``records/soak.jsonl``: for every rank its resident memory over the steps, with evaluations, records and checkpoints as in
any run, and the largest deviation after the first tenth from what it was there.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import tyro
from rich.console import Console
from torch import Tensor

from benchmarks.faults import small_run
from nwise.app.recipes import Mlp, Recipe
from nwise.app.training import Callback, CheckpointPolicy, Trainer, new_run
from nwise.machine import processor

HERE = Path(__file__).parent
RANKS = 4


class Memory(Callback):
    """Looks at this process after every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.mib: list[float] = []
        self.tensors: list[int] = []

    def stepped(self, step: int, losses: Tensor) -> None:
        """Now and then."""
        if step % self.every == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.mib.append(round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 3))
            self.tensors.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))


def work(folder: Path, steps: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    recipe = Recipe(
        name="soak",
        model=Mlp(num_stages=RANKS, width=256),
        strategy="2-wise",
        microbatches=2,
        batch_size=64,
        epochs=steps,
        max_steps=steps,
        eval_every=10,
    )
    trainer, memory = Trainer(recipe, small_run.data()), Memory(max(1, steps // 40))
    run = new_run(recipe, folder) if os.environ["RANK"] == "0" else None
    trainer.train(run, (memory,), CheckpointPolicy(checkpoint_every=max(1, steps // 20)))
    first = len(memory.mib) // 10
    base = memory.mib[first]
    worst = max(abs(value / base - 1) for value in memory.mib[first:])
    record = {
        "rank": int(os.environ["RANK"]),
        "steps": steps,
        "mib": memory.mib,
        "tensors": memory.tensors,
        "deviation": round(worst, 5),
    }
    (folder / f"{record['rank']}.json").write_text(json.dumps(record))


def main(steps: int = 2000, out: Path = HERE / "records" / "soak.jsonl") -> None:
    """Train and look.

    Args:
        steps: how many.
        out: where the records go.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        with Console().status(f"{steps} steps on {RANKS} processes"):
            worker = ["-m", "benchmarks.faults.soak", "--worker", folder, str(steps)]
            subprocess.run([*command, *worker], env=environment, cwd=HERE.parents[1], check=True)
        records = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    machine = {"torch": torch.__version__, "processor": processor(), "cores": os.cpu_count()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps({**record, **machine}) + "\n" for record in records))
    for record in records:
        print(
            f"rank {record['rank']}: {record['mib'][0]} to {record['mib'][-1]} MiB, {100 * record['deviation']:.2f} %"
        )


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        tyro.cli(main)
