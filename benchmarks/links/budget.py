"""A fixed budget of seconds over slow links: loss against wall-clock time, and whether the planned clock is right.

    python -m benchmarks.links.budget                     # 12 minutes on a quiet machine
    python -m benchmarks.links.budget --seconds 4 --slot-ms 200 --records /tmp/rehearsal.jsonl

Four processes train a real network, one stage each. Every action computes, and then waits until an accelerator of the slot would
have ended; every message is due one slot after it was sent. So two cores stand for four accelerators.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tyro

import nwise
from benchmarks.runtime.virtual import Device, sharpen_timers
from nwise.app.data import Tokens, batch_indices
from nwise.app.recipes import Adam, EmbeddedText, Gpt, Recipe
from nwise.app.training import LearningRate, evaluate, make_loss, make_optimizer
from nwise.machine import machine
from nwise.schedule import TRANSFORMER, Action, Costs, Kind, Schedule, best
from nwise.schedule.costs import Prices, prices
from nwise.stage import Stage
from nwise.stage.tape import Cotangents, Tape

RECORDS = Path(__file__).parent / "records" / "budget.jsonl"
# Adam's peak rate of each method: the best of the frontier's search, with eight stages of the same blocks.
RATES = {"end-to-end": 0.008, "end-to-end-delay-1": 0.0005, "2-wise-mean": 0.002, "local": 0.004}
METHODS = tuple(RATES)
STAGES, BATCH, TESTS = 4, 8, 4
_MODEL = Gpt(num_stages=STAGES, blocks_per_stage=2, width=96, head_blocks=0, sequence_length=128)
_WARMUP = 50
# A head multiplies 96 by 256 for a token, and a stage of two blocks 2 (12 96^2 + 2 128 96): three times that ratio.
COSTS = replace(TRANSFORMER, head=0.27, latency=1.0)


@dataclass(frozen=True)
class Budget:
    """What a rank is told.

    Args:
        seconds: of training, for each method.
        slot_ms: milliseconds of a slot.
    """

    seconds: float
    slot_ms: float


def planned(method: str) -> tuple[Schedule, int]:
    """Return the fastest schedule of a method over slow links, and its M.

    >>> schedule, m = planned("local")
    >>> round(schedule.period, 2), m
    (3.31, 1)
    """
    found = [(_best(method, COSTS.split_in(m), m), m) for m in (1, 2, 4, 8)]
    return min(found, key=lambda one: (round(one[0].period, 9), one[1]))


def _best(method: str, costs: Costs, m: int) -> Schedule:
    return best(method, num_stages=STAGES, num_microbatches=m, costs=costs)


def recipe(method: str, steps: int) -> Recipe:
    """Return a method's run."""
    # Not Muon: on cores without bf16 its update takes a quarter of a second, more than all actions of a step.
    rate = _WARMUP**0.5 * RATES[method]  # so that the peak is the rate
    optimizer = Adam(lr=rate, beta2=0.98, eps=1e-9, warmup_steps=_WARMUP, extrapolate="delay" in method)
    data = EmbeddedText(max_bytes=4_700_000, test_limit=20_000)
    return Recipe(data=data, model=_MODEL, optimizer=optimizer, strategy=method, batch_size=BATCH, max_steps=steps)


def pace(stage: Stage, price: Prices, device: Device, latency: float) -> None:
    """Let every action of a stage take as long as on an accelerator, and every message it sends a latency.

    Args:
        stage: the stage; its actions compute as before.
        price: times of its actions, in slots.
        device: the accelerator.
        latency: of a message, in seconds.
    """
    # The moment at which a message is due travels as its last tensor:
    #
    #     F of stage k     (x, due)  ->  stage k + 1 takes `due` off, computes, and waits
    #     I of stage k     (gradient, due)  ->  stage k - 1 likewise, when a pass first needs it
    run = stage.run

    def paced(action: Action, tape: Tape, given: Mapping[Any, Any], *, frees: bool = False) -> Cotangents:
        moments, plain = [0.0], dict(given)
        if action.kind is Kind.FORWARD and stage.index:
            *inputs, due = given[None]
            plain[None] = tuple(inputs)
            moments.append(float(due))
        elif action.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.BOTH):
            for p in tape.flow.cotangent(action.message).needed:
                gradient, *dues = given[p]
                plain[p] = (gradient,)
                moments += [float(due) for due in dues if due is not None]
        slots = price.time(Action(action.kind, stage.index, 0), tape.flow)
        made = run(action, tape, plain, frees=frees)
        device.work(slots, received=max(moments))
        sends = stage.index + 1 < STAGES if action.kind is Kind.FORWARD else action.message is not None
        return (*made, torch.tensor([device.free + latency], dtype=torch.float64)) if sends else made

    stage.run = paced  # type: ignore[method-assign]


