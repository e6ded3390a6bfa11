"""What a person sees while a run trains: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Literal

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from nwise.data import Tokens
from nwise.training import Callback, Score, Scores, Trainer

# Redrawing more often would cost more than a small model's step.
_REFRESH_PER_SECOND = 4


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table; an en dash where there is none.

    >>> number(None), number(0.5), number(float("nan"))
    ('–', '0.5000', '–')
    """
    return "–" if value is None or value != value else f"{value:.{digits}f}"


def quality(score: Score | None, kind: Literal["accuracy", "perplexity"]) -> str:
    """Accuracy in per cent, or perplexity."""
    if score is None:
        return "–"
    return f"{100 * score.accuracy:.2f} %" if kind == "accuracy" else f"{score.perplexity:.2f}"


def resumption(step: int, changes: str) -> str:
    """Where a run goes on, in one line."""
    return f"going on at step {step}" + (f": {changes}" if changes else "")


class _Base(Callback):
    """What both displays know of the run."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.kind: Literal["accuracy", "perplexity"] = "accuracy"
        self.began = time.perf_counter()

    def begin(self, trainer: Trainer) -> str:
        self.began = time.perf_counter()
        self.kind = "perplexity" if isinstance(trainer.test_data, Tokens) else "accuracy"
        recipe, pipe = trainer.recipe, trainer.pipe
        parameters, side = trainer.num_parameters
        threads = torch.get_num_threads()
        return (
            f"{recipe.name}: {pipe.num_stages} stages, {recipe.strategy}, {parameters:,} parameters"
            f" + {side:,} in heads, {trainer.num_steps:,} steps of {recipe.batch_size} on {trainer.device}"
            f"{'' if pipe.team is None else f', {pipe.team.world.size} processes'}"
            f" with {threads} thread{'s' if threads > 1 else ''}{'' if pipe.team is None else ' each'}"
        )


class LiveDisplay(_Base):
    """A table of every head, with a progress bar below it."""

    def started(self, trainer: Trainer) -> None:
        """Show the empty table."""
        self.title = self.begin(trainer)
        self.losses: list[float] = [float("nan")] * trainer.pipe.num_stages
        self.scores: Scores | None = None
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task: TaskID = self.progress.add_task("training", total=trainer.num_steps)
        self.live = Live(self.draw(), console=self.console, refresh_per_second=_REFRESH_PER_SECOND)
        self.live.start()
        self.drawn = 0.0

    def stepped(self, step: int, losses: Tensor) -> None:
        """Take up the losses, now and then."""
        self.progress.update(self.task, completed=step, description="training")
        now = time.perf_counter()
        if now - self.drawn > 1 / _REFRESH_PER_SECOND:
            self.drawn = now
            # A head that rests in this step keeps the loss it had.
            self.losses = [new if new == new else old for new, old in zip(losses.tolist(), self.losses, strict=True)]
            self.live.update(self.draw())

    def evaluating(self, done: int, total: int) -> None:
        """Say that it is not training just now."""
        self.progress.update(self.task, description=f"testing {done}/{total}")

    def evaluated(self, step: int, scores: Scores) -> None:
        """Take up the scores."""
        del step
        self.scores = scores
        self.live.update(self.draw())

    def resumed(self, step: int, changes: str) -> None:
        """A line above the table."""
        self.live.console.print(resumption(step, changes), soft_wrap=True)
        self.progress.update(self.task, completed=step)

    def finished(self, status: str) -> None:
        """Leave the last table on the screen."""
        self.progress.update(self.task, description=status)
        self.live.update(self.draw(), refresh=True)
        self.live.stop()

    def draw(self) -> Group:
        """The table and the bar."""
        table = Table(title=self.title, title_justify="left")
        for heading in ("head", "training loss", "test loss", f"test {self.kind}"):
            table.add_column(heading, justify="left" if heading == "head" else "right")
        for k, loss in enumerate(self.losses):
            score = None if self.scores is None else self.scores.heads[k]
            name = f"stage {k}" + (" (output)" if k == len(self.losses) - 1 else "")
            test_loss = number(None if score is None else score.loss)
            table.add_row(name, number(loss), test_loss, quality(score, self.kind))
        return Group(table, self.progress)


class PlainDisplay(_Base):
    """One line per evaluation."""

    def started(self, trainer: Trainer) -> None:
        """Say what is trained."""
        self.console.print(self.begin(trainer), soft_wrap=True)
        self.console.print(
            f"columns: the heads of stages 0 to {trainer.pipe.num_stages - 1}, the last the output; – not trained (see --heads)",
            soft_wrap=True,
        )
        self.total = trainer.num_steps
        self.losses = ""

    def stepped(self, step: int, losses: Tensor) -> None:
        """Remember the losses for the next line."""
        del step
        self.losses = "  training loss " + " ".join(number(loss, 3) for loss in losses.tolist())

    def evaluated(self, step: int, scores: Scores) -> None:
        """The line."""
        seconds = time.perf_counter() - self.began
        values = " ".join(quality(score, self.kind).replace(" ", "") for score in scores.heads)
        self.console.print(
            f"step {step:>6}/{self.total}  {seconds:7.1f} s  test {self.kind} {values}{self.losses}", soft_wrap=True
        )

    def resumed(self, step: int, changes: str) -> None:
        """A line."""
        self.console.print(resumption(step, changes), soft_wrap=True)

    def finished(self, status: str) -> None:
        """How it ended."""
        self.console.print(status)


def display_for(console: Console) -> LiveDisplay | PlainDisplay:
    """The live table on a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
