"""The checkpoints of a run: which are kept, and which one to resume from."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from nwise.checkpoint import files, state
from nwise.checkpoint.files import PARTIAL, DamagedError
from nwise.checkpoint.lock import FolderLock
from nwise.checkpoint.optimizer import after_first_state, refuse_foreign
from nwise.checkpoint.weights import check_names
from nwise.checks import check_at_least, check_optimizer, needed
from nwise.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint whose files are as they were written; ``facts["step"]`` is the number of mini-batches done."""

    folder: Path
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The result of `Checkpoints.resume`.

    Args:
        step: number of mini-batches done, after which the run continues.
        changes: the differences from the saved state, in one line; empty if there are none.
        parts: the same, one by one.
    """

    step: int
    changes: str
    parts: tuple[str, ...] = field(default=(), repr=False, compare=False)


class Checkpoints:
    """Writes checkpoints to ``<folder>/step-<number>`` and keeps only the newest.

    All processes of a pipeline make it and call its methods, at the same steps, with a folder that all of them reach.

    Args:
        folder: the folder of all checkpoints.
        pipe: the pipeline whose state is saved.
        optimizer: the optimizer of its parameters; the attribute may be set to another one.
        keep: number of newest checkpoints to keep, at least 1.
        extra: what else to save and load, by name: schedulers, a `GradScaler`, averaged weights, a second optimizer. Each has
            `state_dict` and `load_state_dict`.
        asynchronous: copy before `save` returns, and write while training continues.

    Raises:
        ValueError: `keep` is below 1, the optimizer needs a closure or has parameters that the pipeline lacks, or two stages use
            the same name.
        ImportError: safetensors or filelock is not installed; the error names the extra.
        TypeError: the state of a module or the optimizer cannot be saved; the optimizer's first update raises it, too.

    >>> import tempfile, nwise
    >>> pipe = nwise.Pipeline([torch.nn.Linear(2, 2)], strategy="end-to-end")
    >>> optimizer = torch.optim.Adam(pipe.parameters())
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()), pipe, optimizer)
    >>> losses = pipe.step(torch.zeros(3, 2), target=torch.tensor([0, 1, 1])); optimizer.step()
    >>> checkpoints.save().name
    'step-00000001'
    >>> checkpoints.resume(), pipe.steps
    (Resumed(step=1, changes=''), 1)
    """

    def __init__(
        self,
        folder: Path | str,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep: int = 2,
        extra: state.Extra | None = None,
        asynchronous: bool = False,
    ) -> None:
        check_at_least(1, keep=keep)
        for package in ("safetensors", "filelock"):
            needed(package, "checkpoint", "A checkpoint")
        check_names(pipe)
        self.folder = Path(folder)
        self._pipe = pipe
        self._keep = keep
        self._extra = dict(extra or {})
        self._processes = pipe.processes
        state.present_state(pipe, None, self._extra)
        self._optimizer: torch.optim.Optimizer | None = None
        self.optimizer = optimizer
        # A separate group keeps a background writer's messages apart from the messages of training.
        self._group = pipe.processes.new_group()
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._writing: Future[None] | None = None
        self._lock = FolderLock(self.folder)
        # A pipeline that has made steps or looked for a checkpoint is not a new run, and may write beside existing checkpoints:
        #
        #     new pipeline, empty folder                 save
        #     new pipeline, checkpoints there            save raises: it would mix two runs
        #     new pipeline, resume, then save            save
        self._knows_folder = pipe.steps > 0

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; may be set to another one."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and optimizer is not self._optimizer:
            if not isinstance(getattr(optimizer, "param_groups", None), list):
                raise TypeError(
                    f"`optimizer` should be one optimizer. Found {type(optimizer).__name__}; make one with several groups of "
                    "parameters, and save the state of others in another way."
                )
            check_optimizer(optimizer)
            if self._processes.size == 1:  # on several it may have parameters of other stages
                refuse_foreign(optimizer, state.parameter_names(self._pipe))
            state.present_state(self._pipe, optimizer)
            after_first_state(optimizer, partial(state.present_state, self._pipe, optimizer))
        self._optimizer = optimizer

    def save(self, **facts: Any) -> Path:
        """Write a checkpoint of the present state.

        Args:
            facts: JSON values to keep with it, under names other than a checkpoint's own (``step``, ``seed``, ``strategy``,
                ``num_microbatches``, ``ends``, ``optimizer``, ``compress``).

        Returns:
            Its folder, which exists at once unless it is written in the background.

        Raises:
            OSError: it cannot be written. If it is written in the background, the next call warns instead.
            ValueError: the folder has checkpoints of another run (a new run should call `resume` first) or of later steps,
                another process writes to it, or a fact has a reserved name.
        """
        # All ranks meet at the claim and in the writing; `telling` reports an error to those that wait there already.
        if reserved := sorted(set(facts) & {*state.FACTS}):
            raise ValueError(f"`save` should get facts with other names. Found {reserved[0]!r}, which nwise writes.")
        try:
            self.wait()
        except OSError as error:
            if self._processes.is_first:
                warnings.warn(
                    f"{error}. This background write failed; nwise now writes the next checkpoint.", stacklevel=2
                )
        with self._processes.telling("a checkpoint"):
            files.together(self._group, self._claim_folder)
        self._knows_folder = True
        due = self._pipe.pending_gradients()
        with self._processes.telling():
            copied = self._writer is not None
            contents = state.collect(self._pipe, self.optimizer, due, self._extra, copied=copied)
            all_facts = {**state.collect_facts(self._pipe, self.optimizer), **facts}
            json.dumps(all_facts)  # a fact that is not JSON raises on all processes
        folder = self.folder / f"step-{self._pipe.steps:08d}"
        if self._writer is None:
            with self._processes.telling():
                self._write(folder, contents, all_facts)
        else:
            self._writing = self._writer.submit(self._write, folder, contents, all_facts)
        return folder

    def _claim_folder(self) -> None:
        """Make sure, before anything is written, that no other process writes here and no other run is overwritten."""
        if not self._processes.is_first:
            return
        present = sorted(p.name for p in self.folder.glob("step-*") if p.suffix != PARTIAL)
        if present and not self._knows_folder:
            raise ValueError(
                f"{self.folder} should hold no checkpoints of another run. Found {present[-1]}; resume from it (`resume`) or "
                "give another folder."
            )
        if later := [name for name in self._names() if _step(name) > self._pipe.steps]:
            raise ValueError(
                f"{self.folder} should hold no checkpoint of a step beyond {self._pipe.steps}. Found {later[-1]}; resume from "
                "it (`resume`) or give another folder."
            )
        self._lock.acquire()

    def wait(self) -> None:
        """Wait until everything has been written."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            with self._processes.telling():
                writing.result()

    def newest(self) -> CheckpointInfo | None:
        """Return the newest checkpoint whose files are all as they were written; None if the folder holds none.

        A damaged checkpoint is renamed, with a warning.

        Raises:
            ValueError: there are checkpoints, but all of them are damaged, now or earlier.
            OSError: a checkpoint cannot be read at present, or the last one could not be written; nothing has been changed.
        """
        self.wait()  # the checkpoint on its way is the newest, and its writing has the group
        damaged = sorted(p.name for p in self.folder.glob("step-*.damaged*"))
        names, damaged = self._processes.gather("checkpoints", [self._names(), damaged])[0]  # as rank 0 sees the folder
        problem = f"{damaged[-1]} was found to be damaged." if damaged else ""
        # All ranks read shares of one checkpoint and agree on it before any of them looks at the one before.
        for name in reversed(names):
            folder = self.folder / name
            try:
                with self._processes.telling():
                    files.check(folder, self._group)
                info = CheckpointInfo(folder, state.check_facts(files.read_facts(folder), folder))
                self._knows_folder = True
                return info
            except DamagedError as error:
                problem = str(error)
                if self._processes.is_first:
                    warnings.warn(f"{problem} nwise tries the checkpoint before it.", stacklevel=2)
                    with suppress(OSError):  # in a read-only folder
                        folder.rename(_unused(folder.with_name(name + ".damaged")))
        if problem:
            raise ValueError(
                f"{self.folder} should hold a readable checkpoint. Found none: {problem} To start over, use another folder."
            )
        self._knows_folder = True
        return None

    def restore(self, info: CheckpointInfo, *, settings: bool = True) -> Resumed:
        """Load a checkpoint; see `nwise.checkpoint.state.restore`."""
        self.wait()
        with self._processes.telling():
            parts = state.restore(info.folder, self._pipe, self.optimizer, self._extra, settings=settings)
            return Resumed(info.facts["step"], "; ".join(parts), tuple(parts))

    def resume(self) -> Resumed | None:
        """Load the newest checkpoint that can be read; return None if there is no checkpoint.

        Raises:
            ValueError: all checkpoints are damaged, or of another network.
            OSError: a checkpoint cannot be read at present.
        """
        info = self.newest()
        return None if info is None else self.restore(info)

    def _names(self) -> list[str]:
        return sorted((p.name for p in self.folder.glob("step-*") if files.NAME.fullmatch(p.name)), key=_step)

    def _write(self, folder: Path, contents: dict[str, files.Contents], facts: dict[str, Any]) -> None:
        files.write(folder, contents, facts, self._group)
        if self._processes.is_first:
            names = self._names()
            for name in {*names[: -self._keep]} - {folder.name}:
                files.remove(self.folder / name)


def _step(name: str) -> int:
    return int(name.partition("-")[2])


def _unused(path: Path) -> Path:
    """Return the path, or the first that does not exist with a number appended."""
    paths = chain([path], (path.with_name(f"{path.name}-{number}") for number in count(2)))
    return next(unused for unused in paths if not unused.exists())
