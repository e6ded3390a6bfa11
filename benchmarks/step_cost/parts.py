"""What the guards and conveniences of a step cost: each is left out in turn, where a network computes next to nothing.

    python -m benchmarks.step_cost.parts --rounds 200

writes ``records/parts.jsonl`` and ``records/parts.md``. Beside it stands 2-wise training written by
hand, in the pipeline's order.
"""

from __future__ import annotations

import json
import platform
import random
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.step_cost.run import by_hand, ours, overhead, quartiles
from nwise.machine import processor

PARTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "random numbers by stage and step": {
        "nwise.randomness.StepSeeds.run": lambda draws, part, device, function, *others: function(*others)
    },
    "restoring after an error": {"nwise.runtime.step.restored_on_error": lambda *_: nullcontext()},
    "changes of modules and parameters between steps": {"nwise.runtime.structure.Structure.is_current": True},
    "changes in place": {
        "nwise.stage.stage.run_unchanged": lambda function, inputs, who, *others: function(inputs, *others),
    },
    "what others see of this rank": {"nwise.runtime.engine.Status": lambda *_: None},
}


def main(rounds: int = 200, threads: int = 1) -> None:
    """Measure and write.

    Args:
        rounds: turns of every variant.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    case = overhead()
    step, hand = ours(case, "2-wise"), by_hand(case, 2, early=True)
    variants = {**PARTS, "all of these": {name: part for parts in PARTS.values() for name, part in parts.items()}}
    for _ in range(20):
        step()
        hand()
    times: dict[str, list[float]] = {name: [] for name in ("by hand", *variants)}
    shuffled = random.Random(0)
    for _ in track(range(rounds), description="measuring"):
        for name in shuffled.sample(list(times), len(times)):
            with ExitStack() as stack:
                for target, replacement in variants.get(name, {}).items():
                    stack.enter_context(patch(target, replacement))
                turn = hand if name == "by hand" else step
                turn()  # does not count: the next finds warm caches, as in a loop
                begin = time.perf_counter()
                turn()
                times[name].append(time.perf_counter() - begin)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "processor": processor()}
    records, lines = [], ["| left out | wall, ms | wall / by hand |", "|---|---|---|"]
    for name, seconds in times.items():
        low, median, high = quartiles([a / b for a, b in zip(seconds, times["by hand"], strict=True)])
        wall = quartiles(seconds)
        records.append({**machine, "left_out": name, "wall_s": wall, "by_hand": [low, median, high], "rounds": rounds})
        lines.append(f"| {name} | {1e3 * wall[1]:.2f} | {median:.3f} ({low:.3f}–{high:.3f}) |")
    folder = Path(__file__).parent / "records"
    (folder / "parts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = "\n".join(lines) + f"\n\nMedian (quartiles) of {rounds} rounds, {threads} thread, {processor()}.\n"
    (folder / "parts.md").write_text(text)
    Console().print(text, soft_wrap=True, highlight=False)


if __name__ == "__main__":
    tyro.cli(main)
