"""Captured steps: what a step computes on a GPU is recorded once, and later steps replay it without Python.

    two steps   run eagerly         which parts draw random numbers is noted
    a step      recorded, replayed
    the others  batch --copy--> [ replay ] --> gradients, losses

A pipeline of one process is captured, a step in one graph.

Each kind of step has a recording of its own: the place in a strategy's cycle, the shapes of the batch, the dtype of autocast. A
change of modules or of what is trained makes all recordings again.

Python of modules and losses does not run in a replay. So a part that reads values or draws from the CPU cannot be captured; then
the pipeline says which, and runs its steps eagerly. What else a recording relies on stays as it was, as with
`torch.cuda.make_graphed_callables`: attributes such as a dropout rate, and the memory of parameters and buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from nwise._torch import has_hooks, with_hooks
from nwise.capturing.recording import CudaGraphs, NotRecordableError, Observed, Recorded, Seeded
from nwise.checks import warn
from nwise.microbatch import Parts, Results
from nwise.modes import autocast_dtype
from nwise.pipeline import Pipeline
from nwise.randomness import StepSeeds, StreamKey, random_states, restoring
from nwise.runtime.step import Step
from nwise.runtime.structure import Structure
from nwise.stage.graph import gradients_aside
from nwise.tensors import Tensors, each, names

__all__ = ["Capture", "capture"]

_EAGER_STEPS = 2  # of every kind before its recording, in which libraries choose their algorithms
_LIMIT = 8  # recordings in use, and changes in close succession that make all of them again
_MANY = 100  # steps of a kind after which a change was worth its recording


@dataclass(frozen=True)
class Recording:
    """A recorded step: its graph, and the memory that it reads and writes at each replay."""

    #     batch --> inputs ---> [ graph ] ---> gradients --> .grad
    #                                `-------> results, whose values lie in one tensor
    graph: Seeded
    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]  # of each trainable parameter
    results: Results
    values: Tensor


@dataclass
class StepKind:
    """Steps of one kind."""

    steps: int = 0  # that have run or were replayed
    drawing: Counter[StreamKey] = field(default_factory=Counter)  # how often each part draws random numbers
    recording: Recording | None = None


def capture(pipe: Pipeline) -> Pipeline:
    """Let a pipeline on a GPU record its steps, and replay them without Python; return the pipeline.

    Args:
        pipe: a pipeline of one process, without compression. Its next steps fill the same gradients as before.

    Raises:
        ValueError: the pipeline has several processes or compressed messages; its next step raises it on a CPU, under a delay,
            and if a module or parameter has hooks.

    >>> import nwise
    >>> pipe = nwise.capture(nwise.Pipeline([nn.Linear(2, 2)], strategy="end-to-end"))
    >>> pipe.step(torch.zeros(1, 2), target=torch.tensor([1]))
    Traceback (most recent call last):
    ...
    ValueError: `capture` should be used on a GPU. Found a pipeline on the device cpu; move it by `pipe.to('cuda')`.
    """
    several = pipe.processes.size
    if several > 1 or pipe.compress != "none":
        found = f"{several} processes; start one" if several > 1 else "`compress`; leave it out"
        raise ValueError(
            f"A captured pipeline should have all stages in one process, and messages without compression. Found {found}."
        )
    pipe.runner = Capture()
    return pipe


class Capture:
    """Runs the steps of a pipeline eagerly or by replay; the numbers of the losses must stay while a step is recorded."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, StepKind] = {}
        self._graphs: CudaGraphs | None = None
        self._structure: Structure | None = None
        self._changes = 0
        self._failed = self._full = False

    def __call__(self, step: Step) -> Results:
        """Run a step: fill every ``.grad``, and return the rest."""
        if step.schedule.oldest:
            raise ValueError(
                "A captured pipeline should have a strategy without a delay. Found gradients of age "
                f"{step.schedule.oldest}; choose another strategy, or set `pipe.runner = None`."
            )
        hooked = with_hooks(step.structure.learns)
        if hooked or any(map(has_hooks, step.structure.modules)):
            refuse_hooks(step.structure.modules, hooked)
        if self._graphs is None:
            self._graphs = make_graphs(step.engine.device)
        watched = step.on_action is not None or step.engine.recorder is not None
        if self._failed or watched or step.judge is not None:
            return step.run(StepSeeds(step.seed))
        if self._structure is not step.structure:
            self._look(step)
        given = _tensors(step.parts)
        kind = None if self._failed else self._kind(_key(step, given))
        if kind is not None and kind.recording is None:
            if kind.steps < _EAGER_STEPS:
                return self._eagerly(step, kind)
            try:
                kind.recording = self._record(step, kind)
            except NotRecordableError as error:
                self._stop(str(error))
        if kind is None or kind.recording is None:
            return step.run(StepSeeds(step.seed))
        kind.steps += 1
        # A recording that has served 100 steps was worth its price: changes are counted from 0 again.
        self._changes *= kind.steps < _MANY
        return _replay(step, kind.recording, [x for x in given if x is not None])

    def _kind(self, key: Hashable) -> StepKind | None:
        """Return the kind of a step; None, with a warning the first time, if there are too many."""
        if key in self._kinds or len(self._kinds) < _LIMIT:
            return self._kinds.setdefault(key, StepKind())
        if not self._full:
            self._full = True
            warn(
                f"A captured pipeline should have at most {_LIMIT} kinds of steps, such as shapes of the batch. Found another; "
                "steps of further kinds run without capture. Pad the batches. This warning appears once."
            )
        return None

    def _eagerly(self, step: Step, kind: StepKind) -> Results:
        """Run a step eagerly, and note who draws random numbers."""
        assert self._graphs is not None, "as `__call__` has made them"
        draws = Observed(step.seed)
        with self._graphs.beside():
            results = step.run(draws)
        kind.steps += 1
        kind.drawing = draws.drawing
        return results

    def _record(self, step: Step, kind: StepKind) -> Recording:
        """Record a step; if it cannot be, everything is as before."""
        assert self._graphs is not None, "the first steps of a kind run eagerly"
        learns = step.structure.learns
        inputs, targets = (
            [None if x is None else each(x, lambda t: t.detach().clone()) for x in part]
            for part in (step.parts.inputs, step.parts.targets)
        )
        parts = replace(step.parts, inputs=cast(list[Tensors], inputs), targets=targets)
        draws = Recorded(self._graphs, kind.drawing)
        # Autocast keeps a cast weight for the forwards that follow. One of an eager step would lie outside the graph's memory,
        # and one of the recording has no values afterwards.
        torch.clear_autocast_cache()
        try:
            with restoring(random_states()), gradients_aside(learns):
                _refuse_other_devices(step)
                with draws:
                    results = step.record(parts, draws)
                    values = torch.cat([x.reshape(-1).to(results.means) for x in _outputs(results)])
                gradients = [p.grad for p in learns]
        except Exception as error:
            known = isinstance(error, NotRecordableError)
            cause = str(error) if known else f"raises {type(error).__name__}: {error}".splitlines()[0]
            raise NotRecordableError(f"{draws.name} {cause}") from error
        finally:
            torch.clear_autocast_cache()
        read = [x for x in _tensors(parts) if x is not None]
        return Recording(draws.graph, read, gradients, results, values)

    def _look(self, step: Step) -> None:
        """Take the present modules as those that the next steps are recorded with; earlier recordings are forgotten."""
        if self._kinds:
            self._kinds = {}
            self._graphs = make_graphs(step.engine.device)
            self._changes += 1
            if self._changes > _LIMIT:
                self._stop(f"modules or what is trained changed {_LIMIT} times in close succession")
        self._structure = step.structure

    def _stop(self, cause: str) -> None:
        """Run all later steps eagerly, and say why."""
        self._failed = True
        self._kinds.clear()
        warn(
            f"A step should be captured. Found that it cannot be: {cause}. This process runs without capture, with the same "
            "results."
        )

    def __reduce__(self) -> Any:
        """Copy and pickle without the recordings."""
        return Capture, ()


