"""The watch: no rank outlives an error, a kill or a stall of another, and all ranks report the first error.

The rank with the first error writes it into the store. On every rank, one thread waits for that error. Another thread
publishes signs of life and checks on the next rank and on its own main thread:

    rank 0                               store                rank 1
    main thread   first error ---------> error   -----------> `_listen` ends the process
    `_live`       sign of life --------> beat/0  -----------> `_live` checks the next rank (of two ranks: rank 0)

Every rank publishes its last calls with its signs of life (`nwise.runtime.calls`).
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from nwise.process import end_stalled, exit_at_once
from nwise.runtime.calls import Calls, RankError, Status
from nwise.runtime.channel import LostPeer

__all__ = ["Watchdog"]

_BEAT = 1.0  # seconds between signs of life
_END = "closed"  # written instead of an error when training ended well
SPARE = 15.0  # seconds beyond the time limit after which torch ends a wait by itself
_LATER = 3.0  # seconds by which a waiting rank speaks after the limit, so the one that it waits for speaks first
_GRACE = 2.0  # seconds that a main thread has to end by itself, and other ranks have to report
_PUBLISHED = 16


class Watchdog:
    """Watches over this rank and the next, from `start` on.

    Args:
        store: store shared by all ranks, `Processes.store`.
        rank, world_size: this process's rank and the number of processes.
        stages: indices of the stages that this rank holds.
        limit: limit in seconds of one action, and of a rank's silence.
        doing: function that returns the present action of this rank; None between steps.
        clock: function that returns the time in seconds; default: that of `Status.since`.
        calls: calls of this rank that all ranks make; default: none yet.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        stages: Sequence[int],
        limit: float,
        doing: Callable[[], Status | None],
        clock: Callable[[], float] = time.perf_counter,
        calls: Calls | None = None,
    ) -> None:
        self._doing = doing
        self._clock = clock
        self._calls = calls or Calls()
        self._main = store
        # One connection for each thread: a waiting thread blocks every other user of its connection.
        #
        #     _main           main thread, in collectives of facts and for its own error
        #     _store          `_live`, which never waits long
        #     _error_store    `_listen`, which waits for the first error from the start
        self._store = store.clone()
        self._error_store = store.clone()
        self._rank = rank
        self._size = world_size
        self._limit = limit
        names = ", ".join(map(str, stages))
        self._name = f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {names})"
        self._heard: tuple[dict[str, Any], float] = ({}, clock())
        self._failure = ""
        self._tells = False  # whether this rank reports its own error
        self._reporting = threading.Lock()  # three threads may try to report
        self._closed = threading.Event()
        self._beats = itertools.count()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._listen, self._live)]

    def start(self) -> None:
        """Give the first sign of life and begin to watch."""
        self._beat()
        for thread in self._threads:
            thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether there has been an error on any rank."""
        return bool(self._failure)

    def check(self) -> None:
        """Raise the first error, if there has been one on any rank."""
        if self._failure:
            raise RankError(self._failure)

    def failed(self, error: BaseException) -> RankError:
        """Report an error of this rank to all ranks, unless another came first; return the first one to raise."""
        if not self._failure:
            what = f"failed {_where(self._doing())}: {type(error).__name__}: {error}"
            if isinstance(error, LostPeer):
                # A rank that ends after an error reports it before its connections break. So the lost rank was killed, or
                # its report has come first and `_tell` keeps it.
                what = f"lost rank {error.peer} (last seen {self._last_seen(error.peer)}) {_where(self._doing())}"
            self._tell(what)
        return RankError(self._failure)

    def close(self) -> None:
        """End the watch and its threads, after the last step of all ranks."""
        self._closed.set()
        with suppress(RuntimeError):
            self._main.compare_set("error", "", _END)
        for thread in self._threads:  # the interpreter would abort them as it exits
            thread.join(timeout=_GRACE)

    def _tell(self, what: str, kill: int | None = None, store: Any = None) -> None:
        """Record an error as the first one, unless another was first, and give the other ranks time to report it.

        `what` is the rest of a sentence that begins with this rank's name, and `kill` a stalled process of this machine, which
        the launcher would wait for. The main thread's store would block another thread while the main thread waits.
        """
        store = store or self._main
        # `compare_set` writes only where nothing is: of all ranks' errors the first one stays, and all get it back.
        self._tells = True
        failure = f"{self._name.capitalize()} {what}"
        with suppress(RuntimeError):  # the store has ended, and so have all other ranks
            failure = store.compare_set("error", "", failure).decode()
        if kill is not None:
            end_stalled(kill)
        first = self._report(failure)
        # A launcher stops all ranks as soon as one has ended, so wait until the others have printed the error too: `reports`
        # counts those that have, this one included, for at most two seconds.
        with suppress(RuntimeError):
            reports = store.add("reports", int(first))
            deadline = time.monotonic() + _GRACE
            while reports < self._size and time.monotonic() < deadline:
                time.sleep(0.02)
                reports = store.add("reports", 0)

    def _report(self, failure: str) -> bool:
        """Print the failure, once; return whether this call did.

        The main thread raises it only afterwards, because that may end the process.
        """
        with self._reporting:
            first = not self._failure
            if first:
                with suppress(OSError):  # the terminal or the pipe is gone
                    # In one piece, because all ranks write at once.
                    sys.stderr.write(f"nwise: {self._name} stops: {failure}\n")
                    sys.stderr.flush()
                self._failure = failure
        return first

    def _last_seen(self, rank: int) -> str:
        with suppress(RuntimeError):
            if beat := _last_beat(self._main, rank):
                return str(beat["at"])
        return "nowhere yet"

    def _listen(self) -> None:
        """Wait for the first error of any rank, then end this process."""
        try:
            self._error_store.wait(["error"], timedelta(days=365))
            failure = self._error_store.get("error").decode()
        except RuntimeError:
            failure = "The store of all ranks is lost; its process, rank 0 or the launcher, has ended."
        if self._closed.is_set() or failure == _END:
            return
        if not self._tells and self._report(failure):
            with suppress(RuntimeError):
                self._error_store.add("reports", 1)
        # The main thread raises the error at its next `check`, and ends; or it is blocked on a rank that has ended.
        if not self._closed.wait(_GRACE):
            exit_at_once()

    def _live(self) -> None:
        """Publish signs of life, and check on this rank and the next."""
        with suppress(RuntimeError):  # the store has ended, which the other thread reports
            while not self._closed.wait(_BEAT) and not self._failure:
                self._beat()
                self._check_self()
                self._check_next()

    def _beat(self) -> None:
        doing = self._doing()  # read once: the main thread may change it meanwhile
        calls = self._calls.published(_PUBLISHED)
        beat = {"count": next(self._beats), "at": _where(doing), "pid": os.getpid(), "host": platform.node()}
        beat |= {"waits": doing is not None and doing.waits, "calls": calls}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _check_self(self) -> None:
        doing = self._doing()
        if doing is None:
            return
        # A waiting rank is rarely the cause.
        if self._clock() - doing.since > self._limit + (_LATER if doing.waits else 0):
            others = self._other_ranks() if doing.waits else ""
            self._tell(f"has been {doing} for more than {self._limit:g} seconds{others}", store=self._store)

    def _other_ranks(self) -> str:
        """Describe the other ranks that do not wait, such as one whose loader has stalled; if all wait, all of them."""
        beats = {rank: _last_beat(self._store, rank) for rank in range(self._size) if rank != self._rank}
        if running := {rank: beat for rank, beat in beats.items() if beat and not beat["waits"]}:
            return "".join(
                f"; rank {r}, which is slow or has stalled, was last seen {b['at']}" for r, b in running.items()
            )
        waiting = ", ".join(f"rank {rank} {beat['at']}" for rank, beat in beats.items() if beat)
        return f"; all ranks wait, perhaps for a link that is down: {waiting}"

    def _check_next(self) -> None:
        other = (self._rank + 1) % self._size
        now = self._clock()
        beat = _last_beat(self._store, other)
        if different := self._calls.difference(self._rank, other, beat.get("calls", ())):
            self._tell(different, store=self._store)
        elif beat != self._heard[0]:
            self._heard = beat, now
        elif beat and now - self._heard[1] > self._limit and not self._failure:
            pid = beat["pid"] if beat["host"] == platform.node() else None
            self._tell(
                f"has not heard of rank {other} for {self._limit:g} seconds; last seen {beat['at']}", pid, self._store
            )


def _where(doing: Status | None) -> str:
    return "between steps" if doing is None else str(doing)


def _last_beat(store: Any, rank: int) -> dict[str, Any]:
    """Return a rank's last sign of life; empty before its first."""
    key = f"beat/{rank}"
    beat: dict[str, Any] = json.loads(store.get(key)) if store.check([key]) else {}
    return beat
