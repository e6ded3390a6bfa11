"""Starts a script on one or several processes, forks of one that has torch already, and sends them signals."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

RANKS = Path(__file__).parent / "ranks"
Done = subprocess.CompletedProcess[str]

# What torch's C++ says of the network around it (names that no server knows) is none of what the ranks said.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# What a rank imports takes seven seconds; the server has it before it forks. It looks for it where the environment says.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(RANKS.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
).rstrip(":")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ranks.preload"])


def forked(
    num_processes: int,
    arguments: Sequence[str],
    folder: Path,
    *,
    timeout: float = 100,
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run ``python <arguments>`` on every rank, each a fork of a process that has imported torch.

    Every rank writes its process into ``<folder>/pid-<rank>``. A single process is none of torchrun's.

    Args:
        num_processes: how many ranks.
        arguments: a script and its arguments, or ``-m nwise`` and its.
        folder: for what the ranks say.
        timeout: seconds after which a rank that still runs is a failure.
        environment: variables to set in every rank.

    Returns:
        The exit code of the first rank that ended with another one than 0, and what all of them said.
    """
    variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
    if num_processes > 1:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # it is there
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )  # as torchrun's agent has one; a name would have to be looked up
        variables |= {
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": folder.name,
        }
    ranks = started(num_processes, arguments, folder, variables)
    try:
        first = _wait(ranks, time.monotonic() + timeout)
    except TimeoutError as error:
        last = [path.read_text()[-2000:] for path in folder.glob("said-*.err")]
        raise TimeoutError("\n".join([str(error), *last])) from None
    finally:
        for rank in ranks:
            rank.kill()
    texts = [[(folder / f"said-{rank}{end}").read_text() for rank in range(num_processes)] for end in (".out", ".err")]
    return subprocess.CompletedProcess(list(arguments), first, *("".join(text) for text in texts))


def scripted(
    num_processes: int, text: str, folder: Path, *arguments: str, name: str = "script.py", **options: Any
) -> Done:
    """Write a script and run it on every rank."""
    (folder / name).write_text(text)
    return forked(num_processes, [str(folder / name), *arguments], folder, **options)


def started(
    num_processes: int, arguments: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> list[Any]:
    """The processes that `forked` waits for."""
    ranks = [
        _context.Process(
            target=_rank, args=(rank, list(arguments), str(folder / f"said-{rank}"), dict(variables or {}), os.getcwd())
        )
        for rank in range(num_processes)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def elastic(num_processes: int, arguments: Sequence[str], folder: Path, *, restarts: int) -> Done:
    """Do the same under the agent of torchrun, which starts all ranks again after a failure, and needs the main thread."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    code, handlers = 0, {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        elastic_launch(config, _elastic_rank)(list(arguments), str(folder), os.getcwd())
    except ChildFailedError:
        code = 1
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:  # the agent leaves its own
                signal.signal(number, handler)
    texts = ["".join(path.read_text() for path in sorted(folder.glob(f"said-*{end}"))) for end in (".out", ".err")]
    return subprocess.CompletedProcess(list(arguments), code, *texts)


def _elastic_rank(arguments: list[str], folder: str, at: str) -> None:
    said = f"{folder}/said-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    os.environ["OMP_NUM_THREADS"] = "1"
    if code := _run(arguments, said, at):
        raise SystemExit(code)  # a value returned tells the agent that the rank is done


def _wait(ranks: Sequence[Any], deadline: float) -> int:
    """Until all have ended, the others soon after one that failed; the first exit code that is not 0."""
    first = 0
    while any(rank.is_alive() for rank in ranks):
        failed = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        if failed and not first:
            first, deadline = failed, min(deadline, time.monotonic() + 30)
        if time.monotonic() > deadline:
            raise TimeoutError(f"a rank has not ended; exit codes {[rank.exitcode for rank in ranks]}")
        time.sleep(0.01)
    return first or next((rank.exitcode for rank in ranks if rank.exitcode), 0)


def _rank(rank: int, arguments: list[str], said: str, variables: dict[str, str], folder: str) -> None:
    os.environ.update(variables, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if "WORLD_SIZE" in variables else {}))
    os._exit(_run(arguments, said, folder))


def _run(arguments: list[str], said: str, folder: str) -> int:
    """Do in a fork what an interpreter does from its start to its end, and return the exit code."""
    Path(said).with_name(f"pid-{os.environ.get('RANK', 0)}").write_text(str(os.getpid()))
    for number, end in ((1, ".out"), (2, ".err")):
        file = os.open(said + end, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    # Those of the server know what it wrote to: a file can be sought in, a pipe cannot.
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    code: Any = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def results(num_processes: int, script: str, folder: Path, *arguments: str, **options: Any) -> list[Any]:
    """What each rank wrote, as JSON, into ``<folder>/<rank>.json``; an error of any rank is one here."""
    done = forked(num_processes, [str(RANKS / script), str(folder), *arguments], folder, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def signal_when(holds: Callable[[], bool], number: int, folder: Path, rank: int = 0) -> threading.Thread:
    """Send a signal to a rank as soon as a condition holds, in a thread that is returned."""

    def send() -> None:
        until(holds)
        os.kill(int((folder / f"pid-{rank}").read_text()), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread
