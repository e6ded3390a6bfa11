"""The processes of a pipeline, one or several, seen from one of them: which stages are where, and how they exchange values.

Several processes lie on a mesh of one or two dimensions: ``pp`` (ranks with different stages) outermost, then ``dp`` (replicas of
these stages, each with a part of the mini-batch). Facts travel as JSON through the store of `torch.distributed`, messages of
stages through channels. The ranks of 8 processes with 4 stages and 2 replicas::

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
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from nwise.process import exit_at_once, on_uncaught_error
from nwise.randomness import derive
from nwise.runtime.calls import Calls, RankError, Status
from nwise.runtime.compression import Codec
from nwise.runtime.launch import check_same, default_store, exchange, launched, make_mesh, start, time_limit
from nwise.runtime.mailbox import Mailbox
from nwise.runtime.shapes import make_specs, spec_names
from nwise.schedule.placement import Placement, make_placement
from nwise.stage.stage import Stage
from nwise.tensors import Tensors, with_names

if TYPE_CHECKING:
    from nwise.runtime.connections import Channels
    from nwise.runtime.links import Link
    from nwise.runtime.watch import Watchdog

__all__ = ["Processes", "tell_all"]

_SHUFFLE = "shuffle with one seed on all ranks. nwise shares each mini-batch out among replicas"
_SEED = "call `torch.manual_seed` first, with one number on all ranks, or pass `seed=`"
_REMEDIES = {
    "NWISE_SECRET": "set one text on all machines (these are digests)",
    "seed": _SEED,
    "inputs": _SHUFFLE,
    "target": _SHUFFLE,
}

_COPIED = (
    "A copy of a pipeline under several processes should only be read: its stages, parameters and state dict. Found a call that "
    "needs the other processes; load its state dict into the pipeline, or make another `Pipeline` on all processes."
)

_FAREWELL = 5.0  # seconds that the first rank waits for the others at the end
_numbers = itertools.count()  # numbers the pipelines, equally on every rank because all run the same script
_open: list[Processes] = []  # with several processes
_report_crashes = cache(on_uncaught_error)  # once, for example of a data loader or an optimizer
_calls = Calls()  # of all pipelines: a rank may construct one while another steps


def tell_all(error: BaseException) -> None:
    """Report an error that ends this process to the others; for programs that catch their errors."""
    if not isinstance(error, RankError):
        for processes in _open:
            processes.watch.failed(error)


class Processes:
    """The processes of a pipeline: this one alone, unless `torchrun` has started several.

    Args:
        num_stages: number of stages, A.
        placement: place of every stage's rank, see `nwise.schedule.placement`; default: neighbouring stages share a rank.
        mesh: mesh with dimensions ``("pp", "dp")`` or ``("pp",)``; default: of all processes, with as many replicas as fit.
        timeout: time limit of an action, in seconds; default: ``NWISE_TIMEOUT``, else 300.

    Attributes:
        placement: place of every stage's rank among the ranks of a replica.
        place: place of this rank among them.
        rank, size: rank of this process and number of processes, replicas included.
        replica, num_replicas: index of this replica of the stages, and the number of replicas.
        ranks: ranks of this replica's processes, by place.
        doing: present action of this rank, for other ranks that wait for it; None between steps.
        settings: strategy and M in words, and a digest of all that ranks have to train alike by.
        mesh, store: the mesh, and the store in which ranks exchange facts; of several processes.
        groups, channels: groups of `nwise.runtime.sums`, and channels of `nwise.runtime.connections`.
        links: latency and bandwidth from this rank to each with a neighbouring stage on CPUs, measured when they connect.

    Raises:
        ValueError: the number of processes, the mesh or the placement does not fit the stages.
    """

    placement: Placement
    mesh: DeviceMesh
    store: PrefixStore
    place = rank = replica = 0
    size = num_replicas = 1
    ranks: Sequence[int] = (0,)
    doing: Status | None = None
    settings: tuple[str, int] = "", 0
    _watch: Watchdog | None = None

    def __init__(
        self,
        num_stages: int,
        placement: str | Sequence[int] = "contiguous",
        mesh: DeviceMesh | None = None,
        timeout: float | None = None,
    ) -> None:
        self.groups: dict[tuple[tuple[int, ...], bool], ProcessGroup | None] = {}
        self.channels: dict[tuple[torch.device, Placement], Channels] = {}
        self.links: dict[int, Link] = {}
        if launched():
            self._join(num_stages, placement, mesh, time_limit(timeout))
        else:
            ranks = 1 if isinstance(placement, str) else 1 + max(placement, default=0)
            make_placement(placement, num_stages, ranks)  # one process refuses the same placements
            self.placement = (0,) * num_stages

    def _join(self, num_stages: int, placement: str | Sequence[int], mesh: DeviceMesh | None, limit: float) -> None:
        """Meet the other processes."""
        from nwise.runtime.watch import SPARE, Watchdog

        self._limit = limit + SPARE / 3  # of an exchange: the watch speaks of a stalled rank first, and ends it
        self._timeout = timedelta(seconds=limit + SPARE)
        start(limit + SPARE)
        self._number = next(_numbers)
        self._note("the construction")
        self.mesh = make_mesh(num_stages, mesh)
        sizes = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True))
        self.num_replicas = sizes.get("dp", 1)
        self.replica = self.mesh.get_local_rank("dp") if "dp" in sizes else 0
        self.place = self.mesh.get_local_rank("pp")
        self.ranks = dist.get_process_group_ranks(self.mesh.get_group("pp"))
        self.placement = make_placement(placement, num_stages, len(self.ranks))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # Keys of an earlier attempt, such as its error, are still in torchrun's store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"nwise/{attempt}/{self._number}", default_store())
        # Destroy the groups of a mesh made here with the others; a mesh from the caller keeps its groups.
        own = self.mesh.get_all_groups() if mesh is None else []
        self._made = [group for group in own if group is not dist.group.WORLD]
        self._shared: dict[str, int] = {}
        self._watch = Watchdog(self.store, self.rank, self.size, self.here, limit, lambda: self.doing, calls=_calls)
        self._watch.start()
        _open.append(self)
        _report_crashes(tell_all)
        atexit.register(self._close_at_exit)

    @property
    def watch(self) -> Watchdog:
        """The watch over this rank and the next, of several processes."""
        if self._watch is None:
            raise RuntimeError(_COPIED)
        return self._watch

    # Where everything is ----------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the stages of a replica."""
        return 1 + max(self.placement)

    @property
    def here(self) -> tuple[int, ...]:
        """Indices of the stages that this process holds."""
        return tuple([k for k, place in enumerate(self.placement) if place == self.place])

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.rank == 0

    def stage_rank(self, stage: int) -> int:
        """Return the rank of the process of this replica that holds a stage."""
        return self.ranks[self.placement[stage]]

    def columns(self) -> list[list[int]]:
        """Return one list for each replica: its ranks, by place."""
        columns: list[list[int]] = self.mesh.mesh.reshape(self.mesh.shape[0], -1).T.tolist()
        return columns

    # Facts ------------------------------------------------------------------------------------------

    def gather(self, name: str, value: Any) -> list[Any]:
        """Exchange a value between all ranks.

        Args:
            name: name of the value; may be used again.
            value: this rank's value, serialisable as JSON.

        Returns:
            The values of all ranks, in order of the ranks.
        """
        if self.size == 1:
            return [value]
        with self.telling(f"the exchange of {name!r}"):
            return self.exchange(name, value)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Do as `gather` in a call of several processes that is announced already."""
        # A new key at each use of a name; it is the same on all ranks, because all use a name equally often.
        self._shared[name] = self._shared.get(name, -1) + 1
        key = f"{name}/{self._shared[name]}"
        return exchange(self.store, key, self.rank, self.size, value, self.watch.check, self._limit)

    def agree(self, **values: Any) -> None:
        """Raise ValueError unless all ranks have the same values, serialisable as JSON; None does not count."""
        # Two bytes of it: those who read the store learn too little.
        values["NWISE_SECRET"] = derive(os.environ.get("NWISE_SECRET", "")) % 2**16
        check_same(self.gather(" and ".join(values), values), _REMEDIES)

    def by_place(self, name: str, value: Any) -> list[Any]:
        """Exchange a value between the ranks of this replica; return the values in order of their places."""
        values = self.gather(name, value)
        return [values[rank] for rank in self.ranks]

    def by_stage(self, values: Mapping[int, Any]) -> list[Any]:
        """Exchange a value of every stage; return them in order of the stages."""
        all_values = dict(itertools.chain(*self.gather("stages", sorted(values.items()))))
        return [all_values[k] for k in range(len(self.placement))]

    def table(self, rows: Mapping[int, Tensor]) -> Tensor:
        """Gather the values of all stages, ``[A, ...]``; all ranks call it together and wait for each other.

        Args:
            rows: values of this rank's stages, on the CPU, of one dtype; the replicas' values are averaged.
        """
        parts = self.gather("table", [[k, rows[k].tolist()] for k in self.here])
        dtype = rows[self.here[0]].dtype  # a number of Python's has every bit of a float
        by_stage = [[values for part in parts for j, values in part if j == k] for k in range(len(self.placement))]
        return torch.tensor(by_stage, dtype=dtype).mean(1)

    # Tensors ----------------------------------------------------------------------------------------

    @cached_property
    def control(self) -> ProcessGroup:
        """Group of all ranks for CPU tensors that are not urgent; all ranks make it at the first use.

        It is made late because every gloo group has a thread that wakes up a hundred times a second.
        """
        group = self.new_group()
        assert group is not None, "of several processes"
        return group

    def new_group(self) -> ProcessGroup | None:
        """Make a group of all ranks for CPU tensors, None for one process; all ranks call it together."""
        if self.size == 1:
            return None
        with self.telling("the making of a group"):
            return self.group_of(backend="gloo")

    def group_of(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> ProcessGroup:
        """Make a group of some ranks, or of all; all ranks call it together, in a call that is announced already."""
        group = dist.new_group(None if ranks is None else list(ranks), timeout=self._timeout, backend=backend)
        if ranks is None or self.rank in ranks:
            self._made.append(group)
        return group

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Send tensors of any shapes, with their names if they have some, to another process, which calls `receive`."""
        with self.telling():
            dist.send_object_list([make_specs(tensors)], rank, group=self.control)
            for tensor in filter(Tensor.numel, tensors):
                dist.send(tensor.detach().cpu().contiguous(), rank, group=self.control)

    def receive(self, rank: int) -> Tensors:
        """Receive the tensors that another process sends, on the CPU."""
        header: list[Any] = [()]
        with self.telling():
            dist.recv_object_list(header, rank, group=self.control)
            tensors = [spec.empty(torch.device("cpu")) for spec in header[0]]
            for tensor in filter(Tensor.numel, tensors):
                dist.recv(tensor, rank, group=self.control)
        return with_names(tensors, spec_names(header[0]))

    def mailbox(self, stages: Mapping[int, Stage], codec: Codec, device: torch.device) -> Mailbox:
        """Return what carries results between this process's stages, and from and to those of other processes.

        Args:
            stages: this process's stages, by index.
            codec: the form in which messages travel.
            device: device of the stages' tensors.
        """
        if self.size == 1:
            return Mailbox(stages, codec)
        self.watch.check()
        from nwise.runtime.post import Post
        from nwise.runtime.replicas import Replicas

        group = self.mesh.get_group("dp") if self.num_replicas > 1 else None
        replicas = {} if group is None else {k: Replicas(group, stage) for k, stage in stages.items()}
        return Post(self, stages, codec, device, replicas)

    # Calls of all ranks -----------------------------------------------------------------------------

    def announce(self, name: str, batch: object = "") -> None:
        """Announce a call that all ranks make; end all soon if another rank makes another one (`nwise.runtime.watch`)."""
        if self.size > 1 and self.watch:  # which refuses a copy
            self._note(name, batch)

    def _note(self, name: str, batch: object = "") -> None:
        # Replicas have shares of a mini-batch, which may be unequal.
        look = batch if self.num_replicas == 1 else ""
        _calls.begin(f"{name} of pipeline {self._number}" if self._number else name, *self.settings, look)

    def watched(
        self, name: str | None, batch: object = "", errors: type[Exception] = Exception
    ) -> AbstractContextManager[None]:
        """Raise the first error of another rank, if there has been one; end all ranks if the body raises.

        Args:
            name: name of the call, if all ranks make one that is to be announced (`announce`), otherwise None.
            batch: what its mini-batch looks like, with a ``str`` that is the same on all ranks. Default: none.
            errors: those that end all ranks; default: all.
        """
        return nullcontext() if self.size == 1 else self._watched(name, batch, errors)

    @contextmanager
    def _watched(self, name: str | None, batch: object, errors: type[Exception]) -> Iterator[None]:
        watch = self.watch
        if name is not None:
            self.announce(name, batch)
        watch.check()
        try:
            yield
        except RankError:
            raise
        # All ranks end, but the interrupt stays what it is: it ends this process as the user expects.
        except (KeyboardInterrupt, SystemExit) as error:
            watch.failed(error)
            raise
        except errors as error:
            raise watch.failed(error) from error
        finally:
            self.doing = None

    def telling(self, name: str | None = None) -> AbstractContextManager[None]:
        """As `watched`, for a body that raises RuntimeError where another rank is the cause."""
        return self.watched(name, errors=RuntimeError)

    def compare(self, name: str, facts: Any) -> None:
        """Check that all ranks train alike from the next call on; wait for none, and end all soon if they differ.

        Args:
            name: strategy and M of this rank, for the error message.
            facts: everything to compare, with a `repr` that is the same in every process.
        """
        if self.size > 1:
            self.settings = name, derive(repr(facts))

    def close(self) -> None:
        """End the exchange after the last step; all ranks call it together."""
        if self not in _open or self.watch.has_failed:
            return
        _open.remove(self)
        # All ranks meet twice: to compare their calls, and before any connection ends, because another rank may still wait.
        with self.telling("the end (`close`)"):
            everywhere = self.exchange("calls", _calls.published())
        found = [_calls.difference(self.rank, rank, theirs) for rank, theirs in enumerate(everywhere)]
        if different := next(filter(None, found), None):
            raise self.watch.failed(ValueError(f"Rank {self.rank} {different}."))
        self.exchange("closed", None)
        for channel in itertools.chain(*(channels.values() for channels in self.channels.values())):
            channel.close()
        self.watch.close()
        with suppress(RuntimeError):
            # The first rank may hold the store, which the others need until here.
            self.store.set(f"left/{self.rank}", "")
            if self.is_first:
                self.store.wait([f"left/{rank}" for rank in range(self.size)], timedelta(seconds=_FAREWELL))
        while self._made and dist.is_initialized():  # with the default group the caller destroys all others
            dist.destroy_process_group(self._made.pop())
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Close, and exit with 1 after an error: exceptions raised in exit handlers do not change the exit code."""
        try:
            self.close()
        except RankError:
            sys.stdout.flush()
            sys.stderr.flush()
            exit_at_once()

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of a pipeline keeps its stages, without connections.
        facts = ("placement", "place", "rank", "size", "replica", "num_replicas", "ranks")
        return {name: getattr(self, name) for name in facts} | {"groups": {}, "channels": {}, "links": self.links}
