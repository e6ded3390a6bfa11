"""Loss against seconds of the clock, over real links: exact, late and short credit.

    python -m benchmarks.wire.losses rates          # short trials, without links; five minutes
    python -m benchmarks.wire.losses train          # 40 minutes on a quiet machine, as root
    python -m benchmarks.wire.losses smaller local  # 12 minutes: bf16 and int8 messages of a method, over the slower link
    python -m benchmarks.wire.losses show

Four ranks train a small GPT, two blocks each, with real computation, for a fixed time of the clock. The clock pauses while a test
runs. README.md has the protocol.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import nwise
from benchmarks.wire.net import ROOT, Link, Wires
from nwise.app.data import Tokens, batch_indices
from nwise.app.recipes import Adam, EmbeddedText, Gpt, Recipe
from nwise.app.training import LearningRate, evaluate, make_loss, make_optimizer
from nwise.compression import named
from nwise.machine import machine
from nwise.schedule import TRANSFORMER, Costs, Schedule, best

HERE = Path(__file__).parent
RATES, RECORDS = HERE / "records" / "rates.jsonl", HERE / "records" / "losses.jsonl"
LINKS = {"20ms": Link("20 ms, 200 Mbit/s", 0.02, 200e6), "80ms": Link("80 ms, 20 Mbit/s", 0.08, 20e6)}
METHODS = ("end-to-end", "end-to-end-delay-1", "2-wise-mean", "local")
# The best rates of the frontier's search with eight stages; each is tried, and its half and its double.
MIDDLE = {"end-to-end": 0.008, "end-to-end-delay-1": 0.0005, "2-wise-mean": 0.002, "local": 0.004}
STAGES, BATCH, SEEDS, TESTS = 4, 8, 3, 8
TRIAL_STEPS, TRIAL_SEED = 200, 100
SECONDS = 30.0  # of training
_MODEL = Gpt(num_stages=STAGES, blocks_per_stage=2, width=96, head_blocks=0, sequence_length=128)
_WARMUP = 50
_MESSAGE = 4 * BATCH * 128 * 96  # bytes of a mini-batch's activations
_SMALLER = {"none": 1.0, "bf16": 0.5, "int8": 0.25}
Record = dict[str, Any]


def recipe(method: str, rate: float) -> Recipe:
    """Return a method's run with a peak rate."""
    optimizer = Adam(lr=_WARMUP**0.5 * rate, beta2=0.98, eps=1e-9, warmup_steps=_WARMUP, extrapolate="delay" in method)
    data = EmbeddedText(max_bytes=4_700_000, test_limit=20_000)
    return Recipe(data=data, model=_MODEL, optimizer=optimizer, strategy=method, batch_size=BATCH, max_steps=10_000)


class Training:
    """A run in this process: all stages, or those of this rank.

    Args:
        method: strategy.
        rate: peak rate.
        seed: of initial values and of the order of the data.
        schedule: order of work, with its number of micro-batches. Default: that of one process.
        compress: of messages.
    """

    def __init__(
        self, method: str, rate: float, seed: int, schedule: Schedule | None = None, compress: str = "none"
    ) -> None:
        config = recipe(method, rate)
        data, test = config.load()
        assert isinstance(data, Tokens)
        self._test: Any = test
        self._data = data
        torch.manual_seed(seed)
        model = config.build(data)
        rule = config.phases(1)[0][1]
        m = 1 if schedule is None else schedule.num_microbatches
        options: dict[str, Any] = {"schedule": schedule, "seed": seed, "checks": "never", "compress": named(compress)}
        self.pipe = nwise.Pipeline(model.stages, model.heads, make_loss(data), rule, m, **options)
        self._optimizer = make_optimizer(config.optimizer, [{"params": list(self.pipe.parameters())}])
        self._rate = LearningRate(config.optimizer, self._optimizer, 10_000)
        self._seed = seed

    def step(self, number: int) -> torch.Tensor:
        """Train one mini-batch; return the losses of this process."""
        x, y = self._data.batch(batch_indices(len(self._data), BATCH, self._seed, number))
        losses = self.pipe.step(x, target=y)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._rate.step()
        return losses

    def test(self) -> float:
        """Return the test loss of the last head."""
        score = evaluate(self.pipe, self._test, 2 * BATCH).heads[-1]
        assert score is not None
        return round(score.loss, 6)


