"""Memory of a training step on one device, and its speed.

    python -m benchmarks.memory measure --network gpt      # minutes
    python -m benchmarks.memory speed --network gpt        # on a quiet machine
    python -m benchmarks.memory show

`measure` writes ``records/<network>.jsonl``, with a line for each strategy, remedy and number of micro-batches, and `speed` adds
samples per second. Measured bytes are those of torch's allocator: the peak of the second step, with parameters and optimizer.
`show` writes tables.md, and a figure of the records that have a speed.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from nwise.app.data import Images, Tokens
from nwise.app.recipes import Adam, ConvNet, EmbeddedText, Gpt, Recipe, ResNet
from nwise.app.report.figures import MARKERS, method_colour
from nwise.app.training import make_loss, make_optimizer, parameter_groups
from nwise.checks import check_at_least
from nwise.machine import processor
from nwise.network import Chain
from nwise.pipeline import Pipeline

HERE = Path(__file__).parent
RECORDS = HERE / "records"
STRATEGIES = ("end-to-end", "local", "2-wise", "3-wise", "deep-supervision")
Network = Literal["convnet", "gpt", "resnet"]
# What is kept: everything, the inputs of stages, the inputs of blocks, or everything outside the device. In the order of ZB-H1
# the cotangents of all layers are kept, too, between I and W.
Remedy = Literal["plain", "recompute stages", "recompute blocks", "offload", "cotangents kept"]
REMEDIES: tuple[Remedy, ...] = ("plain", "recompute stages", "recompute blocks", "offload")


@dataclass(frozen=True)
class Training:
    """A network in training.

    Args:
        modules: the network.
        optimizer: its optimizer.
        batch: the mini-batch of every step.
        gradients: function that fills every ``.grad``.
    """

    modules: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    gradients: Callable[[], Any]

    def step(self) -> None:
        """Make a step."""
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def num_bytes(self) -> int:
        """Bytes between two steps: parameters, buffers, the optimizer's state and the batch."""
        state = [value for entries in self.optimizer.state.values() for value in entries.values()]
        return sum(t.nbytes for t in (*self.modules.parameters(), *self.modules.buffers(), *state, *self.batch))


@dataclass(frozen=True)
class Cell:
    """A way to train: with `framework` torch, plain autograd that accumulates gradients over M micro-batches."""

    framework: Literal["nwise", "torch"]
    strategy: str
    remedy: Remedy
    microbatches: int

    @property
    def order(self) -> str:
        """The schedule, by name."""
        return "zb-h1" if self.remedy == "cotangents kept" else "depth-first"


def recipe(network: Network) -> tuple[Recipe, Images | Tokens]:
    """Return a recipe and data of its kind: random images, or the source of the standard library."""
    if network == "gpt":
        model = Gpt(num_stages=8, blocks_per_stage=1, width=256, num_heads=4, head_blocks=1, sequence_length=128)
        config = Recipe(data=EmbeddedText(), model=model, optimizer=Adam(lr=1e-3), batch_size=16, device="cpu")
        return config, config.load()[0]
    numbers = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (64, 3, 32, 32), generator=numbers, dtype=torch.uint8)
    labels = torch.randint(0, 10, (64,), generator=numbers)
    ten = tuple(map(str, range(10)))
    data = Images(pixels, labels, ten, (0.5,) * 3, (0.25,) * 3, "none", 32)
    images: ConvNet | ResNet = ConvNet(num_stages=8) if network == "convnet" else ResNet(variant="18", width_factor=0.5)
    return Recipe(model=images, optimizer=Adam(lr=1e-3), batch_size=64, device="cpu"), data


class Recomputed(nn.Module):
    """A block that keeps its input alone and runs its forward once more in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Any:
        """Run the block."""
        return checkpoint(self.block, *inputs, use_reentrant=False)


class Host:
    """Memory outside torch's allocator, which stands for the memory of the host beside a device's."""

    # Used buffers by their size: fresh ones would cost a page fault for every 4 KiB.
    free: ClassVar[dict[int, list[mmap.mmap]]] = {}

    def __init__(self, tensor: Tensor) -> None:
        """Copy a tensor to the host."""
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        buffers = self.free.setdefault(tensor.nbytes, [])
        self._buffer = buffers.pop() if buffers else mmap.mmap(-1, tensor.nbytes)
        self._there().copy_(tensor.detach())

    def _there(self) -> Tensor:
        return torch.frombuffer(self._buffer, dtype=self._dtype).view(self._shape)

    def back(self) -> Tensor:
        """Return a copy on the device."""
        return self._there().to(self._device, copy=True)

    def __del__(self) -> None:
        self.free[len(self._buffer)].append(self._buffer)


class Offloaded(nn.Module):
    """A block whose saved tensors wait on the host for the backward pass, as `torch.autograd.graph.save_on_cpu` does it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Any:
        """Run the block."""
        weights = {p.untyped_storage().data_ptr() for p in self.block.parameters()}

        def pack(tensor: Tensor) -> Tensor | Host:
            stays = not tensor.nbytes or tensor.untyped_storage().data_ptr() in weights
            return tensor if stays else Host(tensor)

        def unpack(saved: Tensor | Host) -> Tensor:
            return saved.back() if isinstance(saved, Host) else saved

        with saved_tensors_hooks(pack, unpack):
            return self.block(*inputs)


