"""When a run writes a checkpoint or stops, and how it resumes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwise.app.training.optimizers import Phase
from nwise.checkpoint import CheckpointInfo, Checkpoints, check_facts
from nwise.checks import check_at_least
from nwise.pipeline import Pipeline
from nwise.runtime.processes import Processes

_RUN_FACTS = {"rate": dict[str, float], "seconds": float, "config": dict[str, object]}


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """Policy of a run's checkpoints: when to write one, and which to keep. The last step and a stopped run always write one."""

    checkpoint_every: int = 0
    """Steps between two checkpoints; 0 to go by `checkpoint_minutes` alone."""
    checkpoint_minutes: float = 10.0
    """Minutes between two checkpoints; 0 for never."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    checkpoint_async: bool = False
    """Write in the background, from a copy."""

    def __post_init__(self) -> None:
        check_at_least(0, checkpoint_every=self.checkpoint_every)
        if not 0 <= self.checkpoint_minutes < 1e6:
            raise ValueError(f"`checkpoint_minutes` should be from 0 to a million. Found {self.checkpoint_minutes}.")
        check_at_least(1, keep=self.keep)


class Requests:
    """What a run is asked to do, such as to stop; all processes do it at the same call of `due`.

    They call it before each step, and after each batch of an evaluation. About once a second they tell one another what each was
    asked, and wait for each other.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._asked: list[str] = []
        self._calls = 0
        self._next = 1  # the call at which the processes tell one another again
        self._told = 0, time.monotonic()  # the call at which they last did, and when it ended

    def ask(self, what: str) -> None:
        """Let `due` return a word in all processes, soon; safe in a signal handler."""
        if what not in self._asked:
            self._asked.append(what)

    def due(self) -> list[str]:
        """Return the words that any process was asked, the same in all processes."""
        self._calls += 1
        if self._processes.size > 1 and self._calls < self._next:
            return []
        asked = self._asked
        self._asked = []
        if self._processes.size == 1:
            return asked
        (call, end) = self._told
        now = time.monotonic()
        told = self._processes.gather("requests", [asked, (now - end) / (self._calls - call)])
        # Each rank has measured other steps, so rank 0's decide when a second will have passed.
        self._next = self._calls + max(1, int(1 / max(told[0][1], 1e-3)))
        self._told = self._calls, time.monotonic()
        return sorted({what for words, _ in told for what in words})


class Saver:
    """Writes a training run's checkpoints by a policy, and resumes from them; all processes call it at the same steps.

    Attributes:
        phase: the present phase of training.
        unwritten: why the newest checkpoint is missing, e.g. on a full disk; empty if it is there.
    """

    def __init__(
        self, folder: Path, pipe: Pipeline, policy: CheckpointPolicy, facts: Callable[[], dict[str, Any]]
    ) -> None:
        self.phase: Phase | None = None
        self.unwritten = ""
        self._pipe = pipe
        self._policy = policy
        self._facts = facts
        background = policy.checkpoint_async
        self._checkpoints = Checkpoints(folder, pipe, keep=policy.keep, asynchronous=background)
        self._written = -1  # step of the checkpoint on the disk that is the present state
        self._saved = time.monotonic()

    def newest(self) -> CheckpointInfo | None:
        """Return the checkpoint to resume from, if there is one, and set the pipeline's step."""
        info = self._checkpoints.newest()
        if info is not None:
            check_facts(info.facts, info.folder, _RUN_FACTS)
            self._pipe.steps = info.facts["step"]
        return info

    def restore(self, info: CheckpointInfo, done: int, before: str | None, now: str) -> str:
        """Load a checkpoint and return the differences from the saved state, in one line.

        If no steps of the phase are done, its optimizer and learning rate start fresh. The checkpoint knows the strategy of its
        step; the differences have those of all steps, `before` and `now`.
        """
        phase = self.phase if done else None
        self._checkpoints.optimizer = None if phase is None else phase.optimizer
        resumed = self._checkpoints.restore(info, settings=False)  # the configuration has them, perhaps others now
        if phase is not None:
            phase.rate.restore(info.facts["rate"], done)
        self._written = -1 if info.facts.get("untested") else self._pipe.steps
        others = [part for part in resumed.parts if not part.startswith("strategy ")]
        return "; ".join([f"strategy {before} -> {now}"] * (before != now) + others)

    @property
    def is_late(self) -> bool:
        """Whether the policy's minutes have passed since the last checkpoint."""
        seconds = 60 * self._policy.checkpoint_minutes
        return bool(seconds) and time.monotonic() - self._saved > seconds

    def stepped(self, *, is_last: bool) -> None:
        """Write a checkpoint after a step if one is due."""
        every = self._policy.checkpoint_every
        if is_last:
            self.save(wait=True)
        elif every and self._pipe.steps % every == 0:
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """Write a checkpoint, unless there is one of this step; warn if it cannot be written."""
        assert self.phase is not None
        self._saved = time.monotonic()
        try:
            if self._written != self._pipe.steps:
                self.phase.guard.check_parameters()
                self._checkpoints.optimizer = self.phase.optimizer
                rate = self.phase.rate.state()
                self._checkpoints.save(rate=rate, **self._facts())
                self._written = self._pipe.steps
            if wait:
                self._checkpoints.wait()
        except OSError as error:
            self._written = -1
            self.unwritten = str(error)
            if self._pipe.processes.is_first:
                warnings.warn(f"{error}. Training continues; the previous checkpoint stays.", stacklevel=2)
        else:
            self.unwritten = ""
