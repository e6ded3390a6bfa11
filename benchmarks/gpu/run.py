"""All jobs that need a GPU, in the order of worth, until the time is over.

    make gpu                                            # 25 minutes
    python benchmarks/gpu/run.py --minutes 3 --device cpu --rehearse

Each job writes records of its own that can be committed; ``records.jsonl`` has a line for every job: command, seconds, exit code.
The checks come first, since no measurement is worth anything without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from nwise._machine import processor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Job:
    """A command.

    Args:
        name: its purpose.
        words: arguments of python.
        minutes: the longest it may take.
    """

    name: str
    words: Sequence[str]
    minutes: float


def jobs(device: str, *, rehearse: bool) -> list[Job]:
    """Return the jobs, the most important one first."""
    memory = ["benchmarks/memory/run.py"]
    few = ["--microbatches", "1"] if rehearse else []
    rounds = ["--rounds", "1" if rehearse else "10"]
    jobs = [
        Job(
            "checks",
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py", "tests/test_checkpoint.py"],
            6,
        )
    ]
    for network in ("gpt", "convnet", "resnet"):
        options = ["--network", network, "--device", device]
        jobs.append(Job(f"memory, {network}", [*memory, "measure", *options, *few], 4))
        jobs.append(Job(f"speed, {network}", [*memory, "speed", *options, *rounds], 3))
    for case in ("gpt", "convnet", "overhead"):
        words = ["benchmarks/step_cost/run.py", "--case", case, "--device", device, *rounds]
        jobs.append(Job(f"step, {case}", words, 3))
    if torch.cuda.device_count() > 1:
        jobs.append(Job("runtime, nccl", ["-m", "pytest", "-q", "tests/test_runtime_edges.py"], 5))
    if not rehearse:
        full = ["-m", "nwise", "reproduce", "e1", "--size", "full", "--seeds", "1"]
        jobs.append(Job("E1 in full size, as many cells as fit", full, 60))
    return jobs


def main(minutes: float = 25, device: str = "cuda", rehearse: bool = False) -> None:
    """Run the jobs.

    Args:
        minutes: time for all.
        device: cuda, or cpu to rehearse.
        rehearse: whether to make every job short.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "nwise: `device` should be a GPU that torch can use. Found none; rehearse with --device cpu --rehearse."
        )
    end = time.monotonic() + 60 * minutes
    name = processor() if device == "cpu" else torch.cuda.get_device_name()
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "NWISE_REHEARSE": device if rehearse else ""}
    for job in jobs(device, rehearse=rehearse):
        left = end - time.monotonic()
        if left < 5:
            print(f"no time left for {job.name}")
            continue
        print(f"--- {job.name}", flush=True)
        start_time = time.monotonic()
        try:
            code: int | str = subprocess.run(
                [sys.executable, *job.words],
                cwd=ROOT,
                env=environment,
                timeout=min(left, 60 * job.minutes),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = "stopped: no time left"
        record = {
            "job": job.name,
            "command": " ".join(job.words),
            "device": name,
            "torch": torch.__version__,
            "seconds": round(time.monotonic() - start_time, 1),
            "exit": code,
        }
        with (HERE / ("rehearsal.jsonl" if rehearse else "records.jsonl")).open("a") as file:
            file.write(json.dumps(record) + "\n")
        if job.name == "checks" and code != 0:
            sys.exit("nwise: the checks should pass before anything is measured. They failed.")


if __name__ == "__main__":
    tyro.cli(main)
