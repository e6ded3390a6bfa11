"""One checkpoint: a folder of tensors and facts that is complete or not there.

    *.safetensors    the tensors, one file per process that holds some (`torch.distributed.checkpoint`)
    checkpoint.json  one line with the facts and the size and SHA-256 of every other file; then the SHA-256 of that line

A checkpoint is written under another name, flushed to disk, and renamed once it is complete. It contains no pickle, so
reading one runs no foreign code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nwise.process import ignore_no_dist

# `torch.distributed.checkpoint` takes a second to import, so the functions below import it when they need it.

PARTIAL = ".part"
FORMAT = 1
NAME = re.compile(r"step-\d{8,}")
_FACTS = "checkpoint.json"


class DamagedError(ValueError):
    """A checkpoint is no longer as it was written."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; rename it to `path` at the end, or remove it and leave `path` alone after an error."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()  # frees the space on a full disk
        raise


def write(
    folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint; all processes of a pipeline call it together.

    A tensor that several processes hold has the same name in each. Only rank 0's facts, which are JSON values, are kept. No other
    call of the group (None for one process) may be under way.

    Raises:
        OSError: the checkpoint cannot be written; nothing has changed.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Only the name of a folder says that it is whole, so a crash needs no repair. What one leaves, by the last line done:
    #
    #     rank 0   make an empty step-9.part             step-9.part, which the next writer removes
    #     all      write their tensors into it           the same
    #     all      read back a share, for SHA-256        the same
    #     rank 0   write checkpoint.json, flush          the same
    #     rank 0   an old step-9 -> step-9.gone.part     the same, and no step 9: readers take the one before it
    #     rank 0   step-9.part -> step-9, flush          the new step 9
    #
    # All ranks meet after the first three lines and after the last, so an error of one is raised by all.
    partial = folder.with_name(folder.name + PARTIAL)
    rank = _place(group)[0]
    try:
        together(group, lambda: _begin(partial) if rank == 0 else None)
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        ignore_no_dist()
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
        fingerprints = together(
            group, lambda: {p.name: _fingerprint(p) for p in _share(partial.glob("*.safetensors"), group)}
        )
        together(group, lambda: _complete(partial, folder, fingerprints, facts) if rank == 0 else None)
    except (CheckpointException, OSError) as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # frees the space on a full disk
        where, first = ("", error) if isinstance(error, OSError) else _first_failure(error)
        raise OSError(f"{folder} should be written as a checkpoint. Found{where}: {first}") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that `write` was given; DamagedError if they differ, OSError if they cannot be read at present."""
    facts: dict[str, Any] = _read_index(folder)["facts"]
    return facts


def check(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Read all files and compare their fingerprints; the processes share the work, and all raise DamagedError or OSError."""

    def compare() -> None:
        expected = _read_index(folder)["files"]
        present = {p.name for p in folder.glob("*.safetensors")}
        for name in sorted(present ^ set(expected)):
            raise DamagedError(
                f"{folder} should hold {name}. Found none."
                if name in expected
                else f"{folder} should hold only the files that its {_FACTS} lists. Found {name}."
            )
        for name in _share(expected, group):
            with _readable(folder / name):
                differs = _fingerprint(folder / name) != expected[name]
            if differs:
                raise DamagedError(f"{folder / name} should be as it was written. Found that its SHA-256 differs.")

    together(group, compare)


def read_layout(folder: Path) -> dict[str, Tensor]:
    """Return the tensors without values (on the device ``meta``), by name."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    try:
        with _readable(folder):
            metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    except (DamagedError, OSError):
        raise
    except Exception as error:  # the readers of three formats raise many kinds
        raise DamagedError(f"{folder} should hold tensors as nwise writes them. Found: {error}") from error
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")  # type: ignore[union-attr]
        for name, entry in metadata.state_dict_metadata.items()
    }


def read(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fill tensors, in place, with the values of the same names; all processes of a pipeline call it together.

    They have the shapes of `read_layout`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    ignore_no_dist()
    reader = HuggingFaceStorageReader(str(folder))
    try:
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        where, first = _first_failure(error)
        kind = OSError if isinstance(first, OSError) else DamagedError
        raise kind(f"{folder} should be read as a checkpoint. Found{where}: {first}") from error


def _first_failure(error: Any) -> tuple[str, BaseException]:
    rank, (first, _) = next(iter(error.failures.items()))  # torch's error: {rank: (error, traceback)}
    return f" on rank {rank}", first


def remove(folder: Path) -> None:
    """Remove a checkpoint; an interruption leaves nothing that looks like one."""
    shutil.rmtree(_discard(folder), ignore_errors=True)


def together(group: dist.ProcessGroup | None, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Do a share of the work on every process; return the results of all by name, or raise the first error, on all of them."""
    # An error travels as a value: a rank that raised before the gather would leave the others waiting in it.
    outcome: dict[str, Any] | Exception
    try:
        outcome = work() or {}
    except (OSError, ValueError) as error:
        outcome = error
    outcomes: list[Any] = [outcome] * _place(group)[1]
    if group is not None:
        dist.all_gather_object(outcomes, outcome, group=group)
    for problem in outcomes:
        if isinstance(problem, Exception):
            raise problem
    return {name: value for results in outcomes for name, value in results.items()}


def _read_index(folder: Path) -> dict[str, Any]:
    """Return the content of checkpoint.json after checking it against its own SHA-256."""
    path = folder / _FACTS
    with _readable(path):
        data = path.read_bytes()
    # JSON has no line break outside its texts, and inside one it is escaped: {"format": 1, ...}\n<SHA-256>\n
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
    # A name with a path would make `check` read files outside the folder.
    names = index.get("files")
    if not isinstance(names, dict) or any(Path(name).name != name for name in names) or "facts" not in index:
        raise DamagedError(f"{path} should have facts, and name files of its own folder. Found {str(index)[:200]}.")
    return index


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Tell a missing file, which is damage, from one that cannot be read at present, e.g. on a lost network disk."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedError(f"{path} should be as it was written. Found: {error}") from error
    except OSError as error:
        raise OSError(
            f"{path} should be readable. Found: {error}. Nothing has been changed; try again when it can be read."
        ) from error


def _complete(partial: Path, folder: Path, fingerprints: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write the index once all files are on the disk, then give the folder its name."""
    line = json.dumps({"format": FORMAT, "files": fingerprints, "facts": facts})
    with (partial / _FACTS).open("wb") as file:
        file.write(f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    _flush(partial)
    # A folder cannot replace another in one call, so a checkpoint of the same step is missing for a moment.
    trash = _discard(folder)
    os.replace(partial, folder)
    _flush(folder.parent)
    shutil.rmtree(trash, ignore_errors=True)


def _discard(folder: Path) -> Path:
    """Rename a checkpoint to a name that no reader takes for one, and return it."""
    trash = folder.with_name(folder.name + ".gone" + PARTIAL)
    if folder.exists():
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(folder, trash)
    return trash


def _begin(partial: Path) -> None:
    """Make an empty folder; remove the partial checkpoints of interrupted writers beside it, and no other files."""
    for other in partial.parent.glob(f"*{PARTIAL}"):
        if NAME.match(other.name):
            shutil.rmtree(other, ignore_errors=True)
    partial.mkdir(parents=True)


def _fingerprint(path: Path) -> list[Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return [path.stat().st_size, digest]


def _flush(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _share(items: Iterable[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Return this process's share of the work on some items."""
    rank, size = _place(group)
    return sorted(items)[rank::size]


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank in a group and its size."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
