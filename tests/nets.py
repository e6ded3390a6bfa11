"""Small networks for the tests, in stages with heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.heads import OnFirstOutput
from nwise.network.layers import Embedding, TransformerBlock, vocabulary

LossFn = Callable[..., Tensor]


class Tally:
    """A count in an object without `__dict__`, which no second run of a forward restores."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclass
class Net:
    """Stages, heads, a loss and a way to draw data."""

    stages: list[nn.Module]
    heads: list[nn.Module | None]
    loss_fn: LossFn
    draw: Callable[[int], tuple[Tensor, Tensor]]
    batch_statistics: bool = False


def perceptron(num_stages: int) -> Net:
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(num_stages)]
    heads: list[nn.Module | None] = [nn.Linear(5, 4) for _ in range(num_stages - 1)]
    stages[-1] = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    return Net(stages, heads, nn.functional.cross_entropy, lambda n: (torch.randn(n, 5), torch.randint(0, 4, (n,))))


def convolutional(num_stages: int) -> Net:
    channels = [2, *[3] * num_stages]
    stages: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(channels[k], channels[k + 1], 3, padding=1), nn.BatchNorm2d(channels[k + 1]), nn.ReLU())
        for k in range(num_stages)
    ]
    stages[-1] = nn.Sequential(stages[-1], nn.Flatten(), nn.Linear(3 * 16, 4))
    heads: list[nn.Module | None] = [
        nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16, 4)) for _ in range(num_stages - 1)
    ]
    return Net(
        stages,
        heads,
        nn.functional.cross_entropy,
        lambda n: (torch.randn(n, 2, 4, 4), torch.randint(0, 4, (n,))),
        batch_statistics=True,
    )


class Mixed(nn.Module):
    """Takes and gives a tuple: a float tensor that learns, another float tensor, and an integer one."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.mix = nn.Linear(4, 4)
        self.side = nn.Linear(4, 3)

    def forward(self, x: Tensor, side: Tensor | None = None, index: Tensor | None = None) -> tuple[Tensor, ...]:
        if side is None or index is None:
            side, index = x.sum(-1, keepdim=True).expand(-1, 3), x.argmax(-1)
        hidden = torch.tanh(self.mix(x)) + side.sum(-1, keepdim=True)
        return hidden, torch.sin(self.side(hidden)) * side, index


class MixedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(7, 4)
        self.shift = nn.Embedding(4, 4)

    def forward(self, x: Tensor, side: Tensor, index: Tensor) -> Tensor:
        return self.classify(torch.cat([x, side], -1)) + self.shift(index)


def tuples(num_stages: int) -> Net:
    stages: list[nn.Module] = [Mixed(first=k == 0) for k in range(num_stages)]
    heads: list[nn.Module | None] = [MixedHead() for _ in range(num_stages - 1)]

    def loss(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        logits = output[0] + output[1].mean() if isinstance(output, tuple) else output
        return nn.functional.cross_entropy(logits, target)

    return Net(stages, heads, loss, lambda n: (torch.randn(n, 4), torch.randint(0, 4, (n,))))


class ByName(nn.Module):
    """A stage or head of `tuples` that takes names and, if it is a stage, gives them, in another order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | dict[str, Tensor]:
        places = ("x", "side", "index")
        made = self.inner(*inputs, *(named[name] for name in places if name in named))
        return {name: made[places.index(name)] for name in ("side", "index", "x")} if isinstance(made, tuple) else made


def names(num_stages: int) -> Net:
    """The network of `tuples` with dictionaries between its stages, and as its output."""
    net = tuples(num_stages)

    def loss(output: Tensor | dict[str, Tensor], target: Tensor) -> Tensor:
        return net.loss_fn((output["x"], output["side"]) if isinstance(output, dict) else output, target)

    return Net([ByName(s) for s in net.stages], [ByName(h) for h in net.heads if h is not None], loss, net.draw)


