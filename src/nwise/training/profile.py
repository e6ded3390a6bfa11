"""Profile: the measured cost of each piece of a network on this machine, for the planner.

Every piece runs alone on the output of the one before, at each requested size of micro-batch: forward, gradient of its input
only (I), of its weights only (W with its chain), of both (B), its update, and a head behind it. The result is the median of
some rounds. The rounds of all pieces take turns, so a busy moment affects all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from nwise._memory import allocated
from nwise.data import Images, Tokens
from nwise.recipes import Adam, Recipe, Sgd
from nwise.schedule.partition import Piece
from nwise.tensors import Tensors, run_module
from nwise.training.build import autocast, make_loss
from nwise.training.optimizers import make_optimizer
from nwise.training.sizes import PieceSizes, head_sizes


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of every piece, in seconds and bytes.

    Args:
        pieces: the pieces, by the number of micro-batches per mini-batch.
        device: the device they were measured on.
        batch_size: samples in a mini-batch.
        starts: index of the first piece of every stage of the recipe's network.
        spread: half the distance between the quartiles of the rounds over their median; nan for a single round.
    """

    pieces: dict[int, list[Piece]]
    device: str
    batch_size: int
    starts: tuple[int, ...]
    spread: float


def profile(
    recipe: Recipe,
    data: Images | Tokens,
    microbatches: Sequence[int],
    *,
    device: torch.device,
    rounds: int = 5,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Profile:
    """Measure a recipe's network.

    Args:
        recipe: the recipe of the network, with batch size and optimizer.
        data: the data, whose first samples are used.
        microbatches: numbers M of micro-batches, at most the batch size.
        device: the device to measure on.
        rounds: number of rounds after a warm-up round; default 5.
        progress: wraps the list of measurements, for a progress bar.

    Raises:
        ValueError: a number of micro-batches is above the batch size.
    """
    for m in microbatches:
        if not 1 <= m <= recipe.batch_size:
            raise ValueError(f"`microbatches` should be from 1 to the batch size of {recipe.batch_size}. Found {m}.")
    bench = _Bench(recipe, data, device)
    times: dict[tuple[int, int], list[dict[str, float]]] = {}
    todo = [(r, m, i) for r in range(rounds + 1) for m in microbatches for i in range(len(bench.names))]
    for r, m, i in progress(todo):
        seconds = bench.measure(i, recipe.batch_size // m)
        if r:
            times.setdefault((m, i), []).append(seconds)
    pieces = {
        m: [_piece(bench, i, times[m, i], recipe.batch_size // m) for i in range(len(bench.names))]
        for m in microbatches
    }
    return Profile(pieces, str(device), recipe.batch_size, bench.starts, _spread(list(times.values())))


def _spread(times: list[list[dict[str, float]]]) -> float:
    totals = [sum(sum(seconds.values()) for seconds in column) for column in zip(*times, strict=True)]
    if len(totals) < 2:
        return float("nan")
    low, middle, high = statistics.quantiles(totals, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _piece(bench: _Bench, i: int, rounds: list[dict[str, float]], size: int) -> Piece:
    """Take medians, and separate the work that the passes share."""
    median = {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}
    through, weights, both = median["input_grad"], median["weights"], median["both"]
    alone = max(0.0, both - through)  # added by weights to a pass that computes the input's gradient anyway
    return Piece(
        name=bench.names[i],
        forward=median["forward"],
        input_grad=through,
        weight_grad=alone,
        chain=min(through, max(0.0, weights - alone)),
        head=median["head"],
        update=median["update"],
        **bench.sizes(i, size),
    )


class _Bench:
    """The pieces of a network, with an input for each."""

    def __init__(self, recipe: Recipe, data: Images | Tokens, device: torch.device) -> None:
        model = recipe.build(data)
        stages = [stage.pieces() for stage in model.stages]
        pieces = {name: piece for stage in stages for name, piece in stage.items()}
        self.names = list(pieces)
        self.starts = tuple(accumulate(map(len, stages[:-1]), initial=0))
        self._device = device
        self._autocast: Callable[[], AbstractContextManager[Any]] = lambda: autocast(recipe, device)
        self._optimizer: Sgd | Adam = recipe.optimizer
        self._pieces = [piece.to(device) for piece in pieces.values()]
        heads = [model.make_head(name) for name in self.names[:-1]]
        self._heads: list[nn.Module] = [head.to(device) for head in [*heads, nn.Identity()]]
        self._loss = make_loss(data)
        self._data = data.to(device)
        self._inputs: dict[tuple[int, int], Tensors] = {}
        self._updates = [_make_update(recipe.optimizer, piece) for piece in self._pieces]

    def measure(self, i: int, size: int) -> dict[str, float]:
        """Run piece i in every way once, and return the seconds."""
        inputs, piece = self._input(i, size), self._pieces[i]
        weights: list[Tensor] = [p for p in piece.parameters() if p.requires_grad]
        leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
        tracked = [x for x in leaves if x.requires_grad and i]
        with self._autocast():
            forward, outputs = self._timed(lambda: run_module(piece, leaves, "The output of a piece"))
        seeds = [torch.randn_like(y) for y in outputs if y.requires_grad]
        roots = [y for y in outputs if y.requires_grad]

        def back(wrt: list[Tensor]) -> float:
            if not wrt or not roots:
                return 0.0
            seconds, _ = self._timed(
                lambda: torch.autograd.grad(roots, wrt, seeds, retain_graph=True, allow_unused=True)
            )
            return seconds

        head = self._time_head(i, size, tuple(y.detach() for y in outputs))
        passes = {"input_grad": back(tracked), "weights": back(weights), "both": back(tracked + weights)}
        update = self._timed(self._updates[i])[0] if weights else 0.0
        return {"forward": forward, **passes, "head": head, "update": update}

    def _time_head(self, i: int, size: int, outputs: Tensors) -> float:
        target = self._batch(size)[1]
        leaves = tuple(y.requires_grad_(y.is_floating_point()) for y in outputs)
        wrt = [*self._heads[i].parameters(), *(y for y in leaves if y.requires_grad)]

        def whole() -> None:
            with self._autocast():
                loss = self._loss(self._heads[i](*leaves), target)
            torch.autograd.grad(loss, wrt, allow_unused=True)

        return self._timed(whole)[0]

    def sizes(self, i: int, size: int) -> dict[str, float]:
        """Return the bytes, as `Piece` names them."""
        piece, target = self._pieces[i], self._batch(size)[1]
        learns = [p for p in piece.parameters() if p.requires_grad]
        leaves = tuple(x.detach().requires_grad_(x.is_floating_point() and i > 0) for x in self._input(i, size))
        given = [p.grad for p in learns]
        with self._autocast():
            update_peak = allocated(lambda _: self._updates[i](), self._device).peak
            part = PieceSizes(piece, leaves, self._device)
            passes = part.measure()
            head = head_sizes(self._heads[i], part.outputs, lambda output: self._loss(output, target), self._device)
        for p, gradient in zip(learns, given, strict=True):
            p.grad = gradient
        return {**passes, **head, "update_peak_bytes": float(update_peak), **self._fixed(i)}

    def _fixed(self, i: int) -> dict[str, float]:
        """Return the bytes of parameters and optimizer state."""
        weights, head = (sum(p.nbytes for p in m.parameters()) for m in (self._pieces[i], self._heads[i]))
        copies = 1 + (2 if isinstance(self._optimizer, Adam) else 1 if self._optimizer.momentum else 0)
        return {
            "weight_bytes": float(weights),
            "fixed_bytes": float(copies * weights),
            "head_bytes": float(copies * head),
        }

    def _input(self, i: int, size: int) -> Tensors:
        """Return the input of piece i for a micro-batch of this size."""
        if (i, size) not in self._inputs:
            if i == 0:
                self._inputs[i, size] = (self._batch(size)[0],)
            else:
                with torch.no_grad(), self._autocast():
                    outputs = run_module(self._pieces[i - 1], self._input(i - 1, size), "The output of a piece")
                self._inputs[i, size] = outputs
        return self._inputs[i, size]

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        return self._data.batch(torch.arange(size) % len(self._data), None)

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        start = time.perf_counter()
        result = run()
        self._wait()
        return time.perf_counter() - start, result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _make_update(config: Sgd | Adam, piece: nn.Module) -> Callable[[], object]:
    parameters = [p for p in piece.parameters() if p.requires_grad]
    if not parameters:
        return lambda: None
    for p in parameters:
        p.grad = torch.zeros_like(p)
    return make_optimizer(config, parameters).step
