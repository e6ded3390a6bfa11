"""The measured timeline: when every process did what, on the clock of rank 0."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nwise.runtime.team import Team
from nwise.schedule.actions import Action, Kind

_PINGS = 5
_CHUNK = 50_000  # actions that a process keeps at most; what comes later is not recorded


class Timeline:
    """Records this process's actions in some steps.

    Args:
        team: of the pipeline.
        strategy: name of the one in force.
        first, last: steps that are recorded, the last one not.
    """

    def __init__(self, team: Team, strategy: str, first: int, last: int) -> None:
        self._team, self._strategy = team, strategy
        self._first, self._last = first, last
        self._events: list[tuple[int, Action, float, float]] = []
        team.recorder = self

    def __call__(self, step: int, action: Action, begin: float, end: float) -> None:
        """An action with its begin and end, in seconds of `time.perf_counter`."""
        if self._first <= step < self._last and len(self._events) < _CHUNK:
            self._events.append((step, action, begin, end))

    def collect(self) -> dict[str, Any]:
        """Bring all processes' actions together; a call for all ranks.

        Returns:
            What `load` reads, of JSON's types.
        """
        offset = _clock_offset(self._team)
        mine = [
            [a.kind.value, a.stage, a.microbatch, a.message, a.turn, step, begin + offset, end + offset]
            for step, a, begin, end in self._events
        ]
        team = self._team
        ranks = team.world.everyone("timeline", {"events": mine, "bytes": team.bytes_per_step})
        # Of several replicas, those of the one that rank 0 is in.
        here = [ranks[rank] for rank in team.world.ranks]
        return {"strategy": self._strategy, **{name: [one[name] for one in here] for name in ("events", "bytes")}}


def _clock_offset(team: Team) -> float:
    """What has to be added to this process's clock to have rank 0's; by the quickest of some round trips."""
    world, control, best = team.world, team.world.control, (float("inf"), 0.0)
    for rank in range(1, dist.get_world_size()):
        for _ in range(_PINGS):
            message = torch.zeros(1, dtype=torch.float64)
            if world.rank == rank:
                sent = time.perf_counter()
                dist.send(message, 0, group=control)
                dist.recv(message, 0, group=control)
                back = time.perf_counter()
                best = min(best, (back - sent, float(message) - (sent + back) / 2))
            elif world.rank == 0:
                dist.recv(message, rank, group=control)
                message[0] = time.perf_counter()
                dist.send(message, rank, group=control)
    return best[1]


@dataclass(frozen=True)
class Recorded:
    """What `Timeline.collect` gave.

    Args:
        strategy: name of the one that was in force.
        events: per stage its actions with step, begin and end in seconds.
        bytes_sent: per stage and step, measured and predicted, of activations and gradients.
    """

    strategy: str
    events: list[list[tuple[int, Action, float, float]]]
    bytes_sent: list[dict[str, Any]]


def load(path: Path) -> Recorded:
    """Read a timeline."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} should hold a measured timeline, as `nwise train --timeline 20` under torchrun writes. Found none."
        )
    try:
        value = json.loads(path.read_text())
        kinds = {kind.value: kind for kind in Kind}
        events = [
            [(step, Action(kinds[kind], k, m, q, turn), begin, end) for kind, k, m, q, turn, step, begin, end in stage]
            for stage in value["events"]
        ]
        return Recorded(value["strategy"], events, value["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} should hold a measured timeline. Found: {error}; train again.") from error
