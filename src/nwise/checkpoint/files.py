"""One checkpoint: a folder of files that is complete or not there.

    stage-<k>.safetensors   the tensors of stage k, which any tool reads
    process-<k>.pt          what else the process needs whose first stage is k (`torch.save`); reading it runs no code
    checkpoint.json         one line with the facts and the SHA-256 of every other file; then the SHA-256 of that line

A checkpoint is written under another name, flushed to disk, and renamed once it is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PARTIAL = ".part"
FORMAT = 2
NAME = re.compile(r"step-\d{8,}")
_FACTS = "checkpoint.json"
_TENSORS = "*.safetensors"
_VALUES = "*.pt"

Contents = Callable[[], bytes]


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


# Contents of files ----------------------------------------------------------------------------------


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU, because safetensors refuses tensors that share memory, as those of a module used twice do."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def as_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the bytes of a safetensors file."""
    from safetensors.torch import save

    return save(unshared(tensors))


def as_values(value: Any) -> bytes:
    """Return nested values, as `plain` makes them, as the bytes of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def plain(value: Any, change: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
    """Return nested values that can be read without running code: numbers, texts, tensors, and collections of them.

    Args:
        value: the values.
        change: what is done to each tensor, which is one tensor afterwards, too; default: nothing.

    Raises:
        TypeError: a part is of another type; the message has its place and its type.

    >>> plain({"step": torch.ones(1), "betas": (0.9, 0.99)}, torch.neg)
    {'step': tensor([-1.]), 'betas': (0.9, 0.99)}
    """
    done: dict[Tensor, Tensor] = {}

    def inner(part: Any, place: str) -> Any:
        if type(part) in (Tensor, nn.Parameter) and part.layout is torch.strided:
            if part not in done:
                done[part] = change(part.detach())
            return done[part]
        if isinstance(part, Mapping):
            return {inner(key, "key"): inner(one, f"{place}/{key}") for key, one in part.items()}
        if type(part) in (list, tuple, set, torch.Size):
            return type(part)(inner(one, f"{place}/{i}") for i, one in enumerate(part))
        if part is None or isinstance(part, torch.dtype | torch.device):
            return part
        # Numbers of NumPy are numbers; an enum may be one, too, and would come back as one.
        for kind in (bool, int, float, complex, str) if not isinstance(part, Enum) else ():
            if isinstance(part, kind):
                return kind(part)  # type: ignore[arg-type]
        layout = f" of layout {part.layout}" if isinstance(part, Tensor) else ""
        raise TypeError(f"{place.removeprefix('/')!r}, a {type(part).__name__}{layout}")

    return inner(value, "")


# Writing --------------------------------------------------------------------------------------------


def write(
    folder: Path, contents: Mapping[str, Contents], facts: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write a checkpoint; all processes of a pipeline call it together.

    Args:
        folder: its folder.
        contents: this process's files by name, each made right before it is written.
        facts: JSON values; those of rank 0 are kept.
        group: a group with no other call under way; default: one process.

    Raises:
        OSError: the checkpoint cannot be written; nothing has changed.
    """
    # Only the name of a folder says that it is whole, so a crash needs no repair. What one leaves, by the last line done:
    #
    #     rank 0   make an empty step-9.part             step-9.part, which the next writer removes
    #     all      write their files into it             the same
    #     rank 0   write checkpoint.json, flush          the same
    #     rank 0   an old step-9 -> step-9.gone.part     the same, and no step 9: readers take the one before it
    #     rank 0   step-9.part -> step-9, flush          the new step 9
    #
    # All ranks meet after the first two lines and after the last, so an error of one is raised by all.
    partial = folder.with_name(folder.name + PARTIAL)
    first = place_in(group)[0] == 0
    try:
        together(group, lambda: _begin(partial) if first else None)
        hashes = together(group, lambda: {name: _put(partial / name, make()) for name, make in contents.items()})
        together(group, lambda: _complete(partial, folder, hashes, facts) if first else None)
    except OSError as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # frees the space on a full disk
        raise OSError(f"{folder} should be written as a checkpoint. Found: {error}") from error