def train(method: str, budget: Budget) -> dict[str, Any] | None:
    """Train in this rank for about the budget; return the record in the last rank."""
    (schedule, m), slot = planned(method), budget.slot_ms / 1e3
    steps = max(TESTS, round(budget.seconds / (schedule.period * slot)))
    config = recipe(method, steps)
    data, test = config.load()
    assert isinstance(data, Tokens)
    model = config.build(data)
    rule = config.phases(1)[0][1]
    # The check knows no message that says when it is due.
    given = model.stages, model.heads, make_loss(data), rule, m
    pipe = nwise.Pipeline(*given, schedule=schedule, seed=0, checks="never")
    optimizer = make_optimizer(config.optimizer, [{"params": list(pipe.parameters())}])
    rate = LearningRate(config.optimizer, optimizer, steps)
    device, price = Device(slot), prices(schedule.costs, STAGES)
    for k in pipe.processes.here:
        pace(pipe._stages[k], price[k], device, slot * schedule.costs.latency)
    curve, seconds = [], 0.0
    ends = [math.ceil(i * steps / TESTS) for i in range(TESTS + 1)]
    for first, end in pairwise(ends):
        device.start()
        begin = time.perf_counter()
        for step in range(first, end):
            x, y = data.batch(batch_indices(len(data), BATCH, 0, step))
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            rate.step()
        seconds += max(pipe.processes.gather("seconds", time.perf_counter() - begin))
        score = evaluate(pipe, test, 2 * BATCH).heads[-1]  # while the clock pauses
        assert score is not None
        curve.append({"step": end, "seconds": round(seconds, 3), "loss": round(score.loss, 6)})
    pipe.forget_pending()
    pipe.close()
    if pipe.processes.rank != STAGES - 1:
        return None
    return {
        "method": method,
        "microbatches": m,
        "slot_ms": budget.slot_ms,
        "planned_slots": round(schedule.period, 4),
        "measured_slots": round(seconds / steps / slot, 4),
        "tests": curve,
        "machine": machine(),
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the measured clock beside the planned one, and test losses at quarters of the budget, in Markdown."""
    lines = ["| method | M | planned slots | measured | measured / planned | loss at 1/4 | 1/2 | 3/4 | the end |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in records:
        planned_slots, measured = row["planned_slots"], row["measured_slots"]
        cells = [row["method"], row["microbatches"], f"{planned_slots:.2f}", f"{measured:.2f}"]
        cells += [f"{measured / planned_slots:.3f}", *(f"{test['loss']:.3f}" for test in row["tests"])]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(seconds: float = 150.0, slot_ms: float = 100.0, records: Path = RECORDS) -> None:
    """Train by every method for a budget of seconds, and write the records.

    Args:
        seconds: of training, for each method, without tests and starts.
        slot_ms: milliseconds of a slot, a forward of a stage for the mini-batch.
        records: file to write.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES)]
    found = []
    for method in METHODS:
        told = json.dumps({"method": method, "seconds": seconds, "slot_ms": slot_ms})
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NWISE_BUDGET": told}
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [*command, "-m", "benchmarks.links.budget"], env=environment, cwd=root, check=True, stdout=subprocess.PIPE
        )
        found += [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
        records.write_text("".join(json.dumps(row) + "\n" for row in found))
    print(table(found))


if __name__ == "__main__":
    if "NWISE_BUDGET" in os.environ:
        sharpen_timers()
        torch.set_num_threads(1)
        settings = json.loads(os.environ["NWISE_BUDGET"])
        record = train(settings.pop("method"), Budget(**settings))
        if record is not None:
            print(json.dumps(record), flush=True)
    else:
        tyro.cli(main)
