"""Files that are whole or unchanged, JSON lines, and values that JSON can hold."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nwise.checkpoint import replacing

__all__ = ["append_text", "json_line", "plain", "read_lines", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, so it is never incomplete.

    Raises:
        OSError: the disk does not take it; the earlier file stays.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def json_line(record: Any) -> str:
    """Return a record as a line of JSON; tensors become lists, and numbers that are not finite null."""
    return json.dumps(plain(record), allow_nan=False) + "\n"


def append_text(path: Path, lines: Sequence[str]) -> None:
    """Append lines to a file, all of them or none.

    Raises:
        OSError: the disk does not take them; the file is as before.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def read_lines(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield number (from 1), text and value of every line of a file of JSON lines; a line that is not JSON has no value."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        text = line.decode(errors="replace")
        try:
            yield number, text, json.loads(line.decode())
        except (ValueError, RecursionError):  # also for bytes that are not UTF-8
            yield number, text, None


def plain(value: Any) -> Any:
    """Return a value of JSON's own types: tensors as lists, numbers that are not finite as None."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
