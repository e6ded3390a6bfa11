"""One run of an experiment, and the record it leaves."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwise.app.data import Images, Tokens
from nwise.app.data.sources import tables
from nwise.app.data.text import standard_library
from nwise.app.recipes import Adam, EmbeddedText, ImageSource, Recipe, TextSource, from_json, to_json
from nwise.app.training import (
    Callback,
    CheckpointPolicy,
    Run,
    Scores,
    Trainer,
    autocast,
    evaluate,
    new_run,
    versions,
)
from nwise.machine import machine

ROOT = Path(__file__).resolve().parents[2]
POLICY = CheckpointPolicy(keep=1)  # every ten minutes

Record = dict[str, Any]
Data = tuple[Images, Images] | tuple[Tokens, Tokens]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run.

    Args:
        method: its name in tables.
        recipe: its complete configuration.
        part: of the experiment, if it has several, such as one point of a grid.
    """

    method: str
    recipe: Recipe
    part: str = ""

    @property
    def num_stages(self) -> int:
        """Number of stages, A; four where the recipe of the model has no such setting, as for a residual network."""
        return getattr(self.recipe.model, "num_stages", 4)

    @property
    def name(self) -> str:
        """The name shown while it runs.

        >>> Cell(method="2-wise", recipe=Recipe()).name
        'digits, 6 stages, 2-wise, seed 0'
        """
        data = (
            "source code"
            if isinstance(self.recipe.data, EmbeddedText)
            else getattr(self.recipe.data, "source", "digits")
        )
        parts = [data, f"{self.num_stages} stages", self.method, self.part, f"seed {self.recipe.seed}"]
        return ", ".join(part for part in parts if part)

    def folder(self, parent: Path) -> Path:
        """Return the folder in which the run keeps its checkpoints until it has a record."""
        text = json.dumps([self.method, self.part, to_json(self.recipe)])
        return parent / hashlib.sha256(text.encode()).hexdigest()[:16]


def read_cell(record: Record) -> Cell | None:
    """Return the cell of a record; None if it was written by a version whose configurations cannot be read."""
    try:
        return Cell(method=record["method"], part=record["part"], recipe=_recipe(json.dumps(record["config"])))
    except (ValueError, TypeError, KeyError):
        return None


@cache  # an index reads the records of the rates for every experiment
def _recipe(config: str) -> Recipe:
    return from_json(json.loads(config))


def missing_data(data: object) -> str | None:
    """Return why the data of a recipe cannot be had; None if they can."""
    if not isinstance(data, ImageSource | TextSource):
        return None
    try:
        for split in data.splits:
            tables(data.source, split, hub=data.hub)
    except (FileNotFoundError, ImportError) as error:
        return str(error)
    return None


def source_digest(data: EmbeddedText) -> str:
    """Return the SHA-256 of the source code to train on: the standard library differs between installations of Python."""
    return hashlib.sha256(standard_library(data.max_bytes).encode()).hexdigest()


@dataclass
class History(Callback):
    """A callback that keeps every test and reports progress."""

    on_progress: Callable[[int, int], None]
    tests: list[Record] = field(default_factory=list)
    steps: int = 0
    losses: list[Tensor] = field(default_factory=list)  # of the last head in training, since the last test
    earlier: float = 0.0  # seconds of training before a stop
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds of the run, of all its parts between stops."""
        return self.earlier + time.perf_counter() - self.began

    def started(self, trainer: Trainer) -> None:
        self.steps = trainer.num_steps

    def stepped(self, step: int, losses: Tensor) -> None:
        self.losses.append(losses[-1].detach())
        self.on_progress(step, self.steps)

    def state(self) -> Record:
        return {"tests": self.tests, "losses": [float(loss) for loss in self.losses], "seconds": self.seconds}

    def restore(self, state: Record) -> None:
        self.tests, self.earlier = state["tests"], state["seconds"]
        self.losses = [torch.tensor(loss) for loss in state["losses"]]

    def evaluated(self, step: int, scores: Scores) -> None:
        loss = [None if s is None or not isfinite(s.loss) else round(s.loss, 6) for s in scores.heads]
        accuracy = [None if s is None else round(s.accuracy, 6) for s in scores.heads]
        mean = float(torch.stack([loss.cpu() for loss in self.losses]).mean()) if self.losses else math.nan
        train = round(mean, 6) if isfinite(mean) else None
        self.losses = []
        self.tests.append({"step": step, "train": train, "loss": loss, "accuracy": accuracy})


@cache
def revision() -> str | None:
    """Return the git revision of this copy, with a plus if code has changed since; None outside a repository.

    Records that a run adds are no change of code.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "pyproject.toml")
        return git("describe", "--always", "--exclude=*") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def _check_length(cell: Cell, steps: int) -> None:
    """Refuse a run that ends while its rate still rises, as with a piece of the text that the recipe is meant for."""
    optimizer = cell.recipe.optimizer
    if isinstance(optimizer, Adam) and optimizer.warmup_steps > steps:
        raise ValueError(
            f"A run should be longer than its warm-up of {optimizer.warmup_steps} steps. Found {steps} steps of {cell.name}; is "
            "there only a piece of the data?"
        )


def _train(trainer: Trainer, history: History, folder: Path | None) -> None:
    """Run all steps, or those behind the last checkpoint in a folder."""
    if folder is None:
        trainer.train(callbacks=(history,))
        return
    earlier = next(iter(sorted(folder.glob("*/run.json"))), None)
    run = new_run(trainer.recipe, folder) if earlier is None else Run.open(earlier.parent)
    trainer.train(run, (history,), POLICY, resume=earlier is not None, allow_restart=True)


def measure(
    cell: Cell,
    data: Data | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    folder: Path | None = None,
) -> Record:
    """Train and test a cell.

    Args:
        cell: the cell.
        data: the data of its recipe, if they were loaded before.
        on_progress: function called with the number of steps done and of all steps.
        folder: folder of checkpoints, from which a run that was stopped continues; default: none, and it starts over,
            as under Hogwild with the weights in memory.

    Returns:
        The record: the cell, every test of every head, the digest of source code, the ensembles of the top heads at the end,
        seconds of this run (one process doing all stages), its end, git revision, machine, versions.

    Raises:
        ValueError: the run would end within its warm-up.
    """
    if not all(strategy.stashes for _, strategy in cell.recipe.phases(1)):
        folder = None  # a checkpoint makes the passes that are due, with the weights of its moment
    history = History(on_progress)
    trainer = Trainer(replace(cell.recipe, on_nan="ignore"), data)  # that a run diverges is a result too
    _check_length(cell, trainer.num_steps)
    _train(trainer, history, folder)
    seconds = history.seconds
    record: Record = {
        "method": cell.method,
        "part": cell.part,
        "stages": cell.num_stages,
        "seed": cell.recipe.seed,
        "steps": trainer.num_steps,
        "tests": history.tests,
    }
    if isinstance(cell.recipe.data, EmbeddedText):
        record["source"] = source_digest(cell.recipe.data)
    if cell.recipe.heads == "all" and not trainer.pipe.strategy.asynchronous:
        with autocast(cell.recipe, trainer.device):
            scores = evaluate(trainer.pipe, trainer.test_data, 2 * cell.recipe.batch_size, ensembles=True)
        record["ensembles"] = [{"accuracy": round(score.accuracy, 6)} for score in scores.ensembles]
    return record | {
        "seconds": round(seconds, 2),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "machine": machine(),
        "versions": versions(),
        "config": to_json(cell.recipe),
    }
