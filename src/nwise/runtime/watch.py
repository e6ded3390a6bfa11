"""The watch: no rank outlives an error, a kill or a stall of another, and all of them say what came first.

A thread on every rank waits for the first error, which the rank that has it writes into the store; tells the others every
second that its process is alive and what it is at; and looks after the next rank, and after its own main thread.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from nwise.schedule.actions import Action, Kind

_WAITS = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT, Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
_BEAT = 1.0  # seconds between signs of life
_GRACE = 3.0  # seconds that a main thread has to end by itself, and the others to hear of it

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


class Watch:
    """Watches over this rank and the next.

    Args:
        store: of all ranks, `World.store`.
        rank, world_size: of this process, and how many there are.
        stage: that this rank holds.
        limit: seconds that one action may take, and that a rank may be silent.

    Attributes:
        doing: step, action and when it began, set by the runtime; None between steps.
    """

    def __init__(self, store: Any, rank: int, world_size: int, stage: int, limit: float) -> None:
        self.doing: tuple[int, Action, float] | None = None
        self._main = store
        # Connections of their own, since one that waits lets nobody else in.
        self._store, self._ears = store.clone(), store.clone()
        self._rank, self._size, self._stage, self._limit = rank, world_size, stage, limit
        self._heard: tuple[str, float] = ("", time.monotonic())
        self._failure = ""
        self._closed = threading.Event()
        for loop in (self._listen, self._beat):
            threading.Thread(target=loop, name=f"nwise {loop.__name__}", daemon=True).start()

    def check(self) -> None:
        """Raise the first error, if there has been one on any rank."""
        if self._failure:
            raise RankError(self._failure)

    def failed(self, error: BaseException) -> RankError:
        """Tell all ranks of an error of this one, unless another came first.

        Returns:
            The first error, to be raised.
        """
        lost = isinstance(error, RuntimeError) and _is_connection(error)
        # A neighbour's connection breaks when it ends; what ended it is about to be known.
        deadline = time.monotonic() + (1.0 if lost else 0.0)
        while not self._failure and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._failure:
            self._publish(self._lost(error) if lost else f"failed {self._where()}: {type(error).__name__}: {error}")
        return RankError(self._failure)

    def close(self) -> None:
        """End the watch, as after the last step."""
        self._closed.set()

    def _publish(self, what: str) -> None:
        sentence = f"Rank {self._rank} (stage {self._stage}) {what}"
        first = self._store_set(sentence)
        self._failure = first
        print(f"nwise: rank {self._rank} (stage {self._stage}): {first}", file=sys.stderr, flush=True)
        self._wait_for_others()

    def _store_set(self, sentence: str) -> str:
        """Only the first error is kept; it, whoever's it is."""
        try:
            return bytes(self._main.compare_set("error", "", sentence)).decode() or sentence
        except RuntimeError:  # the store is gone, and with it all other ranks
            return sentence

    def _wait_for_others(self) -> None:
        """A launcher stops all ranks once one has ended, so that they should have had time to say why."""
        try:
            self._main.add("told", 1)
            deadline = time.monotonic() + _GRACE
            while self._main.add("told", 0) < self._size and time.monotonic() < deadline:
                time.sleep(0.02)
        except RuntimeError:
            return

    def _where(self) -> str:
        if self.doing is None:
            return "between steps"
        step, action, _ = self.doing
        return f"at {describe(action)} of step {step}"

    def _lost(self, error: BaseException) -> str:
        """Which neighbours may be gone, by what they last said."""
        waited = f"lost a neighbour {self._where()}"
        now = [(r, self._last_seen(r)) for r in range(self._size) if r != self._rank]
        silent = [f"rank {r} {seen}" for r, seen in now if seen]
        return f"{waited} ({error}); last seen: {'; '.join(silent)}"

    def _last_seen(self, rank: int) -> str:
        try:
            return str(json.loads(self._main.get(f"beat/{rank}"))["at"]) if self._main.check([f"beat/{rank}"]) else ""
        except RuntimeError:
            return ""

    def _listen(self) -> None:
        """Wait for the first error of any rank."""
        try:
            self._ears.wait(["error"], timedelta(days=365))
            failure = self._ears.get("error").decode()
        except RuntimeError:
            failure = "The store of all ranks is gone; its process, rank 0 or the launcher, has ended."
        self._end(failure)

    def _beat(self) -> None:
        """Give signs of life, and look out for those of the next rank."""
        count = itertools.count()
        with suppress(RuntimeError):  # the store is gone, which the other thread sees too
            while not self._closed.wait(_BEAT) and not self._failure:
                self._store.set(f"beat/{self._rank}", json.dumps({"count": next(count), "at": self._where()}))
                self._look_around()

    def _look_around(self) -> None:
        now = time.monotonic()
        if self.doing is not None:
            _, action, since = self.doing
            # Whoever waits is seldom to blame, so that the one who computes has the time to say so first.
            limit = 2 * self._limit if action.kind in _WAITS else self._limit
            if time.perf_counter() - since > limit:
                self._publish(f"has been {self._where()} for more than {limit:g} seconds")
                return
        other = (self._rank + 1) % self._size
        key = f"beat/{other}"
        found = self._store.get(key).decode() if self._store.check([key]) else ""
        if found != self._heard[0]:
            self._heard = found, now
        elif now - self._heard[1] > self._limit and found:
            self._publish(
                f"has not heard of rank {other} for {self._limit:g} seconds; last seen {json.loads(found)['at']}"
            )

    def _end(self, failure: str) -> None:
        """Let the main thread end, which may be waiting for somebody who is gone."""
        if self._closed.is_set():
            return
        if not self._failure:
            self._failure = failure
            print(f"nwise: rank {self._rank} (stage {self._stage}) stops: {failure}", file=sys.stderr, flush=True)
            with suppress(RuntimeError):
                self._main.add("told", 1)
        self._closed.wait(_GRACE)
        if not self._closed.is_set():
            os._exit(1)


def describe(action: Action) -> str:
    """An action in words.

    >>> describe(Action(Kind.FORWARD, 2, 1))
    'F2(1) (forward, stage 2, micro-batch 1)'
    """
    return f"{action} ({_WHAT[action.kind]}, stage {action.stage}, micro-batch {action.microbatch})"


def _is_connection(error: Any) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "peer", "timed out", "socket", "broken pipe", "aborted"))
