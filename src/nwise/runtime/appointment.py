"""The appointment: a step before which all ranks do what one of them has asked for.

Ranks are at different steps, and whoever waited for the others at one might keep them from reaching it. So the threads of
the watch agree: each says how many steps its rank has begun, and lets it begin no more until all have said so; the largest
of these numbers is a step that nobody has begun, and that all can reach.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from nwise.runtime.team import Team


class Appointment:
    """Of all ranks, or of the one there is; before each step all of them should call `due`.

    Args:
        team: of the pipeline; None for one process.
    """

    def __init__(self, team: Team | None) -> None:
        self._team = team
        self._asked: list[str] = []
        self._round = 0
        self._begun = 0
        self._limit: int | None = None  # the steps that had been begun when this round came up
        self._agreed: tuple[int, str] | None = None
        self._changed = threading.Condition()
        if team is not None:
            team.watch.on_beat = self._look

    def ask(self, what: str) -> None:
        """Have all ranks do something before one of the next steps; safe in a signal handler.

        Args:
            what: that `due` returns then.
        """
        if what not in self._asked:
            self._asked.append(what)

    def due(self, step: int) -> str | None:
        """What is to be done before a step, on all ranks; else it has been begun.

        Args:
            step: its number; each one more than that of the call before, unless something was due.

        Raises:
            RankError: something went wrong on another rank, while this one waited for it.
        """
        if self._team is None:
            return self._asked.pop(0) if self._asked else None
        with self._changed:
            while self._limit is not None and self._agreed is None and step >= self._limit:
                self._changed.wait(0.1)
                self._team.watch.check()
            if self._agreed is not None and step >= self._agreed[0]:
                _, what = self._agreed
                self._round, self._limit, self._agreed = self._round + 1, None, None
                if what in self._asked:
                    self._asked.remove(what)
                return what
            self._begun = step + 1
        return None

    def _look(self, store: Any) -> None:
        """Say what this rank knows, and hear what the others say; in the watch's thread."""
        assert self._team is not None
        with self._changed:
            key = f"appointment/{self._round}"
            if self._asked and self._limit is None:
                store.compare_set(f"{key}/what", "", self._asked[0])
            if self._limit is None and store.check([f"{key}/what"]):
                self._limit = self._begun
                store.set(f"{key}/{self._team.world.rank}", json.dumps(self._begun))
            everyone = [f"{key}/{rank}" for rank in range(self._team.world.size)]
            if self._limit is not None and self._agreed is None and store.check(everyone):
                step = max(json.loads(store.get(name)) for name in everyone)
                self._agreed = step, store.get(f"{key}/what").decode()
                self._changed.notify_all()
