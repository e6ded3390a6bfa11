"""What watches a run of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from nwise.app.training.evaluation import Scores

if TYPE_CHECKING:
    from nwise.app.training.trainer import Trainer


class Callback:
    """Base class of callbacks, such as `nwise.app.report.display`; every method does nothing."""

    def started(self, trainer: Trainer) -> None:
        """Called before the first step."""

    def stepped(self, step: int, losses: Tensor) -> None:
        """Called after each step; with several processes the losses are of the last `logged` step."""

    def logged(self, step: int, losses: Tensor) -> None:
        """Called with the losses of every `log_every`-th step, of the last step and of a step that is tested, in order.

        With several processes it is called later than `stepped`, but before the step's test.
        """

    def evaluated(self, step: int, scores: Scores) -> None:
        """Called after each evaluation."""

    def evaluating(self, done: int, total: int) -> None:
        """Called after each batch of an evaluation."""

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint should keep for `restore`, as JSON; None for nothing."""
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Called with the `state` of a checkpoint before `resumed`, if it has one of this class."""

    def resumed(self, step: int, changes: str) -> None:
        """Called after a checkpoint was loaded, with the differences from the saved state."""

    def finished(self, status: str) -> None:
        """Called after the last step, and after an interruption or an error."""
