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
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.3)
        self.norm: nn.Module = nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(self.norm(self.linear(x))))


class Tokens(nn.Module):
    """Passes on whole numbers as they came, under a name, beside a transposed hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(2, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        x, ids = (x, (x[:, 0] > 0).long()) if ids is None else (x.mT, ids)
        return {"ids": ids, "x": torch.tanh(self.linear(x) + self.table(ids)).mT.contiguous()}


class Fails(Plain):
    """Reads a value in its third call: while it is recorded."""

    calls = [0]  # noqa: RUF012 - of the class, where nwise does not look

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        y = super().forward(x)
        return y * (1.0 if self.calls[0] < 3 or y.sum().item() < 1e9 else 0.5)


class Head(nn.Module):
    """A head for them, also of a stage inside it."""

    def __init__(self, stage: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.stage = nn.Linear(6, 4), stage

    def forward(self, **hidden: Tensor) -> Tensor:
        hidden = hidden if self.stage is None else self.stage(**hidden)
        output: Tensor = self.linear(hidden["x"].mT) + hidden["ids"][:, None]
        return output


def network(kind: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """Stages and heads, the same on every rank."""
    torch.manual_seed(0)
    if kind == "names":
        return [*(Tokens() for _ in range(A - 1)), Head(Tokens())], [Head() for _ in range(A - 1)]
    stages: list[nn.Module] = [Plain(kind == "norm") for _ in range(A)]
    if kind == "fails":
        Fails.calls[0] = 0
        stages[4] = Fails(norm=False)
    if kind == "views":  # a stage that computes nothing
        stages[2] = nn.Identity()
    stages[-1] = nn.Sequential(stages[-1], nn.Linear(6, 4))
    return stages, [nn.Linear(6, 4) for _ in range(A - 1)]


def less_dropout(pipe: nwise.Pipeline) -> None:
    """Change a module of stage 4."""
    if isinstance(pipe.stages[4], Plain):
        pipe.stages[4].dropout.p = 0.1


def frozen(pipe: nwise.Pipeline) -> None:
    """Freeze a parameter of stage 1."""
    if isinstance(pipe.stages[1], Plain):
        pipe.stages[1].linear.bias.requires_grad_(False)


def to_local(pipe: nwise.Pipeline) -> None:
    """Ask the network, and change the strategy, on all ranks."""
    pipe(torch.ones(3, 6, device=next(pipe.parameters()).device))
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
        Case("end-to-end", 1, TWO, change=less_dropout, steps=8),
        Case("2-wise-mean", 1, TWO, change=frozen, zero_every=3, steps=9),
        Case("2-wise", 2, TWO, change=to_local, steps=8),
        Case("3-wise", 1, TWO, "fails"),
        Case("end-to-end", 2, "v", autocast=True),
    ],
    3: [
        Case("local", 2, THREE),
        Case("2-wise", 4, "interleaved", "norm", options={"recompute": True}),
        Case("end-to-end", 1, (0, 0, 1, 2, 2, 2), "views"),
        Case("3-wise-mean", 2, (2, 0, 1, 1, 0, 2), change=less_dropout, steps=8),
        Case("rotating-2", 1, THREE, "fails", steps=8),
    ],
}


def run(case: Case, *, captured: bool, device: torch.device = DEVICE) -> dict[str, Any]:
    """Train, and return what this process has seen and recorded."""
    stages, heads = network(case.kind)
    made: list[CpuGraphs] = []

    def make(device: torch.device) -> CpuGraphs:
        made.append(CpuGraphs(device))
        return made[-1]

    if device.type == "cpu":
        capture.make_graphs = make  # type: ignore[assignment]  # graphs of the CPU
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = nn.functional.cross_entropy, case.strategy, case.m
        pipe = nwise.Pipeline(
            stages, heads, *settings, seed=1, placement=case.placement, capture=captured, **case.options
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
            x = torch.randn(size, 6, generator=generator).to(device)
            y = torch.randint(0, 4, (size,), generator=generator).to(device)
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
            changed = 4 if case.change is less_dropout else 1 if case.change is frozen else None
            assert bool(one["segments"]) != fails, (case, rank)
            assert ["Stage 4 reads a value" in text for text in one["warnings"]] == [True] * fails, (case, rank)
            if device.type == "cpu" and not fails and case.change is not to_local:
                assert one["graphs"] == (1 + (changed in one["stages"])) * sum(one["segments"]), (case, rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write([run(case, captured=True) for case in CASES[int(sys.argv[2])]])
