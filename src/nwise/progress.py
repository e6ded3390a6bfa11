"""Progress bars for work that takes more than a few seconds, on terminals, if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

__all__ = ["MANY", "T", "progress_bar", "with_progress_bar"]

T = TypeVar("T")

MANY = 5000  # small items; fewer are done before a bar could be read


def with_progress_bar(items: Sequence[T], description: str, *, least: int = 1) -> Iterable[T]:
    """Iterate over items, with a bar on stderr if that is a terminal.

    Args:
        items: the items.
        description: text beside the bar.
        least: number of items from which there is a bar, such as `MANY`; default: 1.
    """
    if len(items) < least or not sys.stderr.isatty() or find_spec("rich") is None:
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description=description, console=Console(stderr=True), transient=True)


def progress_bar(description: str, *, shown: bool = True) -> Callable[[list[Any]], Iterable[Any]]:
    """Return a wrapper of a list that shows a progress bar, or nothing.

    Args:
        description: text beside the bar.
        shown: whether there is a bar; default: True.
    """
    return partial(with_progress_bar, description=description) if shown else iter
