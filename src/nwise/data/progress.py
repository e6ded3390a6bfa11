"""A progress bar for work on many items, where somebody can see it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")

# Fewer are done before a bar could be read.
_MANY = 5000


def tracked(items: Sequence[T], description: str) -> Iterable[T]:
    """The items, with a bar on the terminal if there are many; nothing is drawn elsewhere."""
    if len(items) < _MANY or not sys.stderr.isatty():
        return items
    return track(items, description=description, console=Console(stderr=True), transient=True)
