"""Two replicas: gradients of all kinds against plain autograd, and what one replica has otherwise than the other."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import nwise
from nwise.program.arguments import refuse_wrappers
from nwise.runtime.launch import start
from nwise.runtime.replicas import Replicas
from nwise.stage.stage import Stage
from ranks.common import RANK, closed, write

cross_entropy = nn.functional.cross_entropy


def draw(step: int, size: int, *shape: int) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def classes(step: int, size: int, count: int = 3) -> Tensor:
    return torch.randint(count, (size,), generator=torch.Generator().manual_seed(step + 99))


class Sparse(nn.Module):
    """A table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.table(x))


class Complex(nn.Module):
    """Complex and empty parameters, and a buffer of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.inner = nn.Linear(4, 3, dtype=torch.float64)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x.to(torch.complex128) @ self.weight).abs())


class Halved(nn.Module):
    """Layers in bfloat16 and float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.bfloat16()).double())


class Sometimes(nn.Module):
    """A layer that only some samples use, so only one replica has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        used = x[:, 0] > 1
        extra = self.seldom(x[used]) if used.any() else x.new_zeros(0, 3)
        return self.always(x).index_add(0, used.nonzero()[:, 0], extra)


def images() -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3))
    return layers.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def ignoring(step: int) -> tuple[Tensor, Tensor]:
    """Samples of which one replica has none that counts."""
    target = classes(step, 6)
    target[: 3 if step % 2 else 1] = -100
    return draw(step, 6, 4), target


def seven(step: int) -> tuple[Tensor, Tensor]:
    return draw(step, 7, 4), classes(step, 7)


def linear() -> nn.Module:
    return nn.Linear(4, 3).double()


Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], int]
CASES: dict[str, Case] = {
    "sparse": (lambda: Sparse().double(), lambda i: (classes(i, 7, 9), classes(i, 7)), 1),
    "sparse, accumulated": (lambda: Sparse().double(), lambda i: (classes(i, 7, 9), classes(i, 7)), 2),
    "complex": (Complex, seven, 1),
    "two precisions": (Halved, seven, 1),
    "channels last": (images, lambda i: (draw(i, 7, 2, 4, 4), classes(i, 7)), 1),
    "odd batches": (linear, lambda i: (draw(i, (5, 2, 3, 7)[i], 4), classes(i, (5, 2, 3, 7)[i])), 1),
    "ignored targets": (linear, ignoring, 1),
    "seldom used": (Sometimes, seven, 1),
    "accumulated": (linear, seven, 2),
}


def error(name: str) -> float:
    """Train four steps in two replicas and in plain PyTorch; return the largest difference of a parameter."""
    make, data, every = CASES[name]
    torch.manual_seed(0)
    net = make()
    plain = copy.deepcopy(net)
    if RANK:
        for p in net.parameters():
            p.data.add_(1)  # replicas that start otherwise are made equal
    pipe = nwise.Pipeline([net], None, cross_entropy, "end-to-end", seed=0)
    updates = [torch.optim.SGD(module.parameters(), lr=0.3) for module in (net, plain)]
    for step in range(4):
        x, y = data(step)
        pipe.step(x, target=y)
        cross_entropy(plain(x), y).backward()
        for update in updates if (step + 1) % every == 0 else ():
            update.step()
            update.zero_grad()
    both = zip(net.parameters(), plain.parameters(), strict=True)
    return float(closed(pipe, max((p - q).detach().abs().max().item() for p, q in both if p.numel())))


def refusals() -> dict[str, str]:
    """What the replicas of a stage, made without a pipeline, say if one of them differs."""
    group = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)).get_group()
    said: dict[str, str] = {}

    def try_to(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except ValueError as found:
            said[name] = str(found)
        dist.barrier()

    def stage() -> Stage:
        torch.manual_seed(0)
        made = Stage(0, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), None, cross_entropy)
        made.survey(made.module, None)
        return made

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    changes: dict[str, Callable[[Any], object]] = {
        "frozen": lambda net: net[0].requires_grad_(RANK == 0),
        "other layers": lambda net: net.extend([nn.Linear(3, 2)] * RANK),
    }
    for name, change in changes.items():
        one = stage()
        change(one.module)
        try_to(name, lambda one=one: Replicas(group, one))  # type: ignore[misc]

    split = nn.Linear(4, 4)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh, [Shard(0)]))
    try_to("split", lambda: refuse_wrappers([split]))
    alike = stage()
    replicas = Replicas(group, alike)

    def step() -> None:
        alike.survey(alike.module, None)
        replicas.start()
        alike.module(torch.ones(2, 4)).sum().backward()
        replicas.begin()
        replicas.finish()

    try_to("nothing", step)
    next(alike.module.parameters()).requires_grad_(False)
    try_to("frozen later", step)
    return said


class Buffered(nn.Linear):
    """Has a mean, which is a state, and a table, which is none."""

    def __init__(self) -> None:
        super().__init__(4, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)


def other_values() -> list[list[str]]:
    """What a check finds if replicas load other values later: rounding, other values, other buffers, and such that may differ."""
    found = []
    for what, change in (("weight", 1e-9), ("weight", 1e-3), ("mean", 1.0), ("table", 1.0)):
        pipe = nwise.Pipeline([Buffered()], None, cross_entropy, "end-to-end", seed=0)
        x, y = seven(0)
        pipe.step(x, target=y)
        getattr(pipe.stages[0], what).data.flatten()[0] += change * RANK
        found.append([str(one) for one in nwise.check(pipe, x, target=y).findings])
        pipe.close()
    return found


def refused(stages: list[nn.Module], loss: Callable[..., Tensor], x: Tensor) -> str:
    """What a first step says."""
    pipe = nwise.Pipeline(stages, None, loss, "end-to-end", seed=0)
    try:
        pipe.step(x, target=classes(0, 7))
    except ValueError as found:
        return str(closed(pipe, f"{type(found).__name__}: {found}"))
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("NWISE_TIMEOUT", "30")
    start()
    found = {"refusals": refusals(), "values": other_values(), "errors": {name: error(name) for name in CASES}}
    outside, x = torch.ones((), requires_grad=True), draw(0, 7, 4)
    found["loss"] = refused([nn.Linear(4, 4).double(), linear()], lambda y, t: outside * cross_entropy(y, t), x)
    write(found | {"inputs": refused([linear()], cross_entropy, x + RANK)})
