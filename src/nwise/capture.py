"""Captured steps: what a step computes on a GPU is recorded once, and later steps replay it without Python.

    step 1, 2   run as always       its checks look; which parts draw random numbers is noted
    step 3      recorded, replayed
    step 4 ...  batch --copy--> [ replay ] --> gradients, losses

Each kind of step has a recording of its own: the turn of a rotating strategy, the shapes of the batch, the dtype of autocast. A
change of modules, of their numbers (such as a dropout rate) or of the memory of parameters makes all recordings again.

Python of modules and losses does not run in a replay. So a part that reads values, draws from the CPU or counts its calls in an
attribute cannot be captured; then the pipeline says which, and runs its steps as always.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from nwise._torch import has_hooks, hooks_of
from nwise.microbatch import Parts, Results
from nwise.modes import autocast_dtype
from nwise.randomness import Draws
from nwise.recording import CudaGraphs, NotRecordableError, Recording, copies, has_drawn
from nwise.step import Step
from nwise.structure import Structure
from nwise.tensors import Tensors, each

__all__ = ["Capture"]

_EAGER_STEPS = 2  # of every kind before its recording: the checks of first steps read values
_LIMIT = 8  # recordings in use, and changes in close succession that make all of them again
_MANY = 100  # steps of a kind after which a change was worth its recording
_SCALARS = (bool, int, float, str, type(None), Tensor)
_Part = tuple[str, int, int]  # "stage" or "head", its stage, and the micro-batch


class Observed(Draws):
    """Notes which parts draw random numbers on the device."""

    def __init__(self, seed: int, drawing: Counter[_Part]) -> None:
        super().__init__(seed)
        self._drawing = drawing
        self._part: _Part | None = None
        self._device = torch.device("cpu")

    def begin(self, what: str, stage: int, microbatch: int, device: torch.device) -> None:
        self._part, self._device = (what, stage, microbatch), device
        super().begin(what, stage, microbatch, device)

    def end(self) -> None:
        """Note whether the part that has ended has drawn."""
        if self._part is not None and has_drawn(self._device, self.seed_of(*self._part)):
            self._drawing[self._part] += 1


class Recorded(Draws):
    """Lets each part draw from its own stream of a recording, and refuses parts that draw from the CPU.

    Attributes:
        parts: the part of each stream.
    """

    def __init__(self, recording: Recording, drawing: Counter[_Part]) -> None:
        super().__init__()
        self._recording, self._left = recording, Counter(drawing)
        # What draws though it has not drawn before gets a stream that is the same for all.
        self.parts: list[_Part] = [("other", 0, 0), *drawing.elements()]
        self._streams = {part: [i for i, one in enumerate(self.parts) if one == part] for part in drawing}
        self._part, self._on_cpu, self._states = "", False, _states(on_cpu=False)

    def begin(self, what: str, stage: int, microbatch: int, device: torch.device) -> None:
        self._part = f"The {what} of stage {stage}" if what == "head" else f"Stage {stage}"
        self._on_cpu = device.type != "cpu"
        self._states = _states(on_cpu=self._on_cpu)
        streams = self._streams.get((what, stage, microbatch))
        self._recording.draw_from(streams.pop(0) if streams else 0)

    def end(self) -> None:
        """Refuse the part that has ended if it has drawn from the CPU."""
        if self._part and self._states != _states(on_cpu=self._on_cpu):
            raise NotRecordableError("draws random numbers on the CPU")
        self._part = ""

    @property
    def name(self) -> str:
        """Name of the present part."""
        return self._part or "The step"


@dataclass
class Kind:
    """Steps of one kind.

    Attributes:
        steps: how many have run or were replayed.
        drawing: the parts that draw random numbers, and how often in a step.
        recording: the recording; None until there is one.
        inputs: the tensors that it reads: the batch.
        gradients: the tensors that it writes: the gradient of each trainable parameter.
        results: what else it writes.
        values: all values of the results, in one tensor.
        parts: the part of each stream of random numbers.
    """

    steps: int = 0
    drawing: Counter[_Part] = field(default_factory=Counter)
    recording: Recording | None = None
    inputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()
    results: Results | None = None
    values: Tensor | None = None
    parts: Sequence[_Part] = ()


class Capture:
    """Runs the steps of a pipeline, as always or by replay.

    Args:
        losses: the losses, whose numbers must not change while a step is recorded.
    """

    def __init__(self, losses: Sequence[Any]) -> None:
        self._losses = losses
        self._kinds: dict[Hashable, Kind] = {}
        self._graphs: CudaGraphs | None = None
        self._structure: Structure | None = None
        self._held: list[tuple[dict[str, Any], str, str]] = []
        self._values: list[Any] = []
        self._hooks: list[dict[int, Any]] = []
        self._changes = 0
        self._failed = self._full = False

    def run(self, step: Step) -> Results:
        """Run a step: fill every ``.grad``, and return the rest."""
        if self._failed or step.parts.ask_gradients or step.on_action is not None or step.engine.recorder is not None:
            return step.run(Draws(step.seed))
        if step.schedule.oldest:
            raise ValueError(
                "A captured pipeline should have a strategy without a delay. Found gradients of age "
                f"{step.schedule.oldest}; choose another strategy, or leave `capture` out."
            )
        changed = self._has_changed(step.structure)
        hooked = step.hooks.find(step.structure.learns)
        if hooked or any(self._hooks):
            refuse_hooks(step.structure, hooked)
        if changed:
            self._kinds.clear()
            self._graphs, self._changes = None, self._changes + 1
            if self._changes > _LIMIT:
                cause = f"modules, their attributes or the memory of tensors changed {_LIMIT} times in close succession"
                return self._give_up(step, cause)
        given = _tensors(step.parts)
        key = _key(step, given)
        if key not in self._kinds and len(self._kinds) == _LIMIT:
            if not self._full:
                warnings.warn(
                    f"A captured pipeline should have at most {_LIMIT} kinds of steps, such as shapes of the batch. Found "
                    "another; steps of further kinds run without capture. Pad the batches. This warning appears once.",
                    stacklevel=4,
                )
            self._full = True
            return step.run(Draws(step.seed))
        kind = self._kinds.setdefault(key, Kind())
        if kind.recording is None and kind.steps < _EAGER_STEPS:
            return self._as_always(step, kind)
        present = [x for x in given if x is not None]
        if kind.recording is None:
            try:
                self._record(step, kind, present)
            except NotRecordableError as error:
                return self._give_up(step, str(error))
        else:
            step.engine.count(step.number)
            kind.steps += 1
            self._changes *= kind.steps < _MANY
        return _replay(step, kind, present)

    def _as_always(self, step: Step, kind: Kind) -> Results:
        """Run a step without capture, and note who draws random numbers."""
        if self._graphs is None:
            self._graphs = make_graphs(step.engine.device)
        kind.steps, kind.drawing = kind.steps + 1, Counter()
        with self._graphs.beside():
            return step.run(Observed(step.seed, kind.drawing))

    def _record(self, step: Step, kind: Kind, given: Sequence[Tensor]) -> None:
        """Record a step; if it cannot be, everything is as before."""
        assert self._graphs is not None, "the first steps of a kind run as always"
        learns = step.structure.learns
        before = [p.grad for p in learns]
        inputs, targets = [[_static(x) for x in part] for part in (step.parts.inputs, step.parts.targets)]
        parts = replace(step.parts, inputs=cast(list[Tensors], inputs), targets=targets, whole=None)
        recording = self._graphs.new()
        draws = Recorded(recording, kind.drawing)
        self._held = _held(step.structure.modules, self._losses)
        self._values = _values(self._held)

        def body() -> tuple[Results, Tensor]:
            results = step.record(parts, draws)
            return results, torch.cat([x.reshape(-1).to(results.means) for x in _outputs(results)])

        for p in learns:
            p.grad = None
        torch.clear_autocast_cache()
        try:
            results, flat = recording.record(body, len(draws.parts))
            gradients = [p.grad for p in learns]
        except Exception as error:
            raise NotRecordableError(f"{draws.name} {_cause(error)}") from error
        finally:
            torch.clear_autocast_cache()
            for p, gradient in zip(learns, before, strict=True):
                p.grad = gradient
        for (_, _, name), old, new in zip(self._held, self._values, _values(self._held), strict=True):
            if old != new:
                raise NotRecordableError(f"`{name}` changes in every step")
        kind.inputs = [x for x in _tensors(parts) if x is not None]
        kind.recording, kind.gradients, kind.results, kind.values = recording, gradients, results, flat
        kind.parts = draws.parts

    def _has_changed(self, structure: Structure) -> bool:
        """Return whether modules, their numbers, or the memory of their tensors are others than at the step before."""
        before, self._structure = self._structure, structure
        if structure is not before:
            self._held, self._hooks = _held(structure.modules, self._losses), hooks_of(structure.modules)
        old, self._values = self._values, _values(self._held)
        return before is not None and (structure is not before or old != self._values)

    def _give_up(self, step: Step, cause: str) -> Results:
        """Run this and all later steps as always, and say why."""
        self._failed = True
        self._kinds.clear()
        warnings.warn(
            f"A step should be captured. Found that it cannot be: {cause}. All steps run without capture, with the same results.",
            stacklevel=5,
        )
        return step.run(Draws(step.seed))

    def __reduce__(self) -> Any:
        """Copy and pickle without the recordings."""
        return Capture, (self._losses,)


def capture_of(losses: Sequence[Any], num_processes: int, compression: object, always: bool) -> Capture:
    """Return what captures the steps of a pipeline; raise ValueError if an argument of it rules that out."""
    others = {
        f"{num_processes} processes; start one": num_processes > 1,
        "`compress`, which is for several; leave it out": compression is not None,
        "`checks='always'`, which reads values in every step; use `checks='first'`": always,
    }
    if any(others.values()):
        found = next(name for name, is_given in others.items() if is_given)
        raise ValueError(
            f"A captured pipeline should have one process, without compression, and few checks. Found {found}."
        )
    return Capture(losses)


def make_graphs(device: torch.device) -> CudaGraphs:
    """Return what records on a device.

    Raises:
        ValueError: it is no GPU.
    """
    if device.type != "cuda":
        raise ValueError(
            f"`capture` should be used on a GPU. Found a pipeline on the device {device}; move it by `pipe.to('cuda')`, or leave "
            "`capture` out."
        )
    return CudaGraphs(device)


def refuse_hooks(structure: Structure, hooked: Sequence[Tensor]) -> None:
    """Raise ValueError for the hooks of a module or parameter: their Python would not run in a replay."""
    found = [type(module).__name__ for module in structure.modules if has_hooks(module)]
    found += [f"a parameter of shape {list(p.shape)}" for p in hooked]
    raise ValueError(
        f"A captured pipeline should have no hooks, because their Python would not run in a replay. Found one on {found[0]}; "
        "remove it, or leave `capture` out."
    )


def _replay(step: Step, kind: Kind, given: Sequence[Tensor]) -> Results:
    """Replay a step: copy the batch, compute, and hand out gradients and losses."""
    assert kind.recording is not None
    assert kind.results is not None
    assert kind.values is not None
    learns, draws = step.structure.learns, Draws(step.seed)
    before = [p.grad for p in learns]
    with torch.no_grad():
        copies(kind.inputs, given)
        # The memory of a gradient is the same in each replay, so one that is to be added to is put aside.
        kept = [
            g.clone() if g is not None and g is old else None for g, old in zip(kind.gradients, before, strict=True)
        ]
        kind.recording.replay([draws.seed_of(*part) for part in kind.parts])
        for p, old, new, own in zip(learns, before, kind.gradients, kept, strict=True):
            if new is None:
                continue
            if old is None:
                p.grad = new
            elif own is None:
                old.add_(new)
            else:
                new.add_(own)
        return _unpacked(kind.results, kind.values.clone())


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
    batch = tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in given)
    return step.schedule.digest, step.number % len(step.schedule.flows), batch, autocast_dtype(step.engine.device)


def _tensors(parts: Parts) -> list[Tensor | None]:
    """Return all tensors of a batch, None for a micro-batch without a target."""
    given: list[Tensor | None] = []
    for tensors in (*parts.inputs, *parts.targets):
        given += [None] if tensors is None else tensors
    return given


def _static(tensors: Tensors | None) -> Tensors | None:
    return None if tensors is None else each(tensors, lambda x: x.detach().clone())


def _held(modules: Iterable[nn.Module], losses: Iterable[Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Return where modules and losses hold numbers and tensors: a dictionary, the name in it, and a name for errors."""
    stores = [(type(m).__name__, store) for m in modules for store in (vars(m), m._parameters, m._buffers)]
    stores += [(getattr(loss, "__name__", type(loss).__name__), getattr(loss, "__dict__", {})) for loss in losses]
    return [
        (store, name, f"{owner}.{name}")
        for owner, store in stores
        for name, value in store.items()
        if isinstance(value, _SCALARS)
    ]


def _values(held: Iterable[tuple[dict[str, Any], str, str]]) -> list[Any]:
    """Return the numbers, and the addresses of the tensors."""
    found = [store.get(name) for store, name, _ in held]
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in found]


def _states(*, on_cpu: bool) -> Any:
    """Return the states of the generators of Python and NumPy, with `on_cpu` also of torch's on the CPU."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - users' code draws from it
    torchs = torch.default_generator.get_state().numpy().tobytes() if on_cpu else b""
    return torchs, random.getstate(), numpy[1].tobytes(), numpy[2:]


def _cause(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, NotRecordableError)
        else f"raises {type(error).__name__}: {error}".splitlines()[0]
    )
