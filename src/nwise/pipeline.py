"""The pipeline: a network cut into stages and trained by a strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nwise._arguments import Given, HeadDict, check_target, checked, refuse_sharing
from nwise._compiled import allow_several_passes
from nwise._errors import check_at_least
from nwise._inference import Outputs, all_outputs, head_output
from nwise._snapshot import Snapshot
from nwise._summary import describe
from nwise.batchnorm import warn_of_microbatches
from nwise.flow import Flow, flows_for
from nwise.hogwild import Past
from nwise.losses import Divergence, Losses
from nwise.microbatch import Batch, Tensors, Terms, as_tuple, cut
from nwise.randomness import derive, preserved
from nwise.runtime.team import Team, build_modules
from nwise.runtime.worker import execute
from nwise.runtime.world import launched
from nwise.schedule.actions import Action
from nwise.schedule.choose import Order, check_order, choose
from nwise.schedule.lists import Schedule
from nwise.stage import LossFn, Stage
from nwise.strategies import Strategy
from nwise.strategies import strategy as parse


class Pipeline(nn.Module):
    """A network in stages, each with a head, trained by a strategy.

    Args:
        stages: the main network, in order, as modules or functions that make them. A stage takes the output of the one before
            it, a tensor or a tuple of tensors (passed as several arguments); floating-point ones carry gradients. A function
            is called under its own random numbers, and only in the process that holds the stage.
        heads: auxiliary networks for every stage but the last, None for a stage without one.
        loss_fn: ``loss_fn(head_output, target)``, the *mean* over the samples of a micro-batch: one for all
            losses, or a list with one per stage.
        strategy: a name (see `nwise.strategy`) or a `Strategy`.
        num_microbatches: number of micro-batches per mini-batch, M.
        schedule: order of work, one of `nwise.schedule.choose.ORDERS` or a custom schedule; default: ``"best"`` with
            several processes, and with one ``"depth-first"``, which needs the least memory.
        recompute: whether to keep only the input of each stage's forward and run the forward once more before the first
            backward pass (activation checkpointing with one recomputation, however many passes).
        seed: seed of dropout and other random numbers in `step`, which are functions of (seed, stage,
            step, micro-batch); default: `torch.initial_seed()`.
        mesh: processes under ``torchrun``, dimensions ``("pp", "dp", "tp")``; default: one process per stage and replica.
        timeout: time limit of each action of a process, in seconds; default: ``NWISE_TIMEOUT``, else 300.

    Between two steps you may set `strategy`, `num_microbatches`, `schedule`, `seed` and `steps`, replace stages and heads, and
    freeze parameters. The next step uses the new values.

    Attributes:
        steps: number of finished mini-batches, used by `Switch`, rotating strategies and dropout. Set it when you
            resume, because the state dict does not contain it.
        staleness: ``[A, M]``, updates between each stage's forward and update in the last step.
        microbatch_losses: losses of the last step in this process, by (stage, micro-batch).
        team: the processes (`nwise.runtime.team.Team`); None if there is only one.
        on_action: None, or a function called with each `Action` that `step` has executed.
        warns_of_divergence: whether `step` warns, once, of a loss that is not finite.

    Raises:
        ValueError, TypeError: the arguments do not fit together; raised before any tensor work.

    >>> import nwise
    >>> stages = [nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)]
    >>> pipe = nwise.Pipeline(stages, [nn.Linear(8, 3), nn.Linear(8, 3)], nn.functional.cross_entropy, "2-wise")
    >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    >>> losses = pipe.step(torch.randn(5, 4), target=torch.tensor([0, 1, 2, 0, 1]))
    >>> optimizer.step(); optimizer.zero_grad()
    >>> losses.isnan().tolist()
    [True, False, False]
    """

    def __init__(
        self,
        stages: Sequence[Given],
        heads: Sequence[Given | None] | None = None,
        loss_fn: LossFn | Sequence[LossFn] = nn.functional.cross_entropy,
        strategy: str | Strategy = "2-wise",
        num_microbatches: int = 1,
        *,
        schedule: Order | None = None,
        recompute: bool = False,
        seed: int | None = None,
        mesh: DeviceMesh | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        given, given_heads, losses = checked(list(stages), heads, loss_fn)
        check_at_least(1, num_microbatches=num_microbatches)
        schedule = None if schedule is None else check_order(schedule)
        rule = parse(strategy)
        self.team = Team(len(given), mesh, timeout) if launched() else None
        self.seed = torch.initial_seed() if seed is None else seed
        mains = [main for main in build_modules(given, "stage", self.team, self.seed) if main is not None]
        sides = build_modules(given_heads, "head", self.team, self.seed)
        refuse_sharing(mains, sides)
        self.stages = nn.ModuleList(mains)
        self.heads = HeadDict({str(k): head for k, head in enumerate(sides) if head is not None})
        self._strategy = rule
        # One process waits for no other, so the order with the least memory is the best.
        self._order: Order = schedule or ("depth-first" if self.team is None else "best")
        self._num_microbatches = num_microbatches
        self.steps = 0
        self.staleness = torch.zeros(len(mains), num_microbatches, dtype=torch.int64)
        self.microbatch_losses: Mapping[tuple[int, int], Tensor] = {}
        self.on_action: Callable[[Action], None] | None = None
        self.warns_of_divergence = True
        self._divergence = Divergence()
        self._stages = [Stage(k, mains[k], sides[k], losses[k], recompute) for k in range(len(mains))]
        terms = {loss: Terms(loss) for loss in dict.fromkeys(losses)}
        self._terms = [terms[loss] for loss in losses]
        self._chosen: tuple[Order, Schedule] | None = None
        self._past = Past()
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]
        self._trainable: tuple[bool, ...] = ()
        self._warn_of_wide_windows()
        self._survey()
        self._check_heads(self._flows_from(0))
        warn_of_microbatches(self, num_microbatches)
        if self.team is not None:
            self.team.world.agree("strategy", self.strategy.name)
            self.team.world.agree("num_microbatches", num_microbatches)
            self.team.world.agree("seed", self.seed)
            if any(rule.in_force(first).asynchronous for first, _ in rule.phases()):
                self.team.refuse_replicas()

    @property
    def strategy(self) -> Strategy:
        """The strategy; may be set between two steps, also by its name."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str | Strategy) -> None:
        self._strategy = parse(strategy)
        self._warn_of_wide_windows()

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per mini-batch, M; may be set between two steps."""
        return self._num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, num_microbatches: int) -> None:
        check_at_least(1, num_microbatches=num_microbatches)
        self._num_microbatches = num_microbatches

    @property
    def schedule(self) -> Order:
        """The order of work; may be set between two steps."""
        return self._order

    @schedule.setter
    def schedule(self, schedule: Order) -> None:
        self._order = check_order(schedule)

    @property
    def num_stages(self) -> int:
        """Number of stages, A."""
        return len(self._stages)

    @property
    def credit(self) -> Tensor:
        """The credit matrix of the next step's first micro-batch, float64 of shape ``[A, A]``."""
        now = self.strategy.in_force(self.steps)
        return now.credit(self.num_stages, now.turn(self.steps, 0))

    def main_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the main network."""
        return self.stages.parameters()

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the heads."""
        return self.heads.parameters()

    def summary(self) -> str:
        """Describe the next step: parameters, the losses of each stage, messages; all processes must call it."""
        here = [
            [sum(p.numel() for p in part.parameters()) for part in (stage, self.heads.get(k) or nn.Module())]
            for k, stage in enumerate(self.stages)
        ]
        counts = here if self.team is None else self.team.facts(here[self.team.stage])
        now = self.strategy.in_force(self.steps)
        plural = "es" if self.num_microbatches > 1 else ""
        title = f"{self.num_stages} stages, {self.strategy.name}, {self.num_microbatches} micro-batch{plural}"
        return describe(title, counts, self._flows(now)[self.steps % now.turns][0], self.credit)

    def forward(self, *inputs: Tensor) -> Any:
        """Run the main network; return the last stage's output, None in processes that do not hold that stage."""
        return self.head_outputs(*inputs, only=())[-1]

    def head_outputs(self, *inputs: Tensor, only: Collection[int] | None = None) -> Outputs:
        """Run the network and the heads; return one output per stage, None without a head. The last is `forward`'s.

        Args:
            inputs: inputs of the first stage.
            only: indices of the stages whose heads run; default: all.
        """
        if self.team is None:
            return all_outputs(list(self.stages), self.heads, inputs, only)
        return self._outputs_here(inputs, only)

    def _outputs_here(self, inputs: Tensors, only: Collection[int] | None) -> Outputs:
        """Return the outputs, None for stages of other processes."""
        assert self.team is not None
        k = self.team.stage
        outputs: Outputs = [None] * self.num_stages

        def call(hidden: Tensors) -> Tensors:
            output = self.stages[k](*hidden)
            made = as_tuple(output, f"The output of stage {k}")
            outputs[k] = output if k == self.num_stages - 1 else head_output(self.heads, k, made, only)
            return made

        self.team.infer(self._stages[k], as_tuple(inputs, "The input"), self.steps, call)
        return outputs

    def step(self, *inputs: Tensor, target: Tensor | Tensors | None = None) -> Losses:
        """Run one mini-batch and add every gradient to ``.grad``; the optimizer makes the update.

        ``grad(theta_k) = sum_j C[j, k] dL_j/d(theta_k)`` and ``grad(head_j) = dL_j/d(head_j)``, with
        ``L_j`` the mean over the mini-batch, whatever the number of micro-batches.

        A step that raises restores every ``.grad`` and the statistics of batch norm, for which it keeps a copy of earlier
        gradients. With several processes an error ends all of them.

        Args:
            inputs: inputs of the first stage, samples along dimension 0.
            target: the second argument of every loss, samples along dimension 0; default: none.

        Returns:
            The losses, detached, ``[A]``; nan if a head did not run or ran in another process.

        Raises:
            ValueError, TypeError: the batch does not fit the pipeline.
            nwise.runtime.watch.RankError: a rank failed.
        """
        check_target(len(inputs), target, self.stages[0])
        replica, num_replicas = (0, 1) if self.team is None else (self.team.world.replica, self.team.world.num_replicas)
        batch = cut(
            inputs,
            target,
            self.num_microbatches,
            self._terms,
            seed=derive(self.seed, self.steps),
            replica=replica,
            num_replicas=num_replicas,
        )
        if self.team is not None:
            self.team.same_target(target)
        modules = self._survey()
        now = self.strategy.in_force(self.steps)
        schedule, turn = self._schedule_for(now), self.steps % now.turns
        self._check_heads(schedule.flows[turn])
        before = Snapshot(modules, [p for stage in self._stages for p in stage.learns + stage.head_learns])
        try:
            with preserved(self._device(inputs[0])):
                losses, ages = self._run(schedule, turn, batch, stale=now.asynchronous)
            before.commit()
        except BaseException:
            before.restore()
            raise
        self.staleness, self.microbatch_losses = ages, batch.losses
        self.steps += 1
        result = Losses(losses, {k for k, _ in batch.losses}, None if self.team is None else [self.team.stage])
        if self.warns_of_divergence:
            self._divergence.look(self.steps - 1, result)
        return result

    def _run(self, schedule: Schedule, turn: int, batch: Batch, *, stale: bool) -> tuple[Tensor, Tensor]:
        """Execute a mini-batch; return the losses ``[A]`` and the staleness ``[A, M]``."""
        ages = torch.zeros(self.num_stages, self.num_microbatches, dtype=torch.int64)
        if not stale:
            self.forget_versions()
        if self.team is not None and stale:
            here = self.team.stage
            losses, age = self.team.stale_step(self._stages[here], schedule.flows, turn, batch, self.steps)
            ages[here] = age
        elif self.team is not None:
            losses = self.team.step(self._stages[self.team.stage], schedule, turn, batch, self.steps, self.on_action)
        else:
            if stale:
                versions, old = self._past.versions(self.stages, schedule.flows, schedule.flows[turn])
                batch, ages = replace(batch, versions=versions), torch.tensor(old)
            order = schedule.one_process_turns[turn]
            losses = execute(self._stages, order, schedule.flows[turn], batch, self.on_action)
        return losses, ages

    def drain(self) -> bool:
        """Add the gradients of the oldest mini-batch that no update has used yet, under Hogwild with several processes.

        After the last step, call it and update until it returns False.

        Returns:
            Whether there was such a mini-batch; otherwise nothing has been added.
        """
        with preserved(self._device()):
            return self.team is not None and self.team.drain()

    def needed_heads(self, *, later: bool = True) -> set[int]:
        """Return the indices of the stages whose auxiliary heads run.

        Args:
            later: whether to include all steps from the next one on, after switches of the strategy too (the default),
                or only the strategy of the last step.
        """
        now = self.strategy.in_force(max(0, self.steps - 1))
        flows = self._flows_from(self.steps) if later else [flow for turn in self._flows(now) for flow in turn]
        return {k for flow in flows for k in flow.heads} - {self.num_stages - 1}

    def forget_versions(self) -> None:
        """Drop the old parameters that Hogwild keeps, as after loading new ones."""
        self._past = Past()

    def discard_heads(self) -> None:
        """Drop all heads once no later step needs one, as the paper does when it switches to end-to-end.

        Raises:
            ValueError: a later step still needs one of them.
        """
        needed = self.needed_heads()
        if needed:
            raise ValueError(
                f"Heads can be discarded once no loss needs them. Found that {self.strategy.name} needs the heads of stages "
                f"{sorted(needed)} from step {self.steps} on."
            )
        self.heads.clear()
        self._survey()

    def _survey(self) -> list[nn.Module]:
        """Pick up what the caller changed since the last step; return all modules of all stages and heads."""
        heads = self.heads.by_stage(self.num_stages)
        stages = zip(self._stages, self.stages, heads, strict=True)
        modules = [module for stage, main, head in stages for module in stage.survey(main, head)]
        self._trainable = self._known_trainable()
        allow_several_passes(modules)
        return modules

    def _device(self, like: Tensor | None = None) -> torch.device | None:
        return next((p.device for p in self.parameters()), None if like is None else like.device)

    def _known_trainable(self) -> tuple[bool, ...]:
        """Tell for each stage whether it has a parameter to train; processes exchange this only once."""
        trainable = tuple(bool(stage.learns) for stage in self._stages)
        if self.team is None:
            return trainable
        here = trainable[self.team.stage]
        if not self._trainable:
            return tuple(self.team.facts(here))
        if self._trainable[self.team.stage] != here:
            raise ValueError(
                f"Stage {self.team.stage} should have parameters to train as it had when the pipeline was made, because the "
                f"other processes rely on it. Found {'some' if here else 'none'}; make a new pipeline."
            )
        return self._trainable

    def _flows(self, now: Strategy) -> tuple[tuple[Flow, ...], ...]:
        """Return the flows of a strategy's cycle of mini-batches, ``[turns][M]``."""
        heads = [head is not None for head in self.heads.by_stage(self.num_stages - 1)] + [True]
        return flows_for(now, self.num_stages, self.num_microbatches, trainable=self._trainable, heads=heads)

    def _flows_from(self, step: int) -> Iterator[Flow]:
        """Iterate over the flows of every turn of every phase from a step on."""
        for first, _ in self.strategy.phases(step):
            for flows in self._flows(self.strategy.in_force(first)):
                yield from flows

    def _schedule_for(self, now: Strategy) -> Schedule:
        """Return the schedule of a strategy's cycle of mini-batches, the one of the last step if nothing has changed."""
        flows = self._flows(now)
        if self._chosen is None or self._chosen[0] != self._order or self._chosen[1].flows != flows:
            self._chosen = self._order, choose(self._order, flows)
        return self._chosen[1]

    def _check_heads(self, flows: Iterable[Flow]) -> None:
        for k in {k: None for flow in flows for k in flow.heads}:
            if k < self.num_stages - 1 and self._stages[k].head is None:
                raise ValueError(
                    f"`heads` should have a head for stage {k}, whose loss {self.strategy.name!r} needs. Found None; "
                    "see `nwise.heads` for builders."
                )

    def _warn_of_wide_windows(self) -> None:
        for first, _ in self.strategy.phases():
            if (text := self.strategy.in_force(first).caution(self.num_stages)) is not None:
                warnings.warn(text, stacklevel=4)  # at the caller of `Pipeline`, or of the setter


def _forget(pipe: Pipeline, keys: object) -> None:
    del keys
    pipe.forget_versions()