def trial(method: str, rate: float) -> float:
    """Return the mean loss of the last quarter of a short run, on text that it sees for the first time."""
    torch.set_num_threads(1)
    run = Training(method, rate, TRIAL_SEED)
    last = [float(run.step(i)[-1]) for i in range(TRIAL_STEPS)][-TRIAL_STEPS // 4 :]
    return round(statistics.mean(last), 5)


def beyond(method: str, rows: Sequence[Record]) -> list[tuple[str, float]]:
    """Return a rate beyond those that were tried, if the best one is the lowest or the highest."""
    tried = {row["rate"]: row["loss"] for row in rows if row["method"] == method}
    best = min(tried, key=tried.__getitem__)
    return [(method, rate) for edge, rate in ((min(tried), best / 2), (max(tried), 2 * best)) if best == edge]


def rates() -> dict[str, float]:
    """Return the best rate of each method by the trials."""
    rows = [json.loads(line) for line in RATES.open()]
    found = {m: min((row for row in rows if row["method"] == m), key=lambda row: row["loss"]) for m in METHODS}
    return {method: row["rate"] for method, row in found.items()}


def forward_seconds() -> float:
    """Measure the forward of a stage for a mini-batch on one thread, while as many compute as there are ranks to a core."""
    torch.set_num_threads(1)
    stage = torch.nn.Sequential(*list(recipe("local", 0.001).build(recipe("local", 0.001).load()[0]).stages)[1:2])
    x = torch.randn(BATCH, 128, 96)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        with torch.no_grad():
            stage(x)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * max(1.0, STAGES / (os.cpu_count() or 1))


def planned(method: str, link: Link, forward: float, compress: str = "none") -> Schedule:
    """Return the fastest schedule of a method over a link, of several numbers of micro-batches."""
    costs = Costs(
        forward=forward,
        head=0.27 * forward,
        input_grad=forward,
        weight_grad=forward,
        chain_share=TRANSFORMER.chain_share,
        overhead=0.002,
        latency=link.latency,
        bandwidth=link.bytes_per_second,
        message_bytes=_MESSAGE * _SMALLER[compress],
    )
    found = [best(method, num_stages=STAGES, num_microbatches=m, costs=costs.split_in(m)) for m in (1, 2, 4, 8)]
    return min(found, key=lambda one: (round(one.period, 9), one.num_microbatches))


def train_rank(told: Mapping[str, Any]) -> None:
    """Train in this rank for the time; print the record in the last rank."""
    torch.set_num_threads(1)
    schedule = planned(told["method"], LINKS[told["link"]], told["forward"], told["compress"])
    run = Training(told["method"], told["rate"], told["seed"], schedule, told["compress"])
    processes = run.pipe.processes
    curve, seconds, number = [], 0.0, 0
    part = max(1, round(told["seconds"] / TESTS / schedule.period))
    run.step(number)  # connects
    while seconds < told["seconds"]:
        begin = time.perf_counter()
        for _ in range(part):
            number += 1
            run.step(number)
        seconds += max(processes.gather("seconds", time.perf_counter() - begin))
        curve.append({"step": number + 1, "seconds": round(seconds, 3), "loss": run.test()})
        processes.gather("tested", True)  # the links are idle again before the clock goes on
    run.pipe.forget_pending()
    run.pipe.close()
    if processes.rank == STAGES - 1:
        plan = {"microbatches": schedule.num_microbatches, "order": schedule.order, "planned_ms": 1e3 * schedule.period}
        print(json.dumps({**told, **plan, "step_ms": 1e3 * seconds / number, "tests": curve}), flush=True)


def run_all(todo: Sequence[Mapping[str, Any]], records: Path) -> None:
    """Run trainings one after the other, and add their records."""
    for told in track(todo, "training", console=Console(stderr=True)):
        with Wires(STAGES, LINKS[told["link"]]) as wires:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.wire.losses", "rank", json.dumps(told)]
            running = [wires.start(k, command, {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}) for k in range(STAGES)]
            said = [one.communicate() for one in running]
        found = [line for line in said[-1][0].splitlines() if line.startswith("{")]
        if len(found) != 1:
            raise OSError(f"The ranks should train and end. Found: {said[-1][1][-2000:]}")
        with records.open("a") as file:
            file.write(json.dumps(json.loads(found[0]) | {"machine": machine()}) + "\n")


def show(records: Path) -> str:
    """Return a table: seconds of a step, and the mean test loss at parts of the time."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for line in records.open():
        row = json.loads(line)
        groups[row["link"], row["method"], row["compress"]].append(row)
    lines = [
        "| link | method | messages | M | planned, ms | a step, ms | steps | loss at 1/4 | 1/2 | the end | seeds |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for (link, method, compress), rows in groups.items():
        limit = rows[0]["seconds"]
        losses = [_at([loss_at(row, share * limit) for row in rows]) for share in (0.25, 0.5, 1.0)]
        step = statistics.median(row["step_ms"] for row in rows)
        steps = statistics.median(row["tests"][-1]["step"] for row in rows)
        cells = [LINKS[link].name, method, compress, rows[0]["microbatches"], f"{rows[0]['planned_ms']:.0f}"]
        cells += [f"{step:.0f}", f"{steps:.0f}", *losses, len(rows)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def loss_at(row: Record, seconds: float) -> float:
    """Return the loss of a run after some seconds, on a line between two tests."""
    tests = row["tests"]
    if seconds <= tests[0]["seconds"]:
        return float(tests[0]["loss"])
    for before, after in pairwise(tests):
        if seconds <= after["seconds"]:
            share = (seconds - before["seconds"]) / (after["seconds"] - before["seconds"])
            return float(before["loss"] + share * (after["loss"] - before["loss"]))
    return float(tests[-1]["loss"])


def _at(losses: Sequence[float]) -> str:
    middle = statistics.mean(losses)
    return f"{middle:.3f} ± {max(abs(one - middle) for one in losses):.3f}"


def main(what: str, text: str = "") -> None:
    """Do what is asked: rates, train, smaller or show; or train one rank."""
    if what == "rank":
        train_rank(json.loads(text))
    elif what == "rates":
        rows: list[Record] = []
        pairs = [(method, factor * MIDDLE[method]) for method in METHODS for factor in (0.5, 1.0, 2.0)]
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            while pairs:
                losses = track(
                    pool.map(trial, *zip(*pairs, strict=True)), total=len(pairs), console=Console(stderr=True)
                )
                rows += [
                    {"method": m, "rate": rate, "loss": loss} for (m, rate), loss in zip(pairs, losses, strict=True)
                ]
                pairs = [pair for method in METHODS for pair in beyond(method, rows)]
        rows.sort(key=lambda row: (METHODS.index(row["method"]), row["rate"]))
        RATES.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif what in ("train", "smaller"):
        known = [json.loads(line) for line in RECORDS.open()] if RECORDS.exists() else []
        done = {(row["link"], row["method"], row["compress"], row["seed"]) for row in known}
        # All runs have one plan, so those that go on take the time of a forward that the first ones measured.
        chosen, forward = rates(), known[0]["forward"] if known else forward_seconds()
        methods = METHODS if what == "train" else tuple(text.split(","))
        forms = ("none",) if what == "train" else ("bf16", "int8")
        run_all(
            [
                {
                    "link": link, "method": method, "compress": form, "seed": seed, "rate": chosen[method],
                    "forward": round(forward, 5), "seconds": SECONDS,
                }
                for seed in range(SEEDS)
                for link in (LINKS if what == "train" else ("80ms",))
                for method in methods
                for form in forms
                if (link, method, form, seed) not in done
            ],
            RECORDS,
        )  # fmt: skip
    else:
        print(show(RECORDS))


if __name__ == "__main__":
    main(*sys.argv[1:])