def make_graphs(device: torch.device) -> CudaGraphs:
    """Return what records on a device.

    Raises:
        ValueError: it is no GPU.
    """
    if device.type != "cuda":
        raise ValueError(
            f"`capture` should be used on a GPU. Found a pipeline on the device {device}; move it by `pipe.to('cuda')`."
        )
    return CudaGraphs(device)


def refuse_hooks(modules: Iterable[nn.Module], hooked: Sequence[Tensor]) -> None:
    """Raise ValueError for the hooks of a module or parameter: their Python would not run in a replay."""
    found = [type(module).__name__ for module in modules if has_hooks(module)]
    found += [f"a parameter of shape {list(p.shape)}" for p in hooked]
    raise ValueError(
        f"A captured pipeline should have no hooks, because their Python would not run in a replay. Found one on {found[0]}; "
        "remove it, or set `pipe.runner = None`."
    )


def _replay(step: Step, recording: Recording, given: Sequence[Tensor]) -> Results:
    """Replay a step: copy the batch, compute, and hand out gradients and losses."""
    learns = step.structure.learns
    draws = StepSeeds(step.seed)
    before = [p.grad for p in learns]

    with torch.no_grad():
        for target, source in zip(recording.inputs, given, strict=True):
            target.copy_(source, non_blocking=True)
        # The memory of a gradient is the same in each replay, so one that is to be added to is put aside:
        #
        #     .grad before    memory of the graph    after the replay
        #     none            new                    new, the graph's memory
        #     other memory    new                    before + new
        #     this memory     new over before        new + a copy of before
        pairs = zip(recording.gradients, before, strict=True)
        kept = [old.clone() if old is not None and _in_one_place(old, g) else None for g, old in pairs]
        step.engine.follow(step.schedule, step.number)
        graph, parts = recording.graph
        graph.replay([draws.seed_of(part) for part in parts])
        step.engine.next = step.number + 1
        for p, old, new, own in zip(learns, before, recording.gradients, kept, strict=True):
            if new is not None:
                p.grad = new if old is None else old.add_(new if own is None else own)
        return _unpacked(recording.results, recording.values.clone())


