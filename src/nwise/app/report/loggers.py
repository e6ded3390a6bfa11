"""Log losses and scores of every head to TensorBoard, Weights & Biases or trackio."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from nwise.app.recipes import to_json
from nwise.app.training import Callback, Scores, Trainer
from nwise.checks import needed

__all__ = ["Logger", "TensorBoard", "Tracker", "loggers"]

LoggerName = Literal["tensorboard", "wandb", "trackio"]


class Logger(Callback):
    """Base class of loggers; logs ``train_loss/stage_<k>``, ``test_loss/stage_<k>``, ``test_accuracy/stage_<k>``."""

    def started(self, trainer: Trainer) -> None:
        """Log as often as the run records."""
        self._every = trainer.recipe.log_every
        self.open(trainer)

    def open(self, trainer: Trainer) -> None:
        """Open a log of the run."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step."""
        raise NotImplementedError

    def logged(self, step: int, losses: Tensor) -> None:
        if step % self._every == 0:
            values = {f"train_loss/stage_{k}": loss for k, loss in enumerate(losses.tolist())}
            self.write(step, {name: loss for name, loss in values.items() if loss == loss})

    def evaluated(self, step: int, scores: Scores) -> None:
        values: dict[str, float] = {}
        for k, score in enumerate(scores.heads):
            if score is not None:
                values |= {f"test_loss/stage_{k}": score.loss, f"test_accuracy/stage_{k}": score.accuracy}
        self.write(step, values)


class TensorBoard(Logger):
    """Events in the run's folder, for ``tensorboard --logdir runs``.

    Raises:
        ImportError: the extra ``tensorboard`` is not installed.
    """

    def __init__(self) -> None:
        module = needed("torch.utils.tensorboard.writer", "tensorboard", "`--log-to tensorboard`")
        self._new_writer = module.SummaryWriter

    def open(self, trainer: Trainer) -> None:
        assert trainer.run is not None
        self._folder = str(trainer.run.folder)
        self._writer = self._new_writer(self._folder)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def resumed(self, step: int, changes: str) -> None:
        """Hide the events after the checkpoint."""
        self._writer.close()
        self._writer = self._new_writer(self._folder, purge_step=step + 1)

    def finished(self, status: str) -> None:
        self._writer.close()


class Tracker(Logger):
    """Weights & Biases, or trackio, which has the same functions; a resumed run is a new run there.

    Weights & Biases stays offline unless ``WANDB_MODE`` says otherwise; ``wandb sync <folder>/wandb/offline-*`` uploads a run.

    Raises:
        ImportError: the extra of that name is not installed.
    """

    def __init__(self, name: Literal["wandb", "trackio"]) -> None:
        self._name = name
        self._package = needed(name, name, f"`--log-to {name}`")

    def open(self, trainer: Trainer) -> None:
        assert trainer.run is not None
        folder = trainer.run.folder
        options: dict[str, Any] = {"project": "nwise", "name": folder.name, "config": to_json(trainer.recipe)}
        if self._name == "wandb":
            options |= {"dir": str(folder), "mode": os.environ.get("WANDB_MODE", "offline")}
        self._package.init(**options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._package.log(dict(values), step=step)

    def finished(self, status: str) -> None:
        self._package.finish()


def loggers(names: tuple[LoggerName, ...]) -> list[Logger]:
    """Make a logger for each name.

    Raises:
        ImportError: a package is missing; the message names the extra.
    """
    return [TensorBoard() if name == "tensorboard" else Tracker(name) for name in dict.fromkeys(names)]