WRAPPERS: dict[str, type[nn.Module]] = {"recompute blocks": Recomputed, "offload": Offloaded}


def wrap(stage: Chain, remedy: str) -> Chain:
    """Return a stage with every block wrapped."""
    wrapper = WRAPPERS[remedy]
    return Chain({name: wrapper(block) for name, block in stage.pieces().items()})


def build_nwise(cell: Cell, config: Recipe, data: Images | Tokens) -> Training:
    """Build a pipeline with the heads that its strategy trains."""
    model = config.build(data)
    stages = [stage for stage in model.stages if isinstance(stage, Chain)]
    pipe = Pipeline(
        [wrap(stage, cell.remedy) for stage in stages] if cell.remedy in WRAPPERS else stages,
        model.heads,
        make_loss(data),
        cell.strategy,
        cell.microbatches,
        schedule=cell.order,
        recompute=cell.remedy == "recompute stages",
        checks="never",  # batch norm counts the second forward of a block that runs again
    )
    for k in set(range(len(pipe.stages) - 1)) - pipe.needed_heads():
        del pipe.heads[str(k)]
    optimizer = make_optimizer(config.optimizer, parameter_groups(pipe.to(config.device), config.optimizer.lr))
    x, y = (t.to(config.device) for t in data.batch(torch.arange(config.batch_size)))
    return Training(pipe, optimizer, (x, y), lambda: pipe.step(x, target=y))


def build_torch(cell: Cell, config: Recipe, data: Images | Tokens) -> Training:
    """Build the network for plain autograd."""
    stages = [stage for stage in config.build(data).stages if isinstance(stage, Chain)]
    if cell.remedy in WRAPPERS:
        stages = [wrap(stage, cell.remedy) for stage in stages]
    whole = [Recomputed(stage) for stage in stages] if cell.remedy == "recompute stages" else stages
    network, loss_fn = nn.Sequential(*whole).to(config.device), make_loss(data)
    optimizer = make_optimizer(config.optimizer, network.parameters())
    x, y = (t.to(config.device) for t in data.batch(torch.arange(config.batch_size)))

    def gradients() -> None:
        for part, target in zip(x.chunk(cell.microbatches), y.chunk(cell.microbatches), strict=True):
            (loss_fn(network(part), target) / cell.microbatches).backward()

    return Training(network, optimizer, (x, y), gradients)


def build(cell: Cell, config: Recipe, data: Images | Tokens) -> Training:
    """Build the network of a cell."""
    return (build_nwise if cell.framework == "nwise" else build_torch)(cell, config, data)


def peak(run: Callable[[], object], device: str) -> int:
    """Run a function and return the most bytes that its device's allocator gave away at once, beyond those before it."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    # The allocator of the CPU has no statistics, but the profiler's traces have every allocation.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(accumulate((size for _, size in changes), initial=0))


def measure_peak(cell: Cell, config: Recipe, data: Images | Tokens) -> int:
    """Measure the peak of the second step; the first one makes the optimizer's state."""
    training = build(cell, config, data)
    training.step()
    return training.num_bytes + peak(training.step, config.device)


def cells(microbatches: Sequence[int]) -> Iterator[Cell]:
    """Iterate over all ways to train."""
    for m in microbatches:
        for remedy in REMEDIES:
            yield Cell("torch", "end-to-end", remedy, m)
            for strategy in STRATEGIES:
                yield Cell("nwise", strategy, remedy, m)
        yield Cell("nwise", "end-to-end", "cotangents kept", m)


def samples_per_second(
    all_cells: Sequence[Cell], config: Recipe, data: Images | Tokens, rounds: int
) -> dict[Cell, list[float]]:
    """Time all cells in turn, a step each, in an order that is shuffled in every round."""
    steps = {cell: build(cell, config, data) for cell in all_cells}
    rates: dict[Cell, list[float]] = {cell: [] for cell in all_cells}
    numbers = random.Random(0)
    for number in track(range(rounds + 1), "timing", console=Console(stderr=True)):
        order = list(all_cells)
        numbers.shuffle(order)
        for cell in order:
            synchronize(config.device)
            start_time = time.perf_counter()
            steps[cell].step()
            synchronize(config.device)
            if number:
                rates[cell].append(config.batch_size / (time.perf_counter() - start_time))
    return rates


def synchronize(device: str) -> None:
    """Wait until a GPU has finished."""
    if device != "cpu":
        torch.cuda.synchronize()