class Way(nn.Module):
    """A piece of a U-Net: down, it keeps its input under the name of a skip; up, it reads the skip, and drops it."""

    def __init__(self, ins: int, outs: int, skip: str = "") -> None:
        super().__init__()
        self.skip, self.up = skip, outs > ins
        self.layer = nn.Linear(ins + outs if self.up else ins, outs)

    def forward(self, hidden: Tensor, **skips: Tensor) -> dict[str, Tensor]:
        inputs = torch.cat([hidden, skips.pop(self.skip)], -1) if self.up else hidden
        kept = {self.skip: hidden} if self.skip and not self.up else {}
        return {**skips, "hidden": torch.tanh(self.layer(inputs)), **kept}


class Ways(nn.ModuleList):
    """Pieces of a U-Net in one stage; the last output is a tensor."""

    def forward(self, hidden: Tensor, **skips: Tensor) -> Tensor | dict[str, Tensor]:
        made = {"hidden": hidden, **skips}
        for piece in self:
            made = piece(**made)
        return made if len(made) > 1 else made["hidden"]


def unet(num_stages: int) -> Net:
    """A U-Net with two skips in up to five stages; heads look at the output and ignore the skips."""
    pieces = [Way(8, 4, "full"), Way(4, 2, "half"), Way(2, 2), Way(2, 4, "half"), Way(4, 8, "full")]
    last = min(num_stages, len(pieces)) - 1
    stages: list[nn.Module] = [*(Ways([piece]) for piece in pieces[:last]), Ways(pieces[last:])]
    heads: list[nn.Module | None] = [OnFirstOutput(nn.Linear(width, 8)) for width in (4, 2, 2, 4)[:last]]
    return Net(stages, heads, nn.functional.mse_loss, lambda n: (torch.randn(n, 8), torch.randn(n, 8)))


class Every(nn.Module):
    """A loss over all tokens ``[B, T]``."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(num_stages: int) -> Net:
    stages: list[nn.Module] = [TransformerBlock(8, 2) for _ in range(num_stages)]
    stages[0] = nn.Sequential(Embedding(11, 5, 8), stages[0])
    stages[-1] = nn.Sequential(stages[-1], vocabulary(8, 11))
    heads: list[nn.Module | None] = [vocabulary(8, 11) for _ in range(num_stages - 1)]
    return Net(stages, heads, Every(), lambda n: (torch.randint(0, 11, (n, 5)), torch.randint(0, 11, (n, 5))))


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


def some_without_parameters(num_stages: int) -> Net:
    """Every second stage has nothing to train."""
    net = perceptron(num_stages)
    for k in range(0, num_stages - 1, 2):
        net.stages[k] = Half()
    return net


ZOO = {
    make.__name__: make for make in (perceptron, convolutional, tuples, names, unet, tokens, some_without_parameters)
}


X, Y = torch.linspace(-1, 1, 48).view(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])


def three(strategy: str | nwise.Strategy, heads: bool = True, **options: Any) -> nwise.Pipeline:
    sides = [nn.Linear(8, 3), nn.Linear(8, 3)] if heads else None
    return nwise.Pipeline([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)], sides, strategy=strategy, **options)


def train(pipe: nwise.Pipeline, steps: int) -> list[list[int]]:
    """Ages of the parameters in every step."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    ages = []
    for _ in range(steps):
        pipe.step(X, target=Y)
        ages.append(pipe.staleness.flatten().tolist())
        optimizer.step()
        optimizer.zero_grad()
    return ages


def equal(a: Any, b: Any) -> bool:
    """Whether two states are equal in type, dtype, memory order and every bit."""
    if isinstance(a, Tensor):
        same = isinstance(b, Tensor) and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return bool(same and torch.equal(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


class InPlace(torch.autograd.Function):
    """Scales by a weight; the gradient of the input is stored over that of the output, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,), (x, w) = grads, ctx.saved_tensors
        dw = (g * x).sum_to_size(w.shape)
        # A kernel's write raises no version counter, and `.data` raises none either.
        g.data.mul_(w)
        return g, dw
