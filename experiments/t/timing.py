"""The timing model's rows (section 3.1 and appendix C): predicted with schedules that were built and validated, and measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.runtime.bench import Case, start_all
from experiments.t.printed import best_table
from nwise.app.training import versions
from nwise.machine import machine
from nwise.schedule import PAPER, TRANSFORMER, Costs, Schedule, Slot, fit_slot, paper_time, simulate, validate
from nwise.schedule.find import method_schedule
from nwise.schedule.paper import POWERS

Row = dict[str, Any]
_NETWORK = ("train", "source-code", "--num-stages", "2")  # a small Transformer
PER_BATCH = {"end-to-end": "2A", "hogwild": "2", "local": "2", "2-wise": "4", "3-wise": "6"}
SMALLER = 0.005  # overhead of an action in slots, a quarter of that of all other tables
BASELINES = ("zero-bubble", "1f1b", "2-wise", "3-wise")
MEASURED = ("gpipe", "1-wise", "2-wise", "3-wise")


def find(name: str, num_stages: int, m: int, costs: Costs = PAPER) -> Schedule:
    """Find the best schedule of a strategy, or a pipeline, and check it."""
    schedule = method_schedule(name, num_stages=num_stages, num_microbatches=m, costs=costs)
    validate(schedule)
    return schedule


Piece = tuple[str, Callable[[], list[Row]]]


def predicted() -> Iterator[Piece]:
    """Yield the work of all predicted rows, piece by piece: a minute and a half on one core."""
    yield "slots per batch", lambda: [per_batch(name) for name in PER_BATCH]
    for a in range(1, 17):
        yield f"formula, {a} stages", partial(_formula, a)
    yield "best M", best_table
    yield "speed-up", _speedups
    for a in (3, 4, 6, 8, 12, 16, 24, 32):
        yield f"honest costs, {a} stages", partial(_honest, a)
    for a in (4, 8, 16, 32, 36):
        yield f"smaller overhead, {a} stages", partial(_cheaper, a)


def _formula(a: int) -> list[Row]:
    return [cell(a, n, m) for n in range(1, a + 1) for m in POWERS]


def _speedups() -> list[Row]:
    slot = Slot()
    return [
        {"kind": "speed-up", "A": a, "N": n, "over_gpipe": slot.speedup(a, n)}
        for a in range(2, 31)
        for n in range(1, 6)
    ]


def _honest(a: int) -> list[Row]:
    return [honest(name, a) for name in BASELINES]


def _cheaper(a: int) -> list[Row]:
    costs, sizes = dataclasses.replace(TRANSFORMER, overhead=SMALLER), (*POWERS, 64)
    return [{**honest(name, a, costs, sizes), "kind": "smaller overhead"} for name in ("zero-bubble", "2-wise")]


def per_batch(name: str, num_stages: int = 8) -> Row:
    """Return slots per batch without micro-batches (the paper's table: 2A, 2, 2, 4, 6, 2N)."""
    formula = PER_BATCH[name]
    printed = 2 * num_stages if formula == "2A" else int(formula)
    period = steady(name, num_stages)
    return {
        "kind": "per batch",
        "method": name,
        "A": num_stages,
        "printed": printed,
        "ours": period,
        "formula": formula,
    }


def steady(name: str, num_stages: int) -> float:
    """Simulate slots per batch without micro-batches; Hogwild's, whose lists do not repeat, is its busiest stage's work."""
    schedule = find(name, num_stages, 1)
    return schedule.period if name == "hogwild" else _simulated_period(schedule)


def _simulated_period(schedule: Schedule) -> float:
    """Return the period of a run of four mini-batches."""
    return simulate(schedule, cycles=4).period


def cell(a: int, n: int, m: int) -> Row:
    """Return the period of the chosen schedule, and the formula."""
    ours = _simulated_period(find(f"{n}-wise", a, m))
    return {"kind": "formula", "A": a, "N": n, "M": m, "formula": paper_time(a, m, n), "ours": ours}


def honest(name: str, num_stages: int, costs: Costs = TRANSFORMER, microbatches: Sequence[int] = POWERS) -> Row:
    """Return the time at the best M; by default F = I = W = 1, a head of 0.5, and 0.02 for every action."""
    times = {m: find(name, num_stages, m, costs.split_in(m)).period for m in microbatches}
    m = min(times, key=lambda m: (round(times[m], 9), m))
    return {"kind": "honest", "method": name, "A": num_stages, "M": m, "time": times[m]}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Settings of the measured rows.

    Args:
        slot_ms: of a whole mini-batch's forward through a stage, c1; a micro-batch's is 1/M of it.
        microbatches: values of M.
        fewer: values of M where costs are not the paper's, and of the real network.
        batches: mini-batches that are timed.
        steps: training steps of the real network.
        timed_steps: steps of the paper's Transformers on a process for each stage.
    """

    slot_ms: float = 30.0
    microbatches: Sequence[int] = (1, 2, 4, 8, 16)
    fewer: Sequence[int] = (1, 2, 4, 8)
    batches: int = 8
    steps: int = 40
    timed_steps: int = 10


# The full size has the slot that the paper fitted, 1.279 s.
SETTINGS = {"small": Setting(), "full": Setting(slot_ms=1279.0, microbatches=POWERS, fewer=POWERS, steps=400)}


def measured(setting: Setting) -> Iterator[Piece]:
    """Yield the work of all measured rows: real processes and messages, waits or real computation."""
    kinds = [("paper", 4, setting.microbatches), ("paper", 6, setting.microbatches), ("transformer", 4, setting.fewer)]
    for costs, stages, sizes in kinds:
        yield f"{stages} stages, {costs} costs", partial(virtual, costs, MEASURED, stages, sizes, setting)
    for method, m in itertools.product(("end-to-end", "1-wise"), setting.fewer):
        yield f"{method}, a real network in 2 stages, M = {m}", partial(real, method, m, setting.steps)


def _scaled(costs: str) -> str:
    """Return the transformer's costs without the overhead per action, which the benchmark measures."""
    return costs if costs == "paper" else "forward=1,head=0.5,input_grad=1,weight_grad=1"


def virtual(costs: str, methods: Sequence[str], stages: int, sizes: Sequence[int], setting: Setting) -> list[Row]:
    """Measure seconds per mini-batch on virtual devices, all on the same processes, beside the predicted slots."""
    cases = [
        Case(
            method=method,
            stages=stages,
            microbatches=m,
            slot_ms=setting.slot_ms / m,
            costs=_scaled(costs),
            batches=setting.batches,
            rounds=1,
        )
        for method, m in itertools.product(methods, sizes)
    ]
    rows = []
    for case, result in zip(cases, start_all(cases), strict=True):
        slots, seconds = result.predicted_slots, result.measured_slots * case.slot_ms / 1e3
        row = measured_row(f"virtual, {costs} costs", case.method, case.stages, case.microbatches, slots, seconds)
        rows.append(row | {"slot_seconds": case.slot_ms / 1e3})
    return rows


def measured_row(what: str, method: str, stages: int, m: int, slots: float, seconds: float) -> Row:
    """Return the row of a measured time."""
    facts = {"what": what, "method": method, "A": stages, "M": m, "slots": slots, "seconds": seconds}
    return {"kind": "measured", **facts, "machine": machine(), "versions": versions()}


def real(method: str, m: int, steps: int, train: Sequence[str] = _NETWORK) -> list[Row]:
    """Measure seconds per mini-batch of a network in two stages, on two processes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "nwise",
        ]
        command += train
        command += ["--strategy", method, "--microbatches", str(m), "--max-steps", str(steps), "--eval-every", "1000"]
        command += ["--log-every", str(steps // 4), "--runs", folder, "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise OSError(f"Two processes should train and end. Found that they failed: {done.stderr[-300:]}")
        lines = next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines()
    logged = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    first, last = logged[0], logged[-1]
    seconds = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    name = "gpipe" if method == "end-to-end" else method
    slots = method_schedule(name, num_stages=2, num_microbatches=m, costs=PAPER).period
    return [measured_row("real", name, 2, m, slots, seconds)]


def window(row: Row) -> int:
    """Return N of a measured row."""
    return int(row["A"]) if row["method"] == "gpipe" else int(row["method"][0])


def plain(rows: Sequence[Row]) -> list[Row]:
    """Return the measured rows that the formula is for: with micro-batches the mean variant of N-wise takes longer."""
    return [row for row in rows if row["kind"] == "measured" and not row["method"].endswith("-mean")]


def fitted(rows: Sequence[Row], what: str) -> Slot | None:
    """Fit c0 and c1 to the measured rows of a kind; None if there are too few."""
    own = [row for row in plain(rows) if row["what"] == what]
    cells = {(row["A"], row["M"], window(row)): row["seconds"] for row in own}
    return fit_slot(cells) if len({m for _, m, _ in cells}) > 1 else None
