"""Measures the runtime on virtual devices: how close a schedule comes to its predicted period.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.runtime.bench '[{"method": "2-wise", ...}]'

runs every `Case` and prints its `Measured` as JSON; `start_all` does that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import tyro

from benchmarks.runtime.device import Device, sharpen_timers
from benchmarks.runtime.virtual import VirtualStage
from nwise.app.cli.costs import parse_costs
from nwise.checks import check_at_least
from nwise.microbatch import Batch
from nwise.runtime.engine import Engine
from nwise.runtime.processes import Processes
from nwise.schedule import BASELINES, Kind, Schedule
from nwise.schedule.costs import Prices, prices
from nwise.schedule.find import method_schedule
from nwise.schedule.named import RULES
from nwise.schedule.placement import make_placement


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measurement to make.

    Args:
        method: Strategy, or gpipe, 1f1b, zb-h1.
        stages: Number of stages, A.
        ranks: Processes that share the stages; 0 for one each.
        microbatches: Micro-batches in a mini-batch, M.
        slot_ms: Milliseconds of a slot.
        message_mib: MiB of every activation, and of every gradient; 0 for a few bytes.
        costs: Costs of one micro-batch in slots: paper (a slot for a forward and for each loss's pass, heads free), transformer,
            or a list like forward=1,head=0.5,input_grad=1,weight_grad=1.
        batches: Mini-batches of a round that are timed.
        rounds: Number of rounds.
    """

    method: Annotated[str, tyro.conf.arg(name="strategy")] = "2-wise"
    stages: int = 4
    ranks: int = 0
    microbatches: int = 1
    slot_ms: float = 20.0
    message_mib: float = 0.0
    costs: str = "paper"
    batches: int = 20
    rounds: int = 3

    def __post_init__(self) -> None:
        check_at_least(0, ranks=self.ranks)
        check_at_least(1, stages=self.stages, microbatches=self.microbatches, batches=self.batches, rounds=self.rounds)
        if not 0 < self.slot_ms < 1e5:
            raise ValueError(f"`slot_ms` should be above 0 and below 100,000. Found {self.slot_ms}.")
        if not 0 <= self.message_mib < 1e4:
            raise ValueError(f"`message_mib` should be from 0 to 10,000. Found {self.message_mib}.")
        self.schedule()

    def schedule(self) -> Schedule:
        """Return the schedule, its costs in slots."""
        return method_schedule(
            self.method,
            num_stages=self.stages,
            num_ranks=self.num_ranks,
            num_microbatches=self.microbatches,
            costs=parse_costs(self.costs),
        )

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.ranks or self.stages

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of every stage."""
        name = RULES[self.method].placement if self.method in RULES else "contiguous"
        return make_placement(name, self.stages, self.num_ranks)

    @property
    def settle(self) -> int:
        """Mini-batches until the pipeline is steady, which are not timed. An end-to-end one is by its lists from the second on,
        but its processes begin in step, which makes the first few of large messages worse or better than those that follow."""
        return 6 if self.method in BASELINES else self.stages // 2 + 3

    @property
    def message(self) -> torch.Tensor:
        """One message's tensor."""
        return torch.zeros(max(1, int(self.message_mib * 2**17)), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a measurement; times in slots per mini-batch, medians over rounds.

    Args:
        order: of the schedule.
        predicted_slots: its period.
        measured_slots: the time of a mini-batch.
        efficiency: their ratio.
        lowest, highest: of the rounds' efficiencies.
        ceiling: efficiency of the busiest stage's waits alone, without messages, on all ranks at once.
        actions: computations and messages of the stage that has the most, per mini-batch.
        action_overhead_us: excess over the prediction per such action, in microseconds.
        bytes_sent: by every rank and mini-batch, as activations and as gradients.
        bytes_predicted: by the schedule.
    """

    order: str
    predicted_slots: float
    measured_slots: float
    efficiency: float
    lowest: float
    highest: float
    ceiling: float
    actions: float
    action_overhead_us: float
    bytes_sent: list[tuple[float, float]]
    bytes_predicted: list[tuple[float, float]]


def measure(processes: Processes, case: Case) -> Measured:
    """Run a case on all ranks and return the result to each."""
    schedule, slot = case.schedule(), case.slot_ms / 1e3
    turns = len(schedule.flows)
    price = prices(schedule.costs, case.stages)
    device = Device(slot)
    processes.placement = case.placement
    stages: Any = [VirtualStage(k, price[k], device) for k in processes.here]
    engine = Engine(processes, stages, _CPU)
    size = range(case.microbatches)
    inputs = [(case.message,) for _ in size]
    share = 1 / case.microbatches
    batch = Batch(inputs, [None for _ in size], [[share] * case.stages for _ in size], samples=[share for _ in size])
    settle = turns * -(-case.settle // turns)
    count = turns * -(-case.batches // turns)
    periods, step, sent = [], 0, [0.0, 0.0]
    for _ in range(case.rounds):
        device.start()
        moments = [0.0]
        for _ in range(settle + count):
            engine.follow(schedule, step)
            engine.run(schedule, step, batch)
            sent = [total + now for total, now in zip(sent, engine.sent, strict=True)]
            moments.append(time.perf_counter())
            step += 1
        periods.append((moments[-1] - moments[settle]) / count / slot)
    engine.forget()
    every = processes.gather("periods", [periods, [total / step for total in sent]])
    ceiling = median(processes.gather("ceiling", _ceiling(schedule, price, device, slot, case.batches)))
    by_round = [max(one[0][i] for one in every) for i in range(case.rounds)]
    actions = max(sum(a.kind is not Kind.UPDATE for a in actions) for actions in schedule.actions) / turns
    slots = median(by_round)
    return Measured(
        order=schedule.order,
        predicted_slots=schedule.period,
        measured_slots=slots,
        efficiency=schedule.period / slots,
        lowest=schedule.period / max(by_round),
        highest=schedule.period / min(by_round),
        ceiling=ceiling,
        actions=actions,
        action_overhead_us=1e6 * slot * (slots - schedule.period) / actions,
        bytes_sent=[(one[1][0], one[1][1]) for one in every],
        bytes_predicted=predicted_bytes(schedule, case.message.nbytes),
    )


def predicted_bytes(schedule: Schedule, size: int) -> list[tuple[float, float]]:
    """Return bytes by every rank and mini-batch, as activations and as gradients, by the sends of the lists."""
    turns = len(schedule.flows)

    def sends(rank: int, kind: Kind) -> float:
        return size * sum(a.kind is kind for a in schedule.actions[rank]) / turns

    return [(sends(r, Kind.SEND_ACTIVATION), sends(r, Kind.SEND_GRADIENT)) for r in range(len(schedule.actions))]


def _ceiling(schedule: Schedule, price: list[Prices], device: Device, slot: float, batches: int) -> float:
    """Return the efficiency of the busiest stage's waits, each of which begins when the one before it has really ended."""
    graph = schedule.graph
    works = [
        [price[graph.tasks[task].stage].time(graph.tasks[task], graph.stage(task)) for task in tasks]
        for tasks in schedule.by_rank
    ]
    busiest = max(works, key=sum)
    start_time = time.perf_counter()
    for _ in range(batches):
        for slots in busiest:
            if slots:
                device.work(slots, received=time.perf_counter())
    return batches * sum(busiest) * slot / (time.perf_counter() - start_time)


def start(case: Case) -> Measured:
    """Run a case on processes of this machine."""
    return start_all([case])[0]


def start_all(cases: Sequence[Case]) -> list[Measured]:
    """Run cases of equally many ranks one after the other, on the same processes."""
    ranks = cases[0].num_ranks
    if any(case.num_ranks != ranks for case in cases):
        raise ValueError(f"`cases` should have equally many ranks. Found {sorted({case.num_ranks for case in cases})}.")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "benchmarks.runtime.bench", json.dumps([asdict(case) for case in cases])]
    root = Path(__file__).parents[2]  # where `python -m` finds this module
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=root)
    results = [Measured(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(results) == len(cases):
        return results
    lines = [line for line in done.stderr.splitlines() if line.startswith("nwise")] or done.stderr.splitlines()[-1:]
    raise OSError(f"The {ranks} processes should measure and end. Found that they failed: {' '.join(lines[:1])}")


def join(num_ranks: int) -> Processes:
    """Return this process's place, and set its timers and threads for measuring."""
    sharpen_timers()
    torch.set_num_threads(1)
    return Processes(num_ranks, timeout=60.0)


def main(text: str) -> None:
    """Run one rank of `start_all`."""
    settings: list[dict[str, Any]] = json.loads(text)
    cases = [Case(**one) for one in settings]
    processes = join(cases[0].num_ranks)
    for case in cases:
        result = measure(processes, case)
        if processes.rank == 0:
            print(json.dumps(asdict(result)), flush=True)
    processes.close()


_CPU = torch.device("cpu")

if __name__ == "__main__":
    main(sys.argv[1])
