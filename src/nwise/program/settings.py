"""What may be set between two steps of a pipeline: strategy, number of micro-batches, order of work."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor, nn

from nwise.batchnorm import warn_of_microbatches
from nwise.checks import check_at_least
from nwise.program.arguments import warn_of_wide_windows
from nwise.schedule.named import Order, check_order
from nwise.stage.stage import LossFn, Stage
from nwise.strategies import Strategy
from nwise.strategies import strategy as parse


class Settings(nn.Module):
    """The settings of a `Pipeline`, each checked when it is set; the next step uses the new value."""

    _stages: list[Stage]
    _strategy: Strategy
    _num_microbatches: int
    _order: Order
    _seed: int
    _steps: int
    _last_ages: tuple[Sequence[int], int]
    _losses: tuple[LossFn, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, A."""
        return len(self._stages)

    @property
    def loss_fns(self) -> tuple[LossFn, ...]:
        """The loss of each stage; always those with which the pipeline was made."""
        return self._losses

    @loss_fns.setter
    def loss_fns(self, losses: object) -> None:
        raise AttributeError(
            "`loss_fns` should stay the losses with which the pipeline was made. Found an assignment; make another pipeline of "
            "the same stages, or set an attribute of the loss, such as its `weight`."
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy; may be set between two steps, also by its name."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str | Strategy) -> None:
        self._strategy = parse(strategy)
        warn_of_wide_windows(self._strategy, self.num_stages, stacklevel=3)  # through nn.Module

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per mini-batch, M; may be set between two steps."""
        return self._num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, num_microbatches: int) -> None:
        check_at_least(1, num_microbatches=num_microbatches)
        if num_microbatches > self._num_microbatches:
            warn_of_microbatches(self, num_microbatches, stacklevel=3)
        self._num_microbatches = int(num_microbatches)

    @property
    def seed(self) -> int:
        """The seed of random numbers in `step`; may be set between two steps, also to a number of NumPy's."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = index(seed)

    @property
    def steps(self) -> int:
        """Number of finished mini-batches; may be set between two steps, also to a tensor from a file."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = index(steps)

    @property
    def staleness(self) -> Tensor:
        """Updates between each stage's forward and update under the last step's strategy, ``[A, M]``."""
        ages, num_microbatches = self._last_ages
        return torch.tensor(ages)[:, None].expand(-1, num_microbatches)

    @property
    def schedule(self) -> Order:
        """The order of work; may be set between two steps."""
        return self._order

    @schedule.setter
    def schedule(self, schedule: Order) -> None:
        self._order = check_order(schedule)
