"""One rank of the benchmark: nwise and torch.distributed.pipelining train the same stages over the same links, in turn.

`run.py` starts it in each namespace, with the cases as JSON. It uses nwise by its public interface alone, so an earlier revision
runs, too. Rank 0 prints a JSON line for every case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleavedZeroBubble

import nwise
from benchmarks.runtime.device import Device, Loss, SplitModule, VirtualModule, sharpen_timers
from nwise.schedule import BASELINES, Costs, baseline, best

TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
LIMIT = 600.0  # seconds of a wait
Case = dict[str, Any]  # what `run.cases` makes
Run = tuple[Callable[[], Any], Callable[[], Any], Any, Callable[[], Any]]


def order(case: Case, stages: int) -> Any:
    """Return the schedule that a case runs, made for its links."""
    given = {
        "num_stages": stages,
        "num_microbatches": case["microbatches"],
        "costs": Costs(**case["costs"]).split_in(case["microbatches"]),
    }
    made = baseline(case["method"], **given) if case["method"] in BASELINES else best(case["method"], **given)
    return getattr(made, "schedule", made)  # earlier revisions kept the two apart


def modules(case: Case, rank: int, size: int) -> tuple[nn.Module, nn.Module | None, Any]:
    """Return a rank's stage, its head and the loss: of virtual devices, or with real computation."""
    last = rank == size - 1
    if not case["slot"]:
        width = case["shape"][1]
        stage = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        head = nn.Linear(width, 10)
        return nn.Sequential(stage, head) if last else stage, None if last else head, nn.functional.cross_entropy
    slot = 1 / case["microbatches"]  # of a micro-batch: a forward and each of the two gradients take one
    device = Device(case["slot"])
    if case["method"] == "gpipe":
        waiting = VirtualModule(device, (slot, 2 * slot), rank == 0, last)
    else:
        waiting = SplitModule(device, (slot, slot, slot), rank == 0, last)
        waiting.asks = True
    loss: Any = Loss.apply
    return waiting, None if last else nn.Identity(), lambda output, target: loss(output)


def nwise_step(case: Case, size: int, x: Tensor, target: Tensor) -> Run:
    """Return what runs a mini-batch with nwise, what ends the training, this rank's parameters, and what finds its links."""
    made = [modules(case, k, size) for k in range(size)]
    stages, heads = [one[0] for one in made], [one[1] for one in made[:-1]]
    options = {
        "schedule": order(case, size),
        "seed": 0,
        "checks": os.environ.get("NWISE_CHECKS", "never"),
        "timeout": LIMIT,
    }
    pipe = nwise.Pipeline(
        stages,
        heads,
        made[0][2],
        case["method"] if case["method"] not in BASELINES else "end-to-end",
        case["microbatches"],
        **options,
    )

    def end() -> None:
        pipe.forget_pending()
        pipe.close()

    def links() -> Any:
        return list(getattr(pipe.processes, "links", {}).values())  # earlier revisions measured none

    return lambda: pipe.step(x, target=target), end, list(pipe.parameters()), links


def torch_step(case: Case, size: int, x: Tensor, target: Tensor) -> Run:
    """Return the same with one of torch's pipelines."""
    rank = dist.get_rank()
    module, _, loss = modules(case, rank, size)
    group = dist.new_group()  # new connections, as a new pipeline of nwise has
    stage = PipelineStage(module, rank, size, torch.device("cpu"), group=group)
    several = case["method"] == "zero-bubble"
    schedule = TORCH[case["method"]]([stage] if several else stage, case["microbatches"], loss_fn=loss)
    given = [x] if rank == 0 else []
    asked = {"target": target} if rank == size - 1 else {}
    parameters = list(module.parameters())
    return lambda: schedule.step(*given, **asked), lambda: dist.destroy_process_group(group), parameters, list


def measure(case: Case) -> None:
    """Run a case on all ranks; print the result on rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows, width = case["shape"]
    x, target = torch.randn(rows, width), torch.arange(rows) % 10
    begin = nwise_step if case["library"] == "nwise" else torch_step
    step, end, parameters, links = begin(case, size, x, target)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    dist.barrier()
    moments = [time.perf_counter()]
    for _ in range(case["steps"]):
        step()
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.perf_counter())
    digest = sum(float(p.detach().double().abs().sum()) for p in parameters)
    # Steps in which this rank ran ahead are none of the pipeline's, so the slowest rank counts.
    steady = len(moments) - 1 - case["last"]
    first = min(20, case["steps"] - case["last"] - 1)
    mine = [
        moments[1] - moments[0],
        (moments[1 + first] - moments[1]) / first,
        moments[-1] - moments[steady],
        digest,
        links(),
    ]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine)
    end()
    if rank == 0:
        connecting, early, late, digests, links_of_ranks = zip(*found, strict=True)
        record: dict[str, Any] = {
            "connecting_ms": max(connecting),
            "early_ms": max(early),
            "step_ms": max(late) / case["last"],
        }
        record = {name: 1e3 * seconds for name, seconds in record.items()} | {"digest": sum(digests)}
        if measured := [link for one in links_of_ranks for link in one]:  # as a plan takes them: the slowest
            latencies, bandwidths = zip(*measured, strict=True)
            record["link_found"] = {"latency": max(latencies), "bandwidth": min(bandwidths)}
        print(json.dumps({**case, **record}), flush=True)


if __name__ == "__main__":
    sharpen_timers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for each in json.loads(sys.argv[1]):
        measure(each)
    dist.barrier()
    os._exit(0)  # torch's pipelines leave groups that wait for each other
