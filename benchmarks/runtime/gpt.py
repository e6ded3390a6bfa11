"""One rank of real computation: the GPT of `benchmarks/step_cost` on two processes, a thread each, both libraries in turn.

python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.runtime.gpt ROUNDS
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import nwise
from nwise.app import models
from nwise.losses import TokenCrossEntropy
from nwise.runtime.processes import Processes

BATCH, LENGTH, VOCABULARY = 8, 64, 2000
STEPS = 6


def data() -> tuple[Tensor, Tensor]:
    """Draw one batch, used again and again."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def nwise_step(model: models.StagedModel, strategy: str, m: int, schedule: str | None) -> Callable[[], None]:
    """Return a training step of nwise."""
    stages, heads = copy.deepcopy(model.stages), copy.deepcopy(model.heads)
    placement = "v" if schedule == "zb-v" else "contiguous"
    pipe = nwise.Pipeline(
        stages, heads, TokenCrossEntropy(), strategy, m, seed=0, schedule=schedule, placement=placement
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    x, y = data()

    def step() -> None:
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_step(model: models.StagedModel, rank: int, m: int, kind: Any) -> Callable[[], None]:
    """Return a training step of a pipeline of torch.distributed.pipelining, with one stage or two on a rank."""
    last = len(model.stages) - 1
    indices = ((0, 3), (1, 2))[rank] if kind is ScheduleZBVZeroBubble else range(rank, last + 1, 2)
    modules = [copy.deepcopy(model.stages[index]) for index in indices]
    stages: Any = [
        PipelineStage(module, index, last + 1, torch.device("cpu"))
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule = kind(stages if len(stages) > 1 else stages[0], m, loss_fn=TokenCrossEntropy())
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01)
    x, y = data()
    inputs: tuple[Tensor, ...] = (x,) if 0 in indices else ()
    target: dict[str, Any] = {"target": y} if last in indices else {}

    def step() -> None:
        schedule.step(*inputs, **target)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(rounds: int) -> None:
    """Time all methods in turn and print a JSON line for each and every round."""
    torch.set_num_threads(1)
    processes = Processes(2)
    model, halves = models.gpt(2, 6, 256, 4, LENGTH, VOCABULARY), models.gpt(4, 3, 256, 4, LENGTH, VOCABULARY)
    steps: dict[tuple[str, str, int], Callable[[], None]] = {
        ("nwise", "1-wise", 1): nwise_step(model, "1-wise", 1, None)
    }
    steps |= {("nwise", "2-wise", m): nwise_step(model, "2-wise", m, None) for m in (1, 2, 4)}
    for m in (2, 4):
        for name, kind in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
            steps["nwise", name, m] = nwise_step(model, "end-to-end", m, name)
            steps["torch", name, m] = torch_step(model, processes.rank, m, kind)
    for m in (4, 8):
        for name in ("zb-h1", "zero-bubble", "end-to-end-delay-1"):
            late = name == "end-to-end-delay-1"
            steps["nwise", name, m] = nwise_step(model, name if late else "end-to-end", m, None if late else name)
        steps["nwise", "zb-v", m] = nwise_step(halves, "end-to-end", m, "zb-v")
        steps["torch", "zb-v", m] = torch_step(halves, processes.rank, m, ScheduleZBVZeroBubble)
        steps["torch", "interleaved zb", m] = torch_step(halves, processes.rank, m, ScheduleInterleavedZeroBubble)
    for number in range(-1, rounds):  # the first round warms up
        for (library, method, m), step in steps.items():
            torch.distributed.barrier()
            start_time = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.distributed.barrier()
            seconds = time.perf_counter() - start_time
            if processes.rank == 0 and number >= 0:
                record = {"library": library, "method": method, "microbatches": m, "round": number}
                print(json.dumps({**record, "samples_per_second": BATCH * STEPS / seconds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
