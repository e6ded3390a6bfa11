"""Stages that break the contract (docs/contract.md), or only look as if they did, and what the check says of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nwise
from nets import InPlace
from nwise.findings import (
    BUFFERS,
    NOTHING,
    OUTSIDE,
    PLAIN,
    RERUN,
    SAMPLES,
    STEP,
)

WIDTH = 4
X, Y = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, WIDTH).sin(), torch.tensor([0, 1, 2, 2, 1, 0, 0, 1])


class Between(nn.Linear):
    """A layer with a function behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


def function(backward: Callable[[Any, Tensor], Tensor], forward: Callable[[Tensor], Tensor] = torch.tanh) -> Any:
    """An autograd function of one tensor."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x, ctx.walks = x.detach(), 0
            return forward(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Tensor:
            ctx.walks += 1
            return backward(ctx, gradients[0])

    return Custom.apply


def slope(ctx: Any, g: Tensor) -> Tensor:
    return g * (1 - ctx.x.tanh().square())


def frees(ctx: Any, g: Tensor) -> Tensor:
    assert g.any(), "a cotangent of zeros"
    result, ctx.x = slope(ctx, g), None
    return result


def scales_what_it_saved(ctx: Any, g: Tensor) -> Tensor:
    result = slope(ctx, g)
    ctx.x.mul_(0.5)
    return result


class Injecting(torch.autograd.Function):
    """What users write instead of `nwise.inject`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, aux: Tensor) -> Tensor:
        ctx.like = aux
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.like)


injecting: Any = Injecting.apply


def hooked(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor]:
    def put_on(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(hook)
        return h.tanh()

    return put_on


class Removing(nn.Linear):
    """A hook that removes itself, as in deep equilibrium models."""

    handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if h.requires_grad:
            self.handle = h.register_hook(self.halve)
        return h.tanh()

    def halve(self, g: Tensor) -> Tensor:
        self.handle.remove()
        return g / 2


class Reversed(nn.Module):
    """Computes its layer again in the backward, which adds to gradients itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer

        class Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
                ctx.x = x.detach()
                return layer(x).detach()

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None]:
                with torch.enable_grad():
                    x = ctx.x.requires_grad_()
                    layer(x).backward(gradients[0])
                return x.grad, None

        again: Any = Again.apply
        return cast(Tensor, again(x, layer.weight))


class Counting(nn.Linear):
    """Counts its forwards in a buffer, in a block that runs again, or only where there is a graph."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how = how
        self.register_buffer("count", torch.zeros(()))

    def whole(self, x: Tensor) -> Tensor:
        if self.how != "graph" or torch.is_grad_enabled():
            cast(Tensor, self.count).add_(1)
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.whole, x, use_reentrant=False) if self.how == "block" else self.whole(x)


class Moody(nn.Linear):
    """Skips its layer or not, as something outside tells it."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how, self.calls, self.own = how, 0, torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = 1 + torch.rand((), generator=self.own) if self.how == "generator" else self.calls
        return super().forward(x) * factor


outer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
TENSORS: dict[str, Callable[[], nn.Module]] = {
    "adds a gradient": lambda: Between(lambda h: injecting(h, 0.1 * h.square().mean())),
    "adds to each gradient": lambda: Between(hooked(lambda g: g + 0.1)),
    "normalises": lambda: Between(hooked(lambda g: g / g.norm())),
    "keeps a state": lambda: Between(function(lambda ctx, g: slope(ctx, g) * ctx.walks)),
    "frees what it saved": lambda: Between(function(frees)),
    "writes over what it saved": lambda: Between(function(scales_what_it_saved)),
    "writes in place": lambda: Between(hooked(lambda g: g.mul_(2))),
    "removes its hook": lambda: Removing(WIDTH, WIDTH),
    "adds to .grad": Reversed,
    "a closure": lambda: Between(lambda h: outer(h)),
    "counts in a block": lambda: Counting("block"),
    "counts with a graph": lambda: Counting("graph"),
    "counts": lambda: Counting("plain"),
    "a counter": lambda: Moody("counter"),
    "a generator of its own": lambda: Moody("generator"),
    "mixes samples": lambda: Between(lambda h: h - h.mean(0)),
    "its own norm": lambda: Between(lambda h: (h - h.mean(0)) / (h.var(0) + 1).sqrt()),
    "reentrant": lambda: Reentrant(WIDTH, WIDTH),
    "detached": lambda: Between(lambda h: h.detach()),
    "a batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "writes over its cotangent": lambda: Scaled(),
    "Python's numbers": lambda: Between(lambda h: h * random.random()),
    "NumPy's numbers": lambda: Between(lambda h: h * float(np.random.rand())),  # noqa: NPY002
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)),
    "injects": lambda: Between(lambda h: nwise.inject(h, 0.1 * h.square().mean())),
    "looks on": lambda: Between(hooked(lambda g: None)),
}


class Reentrant(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(super().forward, x, use_reentrant=True))


class Scaled(nn.Module):
    """Stores the gradient of its input over that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = InPlace.apply
        return cast(Tensor, apply(self.layer(x), self.scale))


# What a stage gives in a setting: none, or the kind of its finding. The first setting is plain autograd, micro-batch by
# micro-batch, and the others walk graphs in parts.
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"strategy": "end-to-end"},
    "parts": {"strategy": "end-to-end", "num_microbatches": 2},
    "split": {"strategy": "end-to-end", "schedule": "zero-bubble"},
    "several": {"strategy": "2-wise-mean", "num_microbatches": 4},
    "again": {"strategy": "end-to-end", "recompute": True, "num_microbatches": 2},
}
KINDS: dict[str, tuple[str | None, str | None, str | None, str | None, str | None]] = {
    "adds a gradient": (None, SAMPLES, None, STEP, SAMPLES),
    "adds to each gradient": (None, None, None, STEP, None),
    "normalises": (None, SAMPLES, None, STEP, SAMPLES),
    "keeps a state": (None, None, None, STEP, None),
    "frees what it saved": (None, None, None, "raises", None),
    "writes over what it saved": (None, None, None, STEP, None),
    "writes in place": (None, None, STEP, None, None),
    "removes its hook": (None, None, None, STEP, None),
    "adds to .grad": (None, None, STEP, STEP, None),
    "a closure": (OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE),
    "counts in a block": (None, None, BUFFERS, BUFFERS, None),
    "counts with a graph": (None, None, None, None, BUFFERS),
    "counts": (None, None, None, None, None),
    "a counter": (PLAIN, PLAIN, PLAIN, PLAIN, RERUN),
    "a generator of its own": (PLAIN, PLAIN, PLAIN, PLAIN, RERUN),
    "mixes samples": (None, SAMPLES, None, SAMPLES, SAMPLES),
    "its own norm": (None, SAMPLES, None, SAMPLES, SAMPLES),
    "reentrant": ("raises", "raises", "raises", "raises", "raises"),
    "detached": (NOTHING, NOTHING, NOTHING, NOTHING, NOTHING),
    "a batch norm": (None, None, None, None, None),
    "writes over its cotangent": (None, None, None, None, None),
    "Python's numbers": (None, None, None, None, None),
    "NumPy's numbers": (None, None, None, None, None),
    "dropout": (None, None, None, None, None),
    "injects": (None, None, None, None, None),
    "looks on": (None, None, None, None, None),
}
