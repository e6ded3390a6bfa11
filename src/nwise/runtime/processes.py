"""The processes of a pipeline, seen from one of them: which stages are where, and how the processes exchange values.

Here one process has all stages. Several processes are a `nwise.runtime.world.World`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, cast, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from nwise.runtime.compression import Wire
from nwise.runtime.launch import check_same, launched, time_limit
from nwise.runtime.mailbox import Mailbox
from nwise.schedule.actions import SENDS, Action, Kind, describe
from nwise.schedule.placement import Placement, make_placement
from nwise.stage.stage import Stage
from nwise.tensors import Tensors

__all__ = ["Processes"]

_SHUFFLE = "shuffle with one seed on all ranks. nwise shares each mini-batch out among replicas"
_REMEDIES = {
    "seed": "call `torch.manual_seed` first, with one number on all ranks, or pass `seed=`",
    "inputs": _SHUFFLE,
    "target": _SHUFFLE,
}

# The attributes of `Processes` that say which process this is.
FACTS = ("placement", "place", "rank", "size", "replica", "num_replicas", "ranks")


_WAITS = (*SENDS.keys(), *SENDS.values(), Kind.UPDATE)  # an update waits for the sums over replicas


class Doing(NamedTuple):
    """The present action of a rank.

    Args:
        step: number of the mini-batch.
        action: the action, from the stage's list.
        since: start of the action in seconds of `time.perf_counter`.
        over: whether the action is done and the user's `on_action` is running; default: False.
    """

    step: int
    action: Action
    since: float
    over: bool = False

    @property
    def waits(self) -> bool:
        """Whether this rank may be waiting for another."""
        return self.action.kind in _WAITS and not self.over

    def __str__(self) -> str:
        return f"at {'`on_action` of ' if self.over else ''}{describe(self.action)} of step {self.step}"


class Processes:
    """The processes of a pipeline: one process with all stages, unless it is a `World`.

    What all of them share is final. The rest are exchanges: one process gets back what it gives, and a `World` has all of them
    anew.

    Args:
        num_stages: number of stages, A.

    Attributes:
        placement: place of every stage's rank among the ranks of a replica.
        place: place of this rank among them.
        rank, size: rank of this process and number of processes, replicas included.
        replica, num_replicas: index of this replica of the stages, and the number of replicas.
        ranks: ranks of this replica's processes, by place.
        doing: present action of this rank, for other ranks that wait for it; None between steps.
    """

    doing: Doing | None = None
    place = 0
    rank = 0
    size = 1
    replica = 0
    num_replicas = 1
    ranks: Sequence[int] = (0,)

    def __init__(self, num_stages: int) -> None:
        self.placement: Placement = (0,) * num_stages

    @property
    @final
    def num_ranks(self) -> int:
        """Number of ranks that share the stages of a replica."""
        return 1 + max(self.placement)

    @property
    def here(self) -> tuple[int, ...]:
        """Indices of the stages that this process holds."""
        return tuple([k for k, place in enumerate(self.placement) if place == self.place])

    @property
    @final
    def is_first(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.rank == 0

    def gather(self, name: str, value: Any) -> list[Any]:
        """Exchange a value between all ranks.

        Args:
            name: name of the value; may be used again.
            value: this rank's value, serialisable as JSON.

        Returns:
            The values of all ranks, in order of the ranks.
        """
        return [value]

    @final
    def agree(self, **values: Any) -> None:
        """Raise ValueError unless all ranks have the same values, serialisable as JSON; None does not count."""
        check_same(self.gather(" and ".join(values), values), _REMEDIES)

    @final
    def by_place(self, name: str, value: Any) -> list[Any]:
        """Exchange a value between the ranks of this replica; return the values in order of their places."""
        values = self.gather(name, value)
        return [values[rank] for rank in self.ranks]

    @final
    def by_stage(self, values: Mapping[int, Any]) -> list[Any]:
        """Exchange a value of every stage; return them in order of the stages."""
        parts = self.gather("stages", sorted(values.items()))
        all_values = {k: value for part in parts for k, value in part}
        return [all_values[k] for k in range(len(self.placement))]

    @final
    def table(self, rows: Mapping[int, Tensor]) -> Tensor:
        """Gather the values of all stages, ``[A, ...]``; all ranks call it together and wait for each other.

        Args:
            rows: values of this rank's stages, on the CPU, of one dtype; the replicas' values are averaged.
        """
        parts = self.gather("table", [[k, rows[k].tolist()] for k in self.here])
        dtype = rows[self.here[0]].dtype  # a number of Python's has every bit of a float
        return torch.stack(
            [
                torch.tensor([values for part in parts for j, values in part if j == k], dtype=dtype).mean(0)
                for k in range(len(self.placement))
            ]
        )

    def connect(self, sets: Sequence[tuple[int, ...]], *, replicas: bool = False) -> None:
        """Prepare `sums` over sets of stages, in the same order on all ranks.

        Args:
            sets: sets of stages.
            replicas: whether to sum over all replicas of the stages, too; default: False.
        """

    def sums(self, rows: Sequence[tuple[tuple[int, ...], Tensor]], *, replicas: bool = False) -> list[Tensor]:
        """Sum values over the ranks of several sets of stages at once.

        Args:
            rows: the stages of each set with this rank's values, on the CPU; the sums replace the values.
            replicas: whether to sum over all replicas too; default: False.

        Returns:
            The sums, one for each row.
        """
        return [values for _, values in rows]

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collect the tensors of all stages on rank 0; all ranks call it together.

        Args:
            tensors: tensors of this rank's stages, by name.

        Returns:
            On rank 0 all tensors; nothing on other ranks.
        """
        return tensors

    @final
    def stage_rank(self, stage: int) -> int:
        """Return the rank of the process of this replica that holds a stage."""
        return self.ranks[self.placement[stage]]

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Send tensors of any shapes, with their names if they have some, to another process, which calls `receive`."""
        raise AssertionError("one process has no other to send to")

    def receive(self, rank: int) -> Tensors:
        """Receive the tensors that another process sends, on the CPU."""
        raise AssertionError("one process has no other to receive from")

    def mailbox(self, stages: Mapping[int, Stage], wire: Wire, device: torch.device) -> Mailbox:
        """Return what carries results between this process's stages, and from and to those of other processes.

        Args:
            stages: this process's stages, by index.
            wire: the form in which messages travel.
            device: device of the stages' tensors.
        """
        return Mailbox(stages, wire)

    def new_group(self) -> ProcessGroup | None:
        """Make a group of all ranks for CPU tensors, None for one process; all ranks call it together."""
        return None

    def begin(self, name: str, batch: object = "") -> None:
        """Announce a call that all ranks make; end all soon if another rank makes another one (`nwise.runtime.watch`)."""

    def watched(
        self, name: str | None, batch: object = "", errors: type[Exception] = Exception
    ) -> AbstractContextManager[None]:
        """Raise the first error of another rank, if there has been one; end all ranks if the body raises.

        Args:
            name: name of the call, if all ranks make one that is to be announced (`begin`), otherwise None.
            batch: what its mini-batch looks like, with a ``str`` that is the same on all ranks. Default: none.
            errors: those that end all ranks; default: all.
        """
        return nullcontext()

    @final
    def telling(self, name: str | None = None) -> AbstractContextManager[None]:
        """As `watched`, for a body that raises RuntimeError where another rank is the cause."""
        return self.watched(name, errors=RuntimeError)

    def compare(self, name: str, facts: Any) -> None:
        """Check that all ranks train alike from the next call on; wait for none, and end all soon if they differ.

        Args:
            name: strategy and M of this rank, for the error message.
            facts: everything to compare, with a `repr` that is the same in every process.
        """

    def before_close(self, action: Callable[[], None]) -> None:
        """Run an action in `close`, once all ranks are there."""

    def close(self) -> None:
        """End the exchange after the last step; all ranks call it together."""


def _refuse(*_: object, **__: object) -> NoReturn:
    """Raise RuntimeError."""
    raise RuntimeError(
        "A copy of a pipeline under several processes should only be read: its stages, parameters and state dict. Found a call "
        "that needs the other processes; load its state dict into the pipeline, or make another `Pipeline` on all processes."
    )


class Copied(Processes):
    """The processes of a copy of a pipeline: it holds the stages of its process, but has no connections to run them.

    Args:
        facts: the attributes `FACTS` of the processes that it is a copy of.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(len(facts["placement"]))
        vars(self).update(facts)

    gather = post = posted = connect = sums = collect = send = receive = mailbox = cast(Any, _refuse)
    new_group = begin = watched = compare = before_close = cast(Any, _refuse)


def join(num_stages: int, placement: str | Sequence[int], mesh: DeviceMesh | None, timeout: float | None) -> Processes:
    """Return the processes that hold a pipeline's stages: this one alone, unless `torchrun` has started several."""
    if launched():
        from nwise.runtime.world import World

        return World(num_stages, placement, mesh, time_limit(timeout))
    ranks = 1 if isinstance(placement, str) else 1 + max(placement, default=0)
    make_placement(placement, num_stages, ranks)  # one process refuses the same placements
    return Processes(num_stages)
