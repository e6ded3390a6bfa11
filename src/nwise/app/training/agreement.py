"""The agreement on a step before which all ranks fulfil a request of one of them.

Ranks are at different steps, and a rank that blocks at one may be the one that others need to reach it. So the threads of
the watch agree on a step. Each publishes the number of steps that its rank has begun, and lets it begin no more until all
have published theirs. The largest of these numbers is a step that no rank has begun and every rank can reach. A batch of an
evaluation counts as a step here::

    rank 0   begun 7   ->   steps 7, 8   |
    rank 1   begun 9   ->                |   all save before step 9
    rank 2   begun 8   ->   step 8       |
"""

from __future__ import annotations

import json
import threading
from typing import Any

from nwise.runtime.processes import Processes


class Agreement:
    """Agrees with all ranks on a step; every rank calls `due` before each step, and after each batch of an evaluation."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._asked: list[str] = []
        # A round, seen from a rank: `_limit` is None until a request comes up. Then it is the number of steps begun, which
        # the rank publishes and does not exceed. `_agreed` is None until the numbers of all ranks are there.
        self._round = 0
        self._begun = 0  # calls of `due` after which the rank went on
        self._limit: int | None = None
        self._agreed: tuple[int, str] | None = None
        self._changed = threading.Condition()
        processes.set_beat(self._look)

    def ask(self, what: str) -> None:
        """Let `due` return a text on all ranks before one of the next steps; safe in a signal handler."""
        if what not in self._asked:
            self._asked.append(what)

    def due(self) -> str | None:
        """Return the request that is due on all ranks at this call; otherwise begin the next step and return None."""
        if self._processes.size == 1:
            return self._asked.pop(0) if self._asked else None
        with self._changed:
            while self._limit is not None and self._agreed is None and self._begun >= self._limit:
                with self._processes.telling():  # raises the error of a rank that has ended
                    self._changed.wait(0.1)
            if self._agreed is not None and self._begun >= self._agreed[0]:
                _, what = self._agreed
                self._round, self._limit, self._agreed = self._round + 1, None, None
                if what in self._asked:
                    self._asked.remove(what)
                return what
            self._begun += 1
        return None

    def _look(self, store: Any) -> None:
        """Publish this rank's number of steps begun and read the others' numbers; runs in the watch's thread."""
        with self._changed:
            key = f"agreement/{self._round}"
            if self._asked and self._limit is None:
                store.compare_set(f"{key}/what", "", self._asked[0])
            if self._limit is None and store.check([f"{key}/what"]):
                self._limit = self._begun
                store.set(f"{key}/{self._processes.rank}", json.dumps(self._begun))
            keys = [f"{key}/{rank}" for rank in range(self._processes.size)]
            if self._limit is not None and self._agreed is None and store.check(keys):
                step = max(json.loads(store.get(name)) for name in keys)
                self._agreed = step, store.get(f"{key}/what").decode()
                self._changed.notify_all()
