"""When a run's checkpoints are written, and what they are given beside the state of pipeline and optimizer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwise.pipeline import Pipeline
from nwise.training.checkpoint import layout_of
from nwise.training.checkpoints import Checkpoints, Found
from nwise.training.phase import Phase
from nwise.training.state import checked

_FACTS = {"rate": dict[str, int | float], "seconds": float, "best": float}


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """When checkpoints are written, and which stay. One is written after the last step, and when a run is stopped."""

    checkpoint_every: int = 0
    """Steps from one checkpoint to the next; 0 to go by `checkpoint_minutes` alone."""
    checkpoint_minutes: float = 10.0
    """Minutes after which there is one more; 0 for never."""
    keep: int = 2
    """How many of the newest stay."""
    keep_best: bool = False
    """Write and keep the one with the lowest test loss of the last head too."""
    checkpoint_async: bool = False
    """Write in the background, from a copy."""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0:
            raise ValueError(f"`checkpoint_every` should be at least 0. Found {self.checkpoint_every}.")
        if not 0 <= self.checkpoint_minutes < 1e6:
            raise ValueError(f"`checkpoint_minutes` should be from 0 to a million. Found {self.checkpoint_minutes}.")
        if self.keep < 1:
            raise ValueError(f"`keep` should be at least 1. Found {self.keep}.")


class Saver:
    """Writes a run's checkpoints, and goes on from them.

    Of several processes all of them make it, and call its methods at the same steps.

    Args:
        folder: of the checkpoints.
        pipe: whose state is saved.
        keeping: when, and which stay.
        facts: of the run, to be saved with it.

    Attributes:
        phase: the one that is in force.
        unwritten: why the newest checkpoint is missing, as on a full disk; empty if it is there.
    """

    def __init__(self, folder: Path, pipe: Pipeline, keeping: Keeping, facts: Callable[[], dict[str, Any]]) -> None:
        self.phase: Phase | None = None
        self.unwritten = ""
        self._pipe, self._keeping, self._facts = pipe, keeping, facts
        self._checkpoints = Checkpoints(
            folder,
            pipe,
            keep=keeping.keep,
            keep_best=keeping.keep_best,
            asynchronous=keeping.checkpoint_async,
        )
        self._best = float("inf")
        self._tested: tuple[int, float] | None = None  # step and loss of the last test
        self._written = -1  # step of the checkpoint that was written, or gone on from
        self._saved = time.monotonic()

    def newest(self) -> Found | None:
        """The checkpoint that is gone on from, if there is one; the pipeline is told its step.

        Raises:
            ValueError: all of them are damaged, or written by another program.
        """
        found = self._checkpoints.newest()
        if found is not None:
            checked(found.facts, found.folder, _FACTS)
            self._best = found.facts["best"]
            self._pipe.steps = found.facts["step"]
            if not any(name.startswith("heads.") for name in layout_of(found.folder)) and not self._pipe.needed_heads():
                self._pipe.discard_heads()  # as the run did
        return found

    def restore(self, found: Found, done: int) -> str:
        """Put the state back; what is not as it was saved, in one line.

        Args:
            found: the checkpoint.
            done: steps of the phase that are behind it; if there are none, its optimizer and rate are new.
        """
        phase = self.phase if done else None
        self._checkpoints.optimizer = None if phase is None else phase.optimizer
        said = self._checkpoints.restore(found)
        if phase is not None:
            phase.rate.restore(found.facts["rate"], done)
        self._written = self._pipe.steps
        return said.changes

    @property
    def is_late(self) -> bool:
        """Whether the minutes have passed after which there should be a checkpoint."""
        seconds = 60 * self._keeping.checkpoint_minutes
        return bool(seconds) and time.monotonic() - self._saved > seconds

    def stepped(self, step: int, loss: float | None, *, is_last: bool) -> None:
        """After each step: write a checkpoint if one is due.

        Args:
            step: steps done.
            loss: of the last head, if it has been tested after this step.
            is_last: whether the run ends here.
        """
        keeping = self._keeping
        better = keeping.keep_best and loss is not None and loss < self._best
        if loss is not None:
            self._tested, self._best = (step, loss), min(self._best, loss)
        if is_last:
            self.save(wait=True)
        elif better or (keeping.checkpoint_every and step % keeping.checkpoint_every == 0):
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint, unless there is one of this step; if that cannot be done, say so and go on.

        Args:
            wait: until it is there, also if it is written in the background.

        Raises:
            nwise.training.NotFiniteError: a parameter is not finite, and the policy is to stop.
        """
        assert self.phase is not None
        self._saved = time.monotonic()
        try:
            if self._written != self._pipe.steps:
                self._write(self.phase)
                self._written = self._pipe.steps
            if wait:
                self._checkpoints.wait()
        except OSError as error:
            self._written = -1
            self.unwritten = str(error)
            if self._pipe.team is None or not self._pipe.team.world.rank:
                warnings.warn(f"{error} Training goes on; the checkpoint before it stays.", stacklevel=2)
        else:
            self.unwritten = ""

    def _write(self, phase: Phase) -> None:
        phase.finite.check_parameters()
        while self._pipe.drain():  # Hogwild's gradients under way have no place in a checkpoint
            phase.update()
        loss = self._tested[1] if self._tested is not None and self._tested[0] == self._pipe.steps else None
        self._checkpoints.optimizer = phase.optimizer
        self._checkpoints.save(loss=loss, best=self._best, rate=phase.rate.state(), **self._facts())