def _in_one_place(first: Tensor, second: Tensor | None) -> bool:
    """Return whether two gradients share their memory, as a view of one does."""
    return second is not None and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _refuse_other_devices(step: Step) -> None:
    """Raise NotRecordableError for tensors on another device, whose values a recording would keep."""
    device = step.engine.device
    if any(x is not None and x.device != device for x in _tensors(step.parts)):
        raise NotRecordableError(f"gets a tensor of the batch that is not on the device {device}")


def _outputs(results: Results) -> list[Tensor]:
    shares = [share for share in results.shares.values() if isinstance(share, Tensor)]
    return [results.means, *results.losses.values(), *shares]


def _unpacked(like: Results, values: Tensor) -> Results:
    """Return results of these values, ``[means, losses, shares]``."""
    size = len(like.means)
    numbers = iter(values[size:].unbind())
    losses = {key: next(numbers).to(loss.dtype) for key, loss in like.losses.items()}
    shares = {k: next(numbers) if isinstance(share, Tensor) else share for k, share in like.shares.items()}
    return Results(values[:size], losses, shares)


def _key(step: Step, given: Sequence[Tensor | None]) -> Hashable:
    """Return what is the same for all steps that one recording serves."""
    call = step.number % len(step.schedule.flows)
    # Everything that Python decides from the step, beside modules and losses: kernels are chosen by dtype, strides and settings.
    batch = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given)
    known = tuple(names(tensors or ()) for tensors in (*step.parts.inputs[:1], *step.parts.targets[:1]))
    autocast = autocast_dtype(step.engine.device)
    modes = tuple([module.training for module in step.structure.modules])
    exact = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    return step.schedule.digest, step.schedule.flows[call], call, batch, known, modes, exact, precision, autocast


def _tensors(parts: Parts) -> list[Tensor | None]:
    """Return all tensors of a batch, None for a micro-batch without a target."""
    given: list[Tensor | None] = []
    for tensors in (*parts.inputs, *parts.targets):
        given += [None] if tensors is None else tensors
    return given
