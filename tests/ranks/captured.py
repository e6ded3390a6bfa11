"""Trains with capture; returns every bit of losses, gradients and states, and what was recorded.

On a CPU a recorder replaces the CUDA graphs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import nwise
from nets import Net, names
from nwise.capture import capture
from ranks.common import DEVICE, digest, write
from recorder import CpuGraphs

A = 6


class Case(NamedTuple):
    """A run.

    Args:
        strategy: name of the strategy.
        m: number of micro-batches.
        placement: rank of every stage.
        kind: what the stages are made of.
        sizes: of the batches, in turn.
        change: function that changes a pipeline before step 4, in the process that has what it changes.
        zero_every: number of steps between two calls of `zero_grad`.
        options: other arguments of the pipeline.
        steps: number of steps.
        autocast: whether under autocast.
    """

    strategy: str
    m: int
    placement: str | Sequence[int] = "contiguous"
    kind: str = "plain"
    sizes: Sequence[int] = (8,)
    change: Callable[[nwise.Pipeline], object] = lambda _: None
    zero_every: int = 1
    options: Mapping[str, Any] = {}
    steps: int = 5
    autocast: bool = False


class Plain(nn.Module):
    """A layer with dropout and, if asked, batch norm."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.3)
        self.norm: nn.Module = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(self.norm(self.linear(x))))


class Fails(Plain):
    """Reads a value, which a recording cannot."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1.0 if y.sum().item() < 1e9 else 0.5)


def draw(size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets."""
    return torch.randn(size, 4, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def network(kind: str) -> Net:
    """A network, the same on every rank."""
    torch.manual_seed(0)
    if kind == "names":  # and whole numbers that are passed on as they came
        return names(A)
    stages: list[nn.Module] = [Plain(kind == "norm") for _ in range(A)]
    if kind == "fails":
        stages[4] = Fails(norm=False)
    if kind == "views":  # a stage that computes nothing
        stages[2] = nn.Identity()
    stages[-1] = nn.Sequential(stages[-1], nn.Linear(4, 4))
    return Net(stages, [nn.Linear(4, 4) for _ in range(A - 1)], nn.functional.cross_entropy, draw)


def frozen(pipe: nwise.Pipeline) -> None:
    """Freeze a parameter of stage 1."""
    if isinstance(pipe.stages[1], Plain):
        pipe.stages[1].linear.bias.requires_grad_(False)


def to_local(pipe: nwise.Pipeline) -> None:
    """Ask the network, and change the strategy, on all ranks."""
    pipe(torch.ones(3, 4, device=next(pipe.parameters()).device))
    pipe.strategy = "local"


TWO, THREE = (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2)
CASES: dict[int, list[Case]] = {
    2: [
        Case("local", 1, TWO, "norm"),
        Case("2-wise", 2, "v"),
        Case("2-wise-mean", 4, "interleaved", "names"),
        Case("end-to-end", 2, TWO, options={"recompute": True}),
        Case("rotating-2", 2, TWO, steps=8),
        Case("2-wise", 1, TWO, sizes=(8, 8, 8, 7, 8, 7, 7, 8), steps=8),
        Case("2-wise-mean", 1, TWO, change=frozen, zero_every=3, steps=9),
        Case("2-wise", 2, TWO, change=to_local, steps=8),
        Case("3-wise", 1, TWO, "fails"),
        Case("end-to-end", 2, "v", autocast=True),
    ],
    3: [
        Case("local", 2, THREE),
        Case("2-wise", 4, "interleaved", "norm", options={"recompute": True}),
        Case("end-to-end", 1, (0, 0, 1, 2, 2, 2), "views"),
        Case("3-wise-mean", 2, (2, 0, 1, 1, 0, 2), change=frozen, steps=8),
        Case("rotating-2", 1, THREE, "fails", steps=8),
    ],
}


def run(case: Case, *, captured: bool, device: torch.device = DEVICE) -> dict[str, Any]:
    """Train, and return what this process has seen and recorded."""
    net = network(case.kind)
    made: list[CpuGraphs] = []

    def make(device: torch.device) -> CpuGraphs:
        made.append(CpuGraphs(device))
        return made[-1]

    if device.type == "cpu":
        capture.make_graphs = make  # type: ignore[assignment]  # graphs of the CPU
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = net.loss_fn, case.strategy, case.m
        pipe = nwise.Pipeline(
            net.stages, net.heads, *settings, seed=1, placement=case.placement, capture=captured, **case.options
        )
        if case.kind == "norm":
            nwise.defer_batchnorm(pipe)
        pipe.to(device)
        update = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        generator, seen = torch.Generator().manual_seed(5), dict[str, str]()
        for step in range(case.steps):
            if step == 4:
                case.change(pipe)
            size = case.sizes[step % len(case.sizes)]
            x, y = (part.to(device) for part in draw(size, generator))
            if case.kind != "names":  # whose loss counts samples
                y[: step % 3] = -100
            with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
                losses = pipe.step(x, target=y)
            here = pipe.processes.here
            seen |= {f"loss {k} of step {step}": digest(losses.detach()[k]) for k in here if not losses[k].isnan()}
            if step % case.zero_every == case.zero_every - 1:
                nwise.clip_grad_norm_(pipe, 1.0)
                gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
                seen |= {f"{name} in step {step}": digest(g) for name, g in gradients.items()}
                update.step()
                update.zero_grad()
    kinds = [] if pipe._capture is None else list(pipe._capture._kinds.values())
    seen |= {name: digest(x) for name, x in pipe.state_dict().items()}
    found: dict[str, Any] = {
        "seen": seen,
        "stages": pipe.processes.here,
        "bytes": pipe.bytes_per_step,
        "segments": [len(kind.recording.segments) for kind in kinds if kind.recording is not None],
        "graphs": sum(len(graphs.made) for graphs in made),
        "warnings": [str(warning.message) for warning in caught if "captured" in str(warning.message)],
    }
    pipe.close()
    return found


def check(found: Sequence[Sequence[Mapping[str, Any]]], device: torch.device = DEVICE) -> None:
    """Assert that several processes have computed every bit of an eager step in one, and that each has recorded what it can."""
    for number, case in enumerate(CASES[len(found)]):
        expected, ranks = run(case, captured=False, device=device)["seen"], [one[number] for one in found]
        together = {name: bits for one in ranks for name, bits in one["seen"].items()}
        assert sum(len(one["seen"]) for one in ranks) == len(together) == len(expected), case
        assert not {name for name, bits in expected.items() if together[name] != bits}, case
        for rank, one in enumerate(ranks):
            assert one["bytes"]["measured"] == one["bytes"]["predicted"], case
            fails = case.kind == "fails" and 4 in one["stages"]
            again = case.change is frozen and 1 in one["stages"]
            assert bool(one["segments"]) != fails, (case, rank)
            assert ["Stage 4 reads a value" in text for text in one["warnings"]] == [True] * fails, (case, rank)
            if device.type == "cpu" and not fails and case.change is not to_local:
                assert one["graphs"] == (1 + again) * sum(one["segments"]), (case, rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write([run(case, captured=True) for case in CASES[int(sys.argv[2])]])
