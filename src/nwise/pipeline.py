"""The pipeline: a network cut into stages and trained by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nwise.batchnorm import warn_of_microbatches
from nwise.by_stage import HeadDict
from nwise.compiled import allow_several_passes
from nwise.microbatch import Results
from nwise.program import arguments
from nwise.program.arguments import ModuleOrFactory, Planned
from nwise.program.cutting import check_first, check_surroundings, cut_batch
from nwise.program.program import Program
from nwise.randomness import StepSeeds, derive, preserved
from nwise.runtime.compression import Compression, fingerprint, parse_compression
from nwise.runtime.due import Gradients
from nwise.runtime.engine import Engine, Recorder
from nwise.runtime.modules import build_modules
from nwise.runtime.processes import Processes
from nwise.runtime.step import Step
from nwise.runtime.structure import Structure
from nwise.schedule.actions import Action
from nwise.schedule.named import Order
from nwise.stage.stage import LossFn, Stage, learning
from nwise.strategies import Strategy
from nwise.tensors import Input, Tensors, as_inputs, as_tuple, invoke
from nwise.terms import make_terms

if TYPE_CHECKING:
    from nwise.findings import Report

__all__ = ["Pipeline"]


class Pipeline(Program):
    """A network in stages, each with a head, trained by a strategy. What it asks of their code is in docs/contract.md.

    Args:
        stages: the main network, in order, as modules or functions that make them. A stage takes the output of the one before
            it: tensors by position or by name, of which floating-point ones carry gradients. A function is called under its own
            random numbers, only in the process that holds the stage.
        heads: auxiliary networks for every stage but the last, None for a stage without one.
        loss_fn: ``loss_fn(head_output, target)``, the *mean* over the samples of a micro-batch: one for all
            losses, or a list with one per stage; later the attribute `loss_fns`.
        strategy: a name (see `nwise.strategy`) or a `Strategy`.
        num_microbatches: number of micro-batches per mini-batch, M; default: the plan's if there is one, else 1.
        schedule: order of work, one of `nwise.schedule.named.ORDERS` or a custom schedule; default: ``"best"`` with several
            processes, and with one ``"depth-first"``, which needs the least memory.
        recompute: whether a stage keeps only its input while others run, then runs its forward again (activation checkpointing).
        seed: seed of dropout and other random numbers in `step`, functions of (seed, stage, step, micro-batch); default: torch's.
        placement: rank of every stage under ``torchrun``: ``"contiguous"`` (default), ``"v"``, ``"interleaved"``, a rank for
            each (`nwise.schedule.placement`), or a plan (`nwise.plan`). One process has all stages.
        compress: how messages between stages are compressed: ``"bf16"``, or an object such as `nwise.compression.Int8`; default:
            ``"none"``.
        mesh: mesh under ``torchrun``, dimensions ``("pp", "dp")``; default: a rank for each stage, or fewer, or replicas.
        timeout: time limit of each action of a process, in seconds; default: ``NWISE_TIMEOUT``, else 300.
        checks: ``"first"`` (default) to compare the first step with plain autograd (`nwise.check`), or ``"never"``.

    Between two steps you may set `strategy`, `num_microbatches`, `schedule`, `seed` and `steps`, replace stages and heads, and
    freeze parameters. The next step uses the new values.

    Attributes:
        steps: number of finished mini-batches, used by rotating strategies and dropout. Set it when you resume,
            because the state dict does not contain it.
        staleness: ``[A, M]``, updates between each stage's forward and update under the last step's strategy.
        microbatch_losses: losses of the last step in this process, by (stage, micro-batch).
        loss_shares: share of the mini-batch that each loss of the last step covers in this process, by stage.
        processes: the processes (`nwise.runtime.processes.Processes`), possibly one.
        recorder: None, or a function called with each action's step, action, begin and end (on a GPU: of its launch).
        on_action: None, or a function called with each `Action` that `step` has executed.
        runner: None, or what runs each `nwise.runtime.step.Step` in another way and returns its results (`nwise.capture`).

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
        stages: Sequence[ModuleOrFactory],
        heads: Sequence[ModuleOrFactory | None] | None = None,
        loss_fn: LossFn | Sequence[LossFn] = nn.functional.cross_entropy,
        strategy: str | Strategy = "2-wise-mean",
        num_microbatches: int | None = None,
        *,
        schedule: Order | None = None,
        recompute: bool = False,
        seed: int | None = None,
        placement: str | Sequence[int] | Planned = "contiguous",
        compress: str | Compression = "none",
        mesh: DeviceMesh | None = None,
        timeout: float | None = None,
        checks: str = "first",
    ) -> None:
        given_heads, losses = arguments.checked(given := list(stages), heads, loss_fn)
        plan, ranks, num_microbatches = arguments.placed(given, placement, num_microbatches)
        super().__init__(losses, strategy, num_microbatches, schedule, recompute, seed)
        self._checks = arguments.checked_when(checks)  # "never" after the first step, "asked" in one that a check makes
        self._compression = parse_compression(compress)
        vars(self)["compress"] = fingerprint(self._compression)  # `__setattr__` refuses it, as it does the caller's
        self.processes = Processes(len(given), ranks, mesh, timeout)
        stage_modules = [main for main in build_modules(given, "stage", self.processes, self.seed) if main is not None]
        head_modules = build_modules(given_heads, "head", self.processes, self.seed)
        self._sharing = arguments.Sharing(given, given_heads, self.processes.size > 1)
        self.stages = nn.ModuleList(stage_modules)
        self.heads = HeadDict({str(k): head for k, head in enumerate(head_modules) if head is not None})
        self.microbatch_losses: Mapping[tuple[int, int], Tensor] = {}
        self.loss_shares = {}
        self.recorder: Recorder | None = None
        self.on_action: Callable[[Action], None] | None = None
        self.runner: Callable[[Step], Results] | None = None
        self._prices = plan.prices(self.processes.num_ranks) if plan else ()
        self._stages = [Stage(k, stage_modules[k], head_modules[k], losses[k]) for k in range(len(stage_modules))]
        self._terms = make_terms(losses)
        self._begins = True  # whether the next step is the first, or one that a check makes
        self._engine: Engine | None = None
        self._structure: Structure | None = None
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]
        self._warn_of_windows()
        self._survey()
        self._measure()
        self._check_heads()
        warn_of_microbatches(self, num_microbatches)
        facts = {"num_microbatches": num_microbatches, "seed": self.seed, "compress": self.compress}
        self.processes.agree(strategy=self.strategy.name, placement=list(self.processes.placement), **facts)

    def main_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the main network."""
        return self.stages.parameters()

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of the heads."""
        return self.heads.parameters()

    def forward(self, *inputs: Input, **named: Tensor) -> Any:
        """Run the main network; all processes call it. Return its output, None in processes without the last stage."""
        return self.head_outputs(*inputs, only=(), **named)[-1]

    def head_outputs(
        self, *inputs: Input, only: Collection[int] | None = None, **named: Tensor
    ) -> list[Tensor | Tensors | None]:
        """Run the network and the heads; all processes call it. Return an output of each stage, None without a head that runs.

        Args:
            inputs, named: inputs of the first stage, as for `step`.
            only: indices of the stages whose heads run; default: all.
        """
        arguments.check_only(only, self.num_stages)
        outputs: list[Tensor | Tensors | None] = [None] * self.num_stages

        def forward(k: int, hidden: Tensors) -> Tensors:
            output = invoke(self.stages[k], hidden)
            made = as_tuple(output, f"The output of stage {k}")
            runs = only is None or k in only
            outputs[k] = output if k == self.num_stages - 1 else self.heads.run(k, made) if runs else None
            return made

        given = as_inputs(inputs, named, "The input")
        self._connected(given).infer(given, self.steps, forward)
        return outputs

    def step(
        self,
        *inputs: Input,
        target: Input | Tensors | None = None,
        microbatches: Any = None,
        targets: Any = None,
        **named: Tensor,
    ) -> Tensor:
        """Run one mini-batch and add every gradient to ``.grad``; all processes call it. The optimizer makes the update.

        ``grad(theta_k) = sum_j C[j, k] dL_j/d(theta_k)`` and ``grad(head_j) = dL_j/d(head_j)``, with
        ``L_j`` the mean over the mini-batch, whatever the number of micro-batches.

        A step that raises restores every ``.grad`` and the statistics of batch norm; with several processes it ends all of them.
        Under a delay the gradients are those of an earlier mini-batch (`nwise.Delayed`), and the first steps leave none; a step
        that raises drops the mini-batches whose gradients are due.

        Args:
            inputs, named: inputs of the first stage, by position, by name, or one dictionary; of any shapes if M is 1.
            target: the second argument of every loss, likewise: a tensor, several, or a dictionary; default: none.
            microbatches, targets: instead of both, lists of M micro-batches (for each replica) and their targets, of any shapes.

        Returns:
            The losses of this mini-batch, detached, ``[A]``; nan if a head did not run or ran in another process.

        Raises:
            ValueError, TypeError: the batch does not fit the pipeline.
            nwise.ContractError: the first step differs from plain autograd.
            nwise.runtime.calls.RankError: a rank failed.
        """
        check_surroundings()
        processes = self.processes
        m = self._num_microbatches
        number = self._steps
        batch = inputs, named, target, microbatches, targets
        parts = cut_batch(*batch, m, processes.num_replicas, self._stages[0].module)
        structure = self._survey()
        schedule = self._next_schedule(structure)
        engine = self._connected(parts.inputs[0])
        engine.recorder = self.recorder
        if self._begins:
            check_first(processes, parts, self.named_parameters(), schedule)
            self._begins = False
        seed = derive(self._seed, number)
        judge = None if self._checks == "never" else self._judge
        step = Step(number, seed, parts, self._terms, schedule, structure, engine, self.on_action, judge)
        runner = self.runner
        results = step.run(StepSeeds(seed, processes.replica * m)) if runner is None else runner(step)
        # Without `__setattr__`, which looks for modules in each of them.
        vars(self).update(_steps=number + 1, _last_ages=(schedule.ages.weights, m))
        vars(self).update(microbatch_losses=results.losses, loss_shares=results.shares)
        return results.means

    def drain(self) -> bool:
        """Add the next gradients that are due under a delay, without a new mini-batch; return whether any were due.

        After the last step, call it and update until it returns False. All processes call it equally often.
        """
        if self._engine is None:
            return False
        with preserved(self._device()):
            drained = self._engine.drain()
            self._judge()
        return drained

    def pending_gradients(self) -> list[Gradients]:
        """Compute now the gradients that are due later under a delay, for a checkpoint; the next steps still add them.

        Passes with the weights in memory (`nwise.Hogwild`) use those of now.

        Returns:
            For each of the next steps the gradients that it adds, by parameter of this process. All processes call it.
        """
        self._survey()
        with preserved(self._device()):
            return [] if self._engine is None else self._engine.complete()

    def restore_pending(self, gradients: Sequence[Gradients]) -> bool:
        """Make the next steps add the gradients that `pending_gradients` returned at this step; all processes call it together.

        Returns:
            True if they will; False if there are none, or if the delay is shorter now. A later change drops them with a warning.
        """
        self.forget_pending()
        structure = self._survey()
        return bool(gradients) and self._connected(()).restore(self._next_schedule(structure), self.steps, gradients)

    @property
    def has_pending(self) -> bool:
        """Whether gradients are due under a delay."""
        return self._engine is not None and self._engine.has_pending

    @property
    def bytes_per_step(self) -> list[int]:
        """Bytes that this process sent in the last step as activations and as gradients."""
        if self._engine is not None:
            return self._engine.sent
        raise RuntimeError("`bytes_per_step` should be read after a step. Found none so far; call `step` first.")

    def close(self) -> None:
        """End the exchange between processes after the last step; all of them call it. A single process need not."""
        self.processes.close()

    def forget_pending(self, because: str = "") -> int:
        """Drop the mini-batches whose gradients are still due; all processes call it. Return their number; with a cause, warn."""
        return 0 if self._engine is None else self._engine.forget(because)

    def discard_heads(self) -> None:
        """Drop all heads once the strategy needs none, as the paper does when it changes to end-to-end.

        Raises:
            ValueError: the strategy needs one of them.
        """
        if needed := sorted(self.needed_heads()):
            raise ValueError(
                f"Heads should be discarded only when the strategy needs none. Found that {self.strategy.name} needs the heads "
                f"of stages {needed}; keep them, or set `strategy` first."
            )
        self.heads.clear()
        self._survey()

    def refresh(self) -> None:
        """Look everything up again before the next step: for changes inside objects that nwise only holds, such as a strategy.

        Replaced, added or frozen modules and parameters are noticed without it.
        """
        self._structure = None

    def checked_step(self, *inputs: Input, **batch: Any) -> Report:
        """Run a mini-batch as `step` does, with all gradients that are due later, and compare it (`nwise.check`)."""
        checks = self._checks
        self._checks = "asked"
        self._begins = True
        try:
            self.step(*inputs, **batch)
            while self.drain():
                pass
        finally:
            self._checks = checks
        return self._report

    def _judge(self) -> None:
        """Compare the step that waits for it, if all its gradients are there."""
        engine = self._connected(())
        received = engine.received
        if received is None or engine.next <= received.last:
            return
        from nwise.checking import judge

        engine.received = None
        self._report = judge(self, received, engine.device, raises=self._checks == "first")
        self._checks = "never"

    def _survey(self) -> Structure:
        """Pick up the caller's changes since the last step; return all modules and parameters."""
        if self._structure is not None and self._structure.is_current:
            return self._structure
        if len(self.stages) != len(self._stages):
            raise ValueError(
                f"`stages` should keep its {len(self._stages)} stages; any may be replaced. Found {len(self.stages)}; make "
                "another pipeline."
            )
        if any(stage.module is not main for stage, main in zip(self._stages, self.stages, strict=True)):
            self.forget_pending("a stage was replaced")
        heads = self.heads.by_stage(self.num_stages)
        self._shared = self._sharing.check(list(self.stages), heads)
        stages = zip(self._stages, self.stages, heads, strict=True)
        modules = [module for stage, main, head in stages for module in stage.survey(main, head)]
        self._set_trainable({k: bool(self._stages[k].learns) for k in self.processes.here})
        allow_several_passes(modules)
        arguments.refuse_wrappers(modules, several=self.processes.size > 1)
        here = [self._stages[k] for k in self.processes.here]
        self._structure = Structure((self.stages, self.heads), modules, learning(here))
        return self._structure

    def _device(self, like: Tensor | None = None) -> torch.device | None:
        return next((p.device for p in self.parameters()), None if like is None else like.device)

    def _connected(self, inputs: Tensors) -> Engine:
        """Return the engine of this process's stages; all processes make the first call together, to connect."""
        if self._engine is None:
            device = self._device(*inputs[:1])
            stages = [self._stages[k] for k in self.processes.here]
            self._engine = Engine(self.processes, stages, device or torch.device("cpu"), self._compression)
        return self._engine

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast everything, as `to` and `double` do; drop due gradients if a device or dtype changes."""
        before = [(p.device, p.dtype) for p in self.parameters()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = [(p.device, p.dtype) for p in self.parameters()]
        if before != after:
            self.forget_pending("the pipeline was moved or cast")
            self._structure = None
        moved = [device for device, _ in before] != [device for device, _ in after]
        if moved and self._engine is not None and self.processes.size > 1:
            raise ValueError(
                f"A pipeline of several processes should be on its device before it first runs. Found a move to {after[0][0]}; "
                "make another pipeline of the same stages."
            )
        self._engine = None if moved else self._engine
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without mini-batches whose gradients are still due under a delay."""
        return {**self.__dict__, "_engine": None, "_structure": None, "_chosen": None}


def _forget(pipe: Pipeline, _: object) -> None:  # a function, because a method would keep the pipeline alive
    pipe.forget_pending("other weights were loaded")
