"""The world: several processes with a pipeline's stages, and the channels between them.

Processes lie on a mesh of one or two dimensions: ``pp`` (ranks with different stages) outermost, then ``dp`` (replicas of these
stages, each with a part of the mini-batch). Facts travel as JSON through the store of `torch.distributed`, tensors through
channels. The ranks of 8 processes with 4 stages and 2 replicas::

            dp 0   dp 1
    pp 0      0      1        Each column is a pipeline with its own channels.
    pp 1      2      3        Each row sums the gradients of its stages.
    pp 2      4      5
    pp 3      6      7
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from nwise.process import exit_at_once, on_uncaught_error
from nwise.randomness import derive
from nwise.runtime.channel import Carrier, Channel, host_of
from nwise.runtime.compression import Wire
from nwise.runtime.launch import backend_for, default_store, exchange, make_mesh, start
from nwise.runtime.mailbox import Mailbox
from nwise.runtime.post import Channels, Post
from nwise.runtime.processes import FACTS, Copied, Processes
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import make_specs, spec_names
from nwise.runtime.watch import SPARE, Calls, RankError, Watchdog
from nwise.schedule.placement import Placement, make_placement
from nwise.stage.stage import Stage
from nwise.tensors import Named, Tensors, names, with_names

__all__ = ["World", "tell_all"]

_numbers = itertools.count()  # numbers the worlds, equally on every rank because all run the same script
_open: list[World] = []
_calls = Calls()  # of all worlds: a rank may construct one while another steps


def tell_all(error: BaseException) -> None:
    """Report an error that ends this process to the others; for programs that catch their errors."""
    if not isinstance(error, RankError):
        for world in _open:
            world.watch.failed(error)


@cache
def _report_crashes() -> None:
    """End all ranks after an uncaught error, for example in a data loader or an optimizer."""
    on_uncaught_error(tell_all)


class World(Processes):
    """Several processes with a pipeline's stages, seen from one of them.

    Args:
        num_stages: number of stages, A.
        placement: place of every stage's rank, see `nwise.schedule.placement`; default: neighbouring stages share a rank.
        mesh: mesh with dimensions ``("pp", "dp")`` or ``("pp",)``; default: a mesh of
            all processes, with as many replicas as fit.
        limit: limit of an action in seconds; default: 300.

    Attributes:
        mesh: the mesh.
        store: store in which the ranks exchange facts.
        watch: the watch over this rank and the next.

    Raises:
        ValueError: the number of processes, the mesh or the placement does not fit the stages.
    """

    def __init__(
        self,
        num_stages: int,
        placement: str | Sequence[int] = "contiguous",
        mesh: DeviceMesh | None = None,
        limit: float = 300.0,
    ) -> None:
        # One limit: the watch speaks of a slow rank before torch does.
        self._limit, self._timeout = limit, timedelta(seconds=limit + SPARE)
        start(limit + SPARE)
        self._number, self._settings = next(_numbers), ("", 0)
        self.begin("the construction")
        self.mesh = make_mesh(num_stages, mesh)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        sizes = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))
        self.num_replicas = sizes.get("dp", 1)
        self.replica = self.mesh.get_local_rank("dp") if "dp" in sizes else 0
        self.place = self.mesh.get_local_rank("pp")
        self.ranks = dist.get_process_group_ranks(self.mesh.get_group("pp"))
        self.placement = make_placement(placement, num_stages, len(self.ranks))
        # Keys of an earlier attempt, such as its error, are still in torchrun's store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"nwise/{attempt}/{self._number}", default_store())
        # Destroy the groups of a mesh made here with the others; a mesh from the caller keeps its groups.
        own = self.mesh.get_all_groups() if mesh is None else []
        self._made = [group for group in own if group is not dist.group.WORLD]
        self._shared: dict[str, int] = {}
        self._groups: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup | None] = {}
        self.watch = Watchdog(self.store, self.rank, self.size, self.here, limit, lambda: self.doing, calls=_calls)
        self._channels: dict[tuple[torch.device, Placement], Channels] = {}
        self._on_close: list[Callable[[], None]] = []
        self.watch.start()
        _open.append(self)
        _report_crashes()
        atexit.register(self._close_at_exit)

    @cached_property
    def control(self) -> dist.ProcessGroup:
        """Group of all ranks for CPU tensors that are not urgent; all ranks make it at the first use.

        It is made late because every gloo group has a thread that wakes up a hundred times a second.
        """
        return self.new_group()

    def new_group(self) -> dist.ProcessGroup:
        with self.telling("the making of a group"):
            return self._new_group(backend="gloo")

    def _new_group(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
        group = dist.new_group(None if ranks is None else list(ranks), timeout=self._timeout, backend=backend)
        if ranks is None or self.rank in ranks:
            self._made.append(group)
        return group

    def mailbox(self, stages: Mapping[int, Stage], wire: Wire, device: torch.device) -> Mailbox:
        group = self.mesh.get_group("dp") if self.num_replicas > 1 else None
        replicas = {} if group is None else {k: Replicas(group, stage) for k, stage in stages.items()}
        return Post(self, stages, wire, device, replicas, self.channels)

    def channels(self, device: torch.device) -> Channels:
        """Return the channels to other ranks, by place; all ranks make the first call together, to connect."""
        if self.num_ranks == 1:
            return {}
        if (device, self.placement) not in self._channels:
            pairs = {frozenset(pair) for pair in itertools.pairwise(self.placement) if pair[0] != pair[1]}
            others = sorted({place for pair in pairs if self.place in pair for place in pair} - {self.place})
            carriers = self._carriers(device, pairs)
            token = self._exchange("token", secrets.token_hex(8))[0].encode()
            host = host_of(default_store())
            channels = {
                place: Channel(self.ranks[place], host, token, self.watch.check, carriers.get(place))
                for place in others
            }
            mine = {str(channel.peer): channel.addresses for channel in channels.values()}
            addresses = self._exchange("addresses", mine)
            for channel in channels.values():
                channel.connect(addresses[channel.peer][str(self.rank)])
            self._channels[device, self.placement] = channels
        return self._channels[device, self.placement]

    def _carriers(self, device: torch.device, pairs: set[frozenset[int]]) -> dict[int, Carrier]:
        """Return what carries bytes between GPUs, by place; nothing for tensors on CPUs."""
        if device.type == "cpu":
            return {}
        # One group for each direction, from lower to higher places and back: neither waits behind the other.
        up, down = (self._new_group(backend=backend_for(device)) for _ in range(2))
        # nccl connects at the first use and waits for the other end. Two ranks that first use different links would wait for each
        # other forever.
        number = torch.zeros(1, device=device)
        for group, column, (low, high) in itertools.product((up, down), self._columns(), sorted(map(sorted, pairs))):
            sender, receiver = (column[low], column[high])[:: 1 if group is up else -1]
            if self.rank == sender:
                group.send([number], receiver, 0).wait()
            elif self.rank == receiver:
                group.recv([number], sender, 0).wait()
        torch.cuda.synchronize(device)
        here = self.place
        return {
            place: Carrier(*((up, down) if place > here else (down, up)), device)
            for pair in pairs
            if here in pair
            for place in pair - {here}
        }

    def _columns(self) -> list[list[int]]:
        """Return one list for each replica and each part of a stage: its ranks, by place."""
        columns: list[list[int]] = self.mesh.mesh.reshape(self.mesh.shape[0], -1).T.tolist()
        return columns

    def connect(self, sets: Sequence[tuple[int, ...]], *, replicas: bool = False) -> None:
        columns = self._columns()
        new = [places for places in dict.fromkeys(map(self._places, sets)) if (places, replicas) not in self._groups]
        if new:
            self.begin("the making of groups")
        for places in new:
            # Ranks outside the group take part too: all ranks make a group, or none does. Four stages on ranks 0 to 7 in two
            # replicas (see above), for stages 1 and 2: groups (2, 4) and (3, 5), or (2, 4, 3, 5) over the replicas.
            self._groups[places, replicas] = None
            sets_of_ranks = [[column[place] for place in places] for column in columns]
            if replicas:
                sets_of_ranks = [list(itertools.chain(*sets_of_ranks))]
            for ranks in sets_of_ranks:
                group = self._new_group(ranks, backend="gloo") if len(ranks) > 1 else None
                if self.rank in ranks:
                    self._groups[places, replicas] = group

    def _places(self, stages: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({self.placement[k] for k in stages}))

    def gather(self, name: str, value: Any) -> list[Any]:
        with self.telling(f"the exchange of {name!r}"):
            return self._exchange(name, value)

    def _exchange(self, name: str, value: Any) -> list[Any]:
        return exchange(self.store, self._key(name), self.rank, self.size, value, self.watch.check, self._limit)

    def _key(self, name: str) -> str:
        # A new key at each use of a name; it is the same on all ranks, because all use a name equally often.
        self._shared[name] = self._shared.get(name, -1) + 1
        return f"{name}/{self._shared[name]}"

    def sums(self, rows: Sequence[tuple[tuple[int, ...], Tensor]], *, replicas: bool = False) -> list[Tensor]:
        with self.telling():
            works = [
                dist.all_reduce(values, group=group, async_op=True)
                for stages, values in rows
                if (group := self._groups.get((self._places(stages), replicas))) is not None
            ]
            for work in works:
                work.wait()
        return [values for _, values in rows]

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with self.telling("the collection of tensors"):
            # One rank of every place sends, and rank 0 takes them one after the other.
            assert self.control  # also on ranks that send nothing: all ranks make the group
            if self.rank:
                if 0 in self.ranks:
                    self.send(Named(tensors), 0)
                return {}
            collected = {name: t.detach().cpu() for name, t in tensors.items()}
            for rank in self.ranks[1:]:
                received = self.receive(rank)
                collected.update(zip(names(received), received, strict=True))
            return collected

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        with self.telling():
            dist.send_object_list([make_specs(tensors)], rank, group=self.control)
            for tensor in tensors:
                if tensor.numel():
                    dist.send(tensor.detach().cpu().contiguous(), rank, group=self.control)

    def receive(self, rank: int) -> Tensors:
        header: list[Any] = [()]
        with self.telling():
            dist.recv_object_list(header, rank, group=self.control)
            tensors = tuple(spec.empty(torch.device("cpu")) for spec in header[0])
            for tensor in tensors:
                if tensor.numel():
                    dist.recv(tensor, rank, group=self.control)
        return with_names(tensors, spec_names(header[0]))

    def begin(self, name: str, batch: object = "") -> None:
        # Replicas have shares of a mini-batch, which may be unequal.
        look = batch if self.num_replicas == 1 else ""
        _calls.begin(f"{name} of pipeline {self._number}" if self._number else name, *self._settings, look)

    @contextmanager
    def watched(self, name: str | None, batch: object = "", errors: type[Exception] = Exception) -> Iterator[None]:
        if name is not None:
            self.begin(name, batch)
        self.watch.check()
        try:
            yield
        except RankError:
            raise
        # All ranks end, but the interrupt stays what it is: it ends this process as the user expects.
        except (KeyboardInterrupt, SystemExit) as error:
            self.watch.failed(error)
            raise
        except errors as error:
            raise self.watch.failed(error) from error
        finally:
            self.doing = None

    def compare(self, name: str, facts: Any) -> None:
        self._settings = name, derive(repr(facts))

    def before_close(self, action: Callable[[], None]) -> None:
        self._on_close.append(action)

    def close(self) -> None:
        if self not in _open or self.watch.has_failed:
            return
        _open.remove(self)
        # All ranks meet twice: before the flush, because a rank still in a step would mistake it for its message, and after it,
        # because a rank that left earlier would break the connections that another still flushes.
        with self.telling("the end (`close`)"):
            calls = self._exchange("calls", self.watch.calls())
        found = [different for rank, theirs in enumerate(calls) if (different := self.watch.difference(rank, theirs))]
        if found:
            raise self.watch.failed(ValueError(f"Rank {self.rank} {found[0]}."))
        for action in self._on_close:
            action()
        self._exchange("closed", None)
        for channel in itertools.chain(*(channels.values() for channels in self._channels.values())):
            channel.close()
        self.watch.close()
        while self._made and dist.is_initialized():  # with the default group the caller destroys all others
            dist.destroy_process_group(self._made.pop())
        atexit.unregister(self._close_at_exit)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy or a pickle of a pipeline keep its stages without connections."""
        return Copied, ({name: getattr(self, name) for name in FACTS},)

    def _close_at_exit(self) -> None:
        """Close, and exit with 1 after an error: exceptions raised in exit handlers do not change the exit code."""
        try:
            self.close()
        except RankError:
            sys.stdout.flush()
            sys.stderr.flush()
            exit_at_once()
