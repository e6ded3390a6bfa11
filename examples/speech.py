"""A speech encoder with a CTC exit after every two layers, as early-exit speech models train it, and the same in stages.

    python examples/speech.py        # the difference of both loops after three updates, then 300 updates on drawn words

The published loop adds the losses of all exits. In stages it is ``"deep-supervision"``: micro-batches replace batches cut by
hand, and other strategies are a word. Lengths travel with the features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise

STAGES, WIDTH, SYMBOLS, FEATURES = 3, 32, 6, 8  # symbol 0 is CTC's blank
Outputs = tuple[Tensor, Tensor]


class Front(nn.Module):
    """Two strided convolutions and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(FEATURES, WIDTH, 3, 2, 1)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, 2, 1)
        self.positions = nn.Parameter(0.02 * torch.randn(64, WIDTH))

    def forward(self, frames: Tensor, lengths: Tensor) -> Outputs:
        x = self.second(self.first(frames.transpose(1, 2)).relu()).relu().transpose(1, 2)
        return x + self.positions[: x.shape[1]], (lengths + 3) // 4


class Layers(nn.Module):
    """Two Transformer layers that do not look behind the end of a word."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Outputs:
        behind = torch.arange(x.shape[1]) >= lengths.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=behind)
        return x, lengths


class Exit(nn.Module):
    """Log-probabilities of the symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, x: Tensor, lengths: Tensor) -> Outputs:
        return self.output(x).log_softmax(2), lengths


class Sequence(nn.Module):
    """Modules of features and lengths, one after the other."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Tensor, lengths: Tensor) -> Outputs:
        for part in self.parts:
            x, lengths = part(x, lengths)
        return x, lengths


def ctc(outputs: Outputs, target: Outputs) -> Tensor:
    """Return the CTC loss, a mean over words."""
    (logs, frames), (symbols, lengths) = outputs, target
    return functional.ctc_loss(logs.transpose(0, 1), symbols, frames, lengths, blank=0, zero_infinity=True)


def network() -> tuple[list[nn.Module], list[nn.Module]]:
    """Return stages of two layers, and an exit for each."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [Sequence(Front(), Layers()), *(Layers() for _ in range(STAGES - 1))]
    return stages, [Exit() for _ in range(STAGES)]


def words(steps: int, count: int = 12) -> Iterator[tuple[Outputs, Outputs]]:
    """Iterate over mini-batches of drawn words: a symbol is a spectrum that sounds for 6 to 11 frames, in noise."""
    drawn = torch.Generator().manual_seed(1)
    spectra = torch.randn(SYMBOLS, FEATURES, generator=drawn)
    for _ in range(steps):
        lengths = torch.randint(2, 6, (count,), generator=drawn)
        symbols = torch.randint(1, SYMBOLS, (count, 5), generator=drawn)
        held = torch.randint(6, 12, (count, 5), generator=drawn) * (torch.arange(5) < lengths.unsqueeze(1))
        frames = torch.zeros(count, 56, FEATURES)
        for k in range(count):
            frames[k, : held[k].sum()] = spectra[symbols[k].repeat_interleave(held[k])]
        yield (frames + 0.3 * torch.randn(frames.shape, generator=drawn), held.sum(1)), (symbols, lengths)


def plain(stages: list[nn.Module], exits: list[nn.Module], steps: int) -> None:
    """Train by the published loop: one sum of the losses of all exits."""
    parameters = list(nn.ModuleList([*stages, *exits]).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    for (x, lengths), target in words(steps):
        losses = []
        for stage, end in zip(stages, exits, strict=True):
            x, lengths = stage(x, lengths)
            losses.append(ctc(end(x, lengths), target))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def staged(
    stages: list[nn.Module], exits: list[nn.Module], steps: int, microbatches: int, strategy: str = "deep-supervision"
) -> nwise.Pipeline:
    """Train in stages; under torchrun each process has one."""
    stages = [*stages[:-1], Sequence(stages[-1], exits[-1])]
    pipe = nwise.Pipeline(stages, exits[:-1], ctc, strategy, microbatches, seed=0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    for inputs, target in words(steps):
        pipe.step(*inputs, target=target)
        nwise.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return pipe


def difference(microbatches: int, steps: int = 3) -> float:
    """Return the largest difference of the weights after some updates by both loops."""
    ours, theirs = network(), network()
    staged(*ours, steps, microbatches)
    plain(*theirs, steps)
    pairs = [nn.ModuleList([*first, *second]).parameters() for first, second in (ours, theirs)]
    return max(float((a - b).detach().abs().max()) for a, b in zip(*pairs, strict=True))


if __name__ == "__main__":
    for microbatches in (1, 3):
        print(f"largest difference after three updates, M = {microbatches}: {difference(microbatches):.1e}")
    for strategy in ("deep-supervision", "2-wise-mean"):
        score = staged(*network(), 300, 3, strategy).score(words(10), ctc)
        print(f"{strategy:18}CTC loss of the exits:", [round(one, 3) for one in score.tolist()])
