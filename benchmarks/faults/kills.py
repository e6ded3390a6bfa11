"""Runs of several processes, one of which is killed at a random moment: do they all end as if nothing had happened?

    python -m benchmarks.faults kills --runs 100

writes ``records/kills.jsonl``, a line for every run: when and where it was killed, whether that was while a checkpoint was
written, and whether weights, optimizer state and records of the run that torchrun started again are bitwise those of a run
that nobody disturbed (``identical``).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.progress import track
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils._pytree import tree_leaves

from benchmarks.faults import small_run
from nwise.app.training import Run
from nwise.checkpoint import read_tensors, read_values
from nwise.machine import processor

HERE = Path(__file__).parent
RANKS = 4
STEPS, EVERY = 120, 8
LIMIT = 180  # seconds after which a run hangs
Record = dict[str, Any]


def worker(folder: str) -> None:
    """Run one process, whose output goes to a file."""
    with (Path(folder) / f"output-{os.environ['RANK']}.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(OMP_NUM_THREADS="1", NWISE_TIMEOUT="30")
    small_run.main(Path(folder) / "runs", STEPS, EVERY)


def launch(folder: Path) -> bool:
    """Start the processes, and start them again if one ends, as torchrun does; return whether they finished."""
    (folder / "runs").mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=3,
        monitor_interval=0.1,
        start_method="forkserver",  # so that torch is imported once for all runs, in a process without threads
    )
    try:
        elastic_launch(config, worker)(str(folder))
    except (ChildFailedError, SignalException) as error:
        print(error, file=sys.stderr)
        return False
    return True


def read_pid(folder: Path, rank: int) -> int | None:
    """Read the process id of a rank from its file; None if it has not been started."""
    path = folder / "runs" / f"pid-{rank}"
    return int(path.read_text()) if path.exists() and path.read_text() else None


def read_step(folder: Path) -> int:
    """Read the last step of a run from its records; -1 if there are none."""
    for path in folder.glob("runs/*/metrics.jsonl"):
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines() if line.endswith("}")]
        return max(steps, default=0)
    return -1


def kill(folder: Path, rng: random.Random, ended: threading.Event, record: Record) -> None:
    """Kill a rank: while it starts, at a random step and a little later, or while a checkpoint is written after that."""
    rank, step, writing = rng.randrange(RANKS), rng.randrange(-STEPS // 10, STEPS - 3 * EVERY), rng.random() < 0.4
    while read_step(folder) < step and not ended.is_set():
        time.sleep(0.002)
    writes = False
    if step < 0:
        while read_pid(folder, rank) is None and not ended.is_set():
            time.sleep(0.002)
        time.sleep(0.5 * rng.random())
    elif writing:
        while not ended.is_set() and not any(folder.glob("runs/*/checkpoints/*.part")):
            pass
        time.sleep(0.02 * rng.random())
        writes = any(folder.glob("runs/*/checkpoints/*.part"))
    else:
        time.sleep(0.05 * rng.random())
    pid = read_pid(folder, rank)
    at = read_step(folder)
    if pid is not None and not ended.is_set():
        os.kill(pid, signal.SIGKILL)
    record.update(rank=rank, at_step=at, while_writing=writes, hung=not ended.wait(LIMIT))
    if record["hung"]:
        for number in range(RANKS):
            with contextlib.suppress(OSError):
                os.kill(read_pid(folder, number) or 0, signal.SIGKILL)


def outcome(folder: Path) -> dict[str, Any]:
    """Return all that should be the same: weights, the newest checkpoint, and the records but for their times."""
    (one,) = (path.parent for path in folder.glob("runs/*/run.json"))
    newest = max((one / "checkpoints").glob("step-*"))
    tensors = dict(load_file(one / "weights.safetensors"))
    tensors.update({f"checkpoint.{name}": t for name, t in read_tensors(newest).items()})
    for k, values in read_values(newest).items():
        # Python's own generator begins with other numbers in every process, and nothing here draws from it.
        values["random"] = values["random"]["torch"]
        leaves = enumerate(tree_leaves(values))
        tensors.update({f"process-{k}.{i}": torch.as_tensor(x) for i, x in leaves if isinstance(x, Tensor | int)})
    records = [{k: v for k, v in r.items() if k != "seconds"} for r in Run.open(one).metrics()]
    return {"tensors": tensors, "records": records, "newest": newest.name, "status": Run.open(one).status}


def is_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two outcomes are bitwise the same."""
    if {k: v for k, v in a.items() if k != "tensors"} != {k: v for k, v in b.items() if k != "tensors"}:
        return False
    x, y = a["tensors"], b["tensors"]
    return set(x) == set(y) and all(torch.equal(x[name], y[name]) for name in x)


def run(number: int, expected: dict[str, Any]) -> Record:
    """Make a disturbed run and return its record."""
    with tempfile.TemporaryDirectory(prefix=f"kill-{number}-") as name:
        folder, start_time, ended = Path(name), time.monotonic(), threading.Event()
        record: Record = {"run": number}
        killer = threading.Thread(target=kill, args=(folder, random.Random(number), ended, record))
        killer.start()
        same = launch(folder)
        ended.set()
        killer.join()
        seconds = round(time.monotonic() - start_time, 1)
        same = same and is_same(outcome(folder), expected)
        history = []
        for path in folder.glob("runs/*/run.json"):
            history = [one["step"] for one in json.loads(path.read_text()).get("resumed", [])]
        if not same:
            output = [path.read_text()[-1500:] for path in sorted(folder.glob("output-*.txt"))]
            print(record, *output, sep="\n", file=sys.stderr)
        return {**record, "went_on_from": history, "seconds": seconds, "identical": same}


def main(runs: int = 100, first: int = 0, out: Path = HERE / "records" / "kills.jsonl") -> None:
    """Disturb runs and compare.

    Args:
        runs: number of runs.
        first: number of the first, which seeds its disturbance.
        out: file for the records; new ones are appended.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["nwise.training", "torch.distributed.launcher.api", "tyro"]
    )
    with tempfile.TemporaryDirectory(prefix="calm-") as name:
        if not launch(Path(name)):
            raise SystemExit("The undisturbed run should end. Found that it failed.")
        expected = outcome(Path(name))
    machine = {"torch": torch.__version__, "processor": processor(), "cores": os.cpu_count()}
    out.parent.mkdir(parents=True, exist_ok=True)
    bad = 0
    for number in track(range(first, first + runs), "disturbed runs"):
        record = run(number, expected)
        bad += not record["identical"]
        with out.open("a") as file:
            file.write(json.dumps({**record, **machine}) + "\n")
    if bad:
        raise SystemExit(f"All {runs} runs should end as the undisturbed one. Found {bad} that did not.")


if __name__ == "__main__":
    tyro.cli(main)
