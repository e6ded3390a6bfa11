"""Cost of one training step in one process: plain autograd, N-wise written by hand, nwise.

All methods take turns in one run; each starts from the same network and batch. Prints a table and
writes one JSON record per method to ``records/<case>.jsonl``.

    python -m benchmarks.step_cost --case convnet --rounds 40
"""

from __future__ import annotations

import copy
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import nwise
from nwise.app import models
from nwise.losses import TokenCrossEntropy
from nwise.machine import processor

PLAIN = "plain end-to-end"
IN_ITS_ORDER = ", in the pipeline's order"
CAPTURED = {"nwise, 2-wise": "2-wise", "nwise, 3-wise": "3-wise", "nwise, end-to-end": "end-to-end"}

Step = Callable[[], None]
LossFn = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A network with a batch."""

    model: models.StagedModel
    loss_fn: LossFn
    x: Tensor
    y: Tensor
    dtype: torch.dtype | None = None  # of autocast

    def autocast(self) -> torch.autocast:
        """Return the context that its steps run in."""
        return torch.autocast(self.x.device.type, self.dtype, enabled=self.dtype is not None)

    def to(self, device: str) -> Case:
        """Return the same on a device."""
        for module in (*self.model.stages, *self.model.heads):
            module.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device))


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


def overhead() -> Case:
    """The convolutional network on two images of 4x4, where bookkeeping is all that takes time."""
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return Case(models.convnet(10, image_size=4), nn.functional.cross_entropy, x, torch.tensor([0, 1]))


def resnet() -> Case:
    """The paper's ResNet-32 in 4 stages, batch 128, bf16, channels last."""
    generator = torch.Generator().manual_seed(0)
    model = models.resnet("paper-32")
    for module in (*model.stages, *model.heads):
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stubs lack it
    x = torch.randn(128, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (128,), generator=generator)
    return Case(model, nn.functional.cross_entropy, x, y, torch.bfloat16)


CASES = {"convnet": convnet, "resnet": resnet, "gpt": gpt, "overhead": overhead}


