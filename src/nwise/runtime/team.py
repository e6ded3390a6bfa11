"""The team: this rank's part of a pipeline with its stages in different processes."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nwise._dtensor import is_dtensor
from nwise._process import exit_at_once, on_uncaught_error
from nwise.flow import Flow
from nwise.microbatch import Batch, Tensors
from nwise.randomness import derive, seeded
from nwise.runtime.channel import Spec, make_spec
from nwise.runtime.distributed import Distributed, Recorder
from nwise.runtime.replicas import Replicas
from nwise.runtime.shapes import from_json, output_specs, to_json
from nwise.runtime.stale import Stale
from nwise.runtime.watch import RankError, Watch
from nwise.runtime.worker import stack_losses
from nwise.runtime.world import World
from nwise.schedule.actions import Action
from nwise.schedule.lists import Schedule
from nwise.stage import Stage


class Elsewhere(nn.Module):
    """Stands for a stage or head that another process holds.

    Args:
        what: name of the stage or head.
        rank: rank of the process that holds it.
    """

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what, self.rank = what, rank

    def forward(self, *inputs: Tensor) -> NoReturn:
        """Raise RuntimeError: only the process that holds the module can call it."""
        raise RuntimeError(f"{self.what} should be called on rank {self.rank}, which holds it. Found a call elsewhere.")

    def extra_repr(self) -> str:
        return f"{self.what}, on rank {self.rank}"


_teams: list[Team] = []  # the open teams


def tell_all(error: BaseException) -> None:
    """Report an error that ends this process to the others; for programs that catch their errors."""
    if not isinstance(error, RankError):
        for team in _teams:
            team.failed(error)


@cache
def _report_crashes() -> None:
    """End all ranks after an uncaught error, for example in a data loader or an optimizer."""
    on_uncaught_error(tell_all)


class Team:
    """The processes of one pipeline, seen from one of them.

    Args:
        num_stages: number of stages, A.
        mesh: mesh of the processes, see `World`; None for the default.
        timeout: limit of an action in seconds; None for the environment's ``NWISE_TIMEOUT``, else 300.

    Attributes:
        recorder: None, or a function called with the begin and end of every action (`Distributed.recorder`).
        share: weight of this replica's last loss in the loss of the whole mini-batch.
    """

    def __init__(self, num_stages: int, mesh: DeviceMesh | None, timeout: float | None) -> None:
        limit = time_limit(timeout)
        self.world = World(num_stages, mesh, 4 * limit)
        world = self.world
        self._watch = Watch(world.store, world.rank, dist.get_world_size(), world.stage, limit)
        self.share = 1.0
        self.recorder: Recorder | None = None
        self._runtime: Distributed | None = None
        self._stale: tuple[Sequence[Sequence[Flow]], Stale] | None = None
        self._open = True
        self._compared = False
        _teams.append(self)
        _report_crashes()
        atexit.register(self._close_at_exit)

    @property
    def stage(self) -> int:
        """Index of the stage that this rank holds."""
        return self.world.stage

    def holder(self, stage: int) -> int:
        """Return the rank of the process that holds a stage of this replica."""
        return self.world.ranks[stage]

    def facts(self, value: Any) -> list[Any]:
        """Exchange a value for each stage; return them in order of the stages."""
        by_stage: dict[int, Any] = dict(self.world.everyone("facts", [self.stage, value]))
        return [by_stage[k] for k in range(self.world.num_stages)]

    def same_target(self, target: Tensor | Tensors | None) -> None:
        """Raise ValueError unless all ranks with a target have the same one in the first mini-batch, as from equal loaders."""
        if self._compared:
            return
        self._compared = True
        parts = () if target is None else (target,) if isinstance(target, Tensor) else target
        code = "".join(
            sha256(t.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest() for t in parts
        )
        codes = [(rank, other) for rank, other in enumerate(self.world.everyone("target", code)) if other]
        for rank, other in codes[1:]:
            if other != codes[0][1]:
                raise ValueError(
                    f"Every rank should get the same mini-batches. Found other targets on rank {rank} than on rank "
                    f"{codes[0][0]}; shuffle by a seed that is the same everywhere, as `nwise.data.batch_indices` does."
                )

    def runtime(self, stage: Stage, inputs: Tensors) -> Distributed:
        """Return the runtime of this rank's stage; the first call connects and is one for all ranks.

        Args:
            stage: this rank's stage; its parameters determine the device.
            inputs: inputs of the first stage; they determine the device of a stage without parameters.
        """
        if self._runtime is None:
            device = next((p.device for p in stage.module.parameters()), inputs[0].device)

            def shapes(inputs: tuple[Spec, ...]) -> tuple[Spec, ...]:
                return output_specs(stage.module, inputs, device, stage.index)

            replicas = None
            if self.world.num_replicas > 1:
                group = self.world.mesh.get_group("dp")
                replicas = Replicas(group, lambda: stage.learns, lambda: stage.head_learns)
                replicas.make_equal([*stage.module.state_dict().values(), *_state(stage.head)])

            def kept() -> list[Tensor]:
                return [*stage.module.parameters(), *stage.module.buffers()]

            self._runtime = Distributed(self.world, self._watch, stage, shapes, device, kept, replicas)
        return self._runtime

    def step(
        self,
        stage: Stage,
        schedule: Schedule,
        turn: int,
        batch: Batch,
        step: int,
        on_action: Callable[[Action], None] | None = None,
    ) -> Tensor:
        """Run one mini-batch; return the losses ``[A]``, NaN for the stages of other ranks."""
        self._end_stale()
        self._watch.calls += 1
        runtime = self.runtime(stage, batch.inputs[0])
        runtime.recorder = self.recorder
        worker = runtime.run(schedule, turn, batch, step, on_action)
        self.share = worker.share
        return self._losses(worker.loss)

    def stale_step(
        self, stage: Stage, cycle: Sequence[Sequence[Flow]], turn: int, batch: Batch, step: int
    ) -> tuple[Tensor, int]:
        """Run one mini-batch of Hogwild; return the losses ``[A]`` and how many updates old its gradients are."""
        self._watch.calls += 1
        self.refuse_replicas()
        if self._stale is None or self._stale[0] is not cycle:
            self._end_stale()
            self._stale = cycle, Stale(self.world, self.runtime(stage, batch.inputs[0]), stage, cycle)
        worker = self._stale[1].run(turn, batch, step)
        self.share = worker.share
        return self._losses(worker.loss), self._stale[1].age

    def refuse_replicas(self) -> None:
        """Raise ValueError unless there is one replica of every stage, as Hogwild requires."""
        if self.world.num_replicas > 1:
            raise ValueError(
                f"Hogwild should run with one replica of every stage. Found {self.world.num_replicas}; start a process for every "
                "stage and no more."
            )

    @property
    def bytes_per_step(self) -> dict[str, list[int]]:
        """Bytes that this rank sent in its last mini-batch: measured, and predicted from the lists and shapes."""
        assert self._runtime is not None, "asked after a step"
        return self._runtime.bytes_of_last_step

    def drain(self) -> bool:
        """Finish the oldest mini-batch of Hogwild with unused gradients; return whether there was one."""
        return self._stale is not None and self._stale[1].drain()

    def _end_stale(self) -> None:
        """Receive every message that was sent, before another strategy begins."""
        if self._stale is not None:
            while self._stale[1].drain():
                pass
            self._stale[1].close()
        self._stale = None

    def _losses(self, here: Tensor | None) -> Tensor:
        losses: list[Tensor | None] = [None] * self.world.num_stages
        losses[self.stage] = here
        return stack_losses(losses)

    def infer(self, stage: Stage, inputs: Tensors, step: int, call: Callable[[Tensors], Tensors]) -> None:
        """Run a forward through all ranks; `call` is this rank's part."""
        self._watch.calls += 1
        self.runtime(stage, inputs).infer(inputs, step, call)

    def table(self, rows: Tensor) -> Tensor:
        """Gather the values of all stages, ``[A, ...]``; a call for all ranks, which waits for all.

        Args:
            rows: values of this rank's stage, on the CPU; the replicas' values are averaged.
        """
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        with self.telling():
            dist.all_gather(parts, rows, group=self.world.control)
        per_stage = len(parts) // self.world.num_stages
        return torch.stack(parts).unflatten(0, (self.world.num_stages, per_stage)).mean(1)

    def sums(self, rows: Sequence[tuple[tuple[int, ...], Tensor]], *, replicas: bool = False) -> list[Tensor]:
        """Sum values over all of this rank's groups of stages at once; `World.connect` has made the groups.

        Args:
            rows: the stages of each group with this rank's values, on the CPU; the sums replace the values.
            replicas: whether to sum over all replicas too; default: False.

        Returns:
            The sums, one for each row.
        """
        with self.telling():
            works = [
                dist.all_reduce(values, group=group, async_op=True)
                for stages, values in rows
                if (group := self.world.group_for(stages, replicas=replicas)) is not None
            ]
            for work in works:
                work.wait()
        return [values for _, values in rows]

    def collect(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Collect the tensors of all stages on rank 0; a call for all ranks.

        Args:
            tensors: tensors of this rank's stage, by name.

        Returns:
            On rank 0 all tensors, on the CPU and in order of the stages; nothing on other ranks.
        """
        world = self.world
        whole = {name: t.full_tensor() if is_dtensor(t) else t for name, t in tensors.items()}
        mine = {name: t.detach().cpu().contiguous() for name, t in whole.items()}
        header = json.dumps([[name, *to_json((make_spec(t),))[0]] for name, t in mine.items()]).encode()
        with self.telling():
            control = world.control  # also on ranks that send nothing: all ranks make the group
            if world.rank:
                if world.sends_for_its_stage:
                    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                    for tensor in (torch.tensor([len(text)]), text, *mine.values()):
                        if tensor.numel():
                            dist.send(tensor, 0, group=control)
                return {}
            collected = dict(mine)
            for rank in world.ranks[1:]:
                size = self._received(Spec((1,), torch.int64), rank)
                text = self._received(Spec((int(size),), torch.uint8), rank)
                for name, shape, dtype in json.loads(bytes(text.tolist())):
                    collected[name] = self._received(from_json([[shape, dtype]])[0], rank)
        return collected

    def _received(self, spec: Spec, rank: int) -> Tensor:
        tensor = spec.empty(torch.device("cpu"))
        if tensor.numel():
            dist.recv(tensor, rank, group=self.world.control)
        return tensor

    @property
    def watch(self) -> Watch:
        """Watch over this rank and the next."""
        return self._watch

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Fail on all ranks if the body raises RuntimeError."""
        self._watch.check()
        try:
            yield
        except RuntimeError as error:
            raise self._watch.failed(error) from error

    def failed(self, error: BaseException) -> RankError:
        """Report an error outside a step to all ranks; return the error to raise."""
        return self._watch.failed(error)

    def close(self) -> None:
        """Wait until the neighbours have every message, then end the watch; a call for all ranks, after the last step."""
        if not self._open or self._watch.has_failed:
            return
        self._open = False
        _teams.remove(self)
        # Flush only once all ranks are here: a rank still in a step would mistake the flush for its message.
        self._watch.left = self._watch.calls
        with self.telling():
            steps = self.world.everyone("calls", self._watch.calls)
        if len(set(steps)) > 1:
            raise self._watch.failed(ValueError(f"All ranks should make the same number of steps. Found {steps}."))
        self._end_stale()
        if self._runtime is not None:
            self._runtime.close()
        self._runtime = None
        self.world.everyone("closed", None)
        self._watch.close()
        self.world.close()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Close, and exit with 1 after an error: exceptions raised in exit handlers do not change the exit code."""
        try:
            self.close()
        except RankError:
            sys.stdout.flush()
            sys.stderr.flush()
            exit_at_once()


def time_limit(timeout: float | None) -> float:
    """Return the limit of an action in seconds: `timeout`, or the environment's ``NWISE_TIMEOUT`` if it is None."""
    text = os.environ.get("NWISE_TIMEOUT", "300") if timeout is None else timeout
    try:
        limit = float(text)
    except ValueError as error:
        raise ValueError(f"`NWISE_TIMEOUT` should be a number of seconds. Found {text!r}.") from error
    if not 0 < limit < 1e8:
        raise ValueError(f"`timeout` should be a number of seconds above 0. Found {text!r}.")
    return limit


def _state(module: nn.Module | None) -> list[Tensor]:
    return [] if module is None else list(module.state_dict().values())


def build_modules(
    given: Sequence[nn.Module | Callable[[], nn.Module] | None], what: str, team: Team | None, seed: int
) -> list[nn.Module | None]:
    """Build the modules that this process holds, and put an `Elsewhere` in every other place.

    Each function draws from its own seed, so it builds the same module in every process.

    Args:
        given: one module for each stage, a function that makes it, or None.
        what: kind of the modules, for their names and seeds, such as ``"stage"``.
        team: the processes; None if this process holds every module.
        seed: seed of the run.
    """
    modules: list[nn.Module | None] = []
    for k, item in enumerate(given):
        if item is not None and team is not None and k != team.stage:
            modules.append(Elsewhere(f"{what} {k}", team.holder(k)))
        else:
            with seeded(derive(seed, what, k)):
                modules.append(item if item is None or isinstance(item, nn.Module) else item())
    return modules
