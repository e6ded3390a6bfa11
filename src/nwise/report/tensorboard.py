"""Losses and scores of every head as TensorBoard events."""

from __future__ import annotations

from torch import Tensor

from nwise.training import Scores, Trainer, Watcher


class TensorBoard(Watcher):
    """Writes events into the run's folder, for ``tensorboard --logdir runs``.

    Raises:
        ImportError: the extra ``tensorboard`` is not installed.
    """

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "`--tensorboard` needs TensorBoard; install it with `pip install 'nwise[tensorboard]'`."
            ) from error
        self._new_writer = SummaryWriter

    def started(self, trainer: Trainer) -> None:
        """Open the file, and take over the interval of the records."""
        assert trainer.run is not None
        self._folder = str(trainer.run.folder)
        self._writer = self._new_writer(self._folder)
        self._every = trainer.recipe.log_every

    def stepped(self, step: int, losses: Tensor) -> None:
        """Training losses, as often as they are recorded."""
        if step % self._every == 0:
            for k, loss in enumerate(losses.tolist()):
                if loss == loss:
                    self._writer.add_scalar(f"train_loss/stage_{k}", loss, step)

    def evaluated(self, step: int, scores: Scores) -> None:
        """Test losses and accuracies."""
        for k, score in enumerate(scores.heads):
            if score is not None:
                self._writer.add_scalar(f"test_loss/stage_{k}", score.loss, step)
                self._writer.add_scalar(f"test_accuracy/stage_{k}", score.accuracy, step)

    def resumed(self, step: int, changes: str) -> None:
        """What came after the checkpoint is not shown any more."""
        del changes
        self._writer.close()
        self._writer = self._new_writer(self._folder, purge_step=step + 1)

    def finished(self, status: str) -> None:
        """Close the file."""
        del status
        self._writer.close()
