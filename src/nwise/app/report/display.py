"""Progress of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nwise.app.recipes.loop import Quality
from nwise.app.training import Callback, Score, Scores, Trainer

_REFRESH_PER_SECOND = 4  # redrawing more often would cost more than a small model's step
_SECONDS_BETWEEN_LINES = 60


def number(value: float | None, digits: int = 4) -> str:
    """Format a number for a table; an en dash if there is none.

    >>> number(None), number(0.5), number(float("nan"))
    ('–', '0.5000', '–')
    """
    return "–" if value is None or value != value else f"{value:.{digits}f}"


def _quality(score: Score | None, kind: Quality) -> str:
    """Format accuracy in per cent, or perplexity."""
    if score is None:
        return "–"
    return f"{100 * score.accuracy:.2f} %" if kind == "accuracy" else f"{score.perplexity:.2f}"


def head_name(stage: int, num_stages: int) -> str:
    """Name a head by its stage; that of the last stage is the network's output."""
    return f"stage {stage}" + (" (output)" if stage == num_stages - 1 else "")


def score_cells(score: Score | None, kind: Quality) -> tuple[str, str]:
    """Format loss and accuracy or perplexity of a head for a table."""
    return number(None if score is None else score.loss), _quality(score, kind)


def numbers_table(title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table whose first column is text and whose other columns are numbers."""
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def write_at_once(text: str) -> None:
    """Write a line to standard error from a signal handler, where Python's streams may be in use."""
    with suppress(OSError):  # it may be closed
        os.write(2, f"{text}\n".encode())


class _Display(Callback):
    """Base class of both displays."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def started(self, trainer: Trainer) -> None:
        recipe = trainer.recipe
        pipe = trainer.pipe
        self.total = trainer.num_steps
        self.began = time.perf_counter()
        self.kind = recipe.quality
        (main, heads) = trainer.num_parameters
        threads = torch.get_num_threads()
        ranks = pipe.processes.size
        processes, each = (f", {ranks} processes", " each") if ranks > 1 else ("", "")
        self.title = (
            f"{recipe.name}: {pipe.num_stages} stages, {recipe.strategy}, {main:,} parameters + {heads:,} in heads, "
            f"{self.total:,} steps of {recipe.batch_size} on {trainer.device}{processes}"
            f" with {threads} thread{'s' if threads > 1 else ''}{each}"
        )

    def say(self, text: str) -> None:
        """Print a line; a live table stays below it."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def stopping(self, text: str) -> None:
        """Show at once, in a signal handler, that the run is about to stop."""
        write_at_once(text)

    def resumed(self, step: int, changes: str) -> None:
        self.say(f"resuming at step {step}" + (f": {changes}" if changes else ""))


class LiveDisplay(_Display):
    """A table of every head, with a progress bar below it."""

    def started(self, trainer: Trainer) -> None:
        super().started(trainer)
        self.losses: list[float] = [float("nan")] * trainer.pipe.num_stages
        self.notice = ""
        self.scores: Scores | None = None
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, console=self.console)
        self.task = self.progress.add_task("training", total=self.total)
        self.live = Live(self.draw(), console=self.console, refresh_per_second=_REFRESH_PER_SECOND)
        self.live.start()
        self.drawn = 0.0

    def stepped(self, step: int, losses: Tensor) -> None:
        self.progress.update(self.task, completed=step, description="training")
        now = time.perf_counter()
        if now - self.drawn > 1 / _REFRESH_PER_SECOND:
            self.drawn = now
            # A head that does not run in this step keeps its last loss.
            self.losses = [new if new == new else old for new, old in zip(losses.tolist(), self.losses, strict=True)]
            self.live.update(self.draw())

    def evaluating(self, done: int, total: int) -> None:
        self.progress.update(self.task, description=f"testing {done}/{total}")

    def evaluated(self, step: int, scores: Scores) -> None:
        self.scores = scores
        self.live.update(self.draw())

    def stopping(self, text: str) -> None:
        self.notice = text
        self.live.update(self.draw())  # the thread that draws shows it

    def resumed(self, step: int, changes: str) -> None:
        super().resumed(step, changes)
        self.progress.update(self.task, completed=step)

    def finished(self, status: str) -> None:
        self.progress.update(self.task, description=status)
        self.notice = ""
        self.live.update(self.draw(), refresh=True)
        self.live.stop()

    def draw(self) -> Group:
        scores = [None] * len(self.losses) if self.scores is None else self.scores.heads
        rows = [
            (head_name(k, len(scores)), number(loss), *score_cells(score, self.kind))
            for k, (loss, score) in enumerate(zip(self.losses, scores, strict=True))
        ]
        table = numbers_table(self.title, ("head", "training loss", "test loss", f"test {self.kind}"), rows)
        return Group(table, self.progress, *([Text(self.notice)] if self.notice else []))


class PlainDisplay(_Display):
    """One line for each evaluation, and one a minute between two evaluations."""

    def started(self, trainer: Trainer) -> None:
        super().started(trainer)
        self.say(self.title)
        last = trainer.pipe.num_stages - 1
        self.say(f"columns: heads of stages 0 to {last}, the last is the output; –: not trained (see --heads)")
        self.step = trainer.pipe.steps
        self.losses = ""
        self.printed = self.began

    def stepped(self, step: int, losses: Tensor) -> None:
        self.step = step
        self._line_a_minute(f"training{self.losses}")

    def logged(self, step: int, losses: Tensor) -> None:
        self.losses = "  training loss " + " ".join(number(loss, 3) for loss in losses.tolist())

    def evaluating(self, done: int, total: int) -> None:
        self._line_a_minute(f"testing {done}/{total}")

    def evaluated(self, step: int, scores: Scores) -> None:
        values = " ".join(_quality(score, self.kind).replace(" ", "") for score in scores.heads)
        self.step = step
        self._line(f"test {self.kind} {values}{self.losses}")

    def _line_a_minute(self, text: str) -> None:
        if time.perf_counter() - self.printed > _SECONDS_BETWEEN_LINES:
            self._line(text)

    def _line(self, text: str) -> None:
        self.printed = time.perf_counter()
        self.say(f"step {self.step:>6}/{self.total}  {self.printed - self.began:7.1f} s  {text}")

    def finished(self, status: str) -> None:
        self.say(status)


def display_for(console: Console) -> LiveDisplay | PlainDisplay:
    """Choose the live table on a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
