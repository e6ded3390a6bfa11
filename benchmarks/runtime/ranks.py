"""One rank of the benchmark: nwise's runtime and torch.distributed.pipelining's on the same virtual devices, in turn.

    python -m torch.distributed.run --nproc-per-node 4 benchmarks/runtime/ranks.py ROUNDS MIB[,MIB...]

prints a JSON line for every case and round on rank 0; `run.py` starts it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from nwise.runtime.bench import Case, join, measure
from nwise.runtime.virtual import Device
from nwise.runtime.watch import Watch
from nwise.runtime.world import World
from nwise.schedule.rivals import timed_method

SLOT = 0.02
BATCHES = 12


class Wait(torch.autograd.Function):
    """Forward and backward of a virtual stage, for torch's pipelines."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, device: Device, first: bool, last: bool) -> Tensor:
        """A slot, after what was received unless it is the first stage."""
        del parameter
        ctx.device, ctx.last = device, last
        device.work(1.0, received=not first)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """A slot, after what was received unless it is the last stage."""
        ctx.device.work(1.0, received=not ctx.last)
        return gradient, torch.zeros(1), None, None, None


class Loss(torch.autograd.Function):
    """A loss that costs nothing, whose gradient is as large as the output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """Zero."""
        ctx.save_for_backward(output)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The output."""
        del gradient
        return ctx.saved_tensors[0]


class VirtualModule(nn.Module):
    """A stage that waits."""

    def __init__(self, device: Device, first: bool, last: bool) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(1))
        self.device, self.first, self.last = device, first, last

    def forward(self, x: Tensor) -> Tensor:
        """A slot."""
        wait: Any = Wait.apply
        return wait(x, self.parameter, self.device, self.first, self.last)


def torch_step(world: World, kind: str, size: int, elements: int) -> tuple[Device, Callable[[], None]]:
    """One mini-batch of torch's GPipe or 1F1B."""
    device, stages = Device(SLOT), world.num_stages
    first, last = world.stage == 0, world.stage == stages - 1
    loss: Any = Loss.apply
    stage = PipelineStage(VirtualModule(device, first, last), world.stage, stages, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](
        stage,
        size,
        loss_fn=lambda y, _: loss(y),
        scale_grads=False,
    )
    x, target = torch.zeros(size, elements, requires_grad=False), torch.zeros(size)

    def step() -> None:
        if first:
            schedule.step(x)
        elif last:
            schedule.step(target=target)
        else:
            schedule.step()

    return device, step


def measure_torch(world: World, kind: str, case: Case) -> dict[str, Any]:
    """The same numbers as `measure`'s."""
    timed = timed_method(
        kind, num_stages=case.stages, num_microbatches=case.microbatches, costs=case.timed().costs, chains="walked"
    )
    device, step = torch_step(world, kind, case.microbatches, case.message.numel())
    settle = case.stages // 2 + 3
    step()  # shapes
    device.start()
    moments = []
    for _ in range(settle + case.batches):
        moments.append(time.perf_counter())
        step()
    moments.append(time.perf_counter())
    mine = (moments[-1] - moments[settle]) / case.batches / SLOT
    found = max(world.everyone("torch", mine))
    # A stage receives and sends twice, and computes twice, for every micro-batch.
    actions = 6 * case.microbatches
    return {
        "predicted_slots": timed.period,
        "measured_slots": found,
        "efficiency": timed.period / found,
        "actions": actions,
        "action_overhead_us": 1e6 * SLOT * (found - timed.period) / actions,
    }


def cases(stages: int, mib: float) -> list[tuple[str, str, int]]:
    """Library, method and M."""
    found = [("nwise", method, m) for method in ("2-wise", "gpipe") for m in (1, 2)]
    found += [("torch", "gpipe", m) for m in (1, 2)]
    if mib in (0.0, 4.0):
        many = [4, 16] if mib == 0.0 else [4]
        found += [(library, "gpipe", m) for m in many for library in ("nwise", "torch")]
        found += [(library, "1f1b", m) for m in many if m >= stages for library in ("nwise", "torch")]
        found += [("nwise", "local", 1), ("nwise", "3-wise", 2), ("nwise", "zero-bubble-lean", 4)]
    return found


def run(world: World, watch: Watch, rounds: int, sizes: list[float]) -> None:
    """All cases, taking turns."""
    for number in range(rounds):
        for mib in sizes:
            for library, method, m in cases(world.num_stages, mib):
                case = Case(
                    method=method,
                    stages=world.num_stages,
                    microbatches=m,
                    message_mib=mib,
                    batches=max(4, BATCHES // m),
                    rounds=1,
                )
                found = (
                    measure_torch(world, method, case) if library == "torch" else asdict(measure(world, watch, case))
                )
                record = {"library": library, "method": method, "stages": world.num_stages, "microbatches": m}
                if world.rank == 0:
                    print(json.dumps({**record, "message_mib": mib, "round": number, **found}), flush=True)


if __name__ == "__main__":
    import os

    here, guard = join(int(os.environ["WORLD_SIZE"]))
    run(here, guard, int(sys.argv[1]), [float(mib) for mib in sys.argv[2].split(",")])
    guard.close()
