"""How long a slow test and a slow run will take, said once, as soon as it can be known."""

from __future__ import annotations

import math
import time

from nwise.app.training import Trainer

_KNOWN = 5.0  # seconds of work after which the rest can be estimated
_SLOW_TEST, _SLOW_RUN = 60.0, 600.0  # seconds from which it is worth a line


def duration(seconds: float) -> str:
    """Round a duration for people.

    >>> duration(45), duration(372), duration(137_000), duration(10**6)
    ('45 seconds', '6 minutes', '38 hours', '12 days')
    """
    for unit, length, least in (("days", 86400, 3), ("hours", 3600, 2), ("minutes", 60, 2)):
        if seconds >= least * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


class Forecast:
    """Estimates the time of a test, and of all steps and tests, from those so far.

    Args:
        trainer: the trainer of the run, before its first step.
    """

    def __init__(self, trainer: Trainer) -> None:
        recipe = trainer.recipe
        self._num_steps = trainer.num_steps
        self._every = max(1, round(recipe.eval_every * trainer.steps_per_epoch))
        options = ["--max-steps 100", *(["--test-limit 500"] if hasattr(recipe.data, "test_limit") else [])]
        self._trial = " and ".join(f"`{option}`" for option in options)
        self._at = time.perf_counter()  # of the last step or test
        self._test = 0.0  # seconds of the last test
        self._seconds, self._steps = 0.0, -1  # of training; the first step also warms up
        self._said_test = self._said_run = False

    def evaluating(self, done: int, total: int) -> str | None:
        """Return a line if the test turns out to be slow; call it after each batch of a test."""
        seconds = time.perf_counter() - self._at
        whole = seconds / done * total
        if self._said_test or seconds < _KNOWN or whole < _SLOW_TEST:
            return None
        self._said_test = True
        tests = 1 + math.ceil(self._num_steps / self._every)
        return (
            f"A test takes about {duration(whole)} here, and the run has {tests:,}. For a trial, use a smaller recipe "
            f"(`nwise recipes`), or {self._trial}."
        )

    def evaluated(self) -> None:
        """Take the time of a test that is done."""
        now = time.perf_counter()
        self._test, self._at = now - self._at, now

    def stepped(self, step: int) -> str | None:
        """Return a line if the run turns out to be slow; call it after each step."""
        now = time.perf_counter()
        self._steps += 1
        self._seconds += now - self._at if self._steps else 0.0
        self._at = now
        if self._said_run or self._seconds < _KNOWN:
            return None
        self._said_run = True
        left = self._num_steps - step
        rest = left * self._seconds / self._steps + math.ceil(left / self._every) * self._test
        if rest < _SLOW_RUN:
            return None
        return f"The other {left:,} steps and their tests take about {duration(rest)} here. Ctrl-C stops with a checkpoint."
