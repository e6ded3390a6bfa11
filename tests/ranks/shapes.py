"""Shapes that change from step to step, through stages that look at values, as homemade ones do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.compression import named
from nwise.modes import evaluating
from ranks.common import closed, digests

WORDS, WIDTH = 7, 4


@functools.lru_cache
def causal(length: int) -> Tensor:
    """A mask that is made once for every length."""
    return torch.ones(length, length, dtype=torch.bool).tril()


class First(nn.Module):
    """Gives a dictionary; the integers in it have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"ids": ids, "hidden": self.inner(ids)}


class Block(nn.Module):
    """Caches a mask, keeps its last output with the graph, and looks at values by numpy, by `item` and by a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.last: Tensor | None = None

    def forward(self, ids: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        mask = causal(ids.shape[1])
        assert type(mask) is Tensor
        q, k, v = self.inner(hidden).chunk(3, -1)
        hidden = hidden + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        largest = abs(hidden.detach().numpy()).max(axis=(1, 2), keepdims=True)
        hidden = hidden / torch.from_numpy(largest).clamp(min=1.0)
        signs = [-1.0 if row[0].item() > 2 else 1.0 for row in ids]
        if min(signs) < 0:
            hidden = hidden * torch.tensor(signs, dtype=hidden.dtype).view(-1, 1, 1)
        self.last = hidden
        return {"ids": ids, "hidden": hidden}


class Last(nn.Module):
    """Logits of the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


def homemade(num_stages: int, strategy: str, num_microbatches: int = 1, **options: Any) -> nwise.Pipeline:
    """A pipeline of these."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [First(), *(Block() for _ in range(num_stages - 2)), Last()]
    heads = [Last() for _ in range(num_stages - 1)]
    return nwise.Pipeline(
        stages, heads, nwise.losses.TokenCrossEntropy(), strategy, num_microbatches, seed=1, **options
    )


def texts(lengths: Sequence[int], size: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Batches of texts of these lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randint(0, WORDS, (size, n), generator=generator),
            torch.randint(0, WORDS, (size, n), generator=generator),
        )
        for n in lengths
    ]


LENGTHS = (3, 5, 4, 4, 4, 2, 3, 3, 1, 1, 7)


def changing(
    num_stages: int, strategy: str, num_microbatches: int = 1, then: tuple[int, str] | None = None, **options: Any
) -> Any:
    """Another length in almost every step, forwards of others in between, and gradients that are asked for at once."""
    pipe = homemade(num_stages, strategy, num_microbatches, **options)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    seen = []

    def finish() -> None:
        update.step()
        update.zero_grad()

    for i, (x, y) in enumerate(texts(LENGTHS)):
        if then is not None and i == then[0]:
            pipe.strategy = then[1]
        pipe.step(x, target=y)
        finish()
        if i in (2, 7, 8):
            sent = pipe.bytes_per_step
            pipe.pending_gradients()
            assert pipe.bytes_per_step == sent, "its messages belong to no step"
        if i in (4, 9):
            while pipe.drain():
                finish()
        if i % 3 == 1:
            with torch.no_grad():
                outputs: list[Any] = pipe.head_outputs(x[: i % 4 + 1, :2] if i % 2 else x)
                pipe(x)
            seen.append([None if one is None else round(one.double().sum().item(), 9) for one in outputs])
    while pipe.drain():
        finish()
    found = {f"seen {k}": [one[k] for one in seen] for k in pipe.processes.here}
    return closed(pipe, found | {name.replace(".", " "): digest for name, digest in digests(pipe).items()})


def many() -> Any:
    """Forty shapes, of which two are in each mini-batch, and the first again."""
    stages: list[nn.Module] = [nn.PReLU() for _ in range(3)]
    pipe = nwise.Pipeline(stages, None, nn.functional.mse_loss, "end-to-end", 2)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for n in (*range(1, 21), 1, 2, 20):
        x = torch.randn(3, n, generator=generator)
        pipe.step(x, target=x.abs())
        update.step()
        update.zero_grad()
    return closed(pipe, digests(pipe))


class Sparse(nn.Module):
    """Drops rows by their values when it does not train, and adds a second output when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        y = self.inner(x)
        return (y, y.mean()) if self.training else y[y[:, 0] > 0]


class Main(nn.Module):
    """Uses the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        return self.inner(x)


def other_modes() -> Any:
    """A forward alone may give shapes that depend on values, and others in evaluation than in training."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [Sparse(), Sparse(), Main()]
    pipe = nwise.Pipeline(stages, None, nn.functional.cross_entropy, "end-to-end", 2, seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    generator, found = torch.Generator().manual_seed(0), []
    for size in (6, 6, 7, 6):
        x = torch.randn(size, WIDTH, generator=generator)
        pipe.step(x, target=torch.arange(size) % 3)
        update.step()
        update.zero_grad()
        for mode in (nullcontext(), evaluating(pipe)):
            with torch.no_grad(), mode:
                output = pipe(x)
            if output is not None:
                found.append(output.tolist())
    if 2 not in pipe.processes.here:
        return closed(pipe, digests(pipe))
    assert len(set(map(len, found))) > 2
    return closed(pipe, {**digests(pipe), "found.2": found})


CASES: dict[str, Callable[[], Any]] = {
    "lengths, 2-wise": lambda: changing(3, "2-wise"),
    "lengths, uneven micro-batches": lambda: changing(3, "end-to-end", 3),
    "lengths, interleaved": lambda: changing(6, "3-wise-mean", 2, placement="interleaved"),
    "lengths, delay": lambda: changing(3, "2-wise-delay-1", 2),
    "lengths, longer delay": lambda: changing(6, "end-to-end-delay-2", placement="v"),
    "lengths, hogwild": lambda: changing(3, "hogwild", 2),
    "lengths, rotating": lambda: changing(3, "rotating-2", 2),
    "lengths, rotating with delay": lambda: changing(3, "rotating-2-delay-1"),
    "lengths, local": lambda: changing(3, "local"),
    "lengths, switch": lambda: changing(3, "local", then=(6, "3-wise-delay-1")),
    "lengths, int8": lambda: changing(3, "2-wise-delay-1", 2, compress=named("int8")),
    "lengths, largest": lambda: changing(3, "2-wise-mean", compress=named("top-20%")),
    "lengths, recompute": lambda: changing(3, "2-wise-mean", 2, recompute=True),
    "many lengths": many,
    "other modes": other_modes,
}
