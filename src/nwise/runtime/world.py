"""The world: the place of every process among stages and replicas, and the channels between processes.

Processes lie on a mesh of up to three dimensions: ``pp`` (stages) outermost, then ``dp`` (replicas of every stage, each with
a part of the mini-batch), then ``tp`` (tensor parallelism inside a stage). Facts travel as JSON through the store of
`torch.distributed`, tensors through channels. The ranks of 8 processes with 4 stages and 2 replicas:

            dp 0   dp 1
    pp 0      0      1        Each column is a pipeline with its own channels.
    pp 1      2      3        Each row sums the gradients of its stage.
    pp 2      4      5
    pp 3      6      7
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from nwise._process import prepare_rank
from nwise.runtime.channel import Link, Receiver, Sender, introduce

DIMENSIONS = ("pp", "dp", "tp")
_numbers = itertools.count()  # numbers the worlds, equally on every rank because all run the same script


@dataclass(frozen=True, slots=True)
class Ends:
    """This rank's ends of its channels; None where there is no neighbour."""

    activations_in: Receiver | None
    activations_out: Sender | None
    gradients_in: Receiver | None
    gradients_out: Sender | None


class World:
    """This process's place among all processes.

    Args:
        num_stages: number of stages, A.
        mesh: mesh with dimensions ``("pp", "dp", "tp")``, or some of them in this order, ``"pp"`` included; default: a mesh of
            all processes, with as many replicas as fit.
        timeout: limit of a wait in seconds; default: 300.

    Attributes:
        rank: this process's rank.
        size: number of processes.
        stage: index of the stage that this process holds.
        replica, num_replicas: index of this replica of the stage, and the number of replicas.
        ranks: ranks of the processes that hold the stages 0 .. A-1 of this replica.
        store: store in which the ranks exchange facts.

    Raises:
        ValueError: the number of processes or the mesh does not fit the stages.
    """

    def __init__(self, num_stages: int, mesh: DeviceMesh | None = None, timeout: float = 300.0) -> None:
        self._timeout = timedelta(seconds=timeout)
        # The default group is free for our own messages if it was made here.
        self._default = dist.group.WORLD if start(timeout) else None
        self.mesh = _mesh(num_stages, mesh)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        sizes = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))
        self.num_replicas = sizes.get("dp", 1)
        self.replica = self.mesh.get_local_rank("dp") if "dp" in sizes else 0
        self.stage = self.mesh.get_local_rank("pp")
        self.ranks = dist.get_process_group_ranks(self.mesh.get_group("pp"))
        self.num_stages = num_stages
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"nwise/{attempt}/{next(_numbers)}"
        self.store = PrefixStore(prefix, _get_default_store())
        # Destroy the groups of a mesh made here with the others; a mesh from the caller keeps its groups.
        own = self.mesh.get_all_groups() if mesh is None else []
        self._made = [group for group in own if group is not dist.group.WORLD]
        self._shared: dict[str, int] = {}
        self._ends: dict[torch.device, Ends] = {}
        self._groups: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup | None] = {}

    @cached_property
    def control(self) -> dist.ProcessGroup:
        """Group of all ranks for CPU tensors that are not urgent; all ranks make it at the first use.

        It is made late because every gloo group has a thread that wakes up a hundred times a second.
        """
        return self.new_group(backend="gloo")

    def gradient_channels(self, count: int, device: torch.device, depth: int) -> tuple[list[Sender], list[Receiver]]:
        """Connect to the neighbours by one channel for each gradient message; a call for all ranks.

        Args:
            count: number of channels in each direction.
            device: device of the tensors.
            depth: number of cycles of mini-batches whose messages are kept before a sender waits.

        Returns:
            The senders to the stage before and the receivers from the next stage; empty where there is no neighbour.
        """
        groups = [self.new_group() for _ in range(count)]
        below, above = self._neighbours()
        for group in groups:
            introduce(group, above, below, device)
        return (
            [] if below is None else [Sender(Link(group, below, device), depth) for group in groups],
            [] if above is None else [Receiver(Link(group, above, device)) for group in groups],
        )

    def _neighbours(self) -> tuple[int | None, int | None]:
        """Return the ranks of the stages before and after; None where there is none."""
        k = self.stage
        return self.ranks[k - 1] if k else None, self.ranks[k + 1] if k < self.num_stages - 1 else None

    def new_group(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
        """Make a process group that lives as long as the world; a call for all ranks.

        Args:
            ranks: the members' ranks; default: all.
            backend: name of the backend; default: gloo on CPUs and nccl on GPUs.
        """
        group = dist.new_group(None if ranks is None else list(ranks), timeout=self._timeout, backend=backend)
        if ranks is None or self.rank in ranks:
            self._made.append(group)
        return group

    def close(self) -> None:
        """Destroy the world's process groups, once no rank needs them any more."""
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def connect(self, sets: Sequence[tuple[int, ...]], *, replicas: bool = False) -> None:
        """Make the groups that `group_for` returns, in the same order on all ranks.

        Args:
            sets: sets of stages, one for each group.
            replicas: whether all replicas of the stages share one group; default: a group for each replica.
        """
        columns = self._columns()
        for stages in sets:
            if (stages, replicas) in self._groups:
                continue
            # Ranks outside the group take part too: all ranks make a group, or none does.
            self._groups[stages, replicas] = None
            each = [[column[k] for k in stages] for column in columns]
            for ranks in [[rank for part in each for rank in part]] if replicas else each:
                group = self.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
                if self.rank in ranks:
                    self._groups[stages, replicas] = group

    def group_for(self, stages: tuple[int, ...], *, replicas: bool = False) -> dist.ProcessGroup | None:
        """Return the group of the processes that hold these stages; None if this process is alone.

        Args:
            stages: indices of the stages.
            replicas: whether the group spans all replicas; default: this replica only.
        """
        return self._groups.get((stages, replicas))

    def _columns(self) -> list[list[int]]:
        """Return one list for each replica and each part of a stage: the ranks that hold it, stage after stage."""
        ranks = self.mesh.mesh.flatten(1) if self.mesh.mesh.ndim > 1 else self.mesh.mesh.unsqueeze(1)
        return [list(map(int, column)) for column in ranks.T.tolist()]

    @property
    def sends_for_its_stage(self) -> bool:
        """Whether this rank is in rank 0's replica, which has exactly one rank of every stage."""
        return 0 in self.ranks

    def everyone(self, name: str, value: Any) -> list[Any]:
        """Exchange a value between all ranks.

        Args:
            name: name of the value; may be used again.
            value: this rank's value, serialisable as JSON.

        Returns:
            The values of all ranks, in order of the ranks.
        """
        key = self._key(name)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(dist.get_world_size())]

    def hand_on(self, name: str, value_of: Any) -> Any:
        """Pass a value from stage to stage; each stage computes its own from the one before.

        Args:
            name: name of the value; may be used again.
            value_of: function from the value of the stage before (None at stage 0) to this stage's; both values are
                serialisable as JSON.

        Returns:
            This stage's value.
        """
        key = self._key(name)
        before = json.loads(self.store.get(f"{key}/{self.ranks[self.stage - 1]}")) if self.stage else None
        value = value_of(before)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return value

    def agree(self, name: str, value: Any) -> None:
        """Raise ValueError unless all ranks have the same value."""
        values = self.everyone(name, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"`{name}` should be the same on every rank. Found {values[0]!r} on rank 0 and {other!r} on rank {rank}."
                )

    def _key(self, name: str) -> str:
        # A new key at each use of a name; it is the same on all ranks, because all use a name equally often.
        self._shared[name] = self._shared.get(name, -1) + 1
        return f"{name}/{self._shared[name]}"

    def ends(self, device: torch.device) -> Ends:
        """Return the channels to the neighbours for tensors of a device; the first call connects and is one for all ranks."""
        if device not in self._ends:
            # One group for each direction: neither waits behind the other.
            forward, back = self._group_forward(device), self.new_group()
            below, above = self._neighbours()
            introduce(forward, below, above, device)
            introduce(back, above, below, device)
            self._ends[device] = Ends(
                None if below is None else Receiver(Link(forward, below, device)),
                None if above is None else Sender(Link(forward, above, device)),
                None if above is None else Receiver(Link(back, above, device)),
                None if below is None else Sender(Link(back, below, device)),
            )
        return self._ends[device]

    def _group_forward(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group of the forward channels.

        The first call on the CPU takes the default group if it was made here: its gloo thread runs anyway, see `control`.
        """
        group, self._default = self._default, None
        return group if group is not None and device.type == "cpu" else self.new_group()


def launched() -> bool:
    """Return whether this process is one of several, started by `torchrun` or joined in an existing process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    variable("RANK")
    return "RANK" in os.environ and variable("WORLD_SIZE", 1) > 1


def variable(name: str, default: int = 0) -> int:
    """Return a whole number from the environment, as torchrun sets it.

    Args:
        name: name of the environment variable.
        default: value if the variable is not set; default: 0.

    Raises:
        ValueError: the variable is not a whole number.
    """
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"`{name}` in the environment should be a whole number, as torchrun sets it. Found {text!r}.")
    return int(text)


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
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or not one_machine:
        dist.init_process_group(timeout=limit)
    else:
        # torchrun keeps its store over a restart, with the addresses of the processes that ended; a prefix hides them.
        store, rank, size = next(rendezvous("env://", timeout=limit))
        dist.init_process_group(
            store=PrefixStore(f"attempt/{attempt}", store), rank=rank, world_size=size, timeout=limit
        )
    atexit.register(dist.destroy_process_group)
    return True


def _mesh(num_stages: int, mesh: DeviceMesh | None) -> DeviceMesh:
    size = dist.get_world_size()
    if mesh is None:
        if size % num_stages:
            raise ValueError(
                f"`torchrun` should start a multiple of {num_stages} processes, one for each stage. Found {size}; cut the "
                f"network into another number of stages (a recipe by `--cut`, as in `--cut 2 2`), or start {num_stages}."
            )
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        # Without replicas there is no "dp" dimension: it would have a group, and so a thread, see `World.control`.
        shape = (num_stages,) if size == num_stages else (num_stages, size // num_stages)
        return init_device_mesh(kind, shape, mesh_dim_names=DIMENSIONS[: len(shape)])
    names: Sequence[str] = mesh.mesh_dim_names or ()
    if not names or names[0] != "pp" or list(names) != [name for name in DIMENSIONS if name in names]:
        raise ValueError(f"`mesh` should have dimensions 'pp', 'dp', 'tp', in this order. Found {tuple(names)}.")
    if mesh.shape[0] != num_stages:
        raise ValueError(
            f"`mesh` should have {num_stages} ranks along 'pp', one for each stage. Found {mesh.shape[0]}."
        )
    return mesh
