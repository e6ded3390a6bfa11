"""The calls that all ranks make, in the same order: a rank that makes another call than the rest is found at once.

Every rank numbers its calls and publishes the last ones with its signs of life. Two ranks with different calls under one number
would wait for each other until the time limit::

    number    0             1              2
    rank 0    step 0        step 1         `gather_weights`
    rank 1    step 0        step 1         step 2            <- differs: the watch ends both, naming the lines of the script
    rank 2    step 0                                         <- only behind
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_KEPT = 1024  # calls that a rank remembers: more than it can be ahead of another
_PUBLISHED = 16
_LIBRARIES = ("nwise", "torch", "contextlib")


class Collective(NamedTuple):
    """A call that all ranks make.

    Args:
        number: number of the call, over all pipelines of the process.
        name: the call, such as ``"step 3"``.
        settings: strategy and number of micro-batches, for error messages; default: none.
        digest: number that is equal on two ranks if their settings and orders of work are; default: 0.
        batch: what the mini-batch looks like; its ``str`` is equal on two ranks if it looks alike. Default: none.
        place: function of nwise and line of the caller's script; default: unknown.
    """

    number: int
    name: str
    settings: str = ""
    digest: int = 0
    batch: object = ""
    place: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


class Calls:
    """The last calls of this rank; another thread may read them."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[Collective] = deque(maxlen=_KEPT)

    def begin(self, name: str, settings: str = "", digest: int = 0, batch: object = "") -> None:
        """Add a call."""
        self._last.append(Collective(self.count, name, settings, digest, batch, _caller()))
        self.count += 1

    def published(self) -> list[Collective]:
        """Return the last few calls."""
        return [call._replace(batch=str(call.batch)) for call in list(self._last)[-_PUBLISHED:]]

    def pairs(self, theirs: Iterable[Collective]) -> list[tuple[Collective, Collective]]:
        """Return this rank's and another's calls of the same number, in order."""
        mine = {call.number: call for call in list(self._last)}
        return [(mine[call.number], call) for call in theirs if call.number in mine]


def _caller() -> str:
    """Return the function of nwise that the script has called, and the line of the call."""
    frame, function = inspect.currentframe(), ""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        if frame.f_globals["__name__"].startswith("nwise"):
            function = frame.f_code.co_qualname.removesuffix(".__init__")
        frame = frame.f_back
    return "" if frame is None else f"`{function}` in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
