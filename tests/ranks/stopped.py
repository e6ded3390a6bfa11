"""A run whose first test is stopped on rank 1, and which then continues: what its display says, and where each rank stopped."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from pathlib import Path

from rich.console import Console

from nwise.app.recipes import Mlp, Recipe, recipe
from nwise.app.report.display import PlainDisplay
from nwise.app.training import Callback, CheckpointPolicy, StoppedError, Trainer, new_run
from ranks.common import RANK, write

CONFIG = dataclasses.replace(
    recipe("digits"), model=Mlp(num_stages=2, width=16), batch_size=4, max_steps=12, eval_every=5 / 359
)


class Stops(Callback):
    """Makes a test last for seconds, and asks for the stop on rank 1."""

    def started(self, trainer: Trainer) -> None:
        self.trainer, self.batches = trainer, 0

    def evaluating(self, done: int, total: int) -> None:
        self.batches += 1
        time.sleep(0.2)
        if RANK == 1:
            self.trainer.stop()


def train(config: Recipe, folder: Path) -> dict[str, object]:
    """Stop in the first test and resume."""
    trainer, stops = Trainer(config), Stops()
    run = new_run(config, folder) if RANK == 0 else None
    try:
        trainer.train(run, (stops,), CheckpointPolicy())
    except StoppedError as error:
        stopped = str(error)
    trainer = Trainer(config)
    display = PlainDisplay(Console(file=io.StringIO(), width=200))
    trainer.train(run, (display,) if RANK == 0 else (), CheckpointPolicy(), resume=True)
    assert isinstance(display.console.file, io.StringIO)
    lines = [line for line in display.console.file.getvalue().splitlines() if " test accuracy " in line]
    return {"batches": stops.batches, "stopped": stopped, "lines": [line.partition(" test ")[2] for line in lines]}


if __name__ == "__main__":
    write(train(CONFIG, Path(sys.argv[1]) / "runs"))
