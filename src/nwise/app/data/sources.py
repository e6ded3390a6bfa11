"""Rows from Hugging Face `datasets`: the hub, or local parquet, image folders and text files.

A table knows its file, so an error can name file and row.
"""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from nwise.checks import needed

__all__ = ["Table", "column", "library", "local_folder", "tables"]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one file, or of one split of the hub."""

    name: str  # the file, or ``<hub name> (<split>)``
    rows: Any  # a `datasets.Dataset`, its images not decoded


def local_folder(source: str) -> Path | None:
    """Return the path of a source if it exists, as it stands or inside the folder ``$NWISE_DATA``."""
    paths = Path(source), Path(os.environ.get("NWISE_DATA", "/nonexistent")) / source
    return next((path for path in paths if path.exists()), None)


def library() -> Any:
    """Import `datasets`, or raise an ImportError that names the extra."""
    datasets = needed("datasets", "data", "Data from the hub or from local files")
    datasets.disable_progress_bars()
    return datasets


# One Billion Word: its files have a name of their own for the test split, and on the hub only the branch of converted files has
# data, since `datasets` runs no loading scripts.
_LM1B = "billion-word-benchmark/lm1b"
_CONVERTED = "refs/convert/parquet"


def tables(source: str, split: str, *, hub: str | None = None) -> list[Table]:
    """Open the tables of a split: files of a local folder, its folder of images, or a split of the hub.

    The files are ``<split>*.parquet``, ``<split>/*.parquet``, ``<split>*.txt``, or those of One Billion Word as its archive has
    them, ``<split>*-monolingual.tokenized.shuffled/news*``.

    Args:
        source: a local folder or file, a name inside ``$NWISE_DATA``, or a data set of the hub.
        split: ``"train"``, ``"test"``, or ``"heldout"``, as the files of One Billion Word call their test split.
        hub: name on the hub if there is no local `source`; default: `source` itself.

    Raises:
        FileNotFoundError: the source has nothing for this split.
    """
    path = local_folder(source)
    datasets = library()
    if path is None:
        name = hub or source
        branch = None
        if name == _LM1B:
            split = "test" if split == "heldout" else split
            branch = _CONVERTED
        try:
            with _cache_only_without_hub(datasets) as is_reached:
                return [Table(f"{name} ({split})", datasets.load_dataset(name, split=split, revision=branch))]
        except Exception as error:
            why = f"({type(error).__name__})" if is_reached else "and no connection to the hub"
            raise FileNotFoundError(
                f"`source` should be a local folder, a name inside $NWISE_DATA, or a data set of the hub. Found {name!r} "
                f"in none of them {why}; check the name, give a local copy with `--source FOLDER`, or put it at "
                f"$NWISE_DATA/{source}. A copy holds {_layout(split)}."
            ) from error
    if files := _files(path, split):
        return [Table(str(file), _read(datasets, file)) for file in files]
    if (path / split).is_dir():
        # With `data_dir` the library would take words such as "test" in the names of files and classes for splits.
        every = {"train": glob.escape(str((path / split).absolute())) + "/**"}
        folder = datasets.load_dataset("imagefolder", data_files=every, split="train", drop_labels=False)
        return [Table(str(path / split), folder)]
    found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
    raise FileNotFoundError(f"{path} should hold {_layout(split)}. Found {found}; give another folder.")


def _layout(split: str) -> str:
    return f"{split}*.parquet, {split}*.txt or a folder {split}/ with parquet files or one folder of images per class"


@contextmanager
def _cache_only_without_hub(datasets: Any) -> Iterator[bool]:
    """Yield whether the hub can be reached. If not, its libraries use their caches alone; they would retry for half a minute."""
    from huggingface_hub import constants

    is_reached = bool(getproxies()) or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT)
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        if not is_reached:
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        yield is_reached
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _answers(url: str) -> bool:
    """Return whether a server accepts connections."""
    parts = urlsplit(url)
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        socket.create_connection((parts.hostname, port), timeout=5).close()
    except OSError:
        return False
    return True


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    # Text beside parquet files is a note about them.
    patterns = ("*.parquet", "/*.parquet", "*.txt", "*-monolingual.tokenized.shuffled/news*")
    found = next(filter(None, (sorted(path.glob(split + pattern)) for pattern in patterns)), [])
    # Files that the hub has converted call the held-out text the test split.
    return found if found or split != "heldout" else _files(path, "test")


def _read(datasets: Any, file: Path) -> Any:
    kind = "parquet" if file.suffix == ".parquet" else "text"
    try:
        return datasets.load_dataset(kind, data_files={"train": glob.escape(str(file))}, split="train")
    except Exception as error:
        reason = error.__cause__ or error
        need = " in UTF-8" if kind == "text" else ""
        found = f"{type(reason).__name__}: {reason}"
        raise ValueError(f"{file} should be a readable {kind} file{need}. Found: {found}; replace it.") from error


def column(table: Table, wanted: tuple[str, ...], what: str) -> str:
    """Return the first of the wanted columns that the table has."""
    names = table.rows.column_names
    if found := [name for name in wanted if name in names]:
        return found[0]
    raise ValueError(
        f"{table.name} should have a column with the {what}, named {' or '.join(wanted)}. Found {', '.join(names)}; rename one."
    )
