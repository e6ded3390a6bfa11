"""One matrix: how far the weights are from those of one process, whatever the processes, order, memory and interruptions.

    python -m benchmarks.parity        # two minutes on two cores

trains a small GPT and a small convolutional network, both with dropout, by several strategies. It writes ``records.jsonl`` and
the table in ``README.md``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

import nwise
from nwise.app.models import gpt
from nwise.app.records import json_line, write_text
from nwise.checkpoint import Checkpoints, gather_weights
from nwise.machine import machine

FOLDER = Path(__file__).parent
STEPS = 6
STRATEGIES = ("local", "2-wise", "2-wise-mean", "end-to-end", "end-to-end-delay-1", "hogwild-forward")
NETWORKS = ("gpt", "conv")


@dataclass(frozen=True)
class Way:
    """A way to run the same training.

    Args:
        name: its name in the table.
        ranks: number of processes.
        options: arguments of `nwise.Pipeline`.
        microbatches: number of micro-batches; default: 2.
        killed: whether new processes resume at half of the steps, after the first ones were killed. Default: False.
    """

    name: str
    ranks: int
    options: dict[str, Any]
    microbatches: int = 2
    killed: bool = False


ALONE = Way("one process", 1, {})
WAYS = (
    Way("again", 1, {}),
    Way("two processes", 2, {}),
    Way("four processes", 4, {}),
    Way("stages in turn on two", 2, {"placement": [0, 1, 0, 1]}),
    Way("another order (GPipe)", 1, {"schedule": "gpipe"}),
    Way("recomputed", 1, {"recompute": True}),
    Way("killed and resumed, two processes", 2, {}, killed=True),
    Way("one micro-batch: other dropout masks", 1, {}, microbatches=1),
)


def parts(network: str) -> tuple[list[nn.Module], list[nn.Module], Any]:
    """Return stages, heads and loss of a network with four stages and dropout."""
    torch.manual_seed(0)
    if network == "gpt":
        model = gpt(4, 1, width=16, num_heads=2, sequence_length=8, vocabulary_size=31, dropout=0.1)
        return list(model.stages), model.heads, nwise.losses.TokenCrossEntropy()
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    stages = [nn.Sequential(conv(8 if k else 1, 8), nn.ReLU(), nn.Dropout(0.1)) for k in range(4)]
    stages[-1].extend([nn.Flatten(), nn.Linear(8 * 64, 10)])
    chains: list[nn.Module] = [nwise.Chain({f"blocks.{k}": stage}) for k, stage in enumerate(stages)]
    return chains, [nwise.heads.linear((8, 8, 8), 10) for _ in range(3)], nn.functional.cross_entropy


def batches(network: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the mini-batches."""
    numbers = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(31, (8, 9), generator=numbers)
        images, labels = torch.randn(8, 1, 8, 8, generator=numbers), torch.randint(10, (8,), generator=numbers)
        yield (tokens[:, :-1], tokens[:, 1:]) if network == "gpt" else (images, labels)


def work(way: Way, folder: Path) -> None:
    """Train every network by every strategy in this process; the first one writes the weights."""
    torch.set_num_threads(1)
    for network in NETWORKS:
        for strategy in STRATEGIES:
            stages, heads, loss = parts(network)
            pipe = nwise.Pipeline(stages, heads, loss, strategy, way.microbatches, seed=0, **way.options)
            optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
            checkpoints = Checkpoints(folder / f"{network}-{strategy}", pipe, optimizer) if way.killed else None
            begun = checkpoints is not None and checkpoints.resume() is not None
            last = STEPS if begun or not way.killed else STEPS // 2
            for x, y in list(batches(network))[pipe.steps : last]:
                pipe.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()
            if checkpoints is not None and not begun:
                checkpoints.save()
            weights = gather_weights(pipe)
            if pipe.processes.is_first:
                torch.save(weights, folder / f"{network}-{strategy}.pt")
            pipe.close()
    if way.killed and not begun:
        os.kill(os.getpid(), signal.SIGKILL)


def run(way: Way) -> dict[str, dict[str, Tensor]]:
    """Start the processes of a way; return the weights of each network and strategy."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.ranks)]
        command += ["-m", "benchmarks.parity.run", json.dumps(asdict(way)), name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for last in (False, True) if way.killed else (True,):
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if last and done.returncode:
                raise OSError(f"{way.name} should end. Found: {done.stderr[-2000:]}")
        return {path.stem: torch.load(path, weights_only=True) for path in Path(name).glob("*.pt")}


def main() -> None:
    """Run every way, and write records and table."""
    expected = run(ALONE)
    records = []
    for way in track(WAYS, "parity"):
        found = run(way)
        for cell, weights in expected.items():
            apart = max(float((found[cell][key] - x).abs().max()) for key, x in weights.items())
            network, _, strategy = cell.partition("-")
            records.append({"way": way.name, "network": network, "strategy": strategy, "difference": apart})
    write_text(FOLDER / "records.jsonl", "".join(map(json_line, [{"machine": machine()}, *records])))
    page = (FOLDER / "README.md").read_text()
    head = page.partition("<!-- table -->")[0]
    write_text(FOLDER / "README.md", f"{head}<!-- table -->\n\n{table(records)}\n")


def table(records: list[dict[str, Any]]) -> str:
    """Return the matrix: for each way and strategy the larger difference of the two networks."""
    lines = [f"| weights after {STEPS} steps | {' | '.join(STRATEGIES)} |", "|---" * (1 + len(STRATEGIES)) + "|"]
    for way in dict.fromkeys(record["way"] for record in records):
        cells = []
        for strategy in STRATEGIES:
            values = [r["difference"] for r in records if (r["way"], r["strategy"]) == (way, strategy)]
            cells.append(f"{max(values):.0e}" if max(values) else "0")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    work(Way(**json.loads(sys.argv[1])), Path(sys.argv[2]))
