"""What a rank does: its present action, and the last calls that all ranks make.

All ranks make the same calls, in the same order, and every rank numbers its calls. Two ranks with different calls under one
number would wait for each other until the time limit::

    number    0             1              2
    rank 0    step 0        step 1         `gather_weights`
    rank 1    step 0        step 1         step 2            <- differs: both end, naming the lines of the script
    rank 2    step 0                                         <- only behind
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nwise.schedule.actions import SENDS, Action, Kind, describe

__all__ = ["Calls", "Status", "RankError"]

_KEPT = 1024  # calls that a rank remembers: more than it can be ahead of another
_LIBRARIES = ("nwise", "torch", "contextlib")
_WAITS = (*SENDS.keys(), *SENDS.values(), Kind.UPDATE)  # an update waits for the sums over replicas


class Status(NamedTuple):
    """The present action of a rank.

    Args:
        step: number of the mini-batch.
        action: the action, from the stage's list.
        since: start of the action in seconds of `time.perf_counter`.
        over: whether the action is done and the user's `on_action` is running; default: False.
    """

    step: int
    action: Action
    since: float
    over: bool = False

    @property
    def waits(self) -> bool:
        """Whether this rank may be waiting for another."""
        return self.action.kind in _WAITS and not self.over

    def __str__(self) -> str:
        return f"at {'`on_action` of ' if self.over else ''}{describe(self.action)} of step {self.step}"


class RankError(RuntimeError):
    """Training ended on all ranks; the message names the first error and its rank."""


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
        self.last: deque[Collective] = deque(maxlen=_KEPT)

    def begin(self, name: str, settings: str = "", digest: int = 0, batch: object = "") -> None:
        """Add a call."""
        self.last.append(Collective(self.count, name, settings, digest, batch, _caller()))
        self.count += 1

    def published(self, most: int = _KEPT) -> list[Collective]:
        """Return the last calls as other ranks get them."""
        return [call._replace(batch=str(call.batch)) for call in list(self.last)[-most:]]

    def difference(self, rank: int, other: int, calls: Sequence[Any]) -> str:
        """Describe the first call that this rank and another make differently; empty if one may only be ahead.

        The sentence lacks its subject, which is this rank.
        """
        # Only calls of one number are compared: a rank that is behind has not made the others yet.
        own = {call.number: call for call in list(self.last)}
        for theirs in (Collective(*call) for call in calls):
            mine = own.get(theirs.number, theirs)
            if mine.name != theirs.name:
                return (
                    f"should make the same calls of nwise as rank {other}, in the same order. Found {mine} on rank {rank} and "
                    f"{theirs} on rank {other}; make both calls on all ranks, outside of conditions on the rank"
                )
            if str(mine.batch) != theirs.batch:
                return (
                    f"should get mini-batches of the same shapes as rank {other}. Found micro-batches, {mine.batch} in {mine} "
                    f"on rank {rank} and {theirs.batch} in {theirs} on rank {other}; load the same data on all ranks"
                )
            if mine.digest != theirs.digest:
                return (
                    f"should train with the same settings as rank {other}. Found {mine.settings} on rank {rank} and "
                    f"{theirs.settings} on rank {other}; give all ranks the same strategy, number of micro-batches, order and "
                    "trainable stages"
                )
        return ""


def _caller() -> str:
    """Return the function of nwise that the script has called, and the line of the call."""
    frame = inspect.currentframe()
    function = ""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        if frame.f_globals["__name__"].startswith("nwise"):
            function = frame.f_code.co_qualname.removesuffix(".__init__")
        frame = frame.f_back
    return "" if frame is None else f"`{function}` in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
