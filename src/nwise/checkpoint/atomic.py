"""Files that are complete or not there: they are written under another name, and renamed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".part"


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
