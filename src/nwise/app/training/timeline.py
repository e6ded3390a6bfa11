"""The measured timeline: start and end of every process's actions, on the clock of rank 0."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nwise.app.records import write_text
from nwise.app.training.run import Run
from nwise.pipeline import Pipeline
from nwise.runtime.world import World
from nwise.schedule import Action, Kind

_PINGS = 5
_CHUNK = 50_000  # largest number of actions that a process records; later ones are dropped


class TimelineRecorder:
    """Records the actions of one of several processes, in the steps from `first` to before `last`."""

    def __init__(self, pipe: Pipeline, strategy: str, first: int, last: int) -> None:
        self._pipe, self._strategy = pipe, strategy
        self._first, self._last = first, last
        self._events: list[tuple[int, Action, float, float]] = []
        pipe.recorder = self

    def __call__(self, step: int, action: Action, begin: float, end: float) -> None:
        """Record an action, with start and end in seconds of `time.perf_counter`."""
        if self._first <= step < self._last and len(self._events) < _CHUNK:
            self._events.append((step, action, begin, end))

    def save(self, run: Run | None) -> None:
        """Gather the actions of all processes, which call this together, into a file of the run that `load` reads."""
        processes = self._pipe.processes
        assert isinstance(processes, World)
        offset = _clock_offset(processes)
        mine = [
            [a.kind.value, a.stage, a.microbatch, a.message, a.turn, step, begin + offset, end + offset, a.age]
            for step, a, begin, end in self._events
        ]
        # With several replicas, keep the actions of this rank's replica.
        here = processes.by_place("timeline", {"events": mine, "bytes": self._pipe.bytes_per_step})
        if run is not None:
            parts = {name: [one[name] for one in here] for name in ("events", "bytes")}
            path, text = run.folder / "timeline.json", json.dumps({"strategy": self._strategy, **parts}) + "\n"
            run.attempt(path, lambda: write_text(path, text))


def _clock_offset(world: World) -> float:
    """Return the seconds to add to this process's clock to get rank 0's, from the quickest of several round trips."""
    # The reply has rank 0's time, which counts as the time halfway between send and receive. The quickest round trip
    # leaves the least room for an error:
    #
    #     this rank   sent -----------------------> back
    #     rank 0            \---> its time ---/             offset = its time - (sent + back) / 2
    control, best = world.control, (float("inf"), 0.0)
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


class Recorded(NamedTuple):
    """A timeline that `TimelineRecorder.save` wrote, by rank."""

    strategy: str  # that was in force
    events: list[list[tuple[int, Action, float, float]]]  # actions, with step, and start and end in seconds
    bytes_sent: list[dict[str, Any]]  # per step as activations and as gradients, measured and predicted


def load(path: Path) -> Recorded:
    """Read a timeline; FileNotFoundError or ValueError if the file is none."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} should hold a measured timeline, as `nwise train --timeline 20` under torchrun writes. Found none."
        )
    try:
        value = json.loads(path.read_text())
        kinds = {kind.value: kind for kind in Kind}
        events = [
            [
                (step, Action(kinds[kind], k, m, q, turn, *age), begin, end)  # version 0.1 wrote no age
                for kind, k, m, q, turn, step, begin, end, *age in rank
            ]
            for rank in value["events"]
        ]
        return Recorded(value["strategy"], events, value["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} should hold a measured timeline. Found: {error}; train again.") from error
