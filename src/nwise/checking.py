"""Compare a step with plain autograd, stage by stage: does the code of stages, heads and losses keep the contract?

A step keeps what each stage receives for two micro-batches (`nwise.runtime.received`). A copy of the stage computes from that
alone, so one process and many are judged alike, and the stage that differs is named::

    step      the stage's tasks in their order, twice
    plain     for each gradient that arrives, a forward and a backward of its own      step != plain      a backward is not linear
    joined    the same, for both micro-batches at once                                 plain != joined    the cut changes values

The contract is docs/contract.md.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from nwise import findings
from nwise._torch import Norm, hooks_of, version
from nwise.checks import warn
from nwise.differences import differences, gap
from nwise.findings import ContractError, Finding, Report
from nwise.flow import StageFlow, single_passes
from nwise.microbatch import Batch
from nwise.randomness import SeedsAll, preserved, random_states, restore, restoring
from nwise.runtime.received import Received, Work, buffers_of, join, joined
from nwise.runtime.replicas import unlike
from nwise.schedule.actions import Action, Kind
from nwise.stage.graph import clones, gradients_aside, nodes_of
from nwise.stage.stage import Stage
from nwise.stage.tape import Tape
from nwise.stage.weights import NO_HOOKS, Weights
from nwise.tensors import Input, Tensors, asks, each, put, values_of
from nwise.terms import modules_of

if TYPE_CHECKING:
    from nwise.pipeline import Pipeline

__all__ = ["check", "judge"]

_OWN = ("stages", "heads", "loss")  # what begins so does not tell how a mini-batch was cut, as messages do


def check(pipe: Pipeline, *inputs: Input, optimizer: torch.optim.Optimizer | None = None, **batch: Any) -> Report:
    """Compare a step of a pipeline with plain autograd; all processes call it together, while no gradients are due.

    It makes a step, and puts back gradients, buffers, random states and the number of the step. A copy of each stage of this
    process, one at a time, computes from what the stage has received for two micro-batches.

    Args:
        pipe: the pipeline.
        inputs, batch: a mini-batch, as for `Pipeline.step`, such as ``x, target=y``.
        optimizer: the optimizer, to find what it leaves out. Default: none.

    Returns:
        The findings; ``print(report)`` shows them.

    Raises:
        ValueError: gradients are due under a delay; or the step raises.

    >>> import nwise
    >>> pipe = nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], strategy="2-wise")
    >>> check(pipe, torch.ones(2, 2), target=torch.tensor([0, 1])).findings
    []
    """
    if pipe.has_pending:
        raise ValueError(
            "`nwise.check` should be called while no gradients are due. Found some under a delay; update while `pipe.drain()` "
            "returns True, or check before the first step."
        )
    number = pipe.steps
    modules = [pipe, *(module for loss in pipe.loss_fns for module in modules_of(loss).values())]
    buffers = dict.fromkeys(b for module in modules for b in module.buffers())
    try:
        with restoring(random_states()), restoring(values_of(buffers)), gradients_aside(pipe.parameters()):
            report = pipe.checked_step(*inputs, **batch)
    finally:
        pipe.steps = number
    if optimizer is not None and (where := _left_out(pipe, optimizer)):
        report.findings.append(Finding(findings.IDLE, where))
    return report


def judge(pipe: Pipeline, received: Received, device: torch.device, *, raises: bool) -> Report:
    """Compare a step that has been made; all ranks call it together.

    Args:
        pipe: the pipeline.
        received: what its stages have received.
        device: device of its tensors.
        raises: whether to raise errors, and to warn of the rest.

    Raises:
        ContractError: a finding is an error.
    """
    begin = time.perf_counter()
    found = defaultdict[str, list[str]](list)
    for k in received.stages:
        buffers = buffers_of(received.stages[k])  # a loss that is a function is not copied
        try:
            with (
                restoring(values_of(buffers)),
                restoring(random_states()),
                preserved(device),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # the step has shown them
                with torch.enable_grad():
                    _compare(received, k, found)
        except Exception as error:  # what cannot be copied, or does not fit into memory
            said = f"stage {k} ({type(error).__name__}: {error})".splitlines()[0]
            found[findings.AGAIN if NO_HOOKS in said else findings.NOTE].append(said[:200])
    if pipe.processes.num_replicas > 1:
        found[findings.REPLICAS] += unlike(pipe.processes, pipe.state_dict())
    parts = pipe.processes.gather("check", found)
    took = time.perf_counter() - begin
    kinds = (*findings.KINDS, findings.NOTE)
    where = {kind: list(dict.fromkeys(one for part in parts for one in part.get(kind, ()))) for kind in kinds}
    notes = where.pop(findings.NOTE)
    cost = f"{took:.2g} s, {took / (begin - received.begin):.2g} steps"
    title = f"{pipe.strategy.name}, M = {pipe.num_microbatches}; {cost}"
    report = Report(title, [Finding(kind, names) for kind, names in where.items() if names], notes)
    if raises and any(one.is_error for one in report.findings):
        raise ContractError(str(report))
    for finding in report.findings if raises else ():
        warn(f"nwise.check: {finding}")
    return report


def _compare(received: Received, k: int, found: dict[str, list[str]]) -> None:
    """Compare a stage."""
    twin = Twin(received, k)
    work = list(received.work[k].values())
    step = twin.step(work)
    twice = differences(step.numbers, twin.step(work).numbers)
    plain = twin.plain(work)
    if received.stages[k].learns and work[0].flow.weights is not None and not plain.tracked:
        found[findings.NOTHING].append(f"stage {k}")
        return
    apart = differences(step.numbers, plain.numbers)
    moved = differences(step.buffers, plain.buffers)
    if apart or twice or moved or plain.leaves:
        again = twin.plain(work)
        shapes = sorted(list(x.shape) for x in plain.leaves & again.leaves)
        found[findings.OUTSIDE] += [f"one of shape {shape} in stage {k}" for shape in shapes]
        if restless := differences(plain.named(*_OWN), again.named(*_OWN)):
            runs_again = any(received.schedule.graph.tasks[t].kind is Kind.RECOMPUTE for t in received.tasks[k])
            found[findings.RERUN if runs_again else findings.PLAIN] += restless
            return
    found[findings.STEP] += apart or twice
    found[findings.BUFFERS] += moved
    late = received.schedule.oldest  # copies are written to, and forgotten
    found[findings.WRITTEN] += list(plain.written) if late else differences(step.written, plain.written)
    found[findings.WRITTEN] += [] if late or received.alone else twin.moved(step)
    if received.counts and work[0].flow == work[-1].flow and not apart and (different := twin.cut(work)):
        found[different[0]].append(different[1])


@dataclass
class Values:
    """What a stage computes: losses, gradients and messages by name, buffers, changes of parameters, outputs, other leaves."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensors] = field(default_factory=list)
    leaves: set[Tensor] = field(default_factory=set)  # of graphs, beside parameters and inputs
    tracked: bool = False  # whether an output requires a gradient
    weight: Any = 1.0  # of the losses

    def add(self, name: str, value: Tensor | None) -> None:
        """Add to a number."""
        if value is not None:
            self.numbers[name] = self.numbers[name] + value if name in self.numbers else value

    def named(self, *kinds: str) -> dict[str, Tensor]:
        """Return the numbers whose names begin so."""
        return {name: value for name, value in self.numbers.items() if name.startswith(kinds)}


