"""The watch: no rank outlives an error, a kill or a stall of another, and all of them say what came first.

The rank that has the first error writes it into the store. One thread on every rank waits for that; another gives signs of
life, looks after the next rank, and after its own main thread.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from nwise._process import end_stalled, exit_at_once
from nwise.runtime.channel import LostPeer
from nwise.schedule.actions import SENDS, Action, Kind

_WAITS = (*SENDS.keys(), *SENDS.values(), Kind.UPDATE)  # an update waits for the sums over replicas
_BEAT = 1.0  # seconds between signs of life
_END = "closed"  # in the place of an error, when all is well
_GRACE = 2.0  # seconds that a main thread has to end by itself, and the others to hear of it

_WHAT = {
    Kind.FORWARD: "forward",
    Kind.HEAD: "head",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.BOTH: "input and weight gradient",
    Kind.SEND_ACTIVATION: "sending an activation",
    Kind.RECEIVE_ACTIVATION: "waiting for an activation",
    Kind.SEND_GRADIENT: "sending a gradient",
    Kind.RECEIVE_GRADIENT: "waiting for a gradient",
    Kind.DROP: "drop",
    Kind.UPDATE: "update",
}


class RankError(RuntimeError):
    """Training ended on all ranks; says which was the first error, and where."""


class Doing(NamedTuple):
    """What a rank is at.

    Args:
        step: number of the mini-batch.
        action: of the lists.
        since: moment of `time.perf_counter` at which it began.
        over: whether it is done, and the user's `on_action` is told of it.
    """

    step: int
    action: Action
    since: float
    over: bool = False

    @property
    def waits(self) -> bool:
        """Whether it may be another rank that keeps this one."""
        return self.action.kind in _WAITS and not self.over

    def __str__(self) -> str:
        return f"at {'`on_action` of ' if self.over else ''}{describe(self.action)} of step {self.step}"


class Watch:
    """Watches over this rank and the next.

    Args:
        store: of all ranks, `World.store`.
        rank, world_size: of this process, and how many there are.
        stage: that this rank holds.
        limit: seconds that one action may take, and that a rank may be silent.

    Attributes:
        doing: set by the runtime; None between steps.
        calls: steps and forwards that this rank has begun.
        on_beat: None, or called every second in another thread, with a store of all ranks.
        left: the number of calls after which this rank wants to end, set once it does.
    """

    def __init__(self, store: Any, rank: int, world_size: int, stage: int, limit: float) -> None:
        self.doing: Doing | None = None
        self._main = store
        # Connections of their own, since one that waits lets nobody else in.
        self._store, self._ears = store.clone(), store.clone()
        self._rank, self._size, self._limit = rank, world_size, limit
        self._name = f"rank {rank} (stage {stage})"
        self._heard: tuple[dict[str, Any], float] = ({}, time.monotonic())
        self._failure = ""
        self._tells = False  # whether this rank has an error of its own to report
        self._reported = threading.Lock()  # held from the first report on: three threads may want to make it
        self._closed = threading.Event()
        self.calls = 0
        # Called with every sign of life, in the watch's thread, with a store that only this thread uses.
        self.on_beat: Callable[[Any], None] | None = None
        self.left: int | None = None
        self._beats = itertools.count()
        self._beat()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._listen, self._live)]
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
        """Tell all ranks of an error of this one, unless another came first.

        Returns:
            The first error, to be raised.
        """
        if not self._failure:
            what = f"failed {_where(self.doing)}: {type(error).__name__}: {error}"
            if isinstance(error, LostPeer):
                # Whoever ended because of an error told of it before its connections broke; so this one was killed, or told.
                what = f"lost rank {error.peer} (last seen {self._last_seen(error.peer)}) {_where(self.doing)}"
            self._tell(what)
        return RankError(self._failure)

    def close(self) -> None:
        """End the watch, as after the last step of all ranks; its threads too, which an interpreter that ends would abort."""
        self._closed.set()
        with suppress(RuntimeError):
            self._main.compare_set("error", "", _END)
        for thread in self._threads:
            thread.join(timeout=_GRACE)

    def _tell(self, what: str, kill: int | None = None, store: Any = None) -> None:
        """Make it the first error unless there is one, and give the others time to say so.

        Args:
            what: that happened to this rank.
            kill: a process of this machine that stands still; it could not end, and a launcher would wait for it.
            store: of the thread that tells; default: the main thread's, which nobody else can use while that waits in it.
        """
        store = store or self._main
        self._tells = True
        sentence = f"{self._name.capitalize()} {what}"
        self._failure = sentence
        with suppress(RuntimeError):  # the store is gone, and with it all other ranks
            self._failure = store.compare_set("error", "", sentence).decode()
        first = self._report()
        if kill is not None:
            end_stalled(kill)
        # A launcher stops all ranks as soon as one has ended.
        with suppress(RuntimeError):
            told, deadline = store.add("told", int(first)), time.monotonic() + _GRACE
            while told < self._size and time.monotonic() < deadline:
                time.sleep(0.02)
                told = store.add("told", 0)

    def _report(self) -> bool:
        """Print the failure, once; return whether this call did."""
        first = self._reported.acquire(blocking=False)
        if first:
            _say(f"nwise: {self._name} stops: {self._failure}")
        return first

    def _last_seen(self, rank: int) -> str:
        with suppress(RuntimeError):
            if beat := _last_beat(self._main, rank):
                return str(beat["at"])
        return "nowhere yet"

    def _listen(self) -> None:
        """Wait for the first error of any rank, and end with it."""
        try:
            self._ears.wait(["error"], timedelta(days=365))
            failure = self._ears.get("error").decode()
        except RuntimeError:
            failure = "The store of all ranks is gone; its process, rank 0 or the launcher, has ended."
        if self._closed.is_set() or failure == _END:
            return
        if not self._tells:
            self._failure = failure
            if self._report():
                with suppress(RuntimeError):
                    self._ears.add("told", 1)
        # The main thread may be waiting for somebody who is gone.
        if not self._closed.wait(_GRACE):
            exit_at_once()

    def _live(self) -> None:
        """Give signs of life, and look out for those of others."""
        with suppress(RuntimeError):  # the store is gone, which the other thread sees too
            while not self._closed.wait(_BEAT) and not self._failure:
                self._beat()
                if self.on_beat is not None:
                    self.on_beat(self._store)
                self._look_at_myself()
                self._look_at_next()

    def _beat(self) -> None:
        doing = self.doing  # once, since the main thread sets it
        beat = {"count": next(self._beats), "at": _where(doing), "pid": os.getpid(), "host": platform.node()}
        beat |= {"left": self.left, "waits": doing is not None and doing.waits}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _look_at_myself(self) -> None:
        doing = self.doing
        if doing is None:
            return
        # Whoever waits is seldom to blame, so that the one who computes has the time to say so first.
        limit = 2 * self._limit if doing.waits else self._limit
        if time.perf_counter() - doing.since > limit:
            others = self._who_waits_for_nobody() if doing.waits else ""
            self._tell(f"has been {doing} for more than {limit:g} seconds{others}", store=self._store)

    def _who_waits_for_nobody(self) -> str:
        """Of the other ranks; a loader that stands still on one of them, say."""
        beats = {rank: _last_beat(self._store, rank) for rank in range(self._size) if rank != self._rank}
        return "".join(
            f"; rank {rank}, which waits for nobody, was last seen {beat['at']}"
            for rank, beat in beats.items()
            if beat and not beat["waits"]
        )

    def _look_at_next(self) -> None:
        other, now = (self._rank + 1) % self._size, time.monotonic()
        beat = _last_beat(self._store, other)
        left = beat.get("left")
        if left is not None and self.calls > left:  # also where it waits before its first action
            self._tell(
                f"waits for rank {other}, which has left after {left} steps, {_where(self.doing)}", store=self._store
            )
        elif beat != self._heard[0]:
            self._heard = beat, now
        elif beat and now - self._heard[1] > self._limit and not self._failure:
            pid = beat["pid"] if beat["host"] == platform.node() else None
            self._tell(
                f"has not heard of rank {other} for {self._limit:g} seconds; last seen {beat['at']}", pid, self._store
            )


def describe(action: Action) -> str:
    """An action in words.

    >>> describe(Action(Kind.FORWARD, 2, 1))
    'F2(1) (forward, stage 2, micro-batch 1)'
    """
    return f"{action} ({_WHAT[action.kind]}, stage {action.stage}, micro-batch {action.microbatch})"


def _where(doing: Doing | None) -> str:
    return "between steps" if doing is None else str(doing)


def _last_beat(store: Any, rank: int) -> dict[str, Any]:
    """The last sign of life of a rank; empty before its first."""
    key = f"beat/{rank}"
    found: dict[str, Any] = json.loads(store.get(key)) if store.check([key]) else {}
    return found


def _say(sentence: str) -> None:
    """In one piece, since all ranks write at once."""
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
