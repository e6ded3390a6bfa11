"""All trials and runs, in order of worth, until the time is over; a run takes the best rate of its trials.

    python -m experiments.deep.gpu --minutes 7
    python -m experiments.deep.gpu --minutes 5 --workers 2 --device cpu --rehearse

The same command goes on where it stopped. ``python -m experiments deep --size medium --redraw`` writes the tables.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import tyro

from benchmarks.gpu.run import shared_gpu
from experiments.deep.experiment import COMPARISON, cells, experiment
from experiments.frontier.arms import Arm
from experiments.frontier.comparison import Comparison
from experiments.harness.cell import Cell
from experiments.harness.experiment import Job
from experiments.harness.pool import run_cells
from experiments.harness.runs import loss
from experiments.harness.store import Store
from nwise.app.recipes import Adam, EmbeddedText, Gpt, Recipe

HERE = Path(__file__).parent


class TimeIsUp(Exception):
    """The time is over; the cells that still run are lost."""


def tiny(_: Arm, recipe: Recipe) -> Recipe:
    """Return a recipe of a few small steps on a CPU, which cannot capture them."""
    assert isinstance(recipe.model, Gpt)
    assert isinstance(recipe.data, EmbeddedText)
    assert isinstance(recipe.optimizer, Adam)
    return replace(
        recipe,
        model=replace(recipe.model, num_stages=recipe.model.num_stages // 4, width=16, sequence_length=16),
        data=replace(recipe.data, max_bytes=50_000, test_limit=500),
        optimizer=replace(recipe.optimizer, warmup_steps=4),
        batch_size=2,
        max_steps=8,
        eval_every=1,
        capture=False,
        device="cpu",
    )


def cells_by_worth(comparison: Comparison, seeds: int, skip: tuple[str, ...] = ()) -> Iterator[Cell | None]:
    """Yield the most valuable cell that has no record and has not been yielded; None while there is none."""
    store, size, taken = Store(comparison.records), -1, set[Cell]()
    left: list[Cell] = []
    while True:
        if size != (size := comparison.records.stat().st_size):  # a record more: there may be another rate
            pairs = store.records_for(cells(comparison, seeds))
            left = [cell for cell, record in pairs if record is None and cell not in taken]
            left = [cell for cell in left if not any(text in cell.name for text in skip)]
        taken.update(left[:1])
        yield left.pop(0) if left else None


def main(
    minutes: float = 7,
    workers: int = 14,
    seeds: int = 3,
    skip: tuple[str, ...] = (),
    device: str = "cuda",
    rehearse: bool = False,
    folder: Path = HERE.parent,
) -> None:
    """Run cells.

    Args:
        minutes: time for all.
        workers: processes at once.
        seeds: number of seeds.
        skip: texts; cells with one of them in their names do not run.
        device: cuda, or cpu to rehearse.
        rehearse: whether to make every cell tiny; also writes the tables. Give another folder.
        folder: folder of all experiments; records are added to ``deep/medium.jsonl`` in it.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "nwise: `device` should be a GPU that torch can use. Found none; rehearse with --device cpu --rehearse."
        )
    if rehearse and folder == HERE.parent:
        sys.exit(
            "nwise: `folder` should not be that of the records in a rehearsal. Found it; give another, --folder /tmp/x."
        )
    comparison = replace(COMPARISON, records=folder / "deep" / "medium.jsonl")
    if rehearse:
        comparison = replace(comparison, change=tiny)
    store, start_time = Store(comparison.records), time.monotonic()
    store.check_writable()

    def stop(number: int, frame: object) -> NoReturn:
        raise TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    with ExitStack() as stack:
        if device == "cuda":
            variables = stack.enter_context(shared_gpu())
            os.environ.update(variables)
            print(f"multi-process service: {'on' if variables else 'none, so processes take turns'}", flush=True)
        try:
            queue = cells_by_worth(comparison, seeds, skip)
            with closing(run_cells(queue, workers, lambda name, done, total: None)) as records:
                for cell, record in records:
                    store.add(record)
                    done = f"{time.monotonic() - start_time:5.0f} s  {cell.name}: {loss(record):.3f} nats"
                    print(f"{done} after {record['steps']} steps, {record['seconds']:.0f} s", flush=True)
        except TimeIsUp:
            print("The time is over; the same command continues.")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    deep = experiment(comparison)
    job = Job(folder=folder, size="medium", seeds=seeds)
    print("{} of {} cells have a record.".format(*deep.progress(job)))
    if rehearse:
        deep.write(job)


if __name__ == "__main__":
    tyro.cli(main)