def plain(case: Case) -> Step:
    """End-to-end training as everybody writes it."""
    network = nn.Sequential(*copy.deepcopy(case.model.stages))
    parameters = list(network.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with case.autocast():
            loss = case.loss_fn(network(case.x), case.y)
        loss.backward()

    return step


def by_hand(case: Case, n: int, *, early: bool = False, compiled: bool = False) -> Step:
    """N-wise training with `torch.autograd` and nothing else, no pass more than needed.

    Args:
        case: the network with its batch.
        n: the number of stages through which a gradient travels, N.
        early: whether the backward passes of each loss follow its forward at once, as in a pipeline; memory then holds N graphs.
            Default: all forwards run first.
        compiled: whether stages and heads are compiled with CUDA graphs.
    """
    stages: list[Any] = list(copy.deepcopy(case.model.stages))
    heads: list[Any] = list(copy.deepcopy(case.model.heads))
    last = len(stages) - 1
    mains = [list(stage.parameters()) for stage in stages]
    sides = [list(head.parameters()) for head in heads] + [[]]
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # all chains share one forward
        stages, heads = ([torch.compile(one, mode="reduce-overhead") for one in part] for part in (stages, heads))

    def step() -> None:
        for parameter in (p for group in [*mains, *sides] for p in group):
            parameter.grad = None
        inputs, outputs = [case.x], list[Tensor]()
        for j in range(n - 1, last + 1):
            with case.autocast():
                for k in range(len(outputs), (j if early else last) + 1):
                    outputs.append(stages[k](inputs[k]))
                    if k < last:
                        inputs.append(outputs[k].detach().requires_grad_())
            leaf = outputs[j].detach().requires_grad_()
            with case.autocast():
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


def ours(case: Case, strategy: str, *, capture: bool = False) -> Step:
    """The same through `nwise.Pipeline`."""
    stages, heads = copy.deepcopy(case.model.stages), copy.deepcopy(case.model.heads)
    pipe = nwise.Pipeline(stages, heads, case.loss_fn, strategy)
    if capture:
        nwise.capture(pipe)
    parameters = list(pipe.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with case.autocast():
            pipe.step(case.x, target=case.y)

    return step


def methods(case: Case) -> dict[str, Step]:
    """Return the steps of the comparison, by name; those of `CAPTURED` on a GPU alone."""
    captured = {f"{name}, captured": strategy for name, strategy in CAPTURED.items() if case.x.is_cuda}
    return {name: ours(case, strategy, capture=True) for name, strategy in captured.items()} | {
        PLAIN: plain(case),
        "by hand, 2-wise": by_hand(case, 2),
        "by hand, 2-wise" + IN_ITS_ORDER: by_hand(case, 2, early=True),
        "nwise, 2-wise": ours(case, "2-wise"),
        "by hand, 3-wise": by_hand(case, 3),
        "by hand, 3-wise" + IN_ITS_ORDER: by_hand(case, 3, early=True),
        "nwise, 3-wise": ours(case, "3-wise"),
        "nwise, end-to-end": ours(case, "end-to-end"),
        "nwise, local": ours(case, "local"),
        "nwise, 2-wise mean": ours(case, "2-wise-mean"),
    }


def measure(steps: dict[str, Step], rounds: int, device: str) -> dict[str, list[tuple[float, float]]]:
    """Wall-clock and processor seconds of every step, the methods taking turns in a random order.

    The first step of a turn does not count. It brings the method's code and data into the caches, as a training loop does.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    finish: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    shuffle = random.Random(0)
    for _ in track(range(rounds), description="measuring"):
        shuffle.shuffle(names)  # so that no method always runs in the wake of the same one
        for name in names:
            steps[name]()
            finish()
            wall, processor = time.perf_counter(), time.process_time()
            steps[name]()
            finish()
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return times


class ByteCounter(TorchDispatchMode):
    """Bytes that operations read and write, views aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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


def kernel_seconds(step: Step, repeats: int = 3) -> float:
    """Return the seconds for which a step keeps the GPU busy, kernel by kernel."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / repeats


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def main(
    case: Literal["convnet", "resnet", "gpt", "overhead"],
    rounds: int = 40,
    threads: int = 2,
    device: Literal["cpu", "cuda"] = "cpu",
    compiled: bool = False,
) -> None:
    """Measure a case and write its records, as JSON lines and as a table.

    Args:
        case: which network.
        rounds: turns of every method.
        threads: of torch.
        device: where to run.
        compiled: whether to try 2-wise training by hand with `torch.compile(mode="reduce-overhead")` too.
    """
    torch.set_num_threads(threads)
    network = CASES[case]().to(device)
    steps = methods(network)
    if compiled:
        steps |= {"by hand, 2-wise, compiled": by_hand(network, 2, compiled=True)}
    for name, step in list(steps.items()):  # a captured step is recorded before its operations are counted
        try:
            for _ in range(4):
                step()
        except Exception as error:
            if not name.endswith("compiled"):
                raise
            print(f"{name} does not work: {type(error).__name__}: {error}")
            del steps[name]
    counted = {name: counts(step) for name, step in steps.items() if not name.endswith(("captured", "compiled"))}
    counted |= {name: counted[name.rsplit(", ", 1)[0]] for name in steps if name not in counted}
    kernels = {name: kernel_seconds(step) for name, step in steps.items()} if device == "cuda" else {}
    times = measure(steps, rounds, device)
    settings = {
        "case": case,
        "rounds": rounds,
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor() if device == "cpu" else torch.cuda.get_device_name(),
    }
    records = [{**settings, "method": name, **summary(times, counted, name)} for name in steps]
    records = [{**record, "kernels_s": kernels[record["method"]]} if kernels else record for record in records]
    folder = Path(__file__).parent / "records"
    folder.mkdir(exist_ok=True)
    name = case if device == "cpu" else f"{case}-{device}"
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text = markdown(records)
    (folder / f"{name}.md").write_text(text)
    Console().print(text, soft_wrap=True, highlight=False)


def summary(
    times: dict[str, list[tuple[float, float]]], counted: dict[str, dict[str, int]], name: str
) -> dict[str, Any]:
    """Quartiles of a method's seconds and of its ratios, round by round, and its counts."""
    pairs, base = times[name], times[PLAIN]
    hand = name.replace("nwise", "by hand").removesuffix(", captured")
    result: dict[str, Any] = {}
    for clock, what in enumerate(("wall", "processor")):
        result[f"{what}_s"] = quartiles([t[clock] for t in pairs])
        result[f"{what}_ratio"] = quartiles([t[clock] / b[clock] for t, b in zip(pairs, base, strict=True)])
        for order, suffix in (("by_hand", ""), ("in_its_order", IN_ITS_ORDER)):
            if hand != name and (reference := times.get(hand + suffix)):
                ratios = [t[clock] / r[clock] for t, r in zip(pairs, reference, strict=True)]
                result[f"{what}_{order}"] = quartiles(ratios)
    for what, count in counted[name].items():
        result |= {what: count, f"{what}_ratio": count / counted[PLAIN][what]}
    return result


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """The table of the README."""

    def middle(record: dict[str, Any], what: str, unit: float = 1.0, digits: int = 2) -> str:
        if what not in record:
            return ""
        low, median, high = (f"{unit * value:.{digits}f}" for value in record[what])
        return f"{median} ({low}–{high})"

    lines = [
        "| method | wall, ms | wall / plain | processor / plain | FLOPs / plain | bytes / plain "
        "| wall / by hand | the same in the pipeline's order |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if "kernels_s" in records[0]:
        lines = [lines[0] + " kernels, ms |", lines[1] + "---|"]
    for r in records:
        wall = middle(r, "wall_s", 1e3, 0 if r["wall_s"][1] > 0.1 else 2)
        cells = [r["method"], wall, middle(r, "wall_ratio"), middle(r, "processor_ratio")]
        cells += [f"{r['flops_ratio']:.3f}", f"{r['bytes_ratio']:.3f}"]
        cells += [middle(r, "wall_by_hand", digits=3), middle(r, "wall_in_its_order", digits=3)]
        cells += [f"{1e3 * r['kernels_s']:.2f}"] if "kernels_s" in r else []
        lines.append("| " + " | ".join(cells) + " |")
    r = records[0]
    lines.append(
        f"\n{r['case']}: median (quartiles) of {r['rounds']} rounds, {r['threads']} threads, {r['processor']}, "
        f"torch {r['torch']}, Python {r['python']}."
    )
    return "\n".join(lines) + "\n"
