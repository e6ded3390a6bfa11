"""One checkpoint: a folder with tensors and facts that is there as a whole or not at all.

*.safetensors      the tensors, written by `torch.distributed.checkpoint`, a file of every process that holds some
checkpoint.json    facts on one line, with size and SHA-256 of every other file; then the SHA-256 of that line

It is written under another name, flushed to the disk, and renamed once everything is there. Nothing in it is a pickle, so
that reading one runs nobody's code.

`torch.distributed.checkpoint` is imported when there is something to write or to read, since it takes a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

FORMAT = 1
NAME = re.compile(r"step-\d{8,}")
_FACTS = "checkpoint.json"
_ASIDE = ".part"
T = TypeVar("T")


class DamagedError(ValueError):
    """A checkpoint that is not as it was written."""


def write(
    folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint; of several processes all call it.

    Args:
        folder: of this checkpoint, on a disk that all processes reach.
        tensors: of this process, by names that are the same in every process that holds the same tensor; DTensors are
            written by their parts.
        facts: of JSON's types; those of rank 0 are kept.
        group: of all processes, with nothing else under way in it; None for one process.

    Raises:
        OSError: it could not be written; nothing has changed then.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    aside = folder.with_name(folder.name + _ASIDE)
    try:
        together(group, lambda: _fresh(aside) if _rank(group) == 0 else None)
        writer = HuggingFaceStorageWriter(str(aside), save_distributed=True)
        _ignore_no_dist()
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
        listed = together(group, lambda: {p.name: _print_of(p) for p in _mine(aside, group)})
        together(group, lambda: _finish(aside, folder, listed, facts) if _rank(group) == 0 else None)
    except (CheckpointException, OSError) as error:
        if _rank(group) == 0:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk has room again for the rest
        if isinstance(error, OSError):
            raise OSError(f"{folder} should be written as a checkpoint. Found: {error}") from error
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"{folder} should be written as a checkpoint. Found on rank {rank}: {first}") from error


def facts_of(folder: Path) -> dict[str, Any]:
    """What `write` was given as facts.

    Raises:
        DamagedError: they are not as they were written, or of a newer format.
        OSError: they cannot be read now, which says nothing about them.
    """
    facts: dict[str, Any] = _index(folder)["facts"]
    return facts


def check(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Read all files and compare them with what was written; the processes share the work.

    Raises:
        DamagedError: on every process, if anything differs.
        OSError: on every process, if a file cannot be read now.
    """

    def compared() -> dict[str, Any]:
        files = _index(folder)["files"]
        found = {p.name for p in folder.glob("*.safetensors")}
        for odd in sorted(found ^ set(files)):
            raise DamagedError(
                f"{folder} should hold {odd}. Found none." if odd in files else f"{folder} holds {odd} too."
            )
        for name in sorted(files)[_rank(group) :: _size(group)]:
            with _readable(folder / name):
                differs = _print_of(folder / name) != files[name]
            if differs:
                raise DamagedError(f"{folder / name} should be as it was written. Found that its SHA-256 differs.")
        return {}

    together(group, compared)


def layout_of(folder: Path) -> dict[str, Tensor]:
    """The tensors without their values (on the device ``meta``), by name.

    Raises:
        DamagedError: the files are not what `write` makes.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        with _readable(folder):
            metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except (DamagedError, OSError):
        raise
    except Exception as error:  # of many kinds, from the readers of three formats
        raise DamagedError(f"{folder} should hold tensors as nwise writes them. Found: {error}") from error
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")  # type: ignore[union-attr]
        for name, one in metadata.state_dict_metadata.items()
    }


def read(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fill tensors with the values of the same names; of several processes all call it.

    Args:
        folder: a checkpoint that has been checked.
        tensors: of this process, with the shapes of `layout_of`; DTensors may be cut up otherwise than they were.
        group: see `write`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    _ignore_no_dist()
    reader = HuggingFaceStorageReader(str(folder))
    try:
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        kind = OSError if isinstance(first, OSError) else DamagedError
        raise kind(f"{folder} should be read as a checkpoint. Found on rank {rank}: {first}") from error


def remove(folder: Path) -> None:
    """Take a checkpoint away; whoever is stopped halfway leaves nothing that looks like one."""
    shutil.rmtree(_put_away(folder), ignore_errors=True)


def _put_away(folder: Path) -> Path:
    """Give a checkpoint a name that is none."""
    gone = folder.with_name(folder.name + ".gone" + _ASIDE)
    if folder.exists():
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(folder, gone)
    return gone


def sweep(parent: Path) -> None:
    """Take away what writers that were stopped have left, and nothing of anybody else's."""
    for left in parent.glob(f"*{_ASIDE}"):
        if NAME.match(left.name):
            shutil.rmtree(left, ignore_errors=True)


def _index(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says, once it is known to be as it was written."""
    path = folder / _FACTS
    with _readable(path):
        data = path.read_bytes()
    try:
        line, written, rest = data.decode().split("\n")
        if rest or hashlib.sha256(line.encode()).hexdigest() != written:
            raise ValueError("its SHA-256 differs")
        index: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} should be as it was written. Found: {error}") from error
    known = index.get("format") if isinstance(index, dict) else None
    if known != FORMAT:
        raise DamagedError(
            f"{path} should be of format {FORMAT}, which this nwise reads. Found {known!r}; use the nwise that wrote it."
        )
    files = index.get("files")
    if not isinstance(files, dict) or any(Path(name).name != name for name in files) or "facts" not in index:
        raise DamagedError(f"{path} should have facts, and name files of its own folder. Found {str(index)[:200]}.")
    return index


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Tell what is not there, which is damage, from what cannot be read now, as on a network disk that is away."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedError(f"{path} should be as it was written. Found: {error}") from error
    except OSError as error:
        raise OSError(
            f"{path} should be readable. Found: {error}. Nothing has been changed; try again when it can be read."
        ) from error


def _finish(aside: Path, folder: Path, listed: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Everything is on the disk: the list of it, and the name."""
    line = json.dumps({"format": FORMAT, "files": listed, "facts": facts})
    with (aside / _FACTS).open("wb") as file:
        file.write(f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    _flush(aside)
    gone = _put_away(folder)  # one of the same step, for as short a time as can be
    os.replace(aside, folder)
    _flush(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _print_of(path: Path) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return [path.stat().st_size, digest]


def _flush(folder: Path) -> None:
    """Have the disk know the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mine(folder: Path, group: dist.ProcessGroup | None) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))[_rank(group) :: _size(group)]


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def together(group: dist.ProcessGroup | None, work: Callable[[], dict[str, T] | None]) -> dict[str, T]:
    """Do a part of the work on every process; all of it, and the first error, are known to all.

    Args:
        group: of all processes; None for one.
        work: this process's part, by name; None for nothing.
    """
    said: tuple[dict[str, T], Exception | None]
    try:
        said = work() or {}, None
    except (OSError, ValueError) as error:
        said = {}, error
    everyone: list[Any] = [said]
    if group is not None:
        everyone = [None] * _size(group)
        dist.all_gather_object(everyone, said, group=group)
    for _, problem in everyone:
        if problem is not None:
            raise problem
    return {name: value for found, _ in everyone for name, value in found.items()}


def _ignore_no_dist() -> None:
    # Every save of one process is announced as such; a filter that stays, since writers may be threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
