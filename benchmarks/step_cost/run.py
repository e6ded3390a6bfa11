"""Cost of one training step in one process: plain autograd, N-wise written by hand, nwise.

All methods take turns in one run; each starts from the same network and batch. Prints a table and
writes one JSON record per method to ``records/<case>.jsonl``.

    python benchmarks/step_cost/run.py --case convnet --rounds 40
"""

from __future__ import annotations

import copy
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import nwise
from nwise import models
from nwise.losses import TokenCrossEntropy

Step = Callable[[], None]
LossFn = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A network with a batch."""

    model: models.StagedModel
    loss_fn: LossFn
    x: Tensor
    y: Tensor


def convnet() -> Case:
    """The 10-stage convolutional network of the paper at 32x32, batch 64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, 32, 32, generator=generator)
    return Case(models.convnet(10), nn.functional.cross_entropy, x, torch.randint(0, 10, (64,), generator=generator))


def gpt() -> Case:
    """A 12-block GPT in 4 stages, width 256, sequence 64, batch 8, vocabulary 2,000, with the paper's heads."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 2000, (8, 65), generator=generator)
    model = models.gpt(4, 3, 256, 4, 64, 2000)
    return Case(model, TokenCrossEntropy(), tokens[:, :-1], tokens[:, 1:])


def plain(case: Case) -> Step:
    """End-to-end training as everybody writes it."""
    network = nn.Sequential(*copy.deepcopy(case.model.stages))
    parameters = list(network.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        case.loss_fn(network(case.x), case.y).backward()

    return step


def by_hand(case: Case, n: int) -> Step:
    """N-wise training with `torch.autograd` and nothing else, no pass more than needed."""
    stages, heads = copy.deepcopy(case.model.stages), copy.deepcopy(case.model.heads)
    last = len(stages) - 1
    mains = [list(stage.parameters()) for stage in stages]
    sides = [list(head.parameters()) for head in heads] + [[]]

    def step() -> None:
        for parameter in (p for group in [*mains, *sides] for p in group):
            parameter.grad = None
        inputs, outputs = [case.x], []
        for k, stage in enumerate(stages):
            outputs.append(stage(inputs[k]))
            if k < last:
                inputs.append(outputs[k].detach().requires_grad_())
        for j in range(n - 1, last + 1):
            leaf = outputs[j].detach().requires_grad_()
            loss = case.loss_fn(heads[j](leaf) if j < last else leaf, case.y)
            torch.autograd.backward(loss, inputs=[leaf, *sides[j]])
            gradient = leaf.grad
            for k in range(j, max(j - n, -1), -1):
                trains = min(k + n - 1, last) == j
                goes_on = k > max(j - n + 1, 0)
                wanted = ([inputs[k]] if goes_on else []) + (mains[k] if trains else [])
                # The farthest loss is the last to come to a stage, so that its graph can go.
                torch.autograd.backward(outputs[k], gradient, inputs=wanted, retain_graph=not trains)
                gradient, inputs[k].grad = inputs[k].grad, None

    return step


def ours(case: Case, strategy: str) -> Step:
    """The same through `nwise.Pipeline`."""
    pipe = nwise.Pipeline(copy.deepcopy(case.model.stages), copy.deepcopy(case.model.heads), case.loss_fn, strategy)
    parameters = list(pipe.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        pipe.step(case.x, target=case.y)

    return step


def methods(case: Case) -> dict[str, Step]:
    """All that are compared, by name."""
    return {
        "plain end-to-end": plain(case),
        "by hand, 2-wise": by_hand(case, 2),
        "nwise, 2-wise": ours(case, "2-wise"),
        "by hand, 3-wise": by_hand(case, 3),
        "nwise, 3-wise": ours(case, "3-wise"),
        "nwise, end-to-end": ours(case, "end-to-end"),
        "nwise, local": ours(case, "local"),
        "nwise, 2-wise mean": ours(case, "2-wise-mean"),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall-clock and processor seconds of every step, the methods taking turns in a random order."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    shuffle = random.Random(0)
    for round_ in track(range(rounds + 3), description="measuring"):
        shuffle.shuffle(names)  # so that no method always runs in the wake of the same one
        for name in names:
            wall, processor = time.perf_counter(), time.process_time()
            steps[name]()
            pair = time.perf_counter() - wall, time.process_time() - processor
            if round_ >= 3:  # the first rounds warm up
                times[name].append(pair)
    return times


class ByteCounter(TorchDispatchMode):
    """Bytes that operations read and write, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func not in _NO_WORK:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.total += sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
        return result


_NO_WORK = {torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default}


def counts(step: Step) -> dict[str, int]:
    """Operations of a step: floating-point ones of matrix products and convolutions, and bytes of all."""
    with FlopCounterMode(display=False) as flops:
        step()
    with ByteCounter() as moved:
        step()
    return {"flops": flops.get_total_flops(), "bytes": moved.total}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def main(case: Literal["convnet", "gpt"], rounds: int = 40, threads: int = 2) -> None:
    """Measure a case and write its records.

    Args:
        case: which network.
        rounds: turns of every method.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    steps = methods({"convnet": convnet, "gpt": gpt}[case]())
    counted = {name: counts(step) for name, step in steps.items()}
    times = measure(steps, rounds)
    base = times["plain end-to-end"]
    table = Table(title=f"{case}: {rounds} rounds, {threads} threads; ratios to plain end-to-end, round by round")
    for heading in ("method", "wall, ms", "wall ratio", "quartiles", "processor ratio", "FLOPs", "bytes"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    folder = Path(__file__).parent / "records"
    folder.mkdir(exist_ok=True)
    with (folder / f"{case}.jsonl").open("w") as file:
        for name, pairs in times.items():
            wall = quartiles([w / b for (w, _), (b, _) in zip(pairs, base, strict=True)])
            processor = quartiles([p / b for (_, p), (_, b) in zip(pairs, base, strict=True)])
            record: dict[str, Any] = {
                "case": case,
                "method": name,
                "rounds": rounds,
                "threads": threads,
                "wall_s": quartiles([w for w, _ in pairs]),
                "processor_s": quartiles([p for _, p in pairs]),
                "wall_ratio": wall,
                "processor_ratio": processor,
                **counted[name],
                **{f"{what}_ratio": counted[name][what] / counted["plain end-to-end"][what] for what in counted[name]},
                "versus_by_hand_wall": versus(times, name, 0),
                "versus_by_hand_processor": versus(times, name, 1),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "processor": cpu(),
            }
            file.write(json.dumps(record) + "\n")
            table.add_row(
                name,
                f"{1e3 * record['wall_s'][1]:.1f}",
                f"{wall[1]:.3f}",
                f"{wall[0]:.3f} – {wall[2]:.3f}",
                f"{processor[1]:.3f}",
                f"{record['flops_ratio']:.3f}",
                f"{record['bytes_ratio']:.3f}",
            )
    console = Console()
    console.print(table)
    for name in times:
        pair = versus(times, name, 0), versus(times, name, 1)
        if pair[0] is not None and pair[1] is not None:
            console.print(f"{name} / by hand: wall {pair[0][1]:.3f}, processor {pair[1][1]:.3f}")


def versus(times: dict[str, list[tuple[float, float]]], name: str, clock: int) -> tuple[float, float, float] | None:
    """Quartiles of the ratio to the same strategy by hand, round by round."""
    rival = name.replace("nwise", "by hand")
    if rival == name or rival not in times:
        return None
    return quartiles([a[clock] / b[clock] for a, b in zip(times[name], times[rival], strict=True)])


def cpu() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    tyro.cli(main)
