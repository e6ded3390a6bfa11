"""The front door: a network cut into stages, trained by a strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from nwise.batchnorm import DeferredBatchNorm, undeferred
from nwise.compiled import is_compiled, keep_buffers
from nwise.credit import Strategy
from nwise.flow import Flow, flow_of
from nwise.hogwild import History, staleness
from nwise.microbatch import Tensors, Terms, as_tuple, batch_size, scatter
from nwise.randomness import derive
from nwise.runtime.inprocess import Batch, execute
from nwise.schedule.actions import Action
from nwise.schedule.orders import depth_first, schedule_of
from nwise.stage import LossFn, Stage, unchanged
from nwise.strategy import strategy as parse


class Heads(nn.ModuleDict):
    """The heads there are, by the number of their stage: ``pipe.heads[2]``."""

    def __getitem__(self, stage: int | str) -> nn.Module:
        return super().__getitem__(str(stage))

    def __setitem__(self, stage: int | str, head: nn.Module) -> None:
        super().__setitem__(str(stage), head)

    def __contains__(self, stage: object) -> bool:
        return super().__contains__(str(stage))

    def of(self, stage: int) -> nn.Module | None:
        """The head of a stage, or None."""
        return self[stage] if stage in self else None  # noqa: SIM401 - nn.ModuleDict has no get


class Pipeline(nn.Module):
    """A network in stages, each with a head, whose losses travel as far as the strategy says.

    Args:
        stages: the main network, in order. A stage takes what the one before it returns, a tensor or
            a tuple of tensors (passed as several arguments); floating-point ones carry gradients.
        heads: auxiliary networks for every stage but the last, None where there is none.
        loss_fn: ``loss_fn(head_output, target)``, the *mean* over the samples of a micro-batch; used
            for every loss, or a list with one per stage.
        strategy: a name (see `nwise.strategy`) or a `Strategy`.
        num_microbatches: parts that a mini-batch is cut into, M.
        recompute: keep only the input of each stage's forward and run it once more before its first
            backward pass (activation checkpointing: one recomputation, however many passes).
        seed: of dropout and other random numbers in `step`, which are functions of (seed, stage,
            step, micro-batch); default: `torch.initial_seed()`.

    Attributes:
        steps: mini-batches done, which `Switch`, the rotating strategies and dropout go by; set it when you
            resume, since it is not in the state dict.
        staleness: ``[A, M]``, updates between each stage's forward and update in the last step.
        on_action: None, or a function called with each `Action` that `step` has executed.

    Raises:
        ValueError, TypeError: the arguments do not fit together; before any tensor work.

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
        stages: Sequence[nn.Module],
        heads: Sequence[nn.Module | None] | None = None,
        loss_fn: LossFn | Sequence[LossFn] = nn.functional.cross_entropy,
        strategy: str | Strategy = "2-wise",
        num_microbatches: int = 1,
        *,
        recompute: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        mains, sides, losses = _checked(list(stages), heads, loss_fn)
        if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise ValueError(f"`num_microbatches` should be an integer of at least 1. Found {num_microbatches!r}.")
        self.stages = nn.ModuleList(mains)
        self.heads = Heads({str(k): head for k, head in enumerate(sides) if head is not None})
        self._strategy = parse(strategy)
        self.num_microbatches = num_microbatches
        self.seed = torch.initial_seed() if seed is None else seed
        self.steps = 0
        self.staleness = torch.zeros(len(mains), num_microbatches, dtype=torch.int64)
        self.on_action: Callable[[Action], None] | None = None
        self._stages = [Stage(k, mains[k], sides[k], losses[k], recompute) for k in range(len(mains))]
        self._terms = [Terms(loss) for loss in losses]
        self._flows: dict[tuple[Strategy, int, tuple[bool, ...]], Flow] = {}
        self._orders: dict[tuple[Flow, ...], list[Action]] = {}
        self._histories: tuple[object, list[History]] = (None, [])
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]
        self._survey()
        for flow in self._flows_from(0):
            self._check_heads(flow)
        self._warn_of_batch_norm()

    @property
    def strategy(self) -> Strategy:
        """Which loss trains which stage; may be set, to a strategy or its name, between two steps."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: str | Strategy) -> None:
        self._strategy = parse(strategy)

    @property
    def num_stages(self) -> int:
        """Number of stages, A."""
        return len(self._stages)

    @property
    def credit(self) -> Tensor:
        """The credit matrix of the next step, float64 of shape ``[A, A]`` (of its first micro-batch)."""
        now = self.strategy.in_force(self.steps)
        return now.credit(self.num_stages, now.turn(self.steps, 0))

    def main_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the main network."""
        return self.stages.parameters()

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the heads."""
        return self.heads.parameters()

    def forward(self, *inputs: Tensor) -> Tensor | Tensors:
        """Inference through the main network: the last stage's output."""
        output = self.head_outputs(*inputs, only=())[-1]
        assert output is not None
        return output

    def head_outputs(self, *inputs: Tensor, only: Collection[int] | None = None) -> list[Tensor | Tensors | None]:
        """Inference with the heads: one output per stage, None without a head; the last is `forward`'s.

        Args:
            inputs: of the first stage.
            only: stages whose heads are run; default: all.
        """
        hidden: Tensors = inputs
        outputs: list[Tensor | Tensors | None] = []
        for k, stage in enumerate(self.stages):
            output = stage(*hidden)
            hidden = as_tuple(output, f"The output of stage {k}")
            if k == self.num_stages - 1:
                outputs.append(output)
            else:
                head = self.heads.of(k) if only is None or k in only else None
                with unchanged(hidden, f"The head of stage {k}"):
                    outputs.append(None if head is None else head(*hidden))
        return outputs

    def step(self, *inputs: Tensor, target: Tensor | Tensors | None = None) -> Tensor:
        """One mini-batch: add every gradient to ``.grad``; updating is left to the optimizer.

        ``grad(theta_k) = sum_j C[j, k] dL_j/d(theta_k)`` and ``grad(head_j) = dL_j/d(head_j)``, with
        ``L_j`` the mean over the mini-batch, whatever the number of micro-batches.

        Args:
            inputs: of the first stage, samples along dimension 0.
            target: what every loss is given beside its head's output.

        Returns:
            The losses, detached, ``[A]``; nan where a head did not run.

        Raises:
            ValueError, TypeError: the batch does not fit the pipeline.
        """
        batch = self._batch(as_tuple(inputs, "The input of `step`"), target)
        norms = self._survey()
        for norm in norms:
            norm.discard()  # of inference in training mode, or of a step that failed
        flows = self._flows_at(self.steps)
        for flow in flows:
            self._check_heads(flow)
        self.staleness = torch.zeros(self.num_stages, len(flows), dtype=torch.int64)
        if self.strategy.in_force(self.steps).asynchronous:
            batch = self._with_old_versions(batch, flows)
        else:
            self.forget_versions()
        if flows not in self._orders:
            self._orders[flows] = schedule_of("depth-first", [flows], depth_first).one_process()
        losses = execute(self._stages, self._orders[flows], flows, batch, self.on_action)
        for norm in norms:
            norm.commit()
        self.steps += 1
        return losses

    def needed_heads(self, *, later: bool = True) -> set[int]:
        """Stages whose auxiliary heads run.

        Args:
            later: from the next step on, whatever the strategy switches to; else only under the strategy
                of the last step.
        """
        now = self.strategy.in_force(max(0, self.steps - 1))
        flows = self._flows_from(self.steps) if later else [self._flow(now, turn) for turn in range(now.turns)]
        return {k for flow in flows for k in flow.heads} - {self.num_stages - 1}

    def forget_versions(self) -> None:
        """Drop the old parameters that Hogwild keeps, as after loading others."""
        self._histories = (None, [])

    def discard_heads(self) -> None:
        """Drop heads that no later step needs, as the paper does when it switches to end-to-end.

        Raises:
            ValueError: the strategy in force still needs one of them.
        """
        needed = self.needed_heads()
        if needed:
            raise ValueError(
                f"Heads can be discarded once no loss needs them. Found that {self.strategy.name} needs those of stages "
                f"{sorted(needed)} from step {self.steps} on."
            )
        self.heads.clear()
        self._flows.clear()
        self._survey()

    def _survey(self) -> list[DeferredBatchNorm]:
        """Take notice of what the caller may have changed since the last step; the deferred batch norms."""
        for k, stage in enumerate(self._stages):
            stage.module = self.stages[k]
            stage.head = self.heads.of(k)
        modules = [module for stage in self._stages for module in stage.survey()]
        if any(map(is_compiled, modules)):
            keep_buffers()
        return [module for module in modules if isinstance(module, DeferredBatchNorm)]

    def _flows_at(self, step: int) -> tuple[Flow, ...]:
        """The flow of every micro-batch of a step."""
        now = self.strategy.in_force(step)
        return tuple(self._flow(now, now.turn(step, m)) for m in range(self.num_microbatches))

    def _flow(self, now: Strategy, turn: int) -> Flow:
        trainable = tuple(bool(stage.learns) for stage in self._stages)
        key = (now, turn, trainable)
        if key not in self._flows:
            credit = now.credit(self.num_stages, turn)
            present = [k in self.heads for k in range(self.num_stages - 1)] + [True]
            probes = present if now.heads == "all" else ()
            self._flows[key] = flow_of(credit, trainable=trainable, probes=probes)
        return self._flows[key]

    def _flows_from(self, step: int) -> Iterator[Flow]:
        """Flows of every turn of every phase from a step on."""
        for first, _ in self.strategy.phases(step):
            now = self.strategy.in_force(first)
            for turn in range(now.turns):
                yield self._flow(now, turn)

    def _check_heads(self, flow: Flow) -> None:
        for k in flow.heads:
            if k < self.num_stages - 1 and k not in self.heads:
                raise ValueError(
                    f"`heads` should have a head for stage {k}, whose loss {self.strategy.name!r} needs. Found None; "
                    "see `nwise.heads` for builders."
                )

    def _warn_of_batch_norm(self) -> None:
        plain = undeferred(self)
        if plain and self.num_microbatches > 1:
            warnings.warn(
                f"With {self.num_microbatches} micro-batches, batch norm normalises by each micro-batch's own statistics, "
                f"which is another function than with the whole batch, and moves its running statistics with every one of "
                f"them ({', '.join(plain[:3])}{', ...' if len(plain) > 3 else ''}). `nwise.defer_batchnorm(pipe)`, in a recipe "
                "`defer_batchnorm`, moves those once per mini-batch.",
                stacklevel=3,
            )

    def _batch(self, inputs: Tensors, target: Tensor | Tensors | None) -> Batch:
        size = batch_size(inputs, "The input of `step`")
        targets = None if target is None else as_tuple(target, "`target`")
        if targets is not None and batch_size(targets, "`target`") != size:
            raise ValueError(f"`target` should have the input's {size} samples. Found {len(targets[0])}.")
        parts = scatter(inputs, self.num_microbatches)
        target_parts = [None] * len(parts) if targets is None else scatter(targets, self.num_microbatches)
        weights: list[list[float]] = [[1.0] * self.num_stages]
        if len(parts) > 1:
            counts = [
                [float(len(x[0])) if y is None else count(y) for count in self._terms]
                for x, y in zip(parts, target_parts, strict=True)
            ]
            totals = [sum(column) for column in zip(*counts, strict=True)]
            if not all(totals):
                raise ValueError("`target` should have at least one term that counts. Found only ignored ones.")
            weights = [[c / total for c, total in zip(row, totals, strict=True)] for row in counts]
        return Batch(parts, target_parts, weights, derive(self.seed, self.steps), {})

    def _with_old_versions(self, batch: Batch, flows: tuple[Flow, ...]) -> Batch:
        """Hogwild: compute every stage with the parameters of as many updates ago as in the steady grid."""
        now = self.strategy.in_force(self.steps)
        cycle_flows = tuple(self._flow(now, turn) for turn in range(now.turns))
        # Parameters that have been frozen, moved or cast have no past.
        like = tuple((p.device, p.dtype) for p in self.stages.parameters())
        key = (now, cycle_flows, self.num_microbatches, like)
        if self._histories[0] != key:
            cycle = [staleness(flow, self.num_microbatches) for flow in cycle_flows]
            depths = [max(max(ages[k]) for ages in cycle) for k in range(self.num_stages)]
            self._histories = key, [History(stage, depth) for stage, depth in zip(self.stages, depths, strict=True)]
        ages = [staleness(flow, self.num_microbatches) for flow in flows]
        versions: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        for k, history in enumerate(self._histories[1]):
            history.remember()
            for m in range(len(batch.inputs)):
                version, age = history.version(ages[m][k][m])
                self.staleness[k, m] = age
                if age:
                    versions[k, m] = version
        return replace(batch, versions=versions)


