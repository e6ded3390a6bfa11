"""The program of a pipeline: its settings, and the plan of its next steps, made before any tensor work and kept until a change.

strategy in force, M, heads, what is trained  ->  flows  ->  schedule, with the order and the placement
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index, is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from nwise.batchnorm import warn_of_microbatches
from nwise.by_stage import HeadDict
from nwise.checks import check_at_least, warn
from nwise.flow import Flows, flows_for
from nwise.microbatch import Weight
from nwise.program.everywhere import gather, score
from nwise.program.groups import groups
from nwise.program.summary import count, describe
from nwise.runtime.processes import Processes
from nwise.schedule.ages import strategy_ages
from nwise.schedule.named import Order, check_order, choose
from nwise.schedule.schedule import Schedule
from nwise.stage.stage import LossFn
from nwise.strategies import Strategy
from nwise.strategies import strategy as parse

if TYPE_CHECKING:
    from nwise.pipeline import Pipeline

# Arguments of `Pipeline` that are used only while it is made, so an assignment would change nothing.
_FIXED = ("loss_fn", "loss_fns", "recompute", "placement", "compress", "mesh", "timeout", "checks")


class Program(nn.Module):
    """The settings of a `Pipeline`, each checked when it is set, and what follows from them for the next step.

    Args:
        losses: the loss of each stage.
        strategy, num_microbatches, schedule, recompute, seed: as `Pipeline` takes them.
    """

    stages: nn.ModuleList
    heads: HeadDict
    processes: Processes
    loss_shares: Mapping[int, Weight]

    def __init__(
        self,
        losses: Sequence[LossFn],
        strategy: str | Strategy,
        num_microbatches: int,
        schedule: Order | None,
        recompute: bool,
        seed: int | None,
    ) -> None:
        super().__init__()
        self.loss_fns: tuple[LossFn, ...]
        vars(self)["loss_fns"] = tuple(losses)  # `__setattr__` refuses it, as it does the caller's
        self._strategy = parse(strategy)
        self._num_microbatches = num_microbatches
        self._order = None if schedule is None else check_order(schedule)
        self._recompute = recompute
        self.seed = torch.initial_seed() if seed is None else seed
        self.steps = 0
        self._last_ages: tuple[Sequence[int], int] = [0] * len(losses), num_microbatches
        self._prices: tuple[Any, ...] = ()  # costs by which orders are compared, and the memory of every rank
        self._shared: tuple[str, str] | None = None  # two names of a parameter that is in two places
        self._trainable: tuple[bool, ...] = ()
        self._sizes: list[list[int]] = []
        # The schedule, and what it was made for: first as objects, which are compared quickly, then as values.
        self._chosen: tuple[tuple[object, ...], object, Schedule] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED:
            raise AttributeError(
                f"`{name}` should stay as the pipeline was made with it. Found an assignment; make another "
                "pipeline of the same stages."
            )
        super().__setattr__(name, value)

    @property
    def num_stages(self) -> int:
        """Number of stages, A."""
        return len(self.loss_fns)

    @property
    def strategy(self) -> Strategy:
        """The strategy; may be set between two steps, also by its name."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str | Strategy) -> None:
        self._strategy = parse(strategy)
        self._warn_of_windows()

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per mini-batch, M; may be set between two steps."""
        return self._num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, num_microbatches: int) -> None:
        check_at_least(1, num_microbatches=num_microbatches)
        if num_microbatches > self._num_microbatches:
            warn_of_microbatches(self, num_microbatches)
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
    def schedule(self) -> Order:
        """The order of work; may be set between two steps."""
        # One process waits for no other, so the order with the least memory is the best.
        return self._order or ("depth-first" if self.processes.num_ranks == 1 else "best")

    @schedule.setter
    def schedule(self, schedule: Order) -> None:
        self._order = check_order(schedule)

    @property
    def credit(self) -> Tensor:
        """The credit matrix of the next step's first micro-batch, float64 of shape ``[A, A]``."""
        turn = self._strategy.turn(self._steps, 0)
        return self._strategy.credit(self.num_stages, turn).detach().to("cpu", torch.float64)

    @property
    def staleness(self) -> Tensor:
        """Updates between each stage's forward and update under the last step's strategy, ``[A, M]``."""
        ages, num_microbatches = self._last_ages
        return torch.tensor(ages)[:, None].expand(-1, num_microbatches)

    @property
    def here(self) -> list[int]:
        """Stages, heads and losses of this process, by index; all of them in one process."""
        return list(self.processes.here)

    def gather(self, values: Tensor | Mapping[int, float]) -> Tensor:
        """Return a number of every stage in all processes, ``[A]``, float64 on the CPU; all processes call it together.

        Afterwards nan means a head that did not run. It warns of a head that ran and has the loss nan.

        Args:
            values: the losses that `step` returned, or numbers by stage, of which those of `here` count.
        """
        return gather(self, values)

    def score(self, batches: Iterable[Any], metric: Callable[[Any, Any], Any]) -> Tensor:
        """Return the mean of a metric for every head, ``[A]``, in all processes; nan for a head that the strategy does not train.

        It runs in evaluation mode without gradients. All processes call it together, with the same batches.

        Args:
            batches: pairs of inputs and a target: a tensor, or a tuple or dictionary of inputs.
            metric: function of a head's output and the target, a mean over the samples.

        >>> import nwise
        >>> pipe = nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)])
        >>> batches = [(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))]
        >>> pipe.score(batches, lambda output, target: (output.argmax(1) == target).float().mean()).shape
        torch.Size([2])
        """
        return score(cast("Pipeline", self), batches, metric)

    def groups(
        self,
        network: Mapping[str, Any] | None = None,
        heads: Mapping[str, Any] | None = None,
        no_decay: Callable[[str, nn.Parameter], bool] | None = None,
    ) -> list[dict[str, Any]]:
        """Return groups of parameters for one optimizer; every process has the same number, some perhaps without parameters.

        Args:
            network: options of the network's parameters, such as ``{"lr": 0.1}``; default: leave them out.
            heads: options of the heads'; default: leave them out.
            no_decay: function of name and parameter: those for which it is true form a group of their own, with
                ``weight_decay=0``; default: none.

        >>> import nwise
        >>> pipe = nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)])
        >>> groups = pipe.groups(network={"lr": 0.1}, heads={"lr": 0.2}, no_decay=lambda name, p: p.dim() < 2)
        >>> [(len(group["params"]), group["lr"]) for group in groups]
        [(2, 0.1), (2, 0.1), (1, 0.2), (1, 0.2)]
        """
        parts = self.stages.named_parameters(), self.heads.named_parameters()
        return groups(*parts, network, heads, no_decay)

    def summary(self) -> str:
        """Describe the next step: numbers of parameters, the losses of each stage, and messages."""
        self._measure()
        sizes = [(main, head if k in self.heads else 0) for k, (main, head) in enumerate(self._sizes)]
        m = self._num_microbatches
        now = self._strategy
        title = f"{len(sizes)} stages, {now.name}, {m} micro-batch{'es' * (m > 1)}"
        return describe(title, sizes, self._flows()[self._steps % now.turns][0], self.credit)

    def needed_heads(self) -> set[int]:
        """Return the indices of the stages whose auxiliary heads run under the strategy."""
        return {k for batch in self._flows() for flow in batch for k in flow.heads} - {self.num_stages - 1}

    def _flows(self) -> Flows:
        """Return the flows of the strategy's cycle of mini-batches, ``[cycle][M]``."""
        size = self.num_stages
        present = [*(head is not None for head in self.heads.by_stage(size)[:-1]), True]
        return flows_for(self._strategy, size, self._num_microbatches, trainable=self._trainable, heads=present)

    def _next_schedule(self, structure: object) -> Schedule:
        """Return the schedule of the next step, that of the step before if nothing has changed.

        Args:
            structure: what it is made for; the same object as at the step before if no module or parameter has changed.

        Raises:
            ValueError: a head is missing, the order does not fit, a parameter in two places would have gradients of two ages, or
                a second forward would have later weights.
        """
        settings = self._strategy, self._num_microbatches, self._order, structure
        chosen = self._chosen
        if chosen is not None and all(map(is_, settings, chosen[0])):
            return chosen[2]
        flows = self._flows()
        key = self.schedule, flows, self.processes.placement, strategy_ages(self._strategy, flows)
        own = key, tuple(self.heads), self._shared
        if chosen is not None and chosen[1] == own:
            schedule = chosen[2]
        else:
            self._check_heads()
            schedule = choose(*key, *self._prices)
            if self._recompute:
                from nwise.schedule.recompute import recomputing  # most pipelines keep their graphs

                schedule = recomputing(schedule)
            if self._shared is not None and schedule.late_stages:
                raise ValueError(
                    f"Every parameter should belong to one stage or head under a delay. Found {self._shared[0]} again as "
                    f"{self._shared[1]}; use separate heads, as `nwise.heads.copied` makes."
                )
            if schedule.recomputed and schedule.late_stages and not schedule.ages.stashes:
                raise ValueError(
                    f"Stage {min(schedule.late_stages)} should keep its activations under Hogwild with the weights in memory, "
                    "because a second forward would have later weights. Found `recompute=True`; leave it out, or use "
                    "`nwise.Hogwild(weights='forward')`."
                )
            name = f"{self._strategy.name} with M = {self._num_microbatches}"
            self.processes.compare(name, (schedule.digest, flows, schedule.ages.stashes))
        self._chosen = settings, own, schedule
        return schedule

    def _set_trainable(self, here: Mapping[int, bool]) -> None:
        """Record whether each stage of this process has a parameter to train.

        Several processes exchange these facts only once, so the facts must not change.

        Raises:
            ValueError: a stage has become trainable, or has been frozen.
        """
        if not self._trainable or self.processes.size == 1:
            self._trainable = tuple(self.processes.by_stage(here))
        for k, learns in here.items():
            if self._trainable[k] != learns:
                raise ValueError(
                    f"Stage {k} should stay {'frozen' if learns else 'trainable'}, because the other processes rely on "
                    f"it. Found {'some parameters' if learns else 'no parameters'} to train; make a new pipeline."
                )

    def _measure(self) -> None:
        """Count the parameters of this process's stages and heads; the first call exchanges the numbers between all processes."""
        here = {k: [count(self.stages[k]), count(self.heads.get(k))] for k in self.processes.here}
        self._sizes = self._sizes or self.processes.by_stage(here)
        for k, sizes in here.items():
            self._sizes[k] = sizes

    def _check_heads(self) -> None:
        """Raise ValueError unless there is a head for every loss of the strategy but the last."""
        missing = [k for k in self.needed_heads() if k not in self.heads]
        if missing:
            plain = missing == [0] and self._strategy.name == "2-wise-mean"
            way = '`strategy="2-wise"`, which needs none there, or a head' if plain else "one"
            raise ValueError(
                f"`heads` should have a head for stage {min(missing)}, whose loss {self._strategy.name!r} needs. Found None; "
                f"pass {way}, as `nwise.heads` makes them."
            )

    def _warn_of_windows(self) -> None:
        """Warn of a window that is wider than the network."""
        if (text := self._strategy.caution(self.num_stages)) is not None:
            warn(text)
