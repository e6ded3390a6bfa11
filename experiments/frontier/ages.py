"""Credit matrices for each age: prompt near credit beside late far credit.

    python -m experiments.frontier.ages --near local --far end-to-end-delay-2

A second pipeline over the same stages and heads gives the gradients of the near losses at once; the first gives those of the
far losses, late. Both add to ``.grad``. So the idea is tried before the engine learns it: a trial as long as those of
`experiments.rates`, with the same seed and the same withheld text. Its record goes to ``ages.jsonl``.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.progress import Progress
from torch import Tensor

import nwise
from experiments.frontier.arms import Arm
from experiments.harness.cell import revision
from experiments.harness.store import Store
from nwise._machine import machine
from nwise.losses import TokenCrossEntropy
from nwise.training import Callback, Scores, Trainer

RECORDS = Path(__file__).parent / "ages.jsonl"


class _Tests(Callback):
    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._task = progress, progress.add_task(title)
        self.losses: dict[int, float] = {}

    def started(self, trainer: Trainer) -> None:
        self._progress.update(self._task, total=trainer.num_steps)

    def stepped(self, step: int, losses: Tensor) -> None:
        self._progress.update(self._task, completed=step)

    def evaluated(self, step: int, scores: Scores) -> None:
        assert scores.heads[-1] is not None
        self.losses[step] = round(scores.heads[-1].loss, 6)


def trainer_of_both(near: str, far: str, rate: float, steps: int) -> Trainer:
    """Return the trainer of a trial whose steps add the gradients of two strategies.

    Args:
        near: the strategy whose gradients are prompt.
        far: the strategy whose gradients may be late.
        rate: peak rate of Muon.
        steps: number of steps.
    """
    trainer = Trainer(replace(Arm("muon", far).trial(rate), max_steps=steps))
    pipe = trainer.pipe
    heads = [pipe.heads[str(k)] for k in range(pipe.num_stages - 1)]
    second = nwise.Pipeline(list(pipe.stages), heads, TokenCrossEntropy(), near, seed=pipe.seed)
    late = pipe.step

    def step(*batch: Any, **named: Any) -> Tensor:
        second.step(*batch, **named)
        return late(*batch, **named)

    pipe.step = step  # type: ignore[assignment,method-assign]
    return trainer


def main(near: str = "local", far: str = "end-to-end-delay-2", rate: float = 0.02, steps: int = 500) -> None:
    """Run one trial and append its record.

    Args:
        near: the strategy whose gradients are prompt.
        far: the strategy whose gradients are late.
        rate: peak rate of Muon.
        steps: number of steps.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    trainer = trainer_of_both(near, far, rate, steps)
    with Progress() as progress:
        tests = _Tests(progress, f"{near} and {far}")
        trainer.train(callbacks=(tests,))
    record = {"near": near, "far": far, "rate": rate, "steps": steps, "loss": tests.losses}
    seconds = round(time.perf_counter() - began, 1)
    Store(RECORDS).add({**record, "seconds": seconds, "revision": revision(), "machine": machine()})


if __name__ == "__main__":
    tyro.cli(main)
