"""What all processes record, gathered on rank 0: numbers of steps, without making any of them wait, and a timeline of actions."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nwise.app.records import write_text
from nwise.app.training.run import Run
from nwise.pipeline import Pipeline
from nwise.runtime.processes import Processes
from nwise.schedule import Action, Kind

_KEPT = 8  # number of columns on their way before a rank waits for the oldest
_PINGS = 5
_CHUNK = 50_000  # largest number of actions that a process records; later ones are dropped


class StepLog:
    """Losses, learning rates and staleness of logged steps; with several processes rank 0 receives them later."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._ready: list[tuple[int, dict[str, Any]]] = []
        self._ages: dict[int, Tensor] = {}  # of the steps that are still to come
        self._gather = None if pipe.processes.size == 1 else AsyncGather(pipe.processes)

    def put(self, step: int, losses: Tensor, lr: float, seconds: float) -> None:
        """Add a step and the time at which it ended; all processes add the same steps."""
        if self._gather is None:
            self._ready.append((step, _record(losses, lr, seconds, self._pipe.staleness)))
            return
        # A stage whose head does not run, or that another process holds, has no share of a loss.
        shares = [float(self._pipe.loss_shares.get(k, 0.0)) for k in range(self._pipe.num_stages)]
        sums = [loss * share if share else 0.0 for loss, share in zip(losses.tolist(), shares, strict=True)]
        self._gather.put(step, [lr, seconds, *sums, *shares])
        if self._pipe.processes.is_first:
            self._ages[step] = self._pipe.staleness  # another strategy may be in force when the step arrives

    def take(self, *, wait: bool = False) -> list[tuple[int, dict[str, Any]]]:
        """Return the steps that are complete, with their values, on rank 0; with `wait`, all steps that were added."""
        if self._gather is None:
            ready = self._ready
            self._ready = []
            return ready
        return [(step, _summary(table, self._ages.pop(step))) for step, table in self._gather.take(wait=wait)]


def _summary(table: Tensor, ages: Tensor) -> dict[str, Any]:
    """Add up the processes' shares of each stage's loss."""
    sums, shares = table[:, 2:].sum(0).chunk(2)
    losses = torch.where(shares > 0, sums / shares, torch.nan)
    return _record(losses, float(table[0, 0]), float(table[0, 1]), ages)


def _record(losses: Tensor, lr: float, seconds: float, ages: Tensor) -> dict[str, Any]:
    stale = {"staleness": ages.tolist()} if ages.any() else {}
    return {"loss": losses.tolist(), "lr": lr, "seconds": seconds, **stale}


class AsyncGather:
    """Gathers a column of numbers from every rank at chosen steps.

    All ranks, at least two, make it together and put in columns of the same length at the same steps.
    """

    def __init__(self, processes: Processes) -> None:
        self._group = processes.new_group()  # a separate group: no other messages mix in
        self._under_way: deque[tuple[int, list[Tensor], Any]] = deque()

    def put(self, step: int, column: list[float]) -> None:
        """Send this rank's numbers of a step to rank 0."""
        values = torch.tensor(column, dtype=torch.float64)
        rows = None if dist.get_rank() else [torch.zeros_like(values) for _ in range(dist.get_world_size())]
        # A collective, because gloo's receives do not report that they are done until a thread waits for them.
        work = dist.gather(values, rows, 0, group=self._group, async_op=True)
        self._under_way.append((step, rows or [values], work))

    def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
        """Return the steps whose columns have arrived on rank 0 since the last call, with tables ``[ranks, length]``.

        Other ranks get nothing. With `wait`, every column has arrived on rank 0 afterwards, and left the other ranks.
        """
        tables = []
        while self._under_way and (wait or len(self._under_way) > _KEPT or self._under_way[0][2].is_completed()):
            step, rows, work = self._under_way.popleft()
            work.wait()
            if not dist.get_rank():
                tables.append((step, torch.stack(rows)))
        return tables


def check_timeline(processes: Processes, steps: int) -> None:
    """Raise ValueError if steps are to be recorded in one process, which waits for no other."""
    if steps and processes.size == 1:
        raise ValueError(f"`timeline` should be 0 in one process. Found {steps}; start several with torchrun.")


class TimelineRecorder:
    """Records the actions of one of several processes, in the steps from `first` to before `last`."""

    def __init__(self, pipe: Pipeline, strategy: str, first: int, last: int) -> None:
        self._pipe = pipe
        self._strategy = strategy
        self._first = first
        self._last = last
        self._events: list[tuple[int, Action, float, float]] = []
        pipe.recorder = self

    def __call__(self, step: int, action: Action, begin: float, end: float) -> None:
        """Record an action, with start and end in seconds of `time.perf_counter`."""
        if self._first <= step < self._last and len(self._events) < _CHUNK:
            self._events.append((step, action, begin, end))

    def save(self, run: Run | None) -> None:
        """Gather the actions of all processes, which call this together, into a file of the run that `load` reads."""
        processes = self._pipe.processes
        offset = _clock_offset(processes)
        mine = [
            [a.kind.value, a.stage, a.microbatch, a.message, a.minibatch, step, begin + offset, end + offset, a.age]
            for step, a, begin, end in self._events
        ]
        # With several replicas, keep the actions of this rank's replica.
        here = processes.by_place("timeline", {"events": mine, "bytes": self._pipe.bytes_per_step})
        if run is not None:
            parts = {name: [one[name] for one in here] for name in ("events", "bytes")}
            path = run.folder / "timeline.json"
            text = json.dumps({"strategy": self._strategy, **parts}) + "\n"
            run.attempt(path, lambda: write_text(path, text))


def _clock_offset(processes: Processes) -> float:
    """Return the seconds to add to this process's clock to get rank 0's, from the quickest of several round trips."""
    # The reply has rank 0's time, which counts as the time halfway between send and receive. The quickest round trip
    # leaves the least room for an error:
    #
    #     this rank   sent -----------------------> back
    #     rank 0            \---> its time ---/             offset = its time - (sent + back) / 2
    control = processes.control
    best = (float("inf"), 0.0)
    for rank in range(1, dist.get_world_size()):
        for _ in range(_PINGS):
            message = torch.zeros(1, dtype=torch.float64)
            if processes.rank == rank:
                sent = time.perf_counter()
                dist.send(message, 0, group=control)
                dist.recv(message, 0, group=control)
                back = time.perf_counter()
                best = min(best, (back - sent, float(message) - (sent + back) / 2))
            elif processes.rank == 0:
                dist.recv(message, rank, group=control)
                message[0] = time.perf_counter()
                dist.send(message, rank, group=control)
    return best[1]


class Recorded(NamedTuple):
    """A timeline that `TimelineRecorder.save` wrote, by rank."""

    strategy: str  # that was in force
    events: list[list[tuple[int, Action, float, float]]]  # actions, with step, and start and end in seconds
    bytes_sent: list[list[int]]  # in a step, as activations and as gradients


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
                (step, Action(kinds[kind], k, m, q, minibatch, *age), begin, end)  # version 0.1 wrote no age
                for kind, k, m, q, minibatch, step, begin, end, *age in rank
            ]
            for rank in value["events"]
        ]
        return Recorded(value["strategy"], events, value["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} should hold a measured timeline. Found: {error}; train again.") from error
