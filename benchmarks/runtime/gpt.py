"""One rank of real computation: the GPT of `benchmarks/step_cost` in two stages, a thread each, both libraries in turn.

python -m torch.distributed.run --nproc-per-node 2 benchmarks/runtime/gpt.py ROUNDS
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import nwise
from nwise import models
from nwise.losses import TokenCrossEntropy
from nwise.runtime.world import World

BATCH, LENGTH, VOCABULARY = 8, 64, 2000
STEPS = 6


def data() -> tuple[Tensor, Tensor]:
    """One batch, used again and again."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(model: models.StagedModel, strategy: str, m: int, schedule: str | None) -> Callable[[], None]:
    """A training step of nwise."""
    stages, heads = copy.deepcopy(model.stages), copy.deepcopy(model.heads)
    pipe = nwise.Pipeline(stages, heads, TokenCrossEntropy(), strategy, m, seed=0, schedule=schedule)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
    x, y = data()

    def step() -> None:
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchs(
    model: models.StagedModel, rank: int, m: int, kind: type[ScheduleGPipe | Schedule1F1B]
) -> Callable[[], None]:
    """A training step of torch.distributed.pipelining."""
    module = copy.deepcopy(model.stages[rank])
    schedule = kind(PipelineStage(module, rank, 2, torch.device("cpu")), m, loss_fn=TokenCrossEntropy())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, y = data()

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(rounds: int) -> None:
    """All methods in turn; a JSON line for each and every round."""
    torch.set_num_threads(1)
    world = World(2)
    model = models.gpt(2, 6, 256, 4, LENGTH, VOCABULARY)
    steps: dict[tuple[str, str, int], Callable[[], None]] = {("nwise", "1-wise", 1): ours(model, "1-wise", 1, None)}
    steps |= {("nwise", "2-wise", m): ours(model, "2-wise", m, None) for m in (1, 2, 4)}
    for m in (2, 4):
        for name, kind in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
            steps["nwise", name, m] = ours(model, "end-to-end", m, name)
            steps["torch", name, m] = torchs(model, world.rank, m, kind)
    for number in range(-1, rounds):  # the first round warms up
        for (library, method, m), step in steps.items():
            torch.distributed.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            torch.distributed.barrier()
            seconds = time.perf_counter() - began
            if world.rank == 0 and number >= 0:
                record = {"library": library, "method": method, "microbatches": m, "round": number}
                print(json.dumps({**record, "samples_per_second": BATCH * STEPS / seconds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
