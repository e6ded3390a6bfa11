"""Launch: join the processes that `torchrun` has started, and lay them out on a mesh."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nwise.process import choose_gpu, prepare_rank

__all__ = ["launched", "local_gpu", "start", "variable"]

DIMENSIONS = ("pp", "dp")


def launched() -> bool:
    """Return whether this process is one of several, started by `torchrun` or joined in an existing process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    variable("RANK")
    return "RANK" in os.environ and variable("WORLD_SIZE", 1) > 1


def variable(name: str, default: int = 0) -> int:
    """Return a whole number from the environment, as torchrun sets it; raise ValueError if it is something else."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"`{name}` in the environment should be a whole number, as torchrun sets it. Found {text!r}.")
    return int(text)


def local_gpu() -> int:
    """Return the index of this process's GPU: the processes of one machine take its GPUs in turn."""
    return variable("LOCAL_RANK") % torch.cuda.device_count()


def start(timeout: float = 300.0) -> bool:
    """Join the process group that `torchrun` describes, unless this process is already in one.

    Args:
        timeout: limit of a wait in seconds; default: 300.

    Returns:
        Whether this call joined it.
    """
    if dist.is_initialized():
        return False
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    prepare_rank(variable("LOCAL_WORLD_SIZE", 1), one_machine=one_machine)
    limit = timedelta(seconds=timeout)
    # Beside a GPU torch's own choice is nccl alone, which cannot carry the tensors of a network on the CPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not one_machine:
        dist.init_process_group(backend, timeout=limit)
    else:
        # torchrun keeps its store over a restart, with the addresses of the processes that ended; a prefix hides them.
        store, rank, size = next(rendezvous("env://", timeout=limit))
        dist.init_process_group(
            backend, store=PrefixStore(f"attempt/{attempt}", store), rank=rank, world_size=size, timeout=limit
        )
    # A rank that refuses its arguments must not leave while another is still connecting.
    exchange(default_store(), "nwise/joined", dist.get_rank(), dist.get_world_size(), None)
    atexit.register(_leave)
    return True


def default_store() -> Store:
    """Return the store that the processes of the default group share."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def _leave() -> None:
    if dist.is_initialized():  # the caller may have destroyed it
        dist.destroy_process_group()


def backend_for(device: torch.device) -> str:
    """Return the backend of a new group for tensors on a device: the default group's, or torch's choice if that has none."""
    # "cpu:gloo,cuda:nccl" -> {"cpu": "gloo", "cuda": "nccl"}
    chosen = dict(one.split(":") for one in dist.get_backend_config().split(","))
    return chosen.get(device.type) or dist.get_default_backend_for_device(device)


def exchange(
    store: Store,
    key: str,
    rank: int,
    size: int,
    value: Any,
    check: Callable[[], None] = lambda: None,
    limit: float | None = None,
) -> list[Any]:
    """Exchange a value between all ranks through a store; return the values in order of the ranks.

    Args:
        store: the store.
        key: name of the exchange, which is used once.
        rank, size: this process's rank and the number of processes.
        value: serialisable as JSON.
        check: function that raises if the wait has become useless. Default: none.
        limit: limit of the wait in seconds; default: that of the store.

    Raises:
        RuntimeError: another rank has not come in time.
    """
    # Through the store, not by a collective: a rank that waits here still hears of an error of another (`check`).
    store.set(f"{key}/{rank}", json.dumps(value))
    seconds = store.timeout.total_seconds() if limit is None else limit  # type: ignore[attr-defined]  # it is there
    deadline = time.monotonic() + seconds
    pause = 0.001
    keys = [f"{key}/{other}" for other in range(size)]
    while not store.check(keys):  # its `wait` cannot be interrupted
        check()
        if time.monotonic() > deadline:
            late = next(other for other in range(size) if not store.check([keys[other]]))
            raise RuntimeError(
                f"Every rank should come to the exchange of {key!r} within {seconds:g} seconds. Found that rank {late} has not: "
                "it is slow, or has stalled; give slow ranks more time by `timeout=` or NWISE_TIMEOUT."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    # All at once: each request of the store takes a round trip.
    several = store.has_extended_api()  # type: ignore[attr-defined]  # it is there
    return list(map(json.loads, store.multi_get(keys) if several else map(store.get, keys)))


def check_same(everywhere: Sequence[Mapping[str, Any]], remedies: Mapping[str, str] | None = None) -> None:
    """Raise ValueError unless all ranks have the same values, by name; None does not count. A remedy says what to change."""
    for name in everywhere[0]:
        given = [(rank, values[name]) for rank, values in enumerate(everywhere) if values[name] is not None]
        for rank, value in given[1:]:
            if value != given[0][1]:
                raise ValueError(
                    f"`{name}` should be the same on every rank. Found {given[0][1]!r} on rank {given[0][0]} and {value!r} on "
                    f"rank {rank}; {(remedies or {}).get(name, f'give all ranks the same `{name}`')}."
                )


def make_mesh(num_stages: int, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return a mesh of all processes, with a rank for every stage if there are enough; or check the one that is given.

    Raises:
        ValueError: the number of processes or the mesh does not fit the stages.
    """
    size = dist.get_world_size()
    if mesh is None:
        ranks = min(size, num_stages)
        if size % ranks:
            raise ValueError(
                f"`torchrun` should start at most {num_stages} processes, one for each stage, or a multiple of {num_stages}. "
                f"Found {size}; cut the network into another number of stages (a recipe by `--cut`, as in `--cut 2 2`), or start "
                f"{num_stages}."
            )
        # 8 processes and 4 stages: 4 ranks of "pp" by 2 of "dp". 3 processes and 4 stages: 3 ranks, one with two stages.
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda":
            choose_gpu(local_gpu())
        # Without replicas there is no "dp" dimension: it would have a group, and so a thread of gloo.
        shape = (ranks,) if size == ranks else (ranks, size // ranks)
        return init_device_mesh(kind, shape, mesh_dim_names=DIMENSIONS[: len(shape)])
    if (names := tuple(mesh.mesh_dim_names or ())) not in (DIMENSIONS[:1], DIMENSIONS):
        raise ValueError(f"`mesh` should have the dimension 'pp', or 'pp' and 'dp', in this order. Found {names}.")
    if mesh.shape[0] > num_stages:
        raise ValueError(
            f"`mesh` should have at most {num_stages} ranks along 'pp', one for each stage. Found {mesh.shape[0]}."
        )
    return mesh


def time_limit(timeout: float | None) -> float:
    """Return the limit of an action in seconds: `timeout`, or the environment's ``NWISE_TIMEOUT`` if it is None."""
    given = os.environ.get("NWISE_TIMEOUT", "300") if timeout is None else timeout
    name = "NWISE_TIMEOUT" if timeout is None else "timeout"
    try:
        limit = float(given)
    except ValueError as error:
        raise ValueError(f"`{name}` should be a number of seconds. Found {given!r}.") from error
    if not 0 < limit < 1e8:
        raise ValueError(f"`{name}` should be a number of seconds above 0 and below 1e8. Found {given!r}.")
    return limit
