"""A log of any training loop, in the form that `nwise report` reads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import torch
from torch import Tensor

import nwise
from nwise.app.recipes import joined
from nwise.app.recipes.loop import OwnLoop, Quality
from nwise.app.training.log import StepLog, TimelineRecorder, check_timeline
from nwise.app.training.run import Run
from nwise.checks import check_at_least
from nwise.pipeline import Pipeline

__all__ = ["Log"]


class Log:
    """Writes losses, scores and learning rates of a loop into a folder, as `nwise train` does.

    All processes make it and call it together; the first one writes. A folder with a log is continued: records of steps that the
    pipeline has not made, as after a resume from an older checkpoint, are removed.

    Args:
        folder: the run's folder, new or with an earlier log.
        pipe: the pipeline, after a resume if there is one.
        batch_size: number of samples in a mini-batch.
        quality: the score of the report's overview; default: ``"loss"``.
        every: number of steps from one record of losses to the next; default 10.
        timeline: number of steps whose actions are recorded, from the second step on; several processes; default 0: none.

    Raises:
        ValueError: another process writes to the folder, it holds a run of `nwise train`, an option is invalid, or the strategy
            has no name by which `nwise.strategy` finds it.

    >>> import tempfile
    >>> from torch import nn
    >>> pipe = nwise.Pipeline([nn.Linear(4, 4), nn.Linear(4, 2)], strategy="end-to-end")
    >>> with tempfile.TemporaryDirectory() as parent, Log(f"{parent}/mine", pipe, batch_size=8, every=1) as log:
    ...     losses = pipe.step(torch.randn(8, 4), target=torch.zeros(8, dtype=torch.long))
    ...     log.step(losses, lr=0.1)
    ...     log.test(loss=losses)
    ...     [record["kind"] for record in log.records()]
    ['train', 'test']
    """

    def __init__(
        self,
        folder: str | Path,
        pipe: Pipeline,
        *,
        batch_size: int,
        quality: Quality = "loss",
        every: int = 10,
        timeline: int = 0,
    ) -> None:
        check_at_least(1, batch_size=batch_size, every=every)
        check_at_least(0, timeline=timeline)
        if quality not in get_args(Quality):
            raise ValueError(f"`quality` should be one of {', '.join(get_args(Quality))}. Found {quality!r}.")
        check_timeline(pipe.processes, timeline)
        _check_named(pipe)
        self._folder = Path(folder)
        self._pipe = pipe
        self._batch_size = batch_size
        self._quality = quality
        self._every = every
        self._phases = [(0, pipe.strategy)]
        self._steps = StepLog(pipe)
        self._held = ExitStack()
        self._run = Run(self._folder) if pipe.processes.is_first else None
        self._last: dict[str, Any] = {}  # the record from which samples and seconds count on
        if self._run is not None:
            self._held.enter_context(self._run.locked())
            self._last = self._open(self._run)
        self._began = time.perf_counter() - self._last.get("seconds", 0.0)
        self._timeline: TimelineRecorder | None = None
        if timeline:
            begin = pipe.steps + 1
            self._timeline = TimelineRecorder(pipe, pipe.strategy.name, begin, begin + timeline)

    def _open(self, run: Run) -> dict[str, Any]:
        """Begin the log, or continue the one of the folder; return its last record."""
        if not (run.folder / "run.json").exists():
            run.begin(self._described, self._pipe.seed)
            return {"step": self._pipe.steps, "samples": 0}
        before = run.described
        if not isinstance(before, OwnLoop):
            raise ValueError(
                f"{run.folder} should be a new folder, or one with a log. Found a run of `nwise train`; give another folder."
            )
        run.rewind(self._pipe.steps)
        self._phases = [one for one in before.phases(1) if one[0] < self._pipe.steps] or self._phases
        self._follow(self._pipe.steps)
        run.resumed(self._described, self._pipe.steps, "")
        records = run.metrics()
        return records[-1] if records else {}

    def step(self, losses: Tensor, lr: float = float("nan")) -> None:
        """Note a step that has just been made; call it after each.

        Args:
            losses: what `Pipeline.step` returned, ``[A]``.
            lr: the learning rate; default: none.
        """
        self._check_shape(losses=losses)
        if self._follow(self._pipe.steps - 1) and self._run is not None:
            self._run.describe(self._described)
        if self._pipe.steps % self._every == 0:
            self._steps.put(self._pipe.steps, losses, float(lr), self._seconds)
        self._write()

    def test(self, loss: Tensor, accuracy: Tensor | None = None) -> None:
        """Note the scores of all heads at this step.

        Args:
            loss: a number for each stage, ``[A]``, such as `Pipeline.score` returns; nan for heads without one.
            accuracy: the same, from 0 to 1; default: none.
        """
        accuracy = torch.full_like(loss, torch.nan) if accuracy is None else accuracy
        self._check_shape(loss=loss, accuracy=accuracy)
        self._write(wait=True)
        scores = {"loss": loss, "accuracy": accuracy}
        self._record("test", self._pipe.steps, {name: values.tolist() for name, values in scores.items()})

    def records(self) -> list[dict[str, Any]]:
        """Return all records so far, in the first process; none elsewhere."""
        self._write(wait=True)
        return [] if self._run is None else self._run.metrics()

    def close(self, status: str = "done") -> None:
        """Write what is left, and end the log; all processes call it together.

        Args:
            status: ``"done"`` (default), ``"stopped"`` or ``"failed"``.
        """
        self._write(wait=True)
        if self._timeline is not None:
            self._timeline.save(self._run)
        if self._run is not None:
            self._run.finish(status)
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # Another process may have stopped, so this one does not wait.
        if self._run is not None:
            self._run.finish("failed")
        self._held.close()

    @property
    def _seconds(self) -> float:
        return round(time.perf_counter() - self._began, 3)

    def _check_shape(self, **values: Tensor) -> None:
        for name, value in values.items():
            size = self._pipe.num_stages
            if value.shape != (size,):
                raise ValueError(
                    f"`{name}` should have a number for each of the {size} stages. Found shape {list(value.shape)}."
                )

    def _follow(self, first: int) -> bool:
        """Return whether another strategy makes the steps from the `first` on, and note it."""
        rule = self._pipe.strategy
        if rule.name == self._phases[-1][1].name:
            return False
        _check_named(self._pipe)
        self._phases = [*(one for one in self._phases if one[0] < first), (first, rule)]
        return True

    @property
    def _described(self) -> OwnLoop:
        """The configuration, with all strategies so far."""
        order = self._pipe.schedule
        return OwnLoop(
            name=self._folder.name,
            strategy=joined(tuple(self._phases)),
            heads=self._phases[-1][1].heads,
            microbatches=self._pipe.num_microbatches,
            batch_size=self._batch_size,
            schedule=order if isinstance(order, str) else order.order,
            quality=self._quality,
            seed=self._pipe.seed,
        )

    def _write(self, *, wait: bool = False) -> None:
        for step, values in self._steps.take(wait=wait):
            self._record("train", step, values)

    def _record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            steps = step - self._last.get("step", 0)
            samples = self._last.get("samples", 0) + steps * self._batch_size
            self._run.record(kind=kind, step=step, **{"samples": samples, "seconds": self._seconds, **values})


def _check_named(pipe: Pipeline) -> None:
    """Raise ValueError unless the strategy's name says what it is."""
    try:
        same = nwise.strategy(pipe.strategy.name, heads=pipe.strategy.heads) == pipe.strategy
    except ValueError:
        same = False
    if not same:
        raise ValueError(
            f"The strategy of a log should have a name that `nwise.strategy` knows. Found {pipe.strategy.name!r}; give its "
            "matrix to `nwise.Credit`."
        )