def _forget(pipe: Pipeline, keys: object) -> None:
    del keys
    pipe.forget_versions()


def _checked(
    mains: list[nn.Module], heads: Sequence[nn.Module | None] | None, loss_fn: LossFn | Sequence[LossFn]
) -> tuple[list[nn.Module], list[nn.Module | None], list[LossFn]]:
    if not mains or not all(isinstance(stage, nn.Module) for stage in mains):
        found = ", ".join(type(stage).__name__ for stage in mains) or "none"
        raise TypeError(f"`stages` should be one or more nn.Modules. Found {found}.")
    num_stages = len(mains)
    if heads is not None and not isinstance(heads, Iterable):
        raise TypeError(f"`heads` should be a list of nn.Modules or None. Found {type(heads).__name__}.")
    sides = [None] * (num_stages - 1) if heads is None else list(heads)
    if len(sides) == num_stages and sides[-1] is None:
        sides.pop()
    if len(sides) != num_stages - 1:
        raise ValueError(
            f"`heads` should have {num_stages - 1} entries, one for every stage but the last, whose output goes to the "
            f"loss, or be None. Found {len(sides)}."
        )
    for k, head in enumerate(sides):
        if head is not None and not isinstance(head, nn.Module):
            raise TypeError(f"`heads[{k}]` should be an nn.Module or None. Found {type(head).__name__}.")
    losses: list[LossFn] = list(loss_fn) if isinstance(loss_fn, Sequence) else [loss_fn] * num_stages
    if len(losses) != num_stages:
        raise ValueError(f"`loss_fn` should be one function or a list of {num_stages}. Found {len(losses)}.")
    for loss in losses:
        if not callable(loss):
            raise TypeError(f"`loss_fn` should be callable, `loss_fn(output, target)`. Found {type(loss).__name__}.")
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ValueError(
                f"`loss_fn` should have no parameters. Found some in {type(loss).__name__}; put them into the heads."
            )
    _refuse_sharing([(f"stages.{k}", main) for k, main in enumerate(mains)]
                    + [(f"heads.{k}", head) for k, head in enumerate(sides) if head is not None])  # fmt: skip
    return mains, [*sides, None], losses


def _refuse_sharing(owners: Sequence[tuple[str, nn.Module]]) -> None:
    """A parameter in two places would have two credits, and on two devices two values."""
    seen: dict[int, tuple[str, str]] = {}
    for owner, module in owners:
        for name, parameter in module.named_parameters():
            first = seen.setdefault(id(parameter), (owner, name))
            if first[0] != owner:
                raise ValueError(
                    f"Every parameter should belong to one stage or head. Found {'.'.join(first)} again as {owner}.{name}; "
                    "untie them, for example by a copy.deepcopy of one."
                )
