"""A progress bar for work on many items, on terminals only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")

# Fewer items are done before anyone could read the bar.
_MANY = 5000


def with_progress_bar(items: Sequence[T], description: str) -> Iterable[T]:
    """Iterate over the items, with a bar if there are many and stderr is a terminal."""
    if len(items) < _MANY or not sys.stderr.isatty():
        return items
    return track(items, description=description, console=Console(stderr=True), transient=True)
