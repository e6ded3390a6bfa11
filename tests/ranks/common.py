"""What the scripts have in common: a network with dropout, batches, and training it.

`NWISE_TEST_DEVICE=cuda` puts those of `equality`, `placements` and `mesh` on GPUs, so messages travel over nccl; the process that
checks them has to have it too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.runtime.launch import local_gpu

RANK = int(os.environ.get("RANK", "0"))
DEVICE = torch.device(os.environ.get("NWISE_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    assert torch.cuda.device_count(), "NWISE_TEST_DEVICE=cuda needs a GPU"
    DEVICE = torch.device("cuda", local_gpu())
    torch.cuda.set_device(DEVICE)


def network(num_stages: int, width: int = 6) -> tuple[list[nn.Module], list[nn.Module]]:
    """Stages and heads with dropout, the same on every rank."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, width))
        for _ in range(num_stages)
    ]
    heads: list[nn.Module] = [nn.Sequential(nn.Linear(width, 4), nn.Dropout(0.2)) for _ in range(num_stages - 1)]
    stages[-1] = nn.Sequential(stages[-1], nn.Linear(width, 4))
    return [stage.to(DEVICE) for stage in stages], [head.to(DEVICE) for head in heads]


def batches(count: int, width: int = 6, sizes: Sequence[int] = (8,)) -> list[tuple[Tensor, Tensor]]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(n, width, generator=generator).to(DEVICE),
            torch.randint(0, 4, (n,), generator=generator).to(DEVICE),
        )
        for n in (sizes[i % len(sizes)] for i in range(count))
    ]


def pipeline(
    num_stages: int,
    strategy: str | nwise.Strategy,
    num_microbatches: int,
    *,
    frozen: Sequence[int] = (),
    loss: Any = nn.functional.cross_entropy,
    **options: Any,
) -> nwise.Pipeline:
    """A pipeline of `network`, of which some stages may be frozen."""
    stages, heads = network(num_stages)
    for k in frozen:
        stages[k].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an n beyond the number of stages
        return nwise.Pipeline(stages, heads, loss, strategy, num_microbatches, seed=1, **options)


def make_optimizer(name: str, pipe: nwise.Pipeline) -> torch.optim.Optimizer:
    """Momentum SGD or Adam."""
    if name == "sgd":
        return torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(pipe.parameters(), lr=0.01)


def trained(
    pipe: nwise.Pipeline, optimizer: str, data: Sequence[tuple[Tensor, Tensor]], then: tuple[int, str] | None = None
) -> list[list[float]]:
    """Train, from a step on by another strategy; the losses of every step."""
    update = make_optimizer(optimizer, pipe)
    losses = []
    for step, (x, y) in enumerate(data):
        if then is not None and step == then[0]:
            pipe.strategy = then[1]
        losses.append(pipe.step(x, target=y).tolist())
        update.step()
        update.zero_grad()
    return losses


def digests(pipe: nwise.Pipeline) -> dict[str, str]:
    """Every bit of every parameter that this process holds, by name."""
    return {name: digest(p) for name, p in pipe.named_parameters()}


def digest(tensor: Tensor) -> str:
    """Every bit of a tensor."""
    return hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest()


def closed(pipe: nwise.Pipeline, value: Any) -> Any:
    """The value, after the other processes have what they need."""
    pipe.close()
    return value


def write(value: Any) -> None:
    """This rank's result."""
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(value))
