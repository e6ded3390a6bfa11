"""The checkpoints of a run: when one is written, which stay, and which is gone on from."""

from __future__ import annotations

import itertools
import json
import re
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
from nwise.training.weights import check_names

_NAME = re.compile(r"step-\d{8,}")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was read and is as it was written.

    Args:
        folder: of the checkpoint.
        facts: saved with it; ``facts["step"]`` is the number of mini-batches done.
    """

    folder: Path
    facts: dict[str, Any]


class Checkpoints:
    """Checkpoints in ``<folder>/step-<number>``, of which only the last few stay.

    Of a pipeline of several processes, all of them make it and call its methods, at the same steps, with a folder that all
    of them reach.

    Args:
        folder: of all checkpoints.
        pipe: whose state is saved.
        optimizer: of its parameters; may be set anew.
        keep: how many of the newest stay, at least 1.
        keep_best: whether the one with the lowest ``loss`` among its facts stays too.
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
    ('', 1)
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

    def save(self, **facts: Any) -> Path:
        """Write a checkpoint of now.

        Args:
            facts: to be kept with it, of JSON's types.

        Returns:
            Its folder, which is there at once unless it is written in the background.

        Raises:
            OSError: it could not be written. If it is written in the background, the next call warns of that.
            ValueError: there are checkpoints of later steps, which this one would be mistaken for.
        """
        try:
            self.wait()
        except OSError as error:
            if self._is_first:
                warnings.warn(f"{error} It was to be written in the background; the next one is now.", stacklevel=2)
        later = [name for name in self._names() if _step(name) > self._pipe.steps]
        if later:
            raise ValueError(
                f"{self.folder} should hold no checkpoint of a step beyond {self._pipe.steps}. Found {later[-1]}; go on from it "
                "(`resume`) or give another folder."
            )
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
            ValueError: there are some, but all of them are damaged.
        """
        names = self._names()
        if self._team is not None:
            names = self._team.world.everyone("checkpoints", names)[0]
        problem = ""
        for name in reversed(names):
            folder = self.folder / name
            try:
                with self._telling():
                    checkpoint.check(folder, self._group)
                return Found(folder, state.checked(checkpoint.facts_of(folder), folder))
            except DamagedError as error:
                problem = str(error)
                if self._is_first:
                    warnings.warn(f"{problem} The checkpoint before it is looked for.", stacklevel=2)
                    with suppress(OSError):  # in a folder that cannot be written to
                        folder.rename(_free(folder.with_name(name + ".damaged")))
        if problem:
            raise ValueError(f"{self.folder} should hold a checkpoint that can be read. Found none: {problem}")
        return None

    def restore(self, found: Found) -> str:
        """Go on from a checkpoint; see `nwise.training.state.restore`."""
        with self._telling():
            return state.restore(found.folder, self._pipe, self.optimizer, self._group)

    def resume(self) -> str | None:
        """Go on from the newest checkpoint that can be read.

        Returns:
            What is not as it was saved, in one line; None if there is no checkpoint.
        """
        found = self.newest()
        return None if found is None else self.restore(found)

    @property
    def _is_first(self) -> bool:
        return self._team is None or not self._team.world.rank

    def _names(self) -> list[str]:
        return sorted((p.name for p in self.folder.glob("step-*") if _NAME.fullmatch(p.name)), key=_step)

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
                with suppress(DamagedError):
                    loss = checkpoint.facts_of(self.folder / name).get("loss")
                    known.update({} if loss is None else {name: loss})
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