def remove(folder: Path) -> None:
    """Remove a checkpoint; an interruption leaves nothing that looks like one."""
    shutil.rmtree(_discard(folder), ignore_errors=True)


def _begin(partial: Path) -> None:
    """Make an empty folder; remove the partial checkpoints of interrupted writers beside it, and no other files."""
    for other in partial.parent.glob(f"*{PARTIAL}"):
        if NAME.match(other.name):
            shutil.rmtree(other, ignore_errors=True)
    partial.mkdir(parents=True)


def _put(path: Path, data: bytes) -> str:
    """Write a file to the disk itself; return its SHA-256."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _complete(partial: Path, folder: Path, hashes: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Write the index once all files are on the disk, then give the folder its name."""
    line = json.dumps({"format": FORMAT, "files": hashes, "facts": facts})
    _put(partial / _FACTS, f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode())
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


def _flush(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading --------------------------------------------------------------------------------------------


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the facts that `write` was given; DamagedError if they differ, OSError if they cannot be read at present."""
    facts: dict[str, Any] = _read_index(folder)["facts"]
    return facts


def check(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Compare all files with their SHA-256; the processes share the work, and all raise DamagedError or OSError."""

    def compare() -> None:
        expected = _read_index(folder)["files"]
        present = {path.name for pattern in (_TENSORS, _VALUES) for path in folder.glob(pattern)}
        for name in sorted(present ^ set(expected)):
            raise DamagedError(
                f"{folder} should hold {name}. Found none."
                if name in expected
                else f"{folder} should hold only the files that its {_FACTS} lists. Found {name}."
            )
        rank, size = place_in(group)
        for name in sorted(expected)[rank::size]:
            with _readable(folder / name), (folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != expected[name]:
                raise DamagedError(f"{folder / name} should be as it was written. Found that its SHA-256 differs.")

    together(group, compare)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all stages by name; the system reads the values of those that are used."""
    from safetensors.torch import load_file

    with _readable(folder):
        return {name: t for path in sorted(folder.glob(_TENSORS)) for name, t in load_file(path).items()}


def read_values(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what the processes have saved beside the tensors of stages, by their first stage."""
    with _readable(folder):
        return {
            int(path.stem.partition("-")[2]): torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            for path in sorted(folder.glob(_VALUES))
        }


def _read_index(folder: Path) -> dict[str, Any]:
    """Return the content of checkpoint.json after checking it against its own SHA-256."""
    path = folder / _FACTS
    with _readable(path):
        data = path.read_bytes()
    # JSON has no line break outside its texts, and inside one it is escaped: {"format": 2, ...}\n<SHA-256>\n
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
    """Tell a missing file or one in another form, which is damage, from one that cannot be read at present."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedError(f"{path} should be as it was written. Found: {error}") from error
    except OSError as error:
        raise OSError(
            f"{path} should be readable. Found: {error}. Nothing has been changed; try again when it can be read."
        ) from error
    except DamagedError:
        raise
    except Exception as error:  # the readers of two formats raise many kinds
        raise DamagedError(f"{path} should be in the form that nwise writes. Found: {error}") from error


# All processes --------------------------------------------------------------------------------------


def together(group: dist.ProcessGroup | None, work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Do a share of the work on every process; return the results of all by name, or raise the first error, on all of them."""
    # An error travels as a value: a rank that raised before the gather would leave the others waiting in it.
    outcome: dict[str, Any] | Exception
    try:
        outcome = work() or {}
    except (OSError, ValueError) as error:
        outcome = error
    outcomes: list[Any] = [outcome] * place_in(group)[1]
    if group is not None:
        dist.all_gather_object(outcomes, outcome, group=group)
    for problem in outcomes:
        if isinstance(problem, Exception):
            raise problem
    return {name: value for results in outcomes for name, value in results.items()}


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank in a group and its size."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