def measure(network: Network, microbatches: tuple[int, ...] = (1, 2, 4, 8), device: str = "cpu") -> None:
    """Measure the memory of a network and write its records; speeds of earlier ones stay.

    Args:
        network: which network.
        microbatches: numbers of micro-batches.
        device: cpu or cuda.
    """
    config, data = recipe(network)
    config = replace(config, device=device)
    path = records_path(network, device)
    known = {cell_of(record): record for record in (map(json.loads, path.open()) if path.exists() else ())}
    name = processor() if device == "cpu" else torch.cuda.get_device_name()
    machine = {"torch": torch.__version__, "processor": name}
    records = []
    for cell in track(list(cells(microbatches)), "memory", console=Console(stderr=True)):
        found = {"network": network, **asdict(cell), "measured_bytes": measure_peak(cell, config, data), **machine}
        timed = known.get(cell, {})
        records.append(found | {name: timed[name] for name in ("samples_per_second", "threads") if name in timed})
    write(path, records)


def speed(network: Network, rounds: int = 5, threads: int = 2, device: str = "cpu") -> None:
    """Measure the speed of every way to train and add it to the records.

    Args:
        network: which network.
        rounds: timed steps of every way, in turn; at least 2, for quartiles.
        threads: of torch.
        device: cpu or cuda.
    """
    check_at_least(2, rounds=rounds)
    torch.set_num_threads(threads)
    config, data = recipe(network)
    config = replace(config, device=device)
    records = [json.loads(line) for line in records_path(network, device).open()]
    all_cells = list(map(cell_of, records))
    rates = samples_per_second(all_cells, config, data, rounds)
    for cell, record in zip(all_cells, records, strict=True):
        record["threads"] = threads
        record["samples_per_second"] = statistics.quantiles(rates[cell], n=4, method="inclusive")
    write(records_path(network, device), records)


def cell_of(record: dict[str, Any]) -> Cell:
    """Return the cell of a record."""
    return Cell(**{field.name: record[field.name] for field in fields(Cell)})


def records_path(network: Network, device: str) -> Path:
    """Return the path of a network's records."""
    return RECORDS / f"{network}{'' if device == 'cpu' else '-' + device}.jsonl"


def write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(path)


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of (memory, speed) that no other one beats in both, by memory."""
    best: list[tuple[float, float]] = []
    for memory, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speed > best[-1][1]:
            best.append((memory, speed))
    return best


def show() -> None:
    """Write the tables of all records, and draw speed against memory on a CPU."""
    from matplotlib.figure import Figure

    paths = sorted(RECORDS.glob("*.jsonl"), key=lambda path: path.stem)
    records = {path.stem: [json.loads(line) for line in path.open()] for path in paths}
    lines = ["# Tables, written by run.py", ""]
    for name, rows in records.items():
        lines += [f"## {name}", "", "MiB at the peak of a step; samples per second.", ""]
        counts = sorted({row["microbatches"] for row in rows})
        lines += ["| way to train | " + " | ".join(f"M = {m}" for m in counts) + " |", "|---" * (1 + len(counts)) + "|"]
        by_way: dict[str, dict[int, str]] = {}
        for row in rows:
            way = f"{'autograd' if row['framework'] == 'torch' else row['strategy']}, {row['remedy']}"
            speed = f", {row['samples_per_second'][1]:.0f}/s" if "samples_per_second" in row else ""
            by_way.setdefault(way, {})[row["microbatches"]] = f"{row['measured_bytes'] / 2**20:.0f}{speed}"
        lines += [f"| {way} | " + " | ".join(cells[m] for m in counts) + " |" for way, cells in by_way.items()]
        one = rows[0]
        threads = f"Speeds of {one['threads']} thread(s). " if "threads" in one else ""
        lines += ["", f"{threads}{one['processor']}, torch {one['torch']}.", ""]
    (HERE / "tables.md").write_text("\n".join(lines))

    on_cpu = {name: records[name] for name in get_args(Network) if name in records}
    timed = {name: [row for row in rows if "samples_per_second" in row] for name, rows in on_cpu.items()}
    if not timed or not all(timed.values()):
        return
    figure = Figure(figsize=(5.4, 3.2 * len(timed)), layout="constrained")  # panels one below the other, for phones
    titles = {"convnet": "convolutional network", "gpt": "GPT", "resnet": "ResNet"}
    for axes, (name, rows) in zip(figure.subplots(len(timed), 1, squeeze=False)[:, 0], timed.items(), strict=True):
        groups = {"autograd": "0.25", **{strategy: method_colour(strategy) for strategy in STRATEGIES}}
        points: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for row in rows:
            group = "autograd" if row["framework"] == "torch" else row["strategy"]
            points[group].append((row["measured_bytes"] / 2**20, row["samples_per_second"][1]))
        for (strategy, colour), marker in zip(groups.items(), MARKERS, strict=False):
            axes.scatter(*zip(*points[strategy], strict=True), color=colour, alpha=0.25, s=12, marker=marker)
            best = front(points[strategy])
            axes.plot(*zip(*best, strict=True), color=colour, label=strategy, marker=marker, markersize=4, linewidth=1)
        axes.set(title=titles[name], xlabel="peak of a step, MiB", ylabel="samples per second")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "pareto.png", dpi=140)
