"""Sums of values over the ranks of sets of stages, such as the squared norms of gradients that are clipped together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from nwise.runtime.processes import Processes

__all__ = ["Sums"]


class Sums:
    """Sums values over sets of stages. All ranks make it together, and those of a set call it at the same steps.

    Args:
        processes: the processes; one alone has nothing to add.
        sets: sets of stages, in the same order on all ranks.
        replicas: whether to sum over all replicas of the stages, too; default: False.
    """

    def __init__(self, processes: Processes, sets: Sequence[tuple[int, ...]], *, replicas: bool = False) -> None:
        self._processes = processes
        self._replicas = replicas
        if processes.size == 1:
            return
        new = [one for one in dict.fromkeys(map(self._places, sets)) if (one, replicas) not in processes.groups]
        if new:
            processes.announce("the making of groups")
        for places in new:
            # Ranks outside the group take part too: all ranks make a group, or none does. Four stages on ranks 0 to 7 in two
            # replicas (`nwise.runtime.processes`), for stages 1 and 2: groups (2, 4) and (3, 5), or (2, 4, 3, 5) over replicas.
            processes.groups[places, replicas] = None
            sets_of_ranks = [[column[place] for place in places] for column in processes.columns()]
            if replicas:
                sets_of_ranks = [list(itertools.chain(*sets_of_ranks))]
            for ranks in sets_of_ranks:
                group = processes.group_of(ranks, backend="gloo") if len(ranks) > 1 else None
                if processes.rank in ranks:
                    processes.groups[places, replicas] = group

    def __call__(self, rows: Sequence[tuple[tuple[int, ...], Tensor]]) -> list[Tensor]:
        """Sum values of several sets at once.

        Args:
            rows: the stages of each set with this rank's values, on the CPU; the sums replace the values.

        Returns:
            The sums, one for each row.
        """
        groups = [self._processes.groups.get((self._places(stages), self._replicas)) for stages, _ in rows]
        with self._processes.telling():
            pairs = zip(rows, groups, strict=True)
            works = [dist.all_reduce(values, group=g, async_op=True) for (_, values), g in pairs if g is not None]
            for work in works:
                work.wait()
        return [values for _, values in rows]

    def _places(self, stages: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({self._processes.placement[k] for k in stages}))
