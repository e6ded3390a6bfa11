"""The checkpoints of a run: when one is written, which stay, and which is gone on from."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nwise.pipeline import Pipeline
from nwise.training import checkpoint, state
from nwise.training.checkpoint import DamagedError
from nwise.training.lock import FolderLock
from nwise.training.weights import check_names


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was read and is as it was written.

    Args:
        folder: of the checkpoint.
        facts: saved with it; ``facts["step"]`` is the number of mini-batches done.
    """

    folder: Path
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `Checkpoints.resume` has done.

    Args:
        step: number of mini-batches done, after which the run goes on.
        changes: what is not as it was saved, in one line; empty if everything is.
    """

    step: int
    changes: str


class Checkpoints:
    """Checkpoints in ``<folder>/step-<number>``, of which only the last few stay.

    Of a pipeline of several processes, all of them make it and call its methods, at the same steps, with a folder that all
    of them reach.

    Args:
        folder: of all checkpoints.
        pipe: whose state is saved.
        optimizer: of its parameters; may be set anew.
        keep: how many of the newest stay, at least 1.
        keep_best: whether the one with the lowest finite ``loss`` among its facts stays too.
        asynchronous: copy before `save` returns, and write while training goes on.

    Raises:
        ValueError: `keep` is below 1.

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
        keep_best: bool = False,
        asynchronous: bool = False,
    ) -> None:
        if keep < 1:
            raise ValueError(f"`keep` should be at least 1. Found {keep}.")
        check_names(pipe)
        self.folder, self.optimizer = Path(folder), optimizer
        self._pipe, self._keep, self._keep_best = pipe, keep, keep_best
        self._team = pipe.team
        # A group of its own, so that a writer in the background meets no other messages.
        self._group = None if pipe.team is None else pipe.team.world.new_group(backend="gloo")
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._writing: Future[None] | None = None
        self._lock = FolderLock(self.folder)
        # Whether it may write beside others: a pipeline that has made steps, or has looked for a checkpoint, is no new run.
        self._knows = pipe.steps > 0

    def save(self, **facts: Any) -> Path:
        """Write a checkpoint of now.

        Args:
            facts: to be kept with it, of JSON's types, under names other than a checkpoint's own (``step``, ``seed``,
                ``strategy``, ``num_microbatches``, ``ends``, ``optimizer``).

        Returns:
            Its folder, which is there at once unless it is written in the background.

        Raises:
            OSError: it could not be written. If it is written in the background, the next call warns of that.
            ValueError: the folder has checkpoints of another run (a new run should call `resume` first), or of later steps, or
                another process writes to it; or a fact has a reserved name.
        """
        if reserved := sorted(set(facts) & set(state.FACTS)):
            raise ValueError(
                f"`save` should be given facts with names of your own. Found {reserved[0]!r}, which nwise writes."
            )
        try:
            self.wait()
        except OSError as error:
            if self._is_first:
                warnings.warn(f"{error} It was to be written in the background; the next one is now.", stacklevel=2)
        with self._telling():
            checkpoint.together(self._group, self._claim)
        self._knows = True
        self._pipe.forget_versions()  # Hogwild's, which are not saved; so that a run that is not stopped goes on likewise
        with self._telling():
            tensors = state.tensors_of(self._pipe, self.optimizer)
            known = {**state.facts_of(self._pipe, self.optimizer), **facts}
            json.dumps(known)  # what cannot be written shows on all processes
        folder = self.folder / f"step-{self._pipe.steps:08d}"
        if self._writer is None:
            with self._telling():
                self._write(folder, tensors, known)
        else:
            self._writing = self._writer.submit(self._write, folder, tensors, known)
        return folder

    def _claim(self) -> None:
        """Before anything is written: nobody else writes here, and nothing is lost or mistaken for another run's."""
        if not self._is_first:
            return
        there = sorted(self.folder.glob("step-*"))
        if not self._knows and (old := [p.name for p in there if p.suffix != ".part"]):
            raise ValueError(
                f"{self.folder} should hold no checkpoints of another run. Found {old[-1]}; go on from it (`resume`) or give "
                "another folder."
            )
        later = [name for name in self._names() if _step(name) > self._pipe.steps]
        if later:
            raise ValueError(
                f"{self.folder} should hold no checkpoint of a step beyond {self._pipe.steps}. Found {later[-1]}; go on from it "
                "(`resume`) or give another folder."
            )
        try:
            self._lock.acquire()
        except OSError as error:
            raise OSError(f"{self.folder} should be written to, for checkpoints. Found: {error}") from error

    def wait(self) -> None:
        """Until everything has been written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._telling():
                writing.result()

    def newest(self) -> Found | None:
        """The newest that is as it was written, every file of it read; None if there is none at all.

        Those that are damaged are told of in a warning and get another name.

        Raises:
            ValueError: there are some, but all of them are damaged, now or since earlier.
            OSError: one cannot be read now; nothing has been changed.
        """
        names, damaged = self._names(), sorted(p.name for p in self.folder.glob("step-*.damaged*"))
        if self._team is not None:
            names, damaged = self._team.world.everyone("checkpoints", [names, damaged])[0]
        problem = f"{damaged[-1]} was found to be damaged." if damaged else ""
        for name in reversed(names):
            folder = self.folder / name
            try:
                with self._telling():
                    checkpoint.check(folder, self._group)
                found = Found(folder, state.checked(checkpoint.facts_of(folder), folder))
                self._knows = True
                return found
            except DamagedError as error:
                problem = str(error)
                if self._is_first:
                    warnings.warn(f"{problem} The checkpoint before it is looked for.", stacklevel=2)
                    with suppress(OSError):  # in a folder that cannot be written to
                        folder.rename(_free(folder.with_name(name + ".damaged")))
        if problem:
            raise ValueError(
                f"{self.folder} should hold a checkpoint that can be read. Found none: {problem} To begin anew, give another "
                "folder."
            )
        self._knows = True
        return None

    def restore(self, found: Found) -> Resumed:
        """Go on from a checkpoint; see `nwise.training.state.restore`."""
        with self._telling():
            changes = state.restore(found.folder, self._pipe, self.optimizer, self._group)
        return Resumed(self._pipe.steps, changes)

    def resume(self) -> Resumed | None:
        """Go on from the newest checkpoint that can be read.

        Returns:
            The step, and what is not as it was saved; None if there is no checkpoint.

        Raises:
            ValueError: all checkpoints are damaged, or of another network.
            OSError: one cannot be read now.
        """
        found = self.newest()
        return None if found is None else self.restore(found)

    @property
    def _is_first(self) -> bool:
        return self._team is None or not self._team.world.rank

    def _names(self) -> list[str]:
        return sorted((p.name for p in self.folder.glob("step-*") if checkpoint.NAME.fullmatch(p.name)), key=_step)

    def _write(self, folder: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        if self._is_first:
            checkpoint.sweep(self.folder)
        checkpoint.write(folder, tensors, facts, self._group)
        if self._is_first:
            self._tidy(folder.name)

    def _tidy(self, written: str) -> None:
        """Take away all but the newest ones and the best."""
        names = self._names()
        stay = {written, *names[-self._keep :]}
        if self._keep_best:
            known: dict[str, float] = {}
            for name in names:
                try:
                    loss = checkpoint.facts_of(self.folder / name).get("loss")
                except DamagedError:
                    continue
                except OSError:  # it may be the best
                    stay.add(name)
                    continue
                if isinstance(loss, int | float) and math.isfinite(loss):
                    known[name] = loss
            stay.update(sorted(known, key=lambda name: (known[name], name))[:1])
        for name in names:
            if name not in stay:
                checkpoint.remove(self.folder / name)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A process that is lost ends all others, as in a step."""
        if self._team is None:
            yield
        else:
            with self._team.telling():
                yield


def _step(name: str) -> int:
    return int(name.partition("-")[2])


def _free(path: Path) -> Path:
    """A path that nothing has, by a number if need be."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(one for one in names if not one.exists())
