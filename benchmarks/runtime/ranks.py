"""One rank of the benchmark: nwise's runtime and torch.distributed.pipelining's on the same virtual devices, in turn.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.runtime.ranks ROUNDS MIB[,MIB...] [METHOD...]

prints a JSON line for every case and round on rank 0, of these methods or of all; `run.py` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.runtime.bench import Case, join, measure
from benchmarks.runtime.device import Device, Loss, SplitModule, VirtualModule
from nwise.app.cli.costs import parse_costs
from nwise.runtime.processes import Processes
from nwise.schedule.find import method_schedule

BATCHES = 12
SPLIT = "forward=1,head=0,input_grad=1,weight_grad=1,chain_share=0"  # of zero-bubble, with cotangents kept
TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
WHOLE_MS = 100.0  # a forward of a whole mini-batch, where methods are compared at equal batches


def torch_step(processes: Processes, case: Case, device: Device) -> Callable[[], None]:
    """Return a function that runs one mini-batch of one of torch's pipelines."""
    costs, here = case.schedule().costs, [k for k, rank in enumerate(case.placement) if rank == processes.place]
    forward, chain, weights = (costs.per_stage(name, 1)[0] for name in ("forward", "input_grad", "weight_grad"))
    begin, size, loss = costs.overhead, case.microbatches, cast(Any, Loss.apply)
    options: dict[str, Any] = {"loss_fn": lambda y, _: loss(y), "scale_grads": False}

    def stage(k: int) -> PipelineStage:
        ends = k == 0, k == case.stages - 1
        module = (
            SplitModule(device, (forward + begin, chain + begin, weights + begin), *ends)
            if case.method in ("zb-h1", "zb-v")
            else VirtualModule(device, (forward + begin, chain + weights + begin), *ends)
        )
        return PipelineStage(module, k, case.stages, torch.device("cpu"))

    stages: Any = [stage(k) for k in here]
    schedule = TORCH[case.method](stages[0] if case.method in ("gpipe", "1f1b") else stages, size, **options)
    inputs = [torch.zeros(size, case.message.numel(), dtype=case.message.dtype)] if 0 in here else []
    target = {"target": torch.zeros(size)} if case.stages - 1 in here else {}
    return lambda: schedule.step(*inputs, **target)


def measure_torch(processes: Processes, case: Case) -> dict[str, Any]:
    """Measure torch's pipeline and return the same numbers as `measure`."""
    period, slot = case.schedule().period, case.slot_ms / 1e3
    device = Device(slot)
    step = torch_step(processes, case, device)
    step()  # shapes
    device.start()
    moments = []
    for _ in range(case.settle + case.batches):
        moments.append(time.perf_counter())
        step()
    moments.append(time.perf_counter())
    mine = (moments[-1] - moments[case.settle]) / case.batches / slot
    slots = max(processes.gather("torch", mine))
    # A stage receives twice, computes twice and sends twice for every micro-batch.
    actions = 6 * case.microbatches * case.stages // case.num_ranks
    return {
        "predicted_slots": period,
        "measured_slots": slots,
        "efficiency": period / slots,
        "actions": actions,
        "action_overhead_us": 1e6 * slot * (slots - period) / actions,
    }


def cases(stages: int, mib: float) -> list[tuple[str, Case]]:
    """Return libraries and cases: a slot for every micro-batch, and a whole mini-batch of one size cut into M."""

    def case(method: str, m: int, **options: Any) -> Case:
        options = {"stages": stages, **options}
        return Case(method=method, microbatches=m, message_mib=mib, batches=max(4, BATCHES // m), rounds=1, **options)

    pairs = [("nwise", case(method, m)) for method in ("2-wise", "gpipe") for m in (1, 2)]
    pairs += [("torch", case("gpipe", m)) for m in (1, 2)]
    for m in (4, 16) if not mib else (4,):
        methods = ["gpipe", "1f1b"] if m >= stages else ["gpipe"]  # torch's 1F1B wants a micro-batch for every stage
        pairs += [(library, case(method, m)) for method in methods for library in ("nwise", "torch")]
    pairs += [(library, case("zb-h1", 4, costs=SPLIT)) for library in ("nwise", "torch")]
    for method, costs in (("zb-v", SPLIT), ("interleaved-1f1b", "paper")):
        two = case(method, stages, stages=2 * stages, ranks=stages, costs=costs)
        pairs += [(library, two) for library in ("nwise", "torch")]
    pairs += [("nwise", case("end-to-end-delay-1", stages, costs=SPLIT))]
    pairs += [("nwise", case("local", 1)), ("nwise", case("3-wise", 2))]
    if not mib:
        for method in ("2-wise", "end-to-end", "gpipe", "1f1b", "zb-h1"):
            m = 1 if method == "end-to-end" else best_m(method, stages)
            equal = case(method, m, slot_ms=WHOLE_MS, costs=cut(m))
            pairs += [
                (library, equal) for library in ("nwise", "torch") if library == "nwise" or method in ("gpipe", "1f1b")
            ]
    return pairs


def cut(m: int) -> str:
    """Return costs of a micro-batch of a mini-batch whose forward takes a slot, each action 2 % of one more."""
    return f"forward={1 / m},head=0,input_grad={1 / m},weight_grad=0,overhead=0.02"


def best_m(method: str, stages: int) -> int:
    """Return the M with the shortest predicted step."""

    def period(m: int) -> float:
        costs = parse_costs(cut(m))
        return method_schedule(method, num_stages=stages, num_microbatches=m, costs=costs).period

    return min((m for m in (1, 2, 4, 8, 16, 32) if method != "1f1b" or m >= stages), key=period)


def run(processes: Processes, rounds: int, sizes: list[float], methods: list[str]) -> None:
    """Run the cases of some methods, or all, in turn; first each library sends messages of every size, into fresh memory."""
    for mib in sizes:
        warm = Case(method="gpipe", stages=processes.size, microbatches=4, message_mib=mib, batches=4, rounds=1)
        measure_torch(processes, warm)
        measure(processes, warm)
    for number in range(rounds):
        for library, case in (pair for mib in sizes for pair in cases(processes.size, mib)):
            if methods and case.method not in methods:
                continue
            result = measure_torch(processes, case) if library == "torch" else asdict(measure(processes, case))
            if processes.rank == 0:
                print(json.dumps({"library": library, "round": number, **asdict(case), **result}), flush=True)


if __name__ == "__main__":
    here = join(int(os.environ["WORLD_SIZE"]))
    run(here, int(sys.argv[1]), [float(mib) for mib in sys.argv[2].split(",")], sys.argv[3:])
    here.close()