class Twin:
    """A copy of a stage, with its head and loss, that computes from what the stage received; raises if it cannot be copied."""

    def __init__(self, received: Received, k: int) -> None:
        own = received.stages[k]
        self._received = received
        self._k = k
        module, head, loss = _copied(own)
        self._stage = Stage(k, module, head, loss or own.loss_fn)
        self._modules = self._stage.survey(module, head)
        self._buffers = buffers_of(self._stage)
        self._parameters = [
            (p, f"{what}.{k}.{name}", original)
            for what, part, twin in (("stages", own.module, module), ("heads", own.head, head))
            if part is not None and twin is not None
            for (name, original), p in zip(part.named_parameters(), twin.parameters(), strict=True)
        ]

    def step(self, work: Sequence[Work]) -> Values:
        """Run the stage's tasks as the engine does."""
        values = self._begin()
        batch = self._batch(work)
        schedule = self._received.schedule
        tapes = self._stage.tapes(schedule, self._received.number % len(schedule.flows), batch)
        given = {
            one.microbatch: {None: one.inputs, **{q: clones(message) for q, message in one.messages.items()}}
            for one in work
        }
        for task in self._received.tasks[self._k]:
            action = schedule.graph.tasks[task]
            made = self._stage.run(action, tapes[m := action.microbatch], given[m], frees=task in schedule.frees)
            if action.message is not None and action.kind is not Kind.RECOMPUTE:
                self._send(values, action.message, action.microbatch, made)
        return self._end(values, batch, work)

    def plain(self, work: Sequence[Work], seed: int = 0) -> Values:
        """Run a forward of each micro-batch, and one with a backward for every gradient that arrives.

        Args:
            work: the micro-batches.
            seed: what is added to the seed of random numbers. Default: nothing.
        """
        values = self._begin()
        batch = self._batch(work, seed)
        stage = self._stage
        k = self._k
        own = list(stage.module.buffers())
        for one in work:
            m = one.microbatch
            start = values_of(own)
            tape = self._forward(one, one.flow, batch)
            roots: list[Any] = list(tape.outputs)
            values.outputs.append(each(tape.outputs, Tensor.detach))
            values.tracked |= any(map(asks, roots))
            if one.flow.head:
                with restoring(values_of(self._buffers)):
                    roots.append(batch.draws.run(("head", k, m), roots[0].device, stage.loss, tape.outputs, one.target))
                stage.run(Action(Kind.HEAD, k, m), tape, {})
            ends = {node.variable for node in nodes_of(roots) if hasattr(node, "variable")}
            values.leaves |= ends - {p for p, *_ in self._parameters} - {*tape.inputs}
            after = values_of(own)
            passes = list(single_passes(one.flow))
            for q, flow in passes:
                restore(start)
                fresh = self._forward(one, flow, batch)
                fresh.own = tape.own
                kind = Kind.WEIGHT_GRAD if q is None else Kind.INPUT_GRAD if flow.fused is None else Kind.BOTH
                # An I leaves gradients of parameters to other passes.
                with gradients_aside([p for p, *_ in self._parameters] if kind is Kind.INPUT_GRAD else []):
                    messages = {p: clones(message) for p, message in one.messages.items()}
                    made = stage.run(Action(kind, k, m, None if q is None else 0), fresh, messages)
                self._send(values, q, m, made if q is not None else ())
            if len(passes) != 1:  # otherwise a backward may move buffers, as in plain autograd
                restore(after)
        return self._end(values, batch, work)

    def cut(self, work: Sequence[Work]) -> tuple[str, str] | None:
        """Compare the micro-batches with both at once, without random numbers and batch statistics; return what differs."""
        counts = self._received.counts
        for everything in (False, True):
            for one in self._modules:
                one.training &= not (everything or isinstance(one, Norm) or type(one).__module__.startswith("torch.nn"))
            both = joined(work, counts, first=not self._k)
            parts = self.plain(work)
            whole = self.plain([both])
            if (found := self._apart(parts, whole, 0)) is None:
                return None
            with suppress(Exception):  # samples may lie in a later dimension of the same size
                if self._apart(parts, self.plain([joined(work, counts, -1, first=not self._k)]), -1) is None:
                    return None
            if not differences(whole.named(*_OWN), self.plain([both], seed=1).named(*_OWN)):
                return found
        return None  # a module draws random numbers in evaluation mode, too

    def _apart(self, parts: Values, whole: Values, way: int) -> tuple[str, str] | None:
        """Return how micro-batches and both at once differ, None if they do not."""
        counts = self._received.counts
        for i, (y, *xs) in enumerate(zip(whole.outputs[0], *parts.outputs, strict=True)):
            if sum(counts) in y.shape and gap(join(xs, counts, way), y):
                return findings.SAMPLES, f"output {i} of stage {self._k}"
        if (name := f"loss {self._k}") in whole.numbers:
            one, other = (values.numbers[name] / values.weight for values in (whole, parts))
            if gap(one, other) or one.isfinite() != other.isfinite():
                return findings.LOSS, f"{name}, {float(one):.4g} whole and {float(other):.4g} in parts"
        grads = differences(parts.named(*_OWN), whole.named(*_OWN))
        return (findings.SAMPLES, f"{grads[0]}, though outputs and losses agree") if grads else None

    def _batch(self, work: Sequence[Work], seed: int = 0) -> Batch:
        number, first = self._received.seeds
        weights = [[one.weight] * (self._k + 1) for one in work]
        return Batch(
            [], [one.target for one in work], weights, SeedsAll(number + seed, first), [one.share for one in work]
        )

    def _forward(self, one: Work, flow: StageFlow, batch: Batch) -> Tape:
        """Run a forward, for one pass."""
        tape = Tape(flow, batch, one.microbatch, 1, Weights(self._stage.learns))
        # Under Hogwild, parameters in memory are read by hooks, which those of a block that runs again would hide.
        in_memory = self._received.schedule.oldest and not self._received.schedule.ages.stashes
        with disable_saved_tensors_hooks(NO_HOOKS) if in_memory else nullcontext():
            self._stage.run(Action(Kind.FORWARD, self._k, one.microbatch), tape, {None: one.inputs})
        return tape

    def _begin(self) -> Values:
        """Put buffers and parameters back to what the step found, without gradients."""
        for b, value in zip(self._buffers, self._received.buffers[self._k], strict=True):
            put(b, value)
        for p, _, original in self._parameters:
            p.data.copy_(original.detach())
            p.grad = None
        return Values()

    def _end(self, values: Values, batch: Batch, work: Sequence[Work]) -> Values:
        """Take losses and gradients; note the buffers, and the changes of parameters."""
        for one in work:
            if (loss := batch.losses.get((self._k, one.microbatch))) is not None:
                values.add(f"loss {self._k}", loss * one.weight)
        values.weight = sum(one.weight for one in work)
        for p, name, original in self._parameters:
            values.add(name, p.grad)
            if not torch.equal(p, original):
                values.written[name] = (p - original).detach()
        values.buffers = {f"buffer {i} of stage {self._k}": b.clone() for i, b in enumerate(self._buffers)}
        return values

    def moved(self, step: Values) -> list[str]:
        """Return the parameters that the step itself has changed, as by an update inside it, though its forwards do not."""
        old = self._received.versions
        return [n for _, n, p in self._parameters if p in old and old[p] != version(p) and n not in step.written]

    def _send(self, values: Values, q: int | None, m: int, message: Sequence[Tensor | None]) -> None:
        for i, gradient in enumerate(clones(message)):
            values.add(f"message {q}.{i} of stage {self._k}, micro-batch {m},", gradient)


def _copied(own: Stage) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """Return copies of module, head and loss, without what is behind a hook, such as a trainer."""
    modules = [one for part in (own.module, own.head) if part is not None for one in part.modules()]
    bound = (FunctionType, MethodType)
    if fixed := [
        m for m in modules if isinstance(m, torch.jit.ScriptModule) or isinstance(vars(m).get("forward"), bound)
    ]:
        raise ValueError(f"a copy of {type(fixed[0]).__name__} would compute with the original")
    memo: dict[int, Any] = {id(hook): hook for hooks in hooks_of(modules) for hook in hooks.values()}
    return copy.deepcopy((own.module, own.head, own.loss_fn if isinstance(own.loss_fn, nn.Module) else None), memo)


def _left_out(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the parameters that an optimizer leaves out, and how many it has of something else."""
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    held = dict(pipe.named_parameters())
    idle = tuple(f"heads.{k}." for k in {*range(pipe.num_stages)} - pipe.needed_heads())
    found = [name for name, p in held.items() if p.requires_grad and p not in trained and not name.startswith(idle)]
    if strangers := trained - {*held.values()}:
        found.append(f"{len(strangers)} parameters that no stage or head holds")
    return [one for part in pipe.processes.gather("optimizer", found) for one in part]
