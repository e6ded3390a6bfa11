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
from experiments.harness.cell import History, revision, source_digest
from experiments.harness.store import Store
from nwise.app.recipes import EmbeddedText
from nwise.app.training import Trainer
from nwise.losses import TokenCrossEntropy
from nwise.machine import machine

RECORDS = Path(__file__).parent / "ages.jsonl"


def make_trainer(near: str, far: str, rate: float, steps: int) -> Trainer:
    """Return the trainer of a trial whose steps add the gradients of two strategies."""
    trainer = Trainer(replace(Arm("muon", far).trial(rate), max_steps=steps))
    pipe = trainer.pipe
    heads = [pipe.heads[str(k)] for k in range(pipe.num_stages - 1)]
    second = nwise.Pipeline(list(pipe.stages), heads, TokenCrossEntropy(), near, seed=pipe.seed)
    late = pipe.step

    def step(*batch: Any, **named: Any) -> Tensor:
        second.step(*batch, **named)
        return late(*batch, **named)

    pipe.step = step  # type: ignore[method-assign]
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
    start_time = time.perf_counter()
    trainer = make_trainer(near, far, rate, steps)
    text = trainer.recipe.data
    assert isinstance(text, EmbeddedText)
    with Progress() as progress:
        task = progress.add_task(f"{near} and {far}", total=trainer.num_steps)
        history = History(lambda done, _: progress.update(task, completed=done))
        trainer.train(callbacks=(history,))
    loss = {test["step"]: test["loss"][-1] for test in history.tests}
    record = {"near": near, "far": far, "rate": rate, "steps": steps, "loss": loss}
    seconds = round(time.perf_counter() - start_time, 1)
    facts = {"seconds": seconds, "revision": revision(), "machine": machine(), "source": source_digest(text)}
    Store(RECORDS).add({**record, **facts})


if __name__ == "__main__":
    tyro.cli(main)
