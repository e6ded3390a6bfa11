"""Every change that nwise makes to the process it runs in.

A library should leave its process alone; these are the exceptions, and no other module may add one for good
(`tests/test_house.py`)::

    change                              when                                 why
    ----------------------------------  -----------------------------------  -------------------------------------
    GLOO_SOCKET_IFNAME=lo, if not set   all ranks are on one machine         a host name may not resolve
    glibc keeps up to 1 GiB it freed    several processes, on Linux          fresh pages take half of a transfer
    threads = cores / processes         several, OMP_NUM_THREADS not set     ranks would compete for cores
    one thread                          the command trains the digits,       more cost time on a busy machine
                                        OMP_NUM_THREADS not set
    sys.excepthook tells all ranks too  several processes                    the others would wait for this one
    exit code 1 from an exit handler    an error while the last rank closes  Python would exit with 0
    os._exit(1) from a thread           another rank failed                  the main thread waits in a collective
    a GPU becomes the current one       ranks join or pick their devices     torch takes the local rank, if it exists or not
    SIGKILL to a rank of this machine   that rank stalled and cannot end     the launcher would wait for it
    the current folder on sys.path      a recipe has a network of the user   `python -m` looks there, a command does not
    no donated buffers in torch         a module is compiled                 a graph has several backward passes
    more variants of compiled code      `compile_module`                     a ninth block would run uncompiled
    KINETO_LOG_LEVEL=6, if not set,     memory is measured on a CPU          torch announces its profiler
      and one warning is ignored                                             and, 2.11, that it keeps one cycle

The trainer also makes cudnn take repeatable algorithms. The command line handles SIGTERM and SIGINT while it trains, and
replaces a closed standard output, and characters that its encoding lacks. Several processes leave their group in an exit
handler.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import platform
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from nwise._torch import compiler_settings, tracer_settings
from nwise.machine import num_cores

__all__ = ["choose_gpu", "find_modules_here", "use_one_thread"]


def prepare_rank(local_ranks: int, *, one_machine: bool) -> None:
    """Prepare this process to be one of several ranks, `local_ranks` of them on this machine."""
    if one_machine:
        # The loopback device is always there; a name from the network may not even resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        # By default every large buffer that is received is fresh from the kernel, page by page (`benchmarks/runtime`).
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, at its largest
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
    _share_cores(local_ranks)


def choose_gpu(index: int) -> None:
    """Make a GPU of this machine the current one, unless CUDA is already in use.

    `DeviceMesh` would take the GPU with the number of the local rank, which does not exist where ranks share a GPU.
    """
    if not torch.cuda.is_initialized():
        torch.cuda.set_device(index)


def _share_cores(local_ranks: int) -> None:
    """Use a fair share of the cores as threads, unless the user chose a number.

    torchrun sets ``OMP_NUM_THREADS`` to 1 if it is not set, however many cores there are.
    """
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is not None and not (chosen == "1" and _chosen_by_torchrun()):
        return
    share = max(1, num_cores() // local_ranks)
    if chosen is not None or torch.get_num_threads() > share:
        torch.set_num_threads(share)


def use_one_thread() -> None:
    """Use one thread, unless the user chose a number."""
    if "OMP_NUM_THREADS" not in os.environ or _chosen_by_torchrun():
        torch.set_num_threads(1)


def _chosen_by_torchrun() -> bool:
    """Tell whether ``OMP_NUM_THREADS`` comes from torchrun: its own environment then lacks it."""
    # OMP_NUM_THREADS=1 here means that the user chose 1, or nothing: torchrun's own environment, that of the parent, tells.
    path = Path(f"/proc/{os.getppid()}/environ")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not path.exists():
        return False
    with suppress(OSError):
        return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in path.read_bytes().split(b"\0"))
    return False


def on_uncaught_error(report: Callable[[BaseException], None]) -> None:
    """Call a function with an error that ends the process, after the traceback is printed."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        before(kind, error, traceback)
        report(error)

    sys.excepthook = hook


def exit_at_once() -> NoReturn:
    """Exit with code 1 from a thread or an exit handler, whose exceptions would not change the exit code.

    Output is not flushed: the main thread may hold its lock.
    """
    os._exit(1)


def end_stalled(process: int) -> None:
    """End a stalled rank of this machine that cannot end by itself."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def keep_buffers() -> None:
    """Make compiled graphs keep their buffers after a backward pass.

    By default a compiled backward reuses saved activations as scratch memory ("donated buffers"), which forbids a second pass
    over the same graph (pytorch issue 161904). The setting acts when a graph is compiled, so earlier graphs are discarded and
    compiled again at their next call.
    """
    settings = compiler_settings()
    if settings.donated_buffer:
        torch.compiler.reset()
        settings.donated_buffer = False


def allow_variants(most: int) -> dict[str, int]:
    """Let a function be compiled in this many variants; return the option of `torch.compile` that does so.

    Before version 2.13 torch has a setting for all functions instead, and the result is empty.
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": most}
    settings = tracer_settings()
    settings.recompile_limit = max(settings.recompile_limit, most)
    return {}


def find_modules_here() -> None:
    """Let modules of the current folder be imported, before others of their names."""
    sys.path[:] = dict.fromkeys([os.getcwd(), *sys.path])
