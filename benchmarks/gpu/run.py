"""All jobs that need a GPU, in the order of worth, until the time is over.

    make gpu                                            # 25 minutes
    NCCL_MULTI_RANK_GPU_ENABLE=1 make gpu               # several ranks on one GPU, with nccl 2.31 or later
    python -m benchmarks.gpu --minutes 3 --device cpu --rehearse
    python -m benchmarks.gpu capture --minutes 5     # captured steps alone: their tests, and what a step costs

Each job writes records of its own that can be committed; ``records.jsonl`` has a line for every job: command, seconds, exit code.
The checks come first, since no measurement is worth anything without them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from nwise.machine import num_cores, processor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]  # another version of torch is a warning


@dataclass(frozen=True)
class Job:
    """A command.

    Args:
        name: its purpose.
        words: arguments of python.
        minutes: the longest it may take.
        variables: of its environment.
    """

    name: str
    words: Sequence[str]
    minutes: float
    variables: Mapping[str, str] = field(default_factory=dict)


def step_jobs(cases: Sequence[str], device: str, rounds: int, minutes: float) -> list[Job]:
    """Return the jobs that measure what a step costs."""
    words = ["-m", "benchmarks.step_cost", "--device", device, "--rounds", str(rounds), "--case"]
    return [Job(f"step, {case}", [*words, *case.split()], minutes) for case in cases]


def capture_jobs(device: str, *, rehearse: bool) -> list[Job]:
    """Return the jobs of captured steps."""
    cases = ["convnet", "gpt", *([] if rehearse else ["resnet"]), "overhead", "overhead --compiled"]
    return [Job("checks", [*TESTS, "tests/test_gpu.py"], 2), *step_jobs(cases, device, 2 if rehearse else 20, 1.5)]


def jobs(device: str, *, rehearse: bool) -> list[Job]:
    """Return the jobs, the most important one first."""
    memory = ["-m", "benchmarks.memory"]
    few = ["--microbatches", "1"] if rehearse else []
    rounds = ["--rounds", "2" if rehearse else "10"]
    jobs = [Job("checks", [*TESTS, "tests/test_gpu.py", "tests/test_checkpoint.py"], 6)]
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if device == "cuda" and (shared or torch.cuda.device_count() >= 4):
        ranks = [*TESTS, "tests/test_runtime.py", "-k", "bitwise or replicas_match or tensor_parallel"]
        jobs.append(Job("runtime, nccl", ranks, 5, {"NWISE_TEST_DEVICE": "cuda"}))
    for network in ("gpt", "convnet", "resnet"):
        options = ["--network", network, "--device", device]
        jobs.append(Job(f"memory, {network}", [*memory, "measure", *options, *few], 2))
        jobs.append(Job(f"speed, {network}", [*memory, "speed", *options, *rounds], 1))
    jobs += step_jobs(("gpt", "convnet", "overhead"), device, 2 if rehearse else 10, 1)
    if not rehearse:
        several = max(1, min(num_cores() - 2, 14))  # a GPU serves some tens of processes at most; 14 were tried
        commands = [
            f"e1 --size medium --seeds 6 --workers {several}",
            "e4 --size full --workers 1 --only cifar10,",
        ]
        jobs += [Job(f"{one}: as many cells as fit", ["-m", "experiments", *one.split()], 60) for one in commands]
    return jobs


@contextmanager
def shared_gpu() -> Iterator[Mapping[str, str]]:
    """Start CUDA's multi-process service where it can be had, and yield the variables with which processes find it.

    Without it the processes that share a GPU take turns: on an H200 fourteen runs of a small network did 2.6 times the work of
    one, and 8 times with it.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        if control is None or subprocess.run([control, "-d"], env=environment, check=False).returncode:
            yield {}
            return
        try:
            yield variables
        finally:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit -t 5\n", text=True, env=environment, timeout=15, check=False)


@contextmanager
def repository(*, rehearse: bool) -> Iterator[Path]:
    """Yield the folder in which jobs run: a copy in a rehearsal, so it overwrites no record of a measurement."""
    if not rehearse:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        names = shutil.ignore_patterns(".*", "runs", "_build", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=names, dirs_exist_ok=True)
        yield Path(folder)


def run(job: Job, root: Path, environment: Mapping[str, str], seconds: float) -> int | str:
    """Run a job for at most so many seconds, and return its exit code; no process of it is left.

    Args:
        job: the job.
        root: the folder in which it runs.
        environment: its variables, without the job's own.
        seconds: the longest time.
    """
    path = os.pathsep.join([str(root / "src"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    with ExitStack() as stack:
        variables = stack.enter_context(shared_gpu()) if "experiments" in job.words else {}
        process = subprocess.Popen(
            [sys.executable, *job.words],
            cwd=root,
            env={**environment, **job.variables, **variables, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "stopped: no time left"
        finally:
            # Killing the job alone would leave its ranks on the GPU, beside the next job.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(
    what: tyro.conf.Positional[Literal["all", "capture"]] = "all",
    minutes: float = 25,
    device: str = "cuda",
    rehearse: bool = False,
) -> None:
    """Run the jobs.

    Args:
        what: all jobs, or those of captured steps.
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
    environment = {**os.environ, "NWISE_REHEARSE": device if rehearse else ""}
    with repository(rehearse=rehearse) as root:
        for job in (jobs if what == "all" else capture_jobs)(device, rehearse=rehearse):
            left = end - time.monotonic()
            if left < 5:
                print(f"no time left for {job.name}")
                continue
            print(f"--- {job.name}", flush=True)
            start_time = time.monotonic()
            code = run(job, root, environment, min(left, 60 * job.minutes))
            record = {
                "job": job.name,
                "command": " ".join(job.words),
                "variables": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")} | dict(job.variables),
                "device": name,
                "torch": torch.__version__,
                "seconds": round(time.monotonic() - start_time, 1),
                "exit": code,
            }
            with (HERE / ("rehearsal.jsonl" if rehearse else "records.jsonl")).open("a") as file:
                file.write(json.dumps(record) + "\n")
            if job.name == "checks" and code != 0:
                sys.exit("nwise: the checks should pass before anything is measured. They failed.")
